r"""Time and memory of one epoch, before and after a change of the package.

    git worktree add ../before REVISION
    python benchmarks/compare_revisions.py --before ../before

Both revisions take turns in fresh processes (see `speed_cases.py`); medians are
compared. Other work on the machine changes seconds, so read the ratios.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, RESULTS, machine, read_json, versions, write_json
from options import stage
from speed import COMPARED, fresh

CASES: dict[str, dict] = {
    f'{data}/{system}': {'job': 'memory', 'data': data, 'system': system, 'repeats': 7}
    for data, system in COMPARED
    if system != 'idgl-tiled'
}
CASES |= {
    'arxiv-size/idgl-anch': {'job': 'large', 'kind': 'arxiv-idgl', 'repeats': 2}
    | {'n': 169_343, 'edges': 1_166_243},
    'small/idgl': {'job': 'large', 'kind': 'small', 'n': 183, 'repeats': 30},
    'cora/idgl, logits alone': {'job': 'evaluate', 'repeats': 20}
    | {'data': 'cora', 'system': 'idgl'},
}


def measure(case: dict, root: str, package: Path) -> dict:
    """Median seconds of an epoch after the first, and the peak of memory."""
    case = {**case, 'root': root, 'reference': False}
    result = fresh(case, {'PYTHONPATH': str(package)})
    return {'seconds': median(result['seconds'][1:]), 'peak_mb': result['peak_mb']}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--before', type=Path, required=True, help='other checkout')
    parser.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--out', type=Path, default=RESULTS / 'compare_revisions.json')
    args = parser.parse_args(argv)
    stage(args)
    packages = {'before': args.before.resolve(), 'after': HERE.parent}
    result = read_json(args.out) or {'cases': {}}
    result['command'] = 'python benchmarks/compare_revisions.py --before CHECKOUT'
    result['machine'] = machine()
    for name in args.cases:
        row: dict[str, Any] = {}
        for key, package in packages.items():
            command = ['git', '-C', str(package), 'rev-parse', '--short', 'HEAD']
            revision = subprocess.check_output(command, text=True).strip()
            row[key] = {'revision': revision, 'runs': []}
        for _ in range(args.repeats):
            for key, package in packages.items():
                row[key]['runs'].append(measure(CASES[name], args.root, package))
        for value, ratio in (('seconds', 'time_ratio'), ('peak_mb', 'memory_ratio')):
            for key in packages:
                row[key][value] = median(run[value] for run in row[key]['runs'])
            row[ratio] = row['after'][value] / row['before'][value]
        result['cases'][name] = {**row, 'versions': versions()}
        write_json(args.out, result)
        print(f'{name}: {row["time_ratio"]:.2f} time, {row["memory_ratio"]:.2f} memory')


if __name__ == '__main__':
    main()
