r"""Time and memory of one epoch, before and after a change of the package.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py --before ../before

Both revisions take turns in fresh processes (see `speed_cases.py`); medians are
compared. A process that uses neither the same times nor the same memory as the others
is noise, so read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from statistics import median

from common import RESULTS, machine, read_json, versions, write_json
from speed import fresh

from torch_geometric_idgl.datasets import stage_data

ARXIV = {'n': 169_343, 'edges': 1_166_243}
CASES: dict[str, dict] = {
    f'{data}/{system}': {'job': 'memory', 'data': data, 'system': system, 'epochs': 7}
    for data, system in [
        ('cora', 'idgl'),
        ('cora', 'idgl-anch'),
        ('citeseer', 'idgl'),
        ('digits', 'idgl'),
        ('pubmed', 'idgl'),
        ('pubmed', 'idgl-anch'),
    ]
}
CASES['arxiv-size/idgl-anch'] = {'job': 'large', 'kind': 'arxiv-idgl', 'epochs': 2}
CASES['arxiv-size/idgl-anch'] |= ARXIV
CASES['small/idgl'] = {'job': 'large', 'kind': 'small', 'n': 183, 'epochs': 30}
CASES['cora/idgl, logits alone'] = {
    'job': 'evaluate',
    'data': 'cora',
    'system': 'idgl',
    'epochs': 20,
}


def measure(case: dict, root: str, package: Path) -> dict:
    """Median seconds of an epoch after the first, and the peak of memory."""
    case = {**case, 'root': root, 'reference': False, 'repeats': case['epochs']}
    result = fresh(case, {'PYTHONPATH': str(package)})
    return {'seconds': median(result['seconds'][1:]), 'peak_mb': result['peak_mb']}


def revision(folder: Path) -> str:
    command = ['git', '-C', str(folder), 'rev-parse', '--short', 'HEAD']
    return subprocess.check_output(command, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--before', type=Path, required=True, help='other checkout')
    parser.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--out', type=Path, default=RESULTS / 'compare_revisions.json')
    args = parser.parse_args()
    if args.source:
        stage_data(args.source, args.root)
    here = Path(__file__).resolve().parent.parent
    packages = {'before': args.before.resolve(), 'after': here}
    result = read_json(args.out) if args.out.exists() else {}
    result['command'] = 'python benchmarks/compare_revisions.py --before CHECKOUT'
    result['machine'] = machine()
    for name in args.cases:
        runs: dict[str, list[dict]] = {key: [] for key in packages}
        for _ in range(args.repeats):
            for key, package in packages.items():
                runs[key].append(measure(CASES[name], args.root, package))
        row = {
            key: {
                'revision': revision(packages[key]),
                'seconds': median(run['seconds'] for run in found),
                'peak_mb': median(run['peak_mb'] for run in found),
                'runs': found,
            }
            for key, found in runs.items()
        }
        before, after = row['before'], row['after']
        row['time_ratio'] = after['seconds'] / before['seconds']
        row['memory_ratio'] = after['peak_mb'] / before['peak_mb']
        result.setdefault('cases', {})[name] = {**row, 'versions': versions()}
        write_json(args.out, result)
        print(
            f'{name:26}{before["seconds"] * 1e3:9.1f} ms ->'
            f'{after["seconds"] * 1e3:9.1f} ms ({row["time_ratio"]:.2f}),'
            f'{before["peak_mb"]:7.0f} MB -> {after["peak_mb"]:7.0f} MB '
            f'({row["memory_ratio"]:.2f})',
            flush=True,
        )


if __name__ == '__main__':
    main()
