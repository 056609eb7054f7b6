"""Turns the results on disk into the tables of the README.

    python benchmarks/report.py
    python benchmarks/report.py --update README.md benchmarks/README.md

A cell is our mean ± standard deviation in percent, and the paper's figure in brackets.
Cells say how many runs they have if not five; with fewer they count as missing.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import documents
from common import (
    CONFIGS,
    DATASETS,
    RESULTS,
    TABLES,
    TITLES,
    exponent,
    mean_and_deviation,
    percent,
    read_json,
    read_yaml,
    table,
)
from node_classification import ABLATED, ABLATION_DATASETS, results_file
from records import RUNS, accuracy_cell, count
from search import as_key, as_text, log_file, read_trials
from systems import SUPPORTED, System, load_settings

MAIN_ROWS = [name for base in SUPPORTED for name in (base, f'{base}-tuned')]
TIME_ROWS = ['gcn', 'gat', 'lds', 'idgl', 'idgl-noil', 'idgl-anch', 'idgl-anch-noil']
TIME_DATASETS = ('cora', 'citeseer', 'pubmed')

# Systems that have a space to search: wanted tuned on all data they run on.
SEARCHED = [name for name in SUPPORTED if name in read_yaml(CONFIGS / 'search.yaml')]

# A table in Markdown, and the row and column of each cell that is missing.
Table = tuple[str, list[tuple[str, str]]]


def accuracy_table(
    names: list[str],
    datasets: tuple[str, ...],
    folder: Path,
    paper_splits: bool = True,
) -> Table:
    r"""A table of test accuracies, and the cells that are missing.

    Of data without a given split, it shows the runs on the paper's splits with the
    paper's figures, or those on splits drawn anew for each seed.
    """
    reported = read_yaml(CONFIGS / 'reported.yaml')['accuracy']
    tuned = read_yaml(CONFIGS / 'tuned.yaml')
    rows, missing = [], []
    for name in names:
        system = System.parse(name)
        cells = []
        for dataset in datasets:
            figure = reported.get(name, {}).get(dataset) if paper_splits else None
            searched = dataset in tuned.get(system.base, {})
            offered = dataset in SUPPORTED[system.base]
            if system.settings == 'tuned':
                offered &= searched or system.base in SEARCHED
            drawn = paper_splits and dataset in TABLES
            shown = system
            if system.settings == 'tuned' and searched:
                published = load_settings(System(system.base), dataset)
                if load_settings(system, dataset) == published:
                    shown = System(system.base)  # the same runs
            content = read_json(results_file(dataset, shown, folder, drawn))
            stale = content is not None and (
                (system.settings == 'tuned' and not searched)
                or content['settings'] != load_settings(system, dataset, drawn)
            )
            text, complete = accuracy_cell(content, figure, offered, stale)
            if content and system.settings == 'tuned':
                text += remark(content['settings'], changed=shown == system)
            cells.append(text)
            if not complete:
                missing.append((system.title, TITLES[dataset]))
        if any(cell != '–' for cell in cells):
            rows.append([system.title, *cells])
    return table(['', *(TITLES[d] for d in datasets)], rows), missing


def remark(settings: dict[str, Any], changed: bool) -> str:
    """What a search has found, if it is not just another set of numbers."""
    if not changed:
        return ', as published'
    text = ', w/o IL' * (settings.get('max_iters') == 0)
    backbone = settings.get('backbone')
    return text + (f', {backbone.upper()} layers' if backbone else '')


def gains_table(folder: Path) -> Table:
    """What a part of IDGL is worth: the test accuracy with it minus that without, of
    the same seeds, in points.
    """
    parts = {'noil': 'iterating', 'noreg': 'regularisation'}
    rows, missing = [], []
    for base in ('idgl', 'idgl-anch'):
        for ablation, part in parts.items():
            title, cells = f'{System(base).title}: {part}', []
            for dataset in ABLATION_DATASETS:
                whole = scores(dataset, System(base), folder, 'test')
                rest = scores(dataset, System(base, ablation), folder, 'test')
                text, complete = gain_cell(whole, rest)
                cells.append(text)
                if not complete:
                    missing.append((title, TITLES[dataset]))
            rows.append([title, *cells])
    return table(['', *(TITLES[d] for d in ABLATION_DATASETS)], rows), missing


def scores(dataset: str, system: System, folder: Path, key: str) -> dict[int, float]:
    """Test (or dev) accuracies by seed, on the paper's splits, of the settings that the
    system has now.
    """
    drawn = dataset in TABLES
    content = read_json(results_file(dataset, system, folder, drawn))
    if not content or content['settings'] != load_settings(system, dataset, drawn):
        return {}
    return {run['seed']: run[key] for run in content['runs']}


def gain_cell(whole: dict[int, float], rest: dict[int, float]) -> tuple[str, bool]:
    """The mean and deviation of the differences, and whether there are enough."""
    gains = [100.0 * (whole[seed] - rest[seed]) for seed in sorted({*whole} & {*rest})]
    if not gains:
        return 'missing', False
    text = mean_and_deviation(gains, sign='+')
    if len(gains) != RUNS:
        text += f', {count(gains)}'
    return text, len(gains) >= RUNS


def searches_table(folder: Path) -> Table:
    """The searches on the dev sets: the settings chosen, and those published with the
    same seeds.
    """
    tuned = read_yaml(CONFIGS / 'tuned.yaml')
    rows, missing = [], []
    for base, dataset in [(name, d) for name in SEARCHED for d in SUPPORTED[name]]:
        published = load_settings(System(base), dataset, dataset in TABLES)
        trials: dict[str, dict[int, float]] = {}
        for run in read_trials(log_file(base, dataset, folder), published):
            trials.setdefault(as_key(run['settings']), {})[run['seed']] = run['dev']
        chosen = tuned.get(base, {}).get(dataset)
        dev = trials.get(as_key({**published, **(chosen or {})}))
        if chosen is None or dev is None:
            missing.append((System(base).title, TITLES[dataset]))
            continue
        # Of the published setting, runs are at hand that no search had to make.
        before = scores(dataset, System(base), folder, 'dev')
        before |= trials.get(as_key(published), {})
        same = [before[seed] for seed in dev if seed in before]
        changed = {k: v for k, v in chosen.items() if published.get(k) != v}
        compared = sum(len(seeds) >= len(dev) for seeds in trials.values())
        cells = [System(base).title, TITLES[dataset]]
        cells += [str(len(trials)), str(compared), str(len(dev))]
        cells += [percent(same) if len(same) == len(dev) else '–']
        cells += [percent(list(dev.values())), as_text(changed) or 'nothing']
        rows.append(cells)
    header = ['', 'data', 'trials', 'to the end', 'seeds']
    header += ['dev, published', 'dev, chosen', 'changes']
    return table(header, rows), missing


def time_table(folder: Path) -> Table:
    """Seconds until training stops, as a multiple of GCN's with the same seeds, and the
    paper's.
    """
    reported = read_yaml(CONFIGS / 'reported.yaml')['seconds']
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for run in timed_runs(folder):
        key = (run['system'], run['dataset'])
        seconds.setdefault(key, {})[run['seed']] = run['seconds']
    rows, missing = [], []
    for name in TIME_ROWS:
        system = System.parse(name)
        row = [system.title]
        for dataset in TIME_DATASETS:
            figure = reported.get(name, {}).get(dataset)
            beside = f' ({figure})' if figure else ''
            values = seconds.get((name, dataset), {})
            gcn = seconds.get(('gcn', dataset), {}) if name != 'gcn' else {}
            offered = dataset in SUPPORTED[system.base]
            row.append(time_cell(values, gcn) + beside if offered else '–')
            if offered and len(values) < RUNS:
                missing.append((system.title, TITLES[dataset]))
        rows.append(row)
    return table(['', *(TITLES[d] for d in TIME_DATASETS)], rows), missing


def timed_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs that have been timed, with the settings that their systems have now."""
    content = read_json(folder / 'training_time.json') or {'runs': []}
    return [
        run
        for run in content['runs']
        if run['settings'] == load_settings(System.parse(run['system']), run['dataset'])
    ]


def time_cell(values: dict[int, float], gcn: dict[int, float]) -> str:
    """Seconds of some seeds, and how often those of GCN with the same seeds."""
    if not values:
        return 'missing'
    text = f'{mean_and_deviation(list(values.values()))} s'
    if both := sorted({*values} & {*gcn}):
        ratio = sum(values[seed] for seed in both) / sum(gcn[seed] for seed in both)
        text += f', {ratio:.1f}×'
    return text + (f', {count(values)}' if len(values) < RUNS else '')


def speed_table(folder: Path) -> Table:
    """An epoch against the literal algorithm and GCN, and against size."""
    content = read_json(folder / 'speed.json')
    if not content:
        return 'missing', [('speed', 'all')]
    rows, missing = [], []
    for row in content.get('epochs', []):
        if 'gcn_epochs' not in row:
            continue
        name = TITLES[row['data']] + ' (made up)' * row.get('synthetic', False)
        cells = [name, System.parse(row['system']).title]
        cells.append(f'{row["seconds"]["idgl"] * 1e3:,.0f} ms')
        cells.append(f'{row["speedup"]:.0f}×' if 'speedup' in row else '–')
        cells.append(f'{row["gcn_epochs"]:.1f}')
        cells.append(f'{row["peak_mb"]:,.0f} MB')
        other = row.get('reference_peak_mb')
        cells.append(f'{other:,.0f} MB' if other else '–')
        rows.append(cells)
    head = ['data', 'model', 'epoch', 'faster than the literal algorithm']
    head += ['GCN epochs', 'memory', 'memory of the literal algorithm']
    lines = [table(head, rows)]
    for row in content.get('epochs', []):
        if row['system'] == 'idgl-tiled':
            lines.append(
                f'IDGL with ε = 0.1 on all pairs of Pubmed (two refinements): '
                f'{row["seconds"][0]:.0f} s and {row["peak_mb"]:,.0f} MB an epoch.'
            )
    for row in content.get('scaling', []):
        last = row['points'][-1]
        text = f'{row["kind"].capitalize()}: '
        if 'time_exponent' in row:
            text += f'time ~ n^{row["time_exponent"]:.2f}, '
            text += f'memory ~ n^{row["memory_exponent"]:.2f}'
            if last.get('environment') == {}:
                every = exponent(row['points'], 'seconds')
                text += f' without the largest size (n^{every:.2f} with it)'
            text += '; '
        text += (
            f'with two refinements {last["n"]:,} nodes take {last["seconds"]:.1f} s '
        )
        text += f'and {last["peak_mb"]:,.0f} MB an epoch'
        if last.get('environment') == {}:
            text += ', with the default allocator'
        lines.append(f'{text}.')
    if 'arxiv' in content:
        arxiv = content['arxiv']
        lines.append(
            f'At the size of ogbn-arxiv an epoch of IDGL-Anch, with two refinements, '
            f"takes {arxiv['ratio']:.2f} times one of PyG's GCN with the same layers, "
            f'and {arxiv["idgl_anch"]["peak_mb"]:,.0f} MB.'
        )
    if 'documents' in content:
        row = content['documents']
        rate, sizes = row['documents_per_second'], row['sizes']
        lines.append(
            f'Forward and backward of {len(sizes)} documents of {min(sizes)} to '
            f'{max(sizes):,} tokens (made up), with the settings for 20News and '
            f'{row["refinements"]} refinements, on one thread: {rate["idgl"]:.1f} '
            f'documents a second of CPU time and {row["peak_mb"]:,.0f} MB, '
            f'{row["speedup"]:.1f}× as fast as the straightforward implementation, '
            f'which pads documents to the longest and stacks heads '
            f'({rate["padded"]:.2f} a second, {row["padded_peak_mb"]:,.0f} MB); with '
            f'ten refinements {rate["idgl_ten"]:.1f} documents a second.'
        )
    for part in ('epochs', 'scaling', 'arxiv', 'documents'):
        if part not in content:
            missing.append(('speed', part))
    return '\n\n'.join(lines), missing


def make_tables(folder: Path = RESULTS) -> dict[str, Table]:
    """All tables by the name of their markers."""
    ablations = ['idgl', *ABLATED[:2], 'idgl-anch', *ABLATED[2:]]
    published = [name for name in MAIN_ROWS if not name.endswith('-tuned')]
    return {
        'main': accuracy_table(MAIN_ROWS, DATASETS, folder),
        'random-splits': accuracy_table(published, TABLES, folder, paper_splits=False),
        'ablations': accuracy_table(ablations, ABLATION_DATASETS, folder),
        'gains': gains_table(folder),
        'searches': searches_table(folder),
        'training-time': time_table(folder),
        'speed': speed_table(folder),
        'documents': documents.make_table(folder),
    }


def describe(missing: list[tuple[str, str]]) -> str:
    """A sentence that names the missing cells, row by row."""
    rows: dict[str, list[str]] = {}
    for row, column in missing:
        rows.setdefault(row, []).append(column)
    cells = '; '.join(f'{row}: {", ".join(columns)}' for row, columns in rows.items())
    return f'Missing, or with too few runs: {cells}.' if missing else 'Complete.'


def update(text: str, tables: dict[str, Table]) -> tuple[str, list]:
    """Replaces what stands between markers; returns also the names not found."""
    absent = []
    for name, (content, missing) in tables.items():
        content += f'\n\n{describe(missing)}' if missing else ''
        pattern = rf'(<!-- results:{name} -->).*?(<!-- /results:{name} -->)'
        replacement = rf'\1\n{content}\n\2'  # Tables hold no backslashes.
        text, count = re.subn(pattern, replacement, text, flags=re.S)
        if count == 0:
            absent.append(name)
    return text, absent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, default=RESULTS)
    parser.add_argument(
        '--update',
        type=Path,
        nargs='+',
        default=[],
        metavar='FILE',
        help='files with markers to fill',
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    tables = make_tables(args.results)
    for name, (content, missing) in tables.items():
        print(f'## {name}\n\n{content}\n')
        print(f'{describe(missing)}\n')
    absent = set(tables)
    for file in args.update:
        text, without = update(file.read_text(encoding='utf-8'), tables)
        file.write_text(text, encoding='utf-8')
        absent &= set(without)
    if args.update and absent:
        names = [name for name in tables if name in absent]
        print(f'No markers anywhere for: {", ".join(names)}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
