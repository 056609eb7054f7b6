"""Node classification: test accuracy of IDGL and of what it is compared with.

    python benchmarks/node_classification.py --dataset cora --model idgl --runs 5
    python benchmarks/node_classification.py --all

Each finished seed is written to benchmarks/results/ at once and never run again: seeds
whose results are there already, those of the repository among them, are only shown.
`--results` names another folder, to train them anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
from common import DATASETS, RESULTS, TABLES, percent, table
from options import add_options, explain_errors, passed_on, positive, run_options, stage
from records import add_run, checkpoint_file, read_runs, run_missing
from systems import SUPPORTED, System, check_supported, load_settings, run

# The rows of `--all` beside the systems themselves; tuned ones where settings exist.
ABLATED = ['idgl-noreg', 'idgl-noil', 'idgl-anch-noreg', 'idgl-anch-noil']
ABLATION_DATASETS = ('cora', 'citeseer', 'wine', 'cancer', 'digits')
VARIANTS = {
    'idgl-iterdrop': ('citeseer',),
    'idgl-anch-iterdrop': ('citeseer',),
    'idgl-authors': ABLATION_DATASETS,
}


def results_file(
    dataset: str, system: System, folder: Path = RESULTS, paper_splits: bool = False
) -> Path:
    """Where the runs of a pair are kept."""
    folder = folder / 'node_classification' / ('paper_splits' if paper_splits else '')
    return folder / f'{dataset}_{system}.json'


def command(dataset: str, system: System, seeds: str, paper_splits: bool) -> str:
    """The command that gives a result, without paths of the machine it ran on."""
    custom = system.settings not in ('paper', 'tuned')
    name = System(system.base, system.ablation) if custom else system
    options = f'--dataset {dataset} --model {name} {seeds}'
    if custom:
        options += f' --config {Path(system.settings).name}'
    if paper_splits:
        options += ' --splits paper'
    return f'python benchmarks/node_classification.py {options}'


def read_results(
    dataset: str, system: System, folder: Path = RESULTS, paper_splits: bool = False
) -> dict:
    """The runs of a pair so far; those of other settings than the system has now raise
    an error.
    """
    file = results_file(dataset, system, folder, paper_splits)
    settings = load_settings(system, dataset, paper_splits)
    return read_runs(file, about(dataset, system, settings))


def about(dataset: str, system: System, settings: dict) -> dict:
    """What all runs of a results file have in common."""
    return {'dataset': dataset, 'system': str(system), 'settings': settings}


def run_seed(
    dataset: str,
    system: System,
    seed: int,
    root: str,
    *,
    paper_splits: bool = False,
    device='cpu',
    progress: bool = True,
    folder: Path = RESULTS,
    purpose: str = '',
) -> dict:
    """Runs one seed and adds it to its results file, if it is not there yet."""
    settings = read_results(dataset, system, folder, paper_splits)['settings']
    record = run(
        system,
        dataset,
        seed,
        root,
        settings=settings,
        device=device,
        progress=progress,
        checkpoint=checkpoint_file(root, dataset, system, settings, seed, purpose),
    )
    return add_run(
        results_file(dataset, system, folder, paper_splits),
        about(dataset, system, settings),
        seed,
        record,
        lambda seeds: command(dataset, system, seeds, paper_splits),
        device,
    )


def run_pair(
    dataset: str, system: System, runs: int, root: str, first: int = 0, **options: Any
) -> list[dict]:
    """Runs the seeds of a pair that are not in its results file yet; the options are
    those of :meth:`run_seed`. Returns the runs of all these seeds.
    """
    where = (options.get('folder', RESULTS), options.get('paper_splits', False))
    stored = read_results(dataset, system, *where)
    if seeds := stored['settings'].get('seeds'):  # of the authors, each taken once
        first, runs = 0, len(seeds)
    return run_missing(
        f'{dataset} {system}',
        stored['runs'],
        range(first, first + runs),
        lambda seed: run_seed(dataset, system, seed, root, **options),
    )


def all_pairs() -> list[tuple[str, System]]:
    """Every cell of the tables, the quickest systems first."""
    names = [*SUPPORTED, *ABLATED]
    pairs = [
        (dataset, System.parse(name))
        for name in names
        for dataset in DATASETS
        if dataset in SUPPORTED[System.parse(name).base]
        and (name not in ABLATED or dataset in ABLATION_DATASETS)
    ]
    pairs += [(d, System.parse(name)) for name, own in VARIANTS.items() for d in own]
    tuned = common.read_yaml(common.CONFIGS / 'tuned.yaml')
    pairs += [
        (dataset, System(base, settings='tuned'))
        for base, datasets in tuned.items()
        for dataset in datasets
    ]
    slow = ('lds', 'idgl', 'idgl-anch')
    return sorted(
        pairs, key=lambda pair: slow.index(pair[1].base) if pair[1].base in slow else -1
    )


def run_all(args: argparse.Namespace) -> int:
    """Runs all pairs, each in its own process: so its peak memory is its own."""
    failed = []
    runs = [
        (d, system, 'paper' if d in TABLES else 'seeds') for d, system in all_pairs()
    ]
    # On splits drawn anew for each seed, only the systems as they were published.
    runs += [(d, s, 'seeds') for d, s in all_pairs() if d in TABLES and s.is_published]
    for dataset, system, splits in runs:
        options = ['--dataset', dataset, '--model', str(system), '--splits', splits]
        options += ['--runs', str(args.runs), '--first', str(args.first)]
        options += passed_on(args)
        code = subprocess.run([sys.executable, __file__, *options]).returncode
        if code != 0:
            failed.append(f'{dataset} {system} ({splits} splits)')
    if failed:
        print(f'Not finished (see above): {", ".join(failed)}')
    return int(bool(failed))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dataset', choices=DATASETS)
    parser.add_argument('--all', action='store_true', help='all data and systems')
    parser.add_argument('--model', help=f'{", ".join(SUPPORTED)} (default: idgl)')
    parser.add_argument('--runs', type=positive, default=5, help='number of seeds')
    parser.add_argument('--first', type=int, default=0, help='first seed')
    parser.add_argument(
        '--splits',
        choices=['seeds', 'paper'],
        help='of wine, cancer, digits: one for each seed (default), or those of the '
        'paper',
    )
    parser.add_argument('--config', help='YAML file of other settings, as tuned.yaml')
    add_options(parser)
    args = parser.parse_args(argv)
    if args.all == bool(args.dataset):
        parser.error('give either --dataset or --all')
    if args.all and (args.model or args.config or args.splits):
        parser.error('--all runs every system, with every setting and split')
    return args


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    if args.all:
        return run_all(args)
    system = System.parse(args.model or 'idgl', args.config)
    check_supported(system, args.dataset)
    runs = run_pair(
        args.dataset,
        system,
        args.runs,
        args.root,
        args.first,
        paper_splits=args.splits == 'paper',
        **run_options(args),
    )
    rows = [
        [str(r['seed']), f'{100 * r["dev"]:.1f}', f'{100 * r["test"]:.1f}']
        + [str(r['epochs']), f'{r["seconds"]:.1f}', f'{r["peak_memory_mb"]:.0f}']
        for r in runs
    ]
    for title, scores in {
        'mean ± std': runs,
        'smoothed': [r['smoothed'] for r in runs if 'smoothed' in r],
    }.items():
        if scores:
            means = [
                percent([score[key] for score in scores]) for key in ('dev', 'test')
            ]
            rows.append([title, *means, '', '', ''])
    header = ['seed', 'dev (%)', 'test (%)', 'epochs', 'seconds', 'peak MB']
    print(f'\n{system.title} on {args.dataset}\n\n{table(header, rows)}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
