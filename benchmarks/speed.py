r"""Time and memory of one epoch: against the literal algorithm, GCN, and size.

Every case runs in a fresh process (see `speed_cases.py`), whose peak memory is its own;
times are medians of interleaved repeats in one of them.

    python benchmarks/speed.py                      # everything
    python benchmarks/speed.py --only reference     # or gcn, scaling, arxiv, documents,
                                                    # knn
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import (
    HERE,
    KEEP_MEMORY,
    RESULTS,
    exponent,
    machine,
    read_json,
    versions,
    write_json,
)

from torch_geometric_idgl.datasets import stage_data

# Data and systems; of those with a target, how many times faster and smaller than the
# literal algorithm they are meant to be.
COMPARED = (
    ('cora', 'idgl'),
    ('cora', 'idgl-anch'),
    ('citeseer', 'idgl'),
    ('digits', 'idgl'),
    ('pubmed', 'idgl-anch'),
    ('pubmed', 'idgl'),
    ('pubmed', 'idgl-tiled'),
)
TARGETS = {
    ('cora', 'idgl'): (150, 5),
    ('cora', 'idgl-anch'): (40, None),
    ('citeseer', 'idgl'): (30, 5),
    ('digits', 'idgl'): (8, None),
    ('pubmed', 'idgl-anch'): (15, None),
}
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
TILED_SIZES = (3_000, 10_000, 30_000)  # quadratic in time
KINDS = ('low-rank', 'anchor', 'tiled')
# Tokens of the documents of a batch. Their mean is 287 (317 in 20News), and that of
# their squares 136,000.
TOKENS = (60, 80, 100, 120, 140, 160, 180, 205, 230, 260, 290, 330, 380, 470, 580, 1000)
DOCUMENTS_TARGET = 20  # times faster than with padding
KNN_TARGET = 5  # times faster than the exact search, with a recall of 0.9
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}


class OutOfMemory(RuntimeError):
    """A process that was killed, or that got no more memory."""


def made(options: str) -> dict:
    """What made a value: parts of the file come from separate runs."""
    command = f'python benchmarks/speed.py {options}'
    return {'command': command, 'versions': versions(), 'machine': machine()}


def fresh(case: dict, environment: dict[str, str] | None = None) -> dict:
    """One case in a fresh process."""
    command = [sys.executable, str(HERE / 'speed_cases.py'), json.dumps(case)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    no_memory = 'MemoryError' in done.stderr or "can't allocate memory" in done.stderr
    if done.returncode == -signal.SIGKILL or no_memory:
        raise OutOfMemory(f'{case} took too much memory:\n{done.stderr}')
    if done.returncode != 0:
        raise RuntimeError(f'{case} failed:\n{done.stderr}')
    return json.loads(done.stdout.strip().splitlines()[-1])


# Tables -------------------------------------------------------------------------------


def compare(
    args: argparse.Namespace, with_reference: bool, known: list[dict]
) -> list[dict]:
    """Epochs on real data against GCN and, if asked, the literal algorithm.

    Rows of cases that are not asked for stay as they are.
    """
    rows = []
    for name, system in COMPARED:
        if args.cases and f'{name}/{system}' not in args.cases:
            rows += [r for r in known if (r['data'], r['system']) == (name, system)]
            continue
        if system == 'idgl-tiled':
            rows.append(compare_tiled(args))
            continue
        reference = with_reference and (name, system) in TARGETS
        case = {'data': name, 'system': system, 'root': str(args.root)}
        case |= {'repeats': args.repeats, 'reference': reference}
        result = fresh({'job': 'time', **case})
        seconds = {key: median(value) for key, value in result['seconds'].items()}
        memory = fresh({'job': 'memory', **case, 'reference': False, 'repeats': 1})
        row = {
            'data': name,
            'system': system,
            'synthetic': result['synthetic'],
            'seconds': seconds,
            'all_seconds': result['seconds'],
            'gcn_epochs': seconds['idgl'] / seconds['gcn'],
            'peak_mb': memory['peak_mb'],
            'start_mb': memory['start_mb'],  # PyTorch and PyG alone
            'made': made(
                f'--only {"reference" if with_reference else "gcn"} --cases '
                f'{name}/{system} --repeats {args.repeats}'
            ),
        }
        if reference:
            slow = fresh({'job': 'memory', **case, 'repeats': 1})
            row['reference_peak_mb'] = slow['peak_mb']
            row['speedup'] = seconds['reference'] / seconds['idgl']
            row['memory_ratio'] = slow['peak_mb'] / memory['peak_mb']
            used = memory['peak_mb'] - memory['start_mb']
            row['used_memory_ratio'] = (slow['peak_mb'] - slow['start_mb']) / used
            row['targets'] = TARGETS[name, system]
        rows.append(row)
        print(describe(row), flush=True)
    return rows


def compare_tiled(args: argparse.Namespace) -> dict:
    """A threshold on all pairs of Pubmed, which the literal algorithm cannot hold."""
    case = {'data': 'pubmed', 'system': 'idgl-tiled', 'root': str(args.root)}
    tiled = fresh({'job': 'memory', **case, 'reference': False, 'repeats': 1})
    print(
        f'pubmed idgl, threshold on all pairs: {tiled["seconds"][0]:.1f} s, '
        f'{tiled["peak_mb"]:.0f} MB (target: under 3000)'
    )
    by = made('--only gcn --cases pubmed/idgl-tiled')
    return {'data': 'pubmed', 'system': 'idgl-tiled', **tiled, 'made': by}


def describe(row: dict) -> str:
    seconds = row['seconds']
    made = ' (made-up data)' if row['synthetic'] else ''
    text = f'{row["data"]:9}{row["system"]:10}{seconds["idgl"] * 1e3:8.0f} ms'
    text += f' = {row["gcn_epochs"]:.1f} GCN epochs, {row["peak_mb"]:.0f} MB{made}'
    if 'speedup' in row:
        speed, memory = row['targets']
        text += f'; {row["speedup"]:.0f}x the literal algorithm (target {speed}x), '
        text += f'{row["memory_ratio"]:.1f}x less memory'
        text += f' (target {memory}x)' if memory else ''
        text += f', {row["used_memory_ratio"]:.1f}x beside PyTorch itself'
    return text


def scaling(
    args: argparse.Namespace, rows: list[dict], save: Callable[[list[dict]], None]
) -> None:
    """Time and memory against the number of nodes, with fitted exponents.

    Kinds and sizes that are not asked for stay as they are.
    """
    rows = list(rows)
    for kind in args.kinds:
        sizes = args.sizes or (TILED_SIZES if kind == 'tiled' else SIZES)
        before = next((row for row in rows if row['kind'] == kind), {'points': []})
        rows = [row for row in rows if row['kind'] != kind]
        found = [point for point in before['points'] if point['n'] not in sizes]
        row: dict = {'kind': kind, 'points': found}
        rows.append(row)
        for n in sizes:
            found.append(measure_size(kind, n, 1 if kind == 'tiled' else 3))
            found.sort(key=lambda point: point['n'])
            # Other allocators have other slopes: the line is that of the first point's.
            alike = [p for p in found if p['environment'] == found[0]['environment']]
            if len(alike) > 1:
                row['time_exponent'] = exponent(alike, 'seconds')
                row['memory_exponent'] = exponent(alike, 'used_mb')
            save(rows)
        if 'time_exponent' in row:
            print(
                f'{kind:9} time ~ n^{row["time_exponent"]:.2f}, '
                f'memory ~ n^{row["memory_exponent"]:.2f}'
            )


def measure_size(kind: str, n: int, repeats: int) -> dict:
    """One size; with the default allocator where keeping memory takes too much."""
    case = {'job': 'large', 'kind': kind, 'n': n, 'edges': 7 * n, 'repeats': repeats}
    environment: dict[str, str] = KEEP_MEMORY
    try:
        result = fresh(case, environment)
    except OutOfMemory:
        environment = {}
        result = fresh(case, environment)
    seconds, memory = median(result['seconds']), result['peak_mb']
    note = '' if environment else ' (default allocator)'
    print(f'{kind:9} {n:9,} nodes {seconds:8.2f} s {memory:8.0f} MB{note}', flush=True)
    return {
        'n': n,
        'seconds': seconds,
        'peak_mb': memory,
        'used_mb': memory - result['start_mb'],
        'environment': environment,
        'made': made(f'--only scaling --kinds {kind} --sizes {n}'),
    }


def arxiv(args: argparse.Namespace) -> dict:
    """At the size of ogbn-arxiv: an epoch of IDGL-Anch over one of GCN.

    Both take turns in fresh processes, and the medians are compared.
    """
    case = {'job': 'large', 'n': args.arxiv_nodes, 'edges': args.arxiv_edges}
    runs: dict[str, list[dict]] = {'idgl': [], 'gcn': []}
    for _ in range(args.repeats):
        for kind, results in runs.items():
            results.append(fresh({**case, 'kind': f'arxiv-{kind}', 'repeats': 2}))
    ours, gcn = (
        {
            # The first epoch of a process is a warm-up.
            'seconds': [result['seconds'][-1] for result in results],
            'peak_mb': max(result['peak_mb'] for result in results),
        }
        for results in runs.values()
    )
    seconds = median(ours['seconds']), median(gcn['seconds'])
    ratio = seconds[0] / seconds[1]
    print(
        f'arxiv size: {seconds[0]:.1f} s against {seconds[1]:.1f} s of GCN = '
        f'{ratio:.2f} (target 1.0), {ours["peak_mb"]:.0f} MB (target 8000)'
    )
    by = made(f'--only arxiv --repeats {args.repeats}')
    return {'idgl_anch': ours, 'gcn': gcn, 'ratio': ratio, 'made': by}


def documents(args: argparse.Namespace) -> dict:
    """A batch of documents against the straightforward implementation, which pads
    them to the longest: forward and backward of each in turn, on one thread, in
    seconds of CPU time.
    """
    case = {'sizes': list(TOKENS), 'refinements': 3}
    result = fresh({'job': 'documents', **case, 'repeats': args.repeats}, ONE_THREAD)
    seconds = {key: median(value) for key, value in result['seconds'].items()}
    memory, padded = (
        fresh({'job': 'documents-memory', **case, 'system': system}, ONE_THREAD)
        for system in ('idgl', 'padded')
    )
    by = made(f'--only documents --repeats {args.repeats}')
    by['machine']['threads'] = result['threads']
    row = {
        **case,
        'seconds': seconds,
        'all_seconds': result['seconds'],
        'clock': 'CPU time',
        'documents_per_second': {k: len(TOKENS) / v for k, v in seconds.items()},
        'speedup': seconds['padded'] / seconds['idgl'],
        'target': DOCUMENTS_TARGET,
        'peak_mb': memory['peak_mb'],
        'start_mb': memory['start_mb'],
        'padded_peak_mb': padded['peak_mb'],
        'memory_ratio': padded['peak_mb'] / memory['peak_mb'],
        'made': by,
    }
    rate = row['documents_per_second']
    print(
        f'documents: {rate["idgl"]:.2f} a second against {rate["padded"]:.2f} padded = '
        f'{row["speedup"]:.1f}x (target {DOCUMENTS_TARGET}x), '
        f'{row["peak_mb"]:.0f} MB against {row["padded_peak_mb"]:.0f} MB; '
        f'{rate["idgl_ten"]:.2f} a second with ten refinements'
    )
    return row


def knn(args: argparse.Namespace) -> dict:
    """The kNN graph of a large table, exact and approximate, on one thread, in seconds
    of CPU time; beside them the exact search of faiss, which the package does not use.
    """
    case = {'n': args.knn_nodes, 'k': 20}
    result = fresh({'job': 'knn', **case, 'repeats': args.repeats}, ONE_THREAD)
    seconds = {key: median(value) for key, value in result['seconds'].items()}
    by = made(f'--only knn --knn-nodes {args.knn_nodes} --repeats {args.repeats}')
    by['versions']['faiss'] = result['faiss']
    by['machine']['threads'] = result['threads']
    row = {
        **case,
        'channels': 128,
        'seconds': seconds,
        'all_seconds': result['seconds'],
        'clock': 'CPU time',
        'speedup': seconds['exact'] / seconds['approximate'],
        'target': KNN_TARGET,
        'recall': result['recall'],
        'made': by,
    }
    print(
        f'knn of {case["n"]:,} nodes: {seconds["exact"]:.1f} s exact, '
        f'{seconds["approximate"]:.1f} s approximate = {row["speedup"]:.1f}x (target '
        f'{KNN_TARGET}x) with recall {row["recall"]:.3f} (target 0.9), '
        f'{seconds["faiss_flat"]:.1f} s exact with faiss'
    )
    return row


def save_part(path: Path, result: dict, name: str, part) -> None:
    """Write the results so far, with a part of them renewed."""
    write_json(path, result | {name: part})


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against n, log-log."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, label in zip(
        axes, ('seconds', 'peak_mb'), ('seconds an epoch', 'peak MB'), strict=True
    ):
        for row in rows:
            xs = [point['n'] for point in row['points']]
            axis.loglog(xs, [p[key] for p in row['points']], 'o-', label=row['kind'])
        axis.set_xlabel('nodes')
        axis.set_ylabel(label)
        axis.grid(True, which='both', alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument(
        '--only', choices=['reference', 'gcn', 'scaling', 'arxiv', 'documents', 'knn']
    )
    parser.add_argument('--cases', nargs='+', help='such as cora/idgl; default: all')
    parser.add_argument('--sizes', type=int, nargs='+', help='numbers of nodes')
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), choices=KINDS)
    parser.add_argument('--arxiv-nodes', type=int, default=169_343)
    parser.add_argument('--arxiv-edges', type=int, default=1_166_243)
    parser.add_argument('--knn-nodes', type=int, default=100_000)
    parser.add_argument('--out', type=Path, default=RESULTS / 'speed.json')
    args = parser.parse_args()
    if args.source:
        stage_data(args.source, args.root)
    result = read_json(args.out) or {}
    if args.only in (None, 'reference', 'gcn'):
        known = result.get('epochs', [])
        result['epochs'] = compare(args, args.only != 'gcn', known)
        write_json(args.out, result)
    if args.only in (None, 'scaling'):
        known = result.get('scaling', [])
        save = functools.partial(save_part, args.out, result, 'scaling')
        scaling(args, known, save)
        result = read_json(args.out)
        plot(result['scaling'], args.out.with_suffix('.png'))
    if args.only in (None, 'arxiv'):
        result['arxiv'] = arxiv(args)
        write_json(args.out, result)
    if args.only in (None, 'documents'):
        result['documents'] = documents(args)
        write_json(args.out, result)
    if args.only in (None, 'knn'):
        result['knn'] = knn(args)
        write_json(args.out, result)


if __name__ == '__main__':
    main()
