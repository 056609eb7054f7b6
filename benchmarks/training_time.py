"""Training time: seconds until early stopping, and how often GCN's time that is.

    python benchmarks/training_time.py --datasets cora citeseer --runs 5

One run after the other, seed by seed, so that the machine is the same for all; each in
a process of its own, whose C library keeps freed memory (unless the environment says
otherwise). Times are kept in benchmarks/results/training_time.json with when they were
taken, scores where node_classification.py keeps them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import datetime, timezone

from common import KEEP_MEMORY, locked, read_json, table, write_json
from node_classification import run_seed
from options import add_options, explain_errors, passed_on, positive, run_options, stage
from report import TIME_DATASETS, TIME_ROWS, time_table, timed_runs
from systems import SUPPORTED, System, load_settings


def time_run(dataset: str, name: str, seed: int, args: argparse.Namespace) -> None:
    """Times one run and writes it down."""
    system = System.parse(name)
    started = datetime.now(timezone.utc).isoformat(timespec='seconds')
    options = {'purpose': 'training_time', **run_options(args)}
    record = run_seed(dataset, system, seed, args.root, **options)
    timed = {'dataset': dataset, 'system': name, 'seed': seed, 'started': started}
    keys = ('seconds', 'epochs', 'machine', 'versions')
    timed |= {key: record[key] for key in keys}
    timed['settings'] = load_settings(system, dataset)
    timed['command'] = (
        f'python benchmarks/training_time.py --datasets {dataset} --models {name} '
        f'--first {seed} --runs 1'
    )
    file = args.results / 'training_time.json'
    with locked(file):
        content = read_json(file) or {'runs': []}
        content['runs'].append(timed)
        write_json(file, content)
    print(f'{dataset} {name} seed {seed}: {record["seconds"]:.1f} s', flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--datasets', nargs='+', choices=TIME_DATASETS, default=TIME_DATASETS
    )
    parser.add_argument('--models', nargs='+', choices=TIME_ROWS, default=TIME_ROWS)
    parser.add_argument('--first', type=int, default=0, help='first seed')
    parser.add_argument('--runs', type=positive, default=5, help='number of seeds')
    parser.add_argument(
        '--here', action='store_true', help='in this process, and without the table'
    )
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    timed = [(r['dataset'], r['system'], r['seed']) for r in timed_runs(args.results)]
    failed = []
    for dataset in args.datasets:
        for seed in range(args.first, args.first + args.runs):
            for name in args.models:
                known = (dataset, name, seed) in timed
                if known or dataset not in SUPPORTED[System.parse(name).base]:
                    continue
                if args.here:
                    time_run(dataset, name, seed, args)
                    continue
                options = ['--datasets', dataset, '--models', name, '--runs', '1']
                options += ['--first', str(seed), *passed_on(args), '--here']
                command = [sys.executable, __file__, *options]
                done = subprocess.run(command, env={**KEEP_MEMORY, **os.environ})
                if done.returncode != 0:  # the others go on
                    failed.append(f'{dataset} {name} seed {seed}')
    if not args.here:
        rows = time_table(args.results)
        print('\n' + table(rows[0], rows[1:]))
    if failed:
        print(f'Not finished (see above): {", ".join(failed)}')
    return int(bool(failed))


if __name__ == '__main__':
    sys.exit(main())
