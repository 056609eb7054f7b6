"""Turns the results on disk into the tables of the pages.

    python benchmarks/report.py             # prints all tables
    python benchmarks/report.py --update    # writes them between the markers of pages,
                                            # and draws the plots of the analyses anew
    python benchmarks/report.py --check     # fails where a page says something else

Pages are README.md, benchmarks/README.md and docs/**/*.md, or the files that are named.
A cell is our mean ± standard deviation in percent, and the paper's figure in brackets;
it says how many runs it has if not five. Results of other settings than those of
`configs` are not shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import analysis
import documents
import ogbn_arxiv
import optuna
from common import (
    CONFIGS,
    DATASETS,
    HERE,
    PLANETOID,
    RESULTS,
    TABLES,
    TITLES,
    read_json,
    read_yaml,
    table,
)
from node_classification import results_file
from options import explain_errors
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from records import score_cell
from search import tried
from systems import SMOOTHED, SUPPORTED, System, load_settings
from systems import TITLES as SYSTEMS

MAIN_ROWS = [name for base in SUPPORTED for name in (base, f'{base}-tuned')]
MAIN_ROWS += ['idgl-iterdrop', 'idgl-anch-iterdrop', 'idgl-authors']
ABLATED = ('cora', 'citeseer', *TABLES)
IDGLS = ('idgl', 'idgl-anch')
PARTS = {'noil': 'iterating', 'noreg': 'regularisation'}  # by their ablations
TIME_ROWS = ['gcn', 'gat', 'lds', 'idgl', 'idgl-noil', 'idgl-anch', 'idgl-anch-noil']
Rows = dict[str, Callable[[str], str]]  # by title: what is shown of a data set
REPORTED = read_yaml(CONFIGS / 'reported.yaml')


def runs_of(
    name: str, dataset: str, folder: Path, paper_splits: bool = True
) -> list[dict[str, Any]]:
    """The runs of a pair, if they are of the settings that the system has now. Where a
    search has kept the published ones, these are the same runs.
    """
    system, drawn = System.parse(name), paper_splits and dataset in TABLES
    try:
        settings = load_settings(system, dataset, drawn)
    except ValueError:  # not supported, not tuned
        return []
    for shown in (system, System(system.base, system.ablation)):
        content = read_json(results_file(dataset, shown, folder, drawn))
        if content and content['settings'] == settings:
            return content['runs']
    return []


def accuracy(
    name: str,
    dataset: str,
    folder: Path,
    figures: dict[str, dict] = REPORTED['accuracy'],
    paper_splits: bool = True,
) -> str:
    """The test accuracy of a system, beside the paper's figure."""
    runs = runs_of(name, dataset, folder, paper_splits)
    figure = figures.get(name, {}).get(dataset)
    return score_cell([run['test'] for run in runs], figure)


def smoothed(name: str, dataset: str, folder: Path, after: bool) -> str:
    """The test accuracy before or after smoothing, of runs that have been smoothed."""
    runs = [run for run in runs_of(name, dataset, folder) if 'smoothed' in run]
    return score_cell([(run['smoothed'] if after else run)['test'] for run in runs])


def gain(base: str, ablation: str, dataset: str, folder: Path) -> str:
    """What a part of IDGL is worth: the test accuracy with it minus that without, of
    the same seeds, in points.
    """
    whole, rest = (
        {run['seed']: run['test'] for run in runs_of(name, dataset, folder)}
        for name in (base, f'{base}-{ablation}')
    )
    gains = [whole[seed] - rest[seed] for seed in sorted({*whole} & {*rest})]
    return score_cell(gains, sign='+')


def trials(name: str, dataset: str, folder: Path) -> str:
    """How many settings have been tried on the dev set; with a star by Optuna."""
    name = f'{dataset}_{name}'
    old = folder / 'search' / f'{name}.jsonl'
    new = folder / 'search' / 'optuna' / f'{name}.log'
    if new.exists():
        storage = JournalStorage(JournalFileBackend(str(new)))
        return f'{len(tried(optuna.load_study(study_name=name, storage=storage)))}*'
    lines = old.read_text(encoding='utf-8').splitlines() if old.exists() else []
    return str(len({str(json.loads(line)['params']) for line in lines}) or '–')


def training_time(name: str, dataset: str, folder: Path) -> str:
    """Seconds until training stops, how often those of GCN, and the paper's."""
    own, gcn = (
        [run['seconds'] for run in runs_of(system, dataset, folder)]
        for system in (name, 'gcn')
    )
    text = f'{own[0]:.1f} s' if own else '–'
    if own and gcn and name != 'gcn':
        text += f', {own[0] / gcn[0]:.1f}×'
    figure = REPORTED['seconds'].get(name, {}).get(dataset)
    return f'{text} ({figure})' if figure else text


def reported(figures: dict[str, Any], dataset: str) -> str:
    """A figure of others, which have no runs here."""
    return str(figures.get(dataset, '–'))


def rows_of(names: Iterable[str], cell: Callable[..., str], **options: Any) -> Rows:
    """A row for each system."""
    titles = {System.parse(name).title: name for name in names}
    return {title: partial(cell, name, **options) for title, name in titles.items()}


def grid(datasets: Sequence[str], rows: Rows, corner: str = '') -> str:
    """A table with a column for each data set, of the rows that show something."""
    cells = [[title, *map(cell, datasets)] for title, cell in rows.items()]
    header = [corner, *(TITLES[dataset] for dataset in datasets)]
    return table(header, [row for row in cells if {*row[1:]} != {'–'}])


def speed_table(folder: Path) -> list[list[str]]:
    """An epoch against GCN and the literal algorithm (documents: padded ones)."""
    content = read_json(folder / 'speed.json') or {}
    head = ['data', 'model', 'epoch', 'faster than the literal algorithm']
    rows = [[*head, 'GCN epochs', 'memory', 'memory of the literal algorithm']]

    def add(data, model, seconds, speedup=None, gcn=None, memory=None, other=None):
        cells = [(1e3 * seconds, ',.0f', ' ms'), (speedup, '.0f', '×')]
        cells += [(gcn, '.1f', ''), (memory, ',.0f', ' MB'), (other, ',.0f', ' MB')]
        texts = [f'{x:{form}}{unit}' if x else '–' for x, form, unit in cells]
        rows.append([data, model, *texts])

    for row in content.get('epochs', []):
        name, memory = TITLES[row['data']], row['peak_mb']
        if row['system'] == 'idgl-tiled':
            add(f'{name}, all pairs over 0.1', 'IDGL', row['seconds'][0], memory=memory)
            continue
        times = (row['seconds']['idgl'], row.get('speedup'), row['gcn_epochs'])
        other = row.get('reference_peak_mb')
        add(name, System(row['system']).title, *times, memory, other)
    if row := content.get('arxiv'):
        seconds = sorted(row['idgl_anch']['seconds'])[len(row['gcn']['seconds']) // 2]
        own = {'gcn': row['ratio'], 'memory': row['idgl_anch']['peak_mb']}
        add('size of ogbn-arxiv', 'IDGL-Anch', seconds, **own)
    if row := content.get('documents'):
        times = (row['seconds']['idgl'], row['speedup'], None)
        name = f'{len(row["sizes"])} documents'
        add(name, 'IDGL', *times, row['peak_mb'], row['padded_peak_mb'])
    return rows


def scaling_table(folder: Path) -> list[list[str]]:
    """How time and memory of an epoch grow with the number of nodes."""
    content = read_json(folder / 'speed.json') or {}
    rows = [['graph', 'time ~ n^', 'memory ~ n^', 'most nodes', 'epoch', 'memory']]
    for row in content.get('scaling', []):
        last = row['points'][-1]
        cells = [f'{row[key]:.2f}' for key in ('time_exponent', 'memory_exponent')]
        cells += [f'{last["n"]:,}', f'{last["seconds"]:.1f} s']
        rows.append([row['kind'], *cells, f'{last["peak_mb"]:,.0f} MB'])
    return rows


def analyses(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The cells of each analysis that has a table."""
    files = {name: analysis.results_file(name, folder) for name in analysis.ANALYSES}
    found = {name: (read_json(file) or {}).get('cells') for name, file in files.items()}
    return {n: own for n, own in found.items() if own and analysis.make_table(n, own)}


def make_grids(folder: Path) -> dict[str, str]:
    """The tables whose columns are data sets, by the name of their markers."""
    ours = partial(accuracy, figures={}, folder=folder)
    main = rows_of(MAIN_ROWS, accuracy, folder=folder)
    for title, figures in REPORTED['others'].items():
        main[title] = partial(reported, figures)
    both: Rows = {}
    for name in MAIN_ROWS:
        if (system := System.parse(name)).base in SMOOTHED:
            cell = partial(smoothed, name, folder=folder)
            both[system.title] = partial(cell, after=False)
            both[f'{system.title} + smoothing'] = partial(cell, after=True)
    gains: Rows = {}
    for base, (ablation, part) in itertools.product(IDGLS, PARTS.items()):
        cell = partial(gain, base, ablation, folder=folder)
        gains[f'{SYSTEMS[base]}: {part}'] = cell

    def tuned_gcn(dataset: str) -> str:  # where no graph is given: of the neighbours
        return ours('gcn-knn-tuned' if dataset in TABLES else 'gcn-tuned', dataset)

    readme: Rows = {'GCN (tuned)': tuned_gcn, **rows_of(['appnp-tuned', 'idgl'], ours)}
    readme['IDGL + smoothing'] = both['IDGL + smoothing']
    readme |= rows_of(['idgl-anch'], ours)
    for base in IDGLS:
        figures = REPORTED['accuracy'][base]
        readme[f'{SYSTEMS[base]}, paper'] = partial(reported, figures)

    ablated = [base + rest for base in IDGLS for rest in ('', '-noreg', '-noil')]
    searched = read_yaml(CONFIGS / 'search.yaml')
    times = rows_of(TIME_ROWS, training_time, folder=folder / 'training_time')
    return {
        'main': grid(DATASETS, main),
        'readme': grid((*PLANETOID, *TABLES), readme),
        'random-splits': grid(TABLES, rows_of(SUPPORTED, ours, paper_splits=False)),
        'ablations': grid(ABLATED, rows_of(ablated, accuracy, folder=folder)),
        'smoothed': grid((*PLANETOID, *TABLES), both),
        'gains': grid(ABLATED, gains),
        'searches': grid(DATASETS, rows_of(searched, trials, folder=folder)),
        'training-time': grid(PLANETOID, times, 'one run each'),
    }


def make_tables(folder: Path = RESULTS) -> dict[str, str]:
    """All tables by the name of their markers."""
    made = make_grids(folder)
    for name, make in (('speed', speed_table), ('scaling', scaling_table)):
        header, *rows = make(folder)
        made[name] = table(header, rows)
    made |= {f'analysis-{name}': '' for name in analysis.ANALYSES}
    for name, found in analyses(folder).items():
        title = analysis.ANALYSES[name].title
        plot = f'![{title}](results/analysis/{name}.svg)'
        text = analysis.make_table(name, found)
        made[f'analysis-{name}'] = f'### {title}\n\n{plot}\n\n{text}'
    made['documents'] = documents.make_table(folder)
    return {**made, 'ogbn-arxiv': ogbn_arxiv.make_table(folder)}


def update(text: str, tables: dict[str, str], results: str = 'results') -> str:
    """Replaces what stands between markers; `results` is where a page finds plots."""

    def fill(match: re.Match) -> str:
        if match[1] not in tables:
            raise ValueError(f'Expected one of {", ".join(tables)} (got {match[1]!r})')
        made = tables[match[1]].replace('](results/', f']({results}/')
        return f'<!-- results:{match[1]} -->\n{made}\n'

    marked = r'<!-- results:(\S+) -->\n.*?(?=<!-- /results:\1 -->)'
    return re.sub(marked, fill, text, flags=re.S)


def pages() -> list[Path]:
    """The files that show tables."""
    root = HERE.parent
    return [root / 'README.md', HERE / 'README.md', *sorted(root.glob('docs/**/*.md'))]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, default=RESULTS)
    parser.add_argument('--update', type=Path, nargs='*', metavar='FILE')
    parser.add_argument('--check', type=Path, nargs='*', metavar='FILE')
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    tables = make_tables(args.results)
    if args.update is None and args.check is None:
        print('\n\n'.join(f'## {name}\n\n{text}' for name, text in tables.items()))
    if args.update is not None:
        for name, found in analyses(args.results).items():
            plot = analysis.results_file(name, args.results).with_suffix('.svg')
            analysis.draw(name, found, plot)
    code = 0
    asked = (args.update, args.check) != (None, None)
    for file in args.update or args.check or (pages() if asked else []):
        before = file.read_text(encoding='utf-8')
        folder = Path(os.path.relpath(args.results, file.resolve().parent))
        after = update(before, tables, folder.as_posix())
        if args.update is not None:
            file.write_text(after, encoding='utf-8')
        elif after != before:
            print(f'{file}: a table differs from the results; run report.py --update')
            code = 1
    return code


if __name__ == '__main__':
    sys.exit(main())
