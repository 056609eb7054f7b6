"""Node classification: test accuracy of IDGL and of what it is compared with.

    python benchmarks/node_classification.py --dataset cora --model idgl --runs 5
    python benchmarks/node_classification.py --dataset cora pubmed --model gcn gcn-tuned

Each finished seed is written to benchmarks/results/ at once and never run again: seeds
whose results are there already, those of the repository among them, are only shown.
`--results` names another folder, to train them anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import DATASETS, RESULTS, percent, table
from options import add_options, explain_errors, positive, stage
from records import checkpoint_file, run_missing
from systems import SUPPORTED, System, load_settings, run


def results_file(
    dataset: str, system: System, folder: Path = RESULTS, paper_splits: bool = False
) -> Path:
    """Where the runs of a pair are kept."""
    folder = folder / 'node_classification' / ('paper_splits' if paper_splits else '')
    return folder / f'{dataset}_{system}.json'


def run_pair(
    dataset: str, system: System, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs the seeds of a pair that are not in its results file yet. Returns the runs
    of all these seeds.
    """
    paper_splits = args.splits == 'paper'
    settings = load_settings(system, dataset, paper_splits)
    seeds = range(args.first, args.first + args.runs)
    if 'seeds' in settings:  # of the authors, each taken once
        seeds = range(len(settings['seeds']))
    command = f'python benchmarks/node_classification.py --dataset {dataset} --model '
    command += f'{system}' + ' --splits paper' * paper_splits

    def run_seed(seed: int) -> dict[str, Any]:
        about = (dataset, system, settings, seed, args.results.name)
        how = {'settings': settings, 'checkpoint': checkpoint_file(args.root, *about)}
        how |= {'device': args.device, 'progress': not args.quiet}
        return run(system, dataset, seed, args.root, **how)

    file = results_file(dataset, system, args.results, paper_splits)
    about = {'dataset': dataset, 'system': str(system), 'settings': settings}
    return run_missing(file, about, command, seeds, run_seed, args.device)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('--dataset', nargs='+', choices=DATASETS, required=True)
    add('--model', nargs='+', default=['idgl'], help=', '.join(SUPPORTED))
    add('--runs', type=positive, default=5, help='number of seeds')
    add('--first', type=int, default=0, help='first seed')
    add(
        '--splits',
        choices=['seeds', 'paper'],
        help='of wine, cancer, digits: one for each seed (default), or the paper has',
    )
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    systems = [System.parse(name) for name in args.model]
    rows = []
    for dataset in args.dataset:
        for system in systems:
            runs = run_pair(dataset, system, args)
            smoothed = [run['smoothed'] for run in runs if 'smoothed' in run]
            title = f'{system.title}, smoothed'
            for name, found in ((system.title, runs), (title, smoothed)):
                if found:
                    means = [percent([s[k] for s in found]) for k in ('dev', 'test')]
                    rows.append([dataset, name, *means, str(len(found))])
    print('\n' + table(['', '', 'dev (%)', 'test (%)', 'runs'], rows))
    return 0


if __name__ == '__main__':
    sys.exit(main())
