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
import json
import os
import re
import sys
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
    mean_and_deviation,
    read_json,
    read_yaml,
    table,
)
from node_classification import results_file
from options import explain_errors
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from records import runs_remark, score_cell
from search import tried
from systems import SMOOTHED, SUPPORTED, System, load_settings

MAIN_ROWS = [name for base in SUPPORTED for name in (base, f'{base}-tuned')]
MAIN_ROWS += ['idgl-iterdrop', 'idgl-anch-iterdrop', 'idgl-authors']
ABLATED = {'noreg': 'regularisation', 'noil': 'iterating'}
ABLATION_DATASETS = ('cora', 'citeseer', *TABLES)
TIME_ROWS = ['gcn', 'gat', 'lds', 'idgl', 'idgl-noil', 'idgl-anch', 'idgl-anch-noil']
Datasets = tuple[str, ...]
Rows = list[list[str]]
REPORTED = read_yaml(CONFIGS / 'reported.yaml')


def runs_of(
    dataset: str, system: System, folder: Path, paper_splits: bool = True
) -> list[dict[str, Any]]:
    """The runs of a pair, if they are of the settings that the system has now. Where a
    search has kept the published ones, these are the same runs.
    """
    drawn = paper_splits and dataset in TABLES
    try:
        settings = load_settings(system, dataset, drawn)
    except ValueError:  # not supported, not tuned
        return []
    for shown in (system, System(system.base, system.ablation)):
        content = read_json(results_file(dataset, shown, folder, drawn))
        if content and content['settings'] == settings:
            return content['runs']
    return []


def head(datasets: Datasets) -> list[str]:
    return ['', *(TITLES[dataset] for dataset in datasets)]


def accuracy_row(
    name: str,
    datasets: Datasets,
    folder: Path,
    paper_splits: bool = True,
    figures: bool = True,
) -> list[str]:
    """The name of a system and its cells, with the paper's figures or without."""
    system, row = System.parse(name), [System.parse(name).title]
    reported = REPORTED['accuracy'].get(name, {}) if figures else {}
    for dataset in datasets:
        runs = runs_of(dataset, system, folder, paper_splits)
        row.append(score_cell([run['test'] for run in runs], reported.get(dataset)))
    return row


def accuracy_table(
    names: list[str], datasets: Datasets, folder: Path, *options: bool
) -> Rows:
    """Test accuracies, of systems that have some."""
    rows = [accuracy_row(name, datasets, folder, *options) for name in names]
    return [head(datasets), *(row for row in rows if {*row[1:]} != {'–'})]


def reported_row(title: str, figures: dict[str, Any], datasets: Datasets) -> list[str]:
    """Figures of others, which have no runs here."""
    return [title, *(str(figures.get(dataset, '–')) for dataset in datasets)]


def main_table(folder: Path) -> Rows:
    """All systems, and what others report."""
    others = REPORTED['others'].items()
    rows = accuracy_table(MAIN_ROWS, DATASETS, folder)
    return rows + [reported_row(*other, DATASETS) for other in others]


def readme_table(folder: Path) -> Rows:
    """The few rows of the README. Where no graph is given, GCN has that of the nearest
    neighbours.
    """
    datasets = (*PLANETOID, *TABLES)
    names = ['gcn-tuned', 'appnp-tuned', 'idgl', 'idgl-anch']
    rows = [accuracy_row(name, datasets, folder, True, False) for name in names]
    rows[0][4:] = accuracy_row('gcn-knn-tuned', TABLES, folder, True, False)[1:]
    rows.insert(3, smoothed_rows('idgl', datasets, folder)[1])
    for name in ('idgl', 'idgl-anch'):
        title = f'{System(name).title}, paper'
        rows.append(reported_row(title, REPORTED['accuracy'][name], datasets))
    return [head(datasets), *rows]


def smoothed_rows(name: str, datasets: Datasets, folder: Path) -> Rows:
    """A system before and after smoothing, by the same runs."""
    system = System.parse(name)
    plain, smooth = [system.title], [f'{system.title} + smoothing']
    for dataset in datasets:
        runs = [r for r in runs_of(dataset, system, folder) if 'smoothed' in r]
        plain.append(score_cell([run['test'] for run in runs]))
        smooth.append(score_cell([run['smoothed']['test'] for run in runs]))
    return [plain, smooth]


def smoothed_table(folder: Path) -> Rows:
    """Systems before and after smoothing, those that have been smoothed."""
    datasets = (*PLANETOID, *TABLES)
    names = [name for name in MAIN_ROWS if System.parse(name).base in SMOOTHED]
    pairs = [smoothed_rows(name, datasets, folder) for name in names]
    shown = [pair for pair in pairs if {*pair[0][1:]} != {'–'}]
    return [head(datasets), *(row for pair in shown for row in pair)]


def gains_table(folder: Path) -> Rows:
    """What a part of IDGL is worth: the test accuracy with it minus that without, of
    the same seeds, in points.
    """
    rows = [head(ABLATION_DATASETS)]
    for base in ('idgl', 'idgl-anch'):
        for ablation, part in reversed(ABLATED.items()):
            row = [f'{System(base).title}: {part}']
            for dataset in ABLATION_DATASETS:
                whole, rest = (
                    {run['seed']: run['test'] for run in runs_of(dataset, s, folder)}
                    for s in (System(base), System(base, ablation))
                )
                gains = [100 * (whole[s] - rest[s]) for s in sorted({*whole} & {*rest})]
                text = mean_and_deviation(gains, sign='+') if gains else '–'
                row.append(text + runs_remark(gains) * bool(gains))
            rows.append(row)
    return rows


def searches_table(folder: Path) -> Rows:
    """How many settings have been tried on the dev set; with a star by Optuna."""

    def count(name: str) -> str:
        old = folder / 'search' / f'{name}.jsonl'
        new = folder / 'search' / 'optuna' / f'{name}.log'
        if new.exists():
            storage = JournalStorage(JournalFileBackend(str(new)))
            return f'{len(tried(optuna.load_study(study_name=name, storage=storage)))}*'
        lines = old.read_text(encoding='utf-8').splitlines() if old.exists() else []
        return str(len({str(json.loads(line)['params']) for line in lines}) or '–')

    systems = read_yaml(CONFIGS / 'search.yaml')
    rows = [[System(s).title, *(count(f'{d}_{s}') for d in DATASETS)] for s in systems]
    return [head(DATASETS), *rows]


def time_table(folder: Path) -> Rows:
    """Seconds until training stops, how often those of GCN, and the paper's."""
    rows = [['one run each', *head(PLANETOID)[1:]]]
    for name in TIME_ROWS:
        row = [System.parse(name).title]
        for dataset in PLANETOID:
            seconds, gcn = (
                runs[0]['seconds'] if runs else None
                for runs in (
                    runs_of(dataset, System.parse(n), folder / 'training_time')
                    for n in (name, 'gcn')
                )
            )
            text = f'{seconds:.1f} s' if seconds else '–'
            if seconds and gcn and name != 'gcn':
                text += f', {seconds / gcn:.1f}×'
            figure = REPORTED['seconds'].get(name, {}).get(dataset)
            row.append(f'{text} ({figure})' if figure else text)
        rows.append(row)
    return rows


def speed_table(folder: Path) -> Rows:
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


def scaling_table(folder: Path) -> Rows:
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


def make_tables(folder: Path = RESULTS) -> dict[str, str]:
    """All tables by the name of their markers."""
    ablations = [b + a for b in ('idgl', 'idgl-anch') for a in ('', '-noreg', '-noil')]
    tables = {
        'main': main_table(folder),
        'readme': readme_table(folder),
        'random-splits': accuracy_table([*SUPPORTED], TABLES, folder, False, False),
        'ablations': accuracy_table(ablations, ABLATION_DATASETS, folder),
        'smoothed': smoothed_table(folder),
        'gains': gains_table(folder),
        'searches': searches_table(folder),
        'training-time': time_table(folder),
        'speed': speed_table(folder),
        'scaling': scaling_table(folder),
    }
    made = {name: table(rows[0], rows[1:]) for name, rows in tables.items()}
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
