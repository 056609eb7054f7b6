"""Training time: seconds until early stopping, and how often GCN's time that is.

    python benchmarks/training_time.py --datasets cora citeseer --runs 5

One run after the other, seed by seed, so that the machine is the same for all; each in
a process of its own. Times are kept in benchmarks/results/training_time.json, scores
where node_classification.py keeps them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import common
from common import RESULTS, read_json, write_json
from node_classification import run_seed
from report import TIME_DATASETS, TIME_ROWS, describe, time_table
from systems import SUPPORTED, System, load_settings

Run = tuple[str, str, int]  # data set, system, seed


def wanted_runs(args: argparse.Namespace) -> list[Run]:
    """The runs asked for that have not been timed yet, in order."""
    content = read_json(args.results / 'training_time.json') or {'runs': []}
    done = {(r['dataset'], r['system'], r['seed']) for r in content['runs']}
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
    record = run_seed(
        dataset,
        system,
        seed,
        args.root,
        device=args.device or common.default_device(),
        progress=not args.quiet,
        folder=args.results,
    )
    file = args.results / 'training_time.json'
    content = read_json(file) or {'runs': []}
    content['runs'].append(
        {
            'dataset': dataset,
            'system': name,
            'seed': seed,
            'seconds': record['seconds'],
            'epochs': record['epochs'],
            'settings': load_settings(system, dataset),
            'command': f'python benchmarks/training_time.py --datasets {dataset} '
            f'--models {name} --first {seed} --runs 1',
            'machine': record['machine'],
            'versions': record['versions'],
        }
    )
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
        options += ['--runs', '1', '--root', args.root, '--results', str(args.results)]
        options += ['--quiet'] if args.quiet else []
        options += ['--device', args.device] if args.device else []
        command = [sys.executable, __file__, *options, '--no-table']
        if subprocess.run(command).returncode != 0:
            failed.append(f'{dataset} {name} seed {seed}')
    if failed:
        print(f'Not finished (see above): {", ".join(failed)}')
    return int(bool(failed))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--datasets', nargs='+', choices=TIME_DATASETS, default=list(TIME_DATASETS)
    )
    parser.add_argument('--models', nargs='+', choices=TIME_ROWS, default=TIME_ROWS)
    parser.add_argument('--first', type=int, default=0, help='first seed')
    parser.add_argument('--runs', type=int, default=5, help='number of seeds')
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--device', help='default: the GPU if there is one')
    parser.add_argument('--results', type=Path, default=RESULTS, help='where to write')
    parser.add_argument('--quiet', action='store_true', help='no progress bars')
    parser.add_argument('--no-table', action='store_true', help='only time')
    args = parser.parse_args(argv)
    if args.source:
        from torch_geometric_idgl.datasets import stage_data

        stage_data(args.source, args.root)
    runs, code = wanted_runs(args), 0
    if len(runs) == 1:
        time_run(*runs[0], args)
    else:
        code = time_in_turn(runs, args)
    if not args.no_table:
        content, missing = time_table(args.results)
        print(f'\n{content}\n\n{describe(missing)}')
    return code


if __name__ == '__main__':
    sys.exit(main())
