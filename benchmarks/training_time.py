"""Training time: seconds until early stopping, and how often GCN's time that is.

    python benchmarks/training_time.py --datasets cora citeseer --runs 5

All systems are timed by one process in turn, seed by seed, so that the machine is the
same for all. Finished runs are kept in benchmarks/results/training_time.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import common
from common import RESULTS, read_json, write_json
from report import TIME_DATASETS, TIME_ROWS, describe, time_table
from systems import SUPPORTED, System, load_settings, run


def time_all(
    datasets: list[str],
    names: list[str],
    runs: int,
    root: str,
    *,
    device='cpu',
    progress: bool = True,
    folder: Path = RESULTS,
) -> dict:
    """Times what is not in the results file yet."""
    file = folder / 'training_time.json'
    content = read_json(file) or {'runs': []}
    done = {(r['dataset'], r['system'], r['seed']) for r in content['runs']}
    for dataset in datasets:
        for seed in range(runs):
            for name in names:
                system = System.parse(name)
                if dataset not in SUPPORTED[system.base]:
                    continue
                if (dataset, name, seed) in done:
                    continue
                record = run(
                    system, dataset, seed, root, device=device, progress=progress
                )
                content['command'] = (
                    f'python benchmarks/training_time.py --datasets '
                    f'{" ".join(datasets)} --runs {runs}'
                )
                content['runs'].append(
                    {
                        'dataset': dataset,
                        'system': name,
                        'seed': seed,
                        'seconds': record['seconds'],
                        'epochs': record['epochs'],
                        'settings': load_settings(system, dataset),
                        'machine': common.machine(),
                        'versions': common.versions(),
                    }
                )
                write_json(file, content)
                print(
                    f'{dataset} {name} seed {seed}: {record["seconds"]:.1f} s, '
                    f'{record["epochs"]} epochs',
                    flush=True,
                )
    return content


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--datasets', nargs='+', default=list(TIME_DATASETS))
    parser.add_argument('--models', nargs='+', default=TIME_ROWS)
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--device', help='default: the GPU if there is one')
    parser.add_argument('--results', type=Path, default=RESULTS, help='where to write')
    parser.add_argument('--quiet', action='store_true', help='no progress bars')
    args = parser.parse_args(argv)
    if args.source:
        from torch_geometric_idgl.datasets import stage_data

        stage_data(args.source, args.root)
    time_all(
        args.datasets,
        args.models,
        args.runs,
        args.root,
        device=args.device or common.default_device(),
        progress=not args.quiet,
        folder=args.results,
    )
    content, missing = time_table(args.results)
    print(f'\n{content}\n\n{describe(missing)}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
