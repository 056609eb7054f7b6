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

from common import KEEP_MEMORY, locked, read_json, write_json
from node_classification import run_seed
from options import (
    add_options,
    explain_errors,
    passed_on,
    positive,
    run_options,
    stage,
)
from report import TIME_DATASETS, TIME_ROWS, describe, time_table, timed_runs
from systems import SUPPORTED, System, load_settings

Run = tuple[str, str, int]  # data set, system, seed


def wanted_runs(args: argparse.Namespace) -> list[Run]:
    """The runs asked for that have not been timed yet, in order."""
    timed = timed_runs(args.results)
    done = {(r['dataset'], r['system'], r['seed']) for r in timed}
    runs = [
        (dataset, name, seed)
        for dataset in args.datasets
        for seed in range(args.first, args.first + args.runs)
        for name in args.models
        if dataset in SUPPORTED[System.parse(name).base]
    ]
    return [run for run in runs if run not in done]


def time_run(dataset: str, name: str, seed: int, args: argparse.Namespace) -> None:
    """Times one run and writes it down."""
    system = System.parse(name)
    started = datetime.now(timezone.utc).isoformat(timespec='seconds')
    record = run_seed(
        dataset,
        system,
        seed,
        args.root,
        purpose='training_time',
        **run_options(args),
    )
    file = args.results / 'training_time.json'
    timed = {
        'dataset': dataset,
        'system': name,
        'seed': seed,
        'seconds': record['seconds'],
        'epochs': record['epochs'],
        'started': started,
        'settings': load_settings(system, dataset),
        'command': f'python benchmarks/training_time.py --datasets {dataset} '
        f'--models {name} --first {seed} --runs 1',
        'machine': record['machine'],
        'versions': record['versions'],
    }
    with locked(file):
        content = read_json(file) or {'runs': []}
        content['runs'].append(timed)
        write_json(file, content)
    print(
        f'{dataset} {name} seed {seed}: {record["seconds"]:.1f} s, '
        f'{record["epochs"]} epochs',
        flush=True,
    )


def time_in_turn(runs: list[Run], args: argparse.Namespace) -> int:
    """Times runs one after the other; the rest goes on where one fails."""
    failed = []
    for dataset, name, seed in runs:
        options = ['--datasets', dataset, '--models', name, '--first', str(seed)]
        options += ['--runs', '1', *passed_on(args), '--here']
        command = [sys.executable, __file__, *options]
        if subprocess.run(command, env={**KEEP_MEMORY, **os.environ}).returncode != 0:
            failed.append(f'{dataset} {name} seed {seed}')
    if failed:
        print(f'Not finished (see above): {", ".join(failed)}')
    return int(bool(failed))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--datasets', nargs='+', choices=TIME_DATASETS, default=list(TIME_DATASETS)
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
    runs = wanted_runs(args)
    if args.here:
        for run in runs:
            time_run(*run, args)
        return 0
    code = time_in_turn(runs, args)
    content, missing = time_table(args.results)
    print(f'\n{content}\n\n{describe(missing)}')
    return code


if __name__ == '__main__':
    sys.exit(main())
