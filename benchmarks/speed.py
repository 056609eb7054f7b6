r"""Time and memory of one epoch: against the literal algorithm, GCN, and size.

Every case runs in a fresh process (see `speed_cases.py`), whose peak memory is its own;
times are medians of interleaved repeats in one of them.

    python benchmarks/speed.py                      # everything
    python benchmarks/speed.py --only reference     # or gcn, scaling, arxiv, documents,
                                                    # newsgroups, knn
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, RESULTS, exponent, machine, read_json, versions, write_json
from options import stage

# Whether the literal algorithm can run it as well.
COMPARED = {
    ('cora', 'idgl'): True,
    ('cora', 'idgl-anch'): True,
    ('citeseer', 'idgl'): True,
    ('digits', 'idgl'): True,
    ('pubmed', 'idgl-anch'): True,
    ('pubmed', 'idgl'): False,
    ('pubmed', 'idgl-tiled'): False,
}
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
TILED_SIZES = (3_000, 10_000, 30_000)  # quadratic in time
KINDS = ('low-rank', 'anchor', 'anchor-recomputed', 'tiled')
# Tokens of the documents of a batch. Their mean is 287 (317 in 20News), and that of
# their squares 136,000.
TOKENS = (60, 80, 100, 120, 140, 160, 180, 205, 230, 260, 290, 330, 380, 470, 580, 1000)
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
PARTS = {'reference': 'epochs', 'gcn': 'epochs', 'scaling': 'scaling'}
PARTS |= {name: name for name in ('arxiv', 'documents', 'newsgroups', 'knn')}


def made(options: str, result: dict | None = None) -> dict[str, Any]:
    """What made a value: parts of the file come from separate runs."""
    command = f'python benchmarks/speed.py {options}'
    by = {'command': command, 'versions': versions(), 'machine': machine()}
    by['machine']['threads'] = (result or by['machine'])['threads']
    return by


def fresh(case: dict, environment: dict[str, str] | None = None) -> dict:
    """One case in a fresh process."""
    command = [sys.executable, str(HERE / 'speed_cases.py'), json.dumps(case)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        killed = ' (killed, maybe for lack of memory)' * (done.returncode == -9)
        raise RuntimeError(f'{case} failed{killed}:\n{done.stderr}')
    result = done.stdout.strip().splitlines()[-1]
    print(f'{json.dumps(case)}\n  {result}', flush=True)
    return json.loads(result)


def medians(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What a row says of times."""
    found = {name: median(values) for name, values in seconds.items()}
    return {'seconds': found, 'all_seconds': seconds}


def epochs(args: argparse.Namespace, known: list[dict] | None) -> list[dict]:
    """Epochs on real data against GCN and, if asked, the literal algorithm. Rows of
    cases that are not asked for stay as they are.
    """
    rows = []
    for (name, system), possible in COMPARED.items():
        row: dict[str, Any] = {'data': name, 'system': system}
        if args.cases and f'{name}/{system}' not in args.cases:
            rows += [r for r in known or [] if {**r, **row} == r]
            continue
        case = {**row, 'root': str(args.root), 'repeats': 1, 'reference': False}
        memory = fresh({'job': 'memory', **case})
        only = args.only or 'reference'
        options = f'--only {only} --cases {name}/{system} --repeats {args.repeats}'
        row |= {**memory, 'made': made(options)}
        if system != 'idgl-tiled':
            case['reference'] = possible and only == 'reference'
            result = fresh({'job': 'time', **case, 'repeats': args.repeats})
            row |= medians(result['seconds'])
            row['gcn_epochs'] = row['seconds']['idgl'] / row['seconds']['gcn']
        if case['reference']:
            slow = fresh({'job': 'memory', **case})
            row['reference_peak_mb'] = slow['peak_mb']
            row['speedup'] = row['seconds']['reference'] / row['seconds']['idgl']
            row['memory_ratio'] = slow['peak_mb'] / memory['peak_mb']
            used = memory['peak_mb'] - memory['start_mb']  # beside PyTorch and PyG
            row['used_memory_ratio'] = (slow['peak_mb'] - slow['start_mb']) / used
        rows.append(row)
    return rows


def scaling(args: argparse.Namespace, known: list[dict] | None) -> list[dict]:
    """Time and memory against the number of nodes, with fitted exponents. Kinds and
    sizes that are not asked for stay as they are.
    """
    rows = {row['kind']: row for row in known or []}
    for kind in args.kinds:
        sizes = args.sizes or (TILED_SIZES if kind == 'tiled' else SIZES)
        row = rows.setdefault(kind, {'kind': kind, 'points': []})
        for n in sizes:
            points = [point for point in row['points'] if point['n'] != n]
            points = sorted([*points, measure_size(kind, n)], key=lambda p: p['n'])
            row['points'] = points
            # Other threads, and allocators, have other slopes.
            alike = [p for p in points if p['environment'] == points[0]['environment']]
            if len(alike) > 1:
                row['time_exponent'] = exponent(alike, 'seconds')
                row['memory_exponent'] = exponent(alike, 'used_mb')
            content = read_json(args.out) or {}
            write_json(args.out, {**content, 'scaling': list(rows.values())})
    plot(list(rows.values()), args.out.with_suffix('.png'))
    return list(rows.values())


def measure_size(kind: str, n: int) -> dict:
    """One size, on one thread, in CPU time, with the allocator as it comes."""
    repeats = 1 if kind == 'tiled' else 3
    case = {'job': 'large', 'kind': kind, 'n': n, 'edges': 7 * n, 'repeats': repeats}
    result = fresh(case, ONE_THREAD)
    return {
        'n': n,
        'seconds': median(result['seconds']),
        'peak_mb': result['peak_mb'],
        'used_mb': result['peak_mb'] - result['start_mb'],
        'environment': ONE_THREAD,
        'made': made(f'--only scaling --kinds {kind} --sizes {n}', result),
    }


def arxiv(args: argparse.Namespace, known: dict | None) -> dict:
    """At the size of ogbn-arxiv: an epoch of IDGL-Anch over one of GCN, in turns."""
    case = {'job': 'large', 'n': args.arxiv_nodes, 'edges': args.arxiv_edges}
    ours: dict[str, Any] = {'seconds': [], 'peak_mb': 0.0}
    gcn: dict[str, Any] = {'seconds': [], 'peak_mb': 0.0}
    for _ in range(args.repeats):
        for kind, row in (('arxiv-idgl', ours), ('arxiv-gcn', gcn)):
            result = fresh({**case, 'kind': kind, 'repeats': 2})
            row['seconds'].append(result['seconds'][-1])  # after one to warm up
            row['peak_mb'] = max(row['peak_mb'], result['peak_mb'])
    ratio = median(ours['seconds']) / median(gcn['seconds'])
    by = made(f'--only arxiv --repeats {args.repeats}')
    return {'idgl_anch': ours, 'gcn': gcn, 'ratio': ratio, 'made': by}


def documents(args: argparse.Namespace, known: dict | None) -> dict:
    """A batch of documents against the straightforward implementation, which pads
    them to the longest: forward and backward, on one thread, in seconds of CPU time.
    """
    case = {'sizes': list(TOKENS), 'refinements': 3}
    result = fresh({'job': 'documents', **case, 'repeats': args.repeats}, ONE_THREAD)
    memory, padded = (
        fresh({'job': 'documents-memory', **case, 'system': system}, ONE_THREAD)
        for system in ('idgl', 'padded')
    )
    row = {**case, **medians(result['seconds']), 'clock': 'CPU time'}
    seconds = row['seconds']
    return {
        **row,
        'documents_per_second': {k: len(TOKENS) / v for k, v in seconds.items()},
        'speedup': seconds['padded'] / seconds['idgl'],
        'peak_mb': memory['peak_mb'],
        'start_mb': memory['start_mb'],
        'padded_peak_mb': padded['peak_mb'],
        'memory_ratio': padded['peak_mb'] / memory['peak_mb'],
        'made': made(f'--only documents --repeats {args.repeats}', result),
    }


def newsgroups(args: argparse.Namespace, known: dict | None) -> dict:
    """The first training epoch on 20News, from one in so many batches."""
    case = {'root': str(args.root), 'every': args.every, 'repeats': 1}
    result = fresh({'job': 'newsgroups', **case})
    seconds = result.pop('seconds')[0]
    epoch = seconds * result['all_documents'] / result['documents']
    by = made(f'--only newsgroups --every {args.every}', result)
    return {**result, 'seconds': seconds, 'epoch_minutes': epoch / 60, 'made': by}


def knn(args: argparse.Namespace, known: dict | None) -> dict:
    """The kNN graph of a large table, exact and approximate, on one thread, in seconds
    of CPU time; beside them the exact search of faiss, which the package does not use.
    """
    case = {'n': args.knn_nodes, 'k': 20}
    result = fresh({'job': 'knn', **case, 'repeats': args.repeats}, ONE_THREAD)
    by = made(f'--only knn --knn-nodes {case["n"]} --repeats {args.repeats}', result)
    by['versions']['faiss'] = result['faiss']
    row = {**case, 'channels': 128, **medians(result['seconds']), 'clock': 'CPU time'}
    speedup = row['seconds']['exact'] / row['seconds']['approximate']
    return {**row, 'speedup': speedup, 'recall': result['recall'], 'made': by}


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against n, log-log."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    labels = {'seconds': 'seconds an epoch', 'peak_mb': 'peak MB'}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for row in rows:
            xs = [point['n'] for point in row['points']]
            axis.loglog(xs, [p[key] for p in row['points']], 'o-', label=row['kind'])
        axis.set(xlabel='nodes', ylabel=label)
        axis.grid(True, which='both', alpha=0.3)
    axes[1].legend(loc='upper left')
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--only', choices=PARTS)
    parser.add_argument('--cases', nargs='+', help='such as cora/idgl; default: all')
    parser.add_argument('--sizes', type=int, nargs='+', help='numbers of nodes')
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), choices=KINDS)
    parser.add_argument('--arxiv-nodes', type=int, default=169_343)
    parser.add_argument('--arxiv-edges', type=int, default=1_166_243)
    parser.add_argument('--knn-nodes', type=int, default=100_000)
    parser.add_argument('--every', type=int, default=10, help='batches of 20News')
    parser.add_argument('--out', type=Path, default=RESULTS / 'speed.json')
    args = parser.parse_args(argv)
    stage(args)
    for name in [PARTS[args.only]] if args.only else dict.fromkeys(PARTS.values()):
        content = read_json(args.out) or {}
        part = globals()[name](args, content.get(name))
        write_json(args.out, {**content, name: part})


if __name__ == '__main__':
    main()
