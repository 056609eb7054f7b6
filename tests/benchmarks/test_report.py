import json
import shutil

import common
import pytest
import report
import search
import systems
from node_classification import results_file
from records import score_cell
from report import make_tables
from systems import System, load_settings


@pytest.fixture(autouse=True)
def configs(tmp_path, monkeypatch):
    """A folder of settings whose `tuned.yaml` is a test's own."""
    folder = tmp_path / 'configs'
    shutil.copytree(common.CONFIGS, folder)
    tuned = folder / 'tuned.yaml'
    tuned.write_text(
        'gcn: {cora: {lr: 0.5}}\ngcn-knn: {wine: {lr: 0.5}}\nidgl: {cora: {}}'
    )
    for module in (report, systems):
        monkeypatch.setattr(module, 'CONFIGS', folder)


def write_result(
    folder,
    dataset,
    name,
    scores,
    paper_splits=False,
    smoothed=(),
    seconds=1.0,
    **changed,
):
    system = System.parse(name)
    runs = [
        {'seed': seed, 'test': score, 'seconds': seconds}
        for seed, score in enumerate(scores)
    ]
    for run, score in zip(runs, smoothed, strict=False):
        run['smoothed'] = {'test': score}
    settings = {**load_settings(system, dataset, paper_splits), **changed}
    file = results_file(dataset, system, folder, paper_splits)
    common.write_json(file, {'settings': settings, 'runs': runs})


def cell(markdown, row, column):
    lines = [
        [part.strip() for part in line.strip('|').split('|')]
        for line in markdown.splitlines()
    ]
    (line,) = [line for line in lines if line[0] == row]
    return line[lines[0].index(column)]


def test_accuracies(tmp_path):
    write_result(tmp_path, 'cora', 'idgl', [0.84, 0.85, 0.84, 0.85, 0.84])
    write_result(tmp_path, 'cora', 'gcn', [0.81, 0.82])
    write_result(tmp_path, 'cora', 'gcn-tuned', [0.83] * 5)
    write_result(tmp_path, 'wine', 'gcn-knn-tuned', [0.95] * 5, paper_splits=True)
    write_result(tmp_path, 'wine', 'idgl', [0.98], paper_splits=True)
    write_result(tmp_path, 'wine', 'idgl', [0.96, 0.96])
    write_result(tmp_path, 'cora', 'idgl-noil', [0.8] * 5)
    write_result(tmp_path, 'citeseer', 'appnp', [0.8] * 5, dropout=0.123)
    tables = make_tables(tmp_path)

    main = tables['main']
    assert cell(main, 'IDGL', 'Cora') == '84.4 ± 0.5 (84.5)'
    assert cell(main, 'IDGL (tuned)', 'Cora') == '84.4 ± 0.5'  # nothing changed
    assert cell(main, 'GCN', 'Cora') == '81.5 ± 0.7, 2 runs (81.5)'
    assert cell(main, 'IDGL', 'Wine') == '98.0, 1 run (97.8)'
    assert cell(main, 'IDGL', 'Pubmed') == '(out of memory)'
    assert cell(main, 'GAT', 'Wine') == '–'
    assert cell(main, 'APPNP', 'Citeseer') == '(75.7)'  # of other settings
    assert 'APPNP (tuned)' not in main
    assert 'seeds' not in main
    assert cell(main, 'IDGL, reported by OpenGSL', 'Citeseer') == '73.3'

    readme = tables['readme']
    assert cell(readme, 'GCN (tuned)', 'Cora') == '83.0 ± 0.0'
    assert cell(readme, 'GCN (tuned)', 'Wine') == '95.0 ± 0.0'  # on neighbours
    assert cell(readme, 'IDGL', 'Cora') == '84.4 ± 0.5'
    assert cell(readme, 'IDGL, paper', 'Cora') == '84.5'
    assert cell(readme, 'IDGL, paper', 'Pubmed') == 'out of memory'

    # The paper's figures are not those of other splits.
    assert cell(tables['random-splits'], 'IDGL', 'Wine') == '96.0 ± 0.0, 2 runs'
    ablations = tables['ablations']
    assert cell(ablations, 'IDGL w/o IL', 'Cora') == '80.0 ± 0.0 (83.5)'


def test_variants_have_rows(tmp_path):
    write_result(tmp_path, 'citeseer', 'idgl-authors', [0.71])
    write_result(tmp_path, 'wine', 'idgl-authors', [0.97] * 5, paper_splits=True)
    write_result(tmp_path, 'citeseer', 'idgl-iterdrop', [0.73] * 5)
    tables = make_tables(tmp_path)
    row = "IDGL with the authors' seeds"
    assert cell(tables['main'], row, 'Citeseer') == '71.0, 1 run'
    assert cell(tables['main'], row, 'Wine') == '97.0 ± 0.0'
    row = "IDGL with dropout in iterations (not the paper's setting)"
    assert cell(tables['main'], row, 'Citeseer') == '73.0 ± 0.0'
    assert 'seeds' not in tables['random-splits']


def test_smoothed_rows_are_of_the_same_runs(tmp_path):
    write_result(tmp_path, 'cora', 'idgl', [0.8] * 5 + [0.1], smoothed=[0.85] * 5)
    write_result(tmp_path, 'cora', 'gcn', [0.8] * 5)
    write_result(tmp_path, 'wine', 'gcn-knn', [0.8], True, smoothed=[0.9])
    markdown = make_tables(tmp_path)['smoothed']
    assert cell(markdown, 'IDGL', 'Cora') == '80.0 ± 0.0'
    assert cell(markdown, 'IDGL + smoothing', 'Cora') == '85.0 ± 0.0'
    assert 'GCN + smoothing' not in markdown  # nothing to show
    assert cell(markdown, 'GCN-kNN + smoothing', 'Wine') == '90.0, 1 run'
    assert 'GCN (tuned)' not in markdown
    write_result(tmp_path, 'cora', 'gcn-tuned', [0.8] * 5, smoothed=[0.82] * 5)
    markdown = make_tables(tmp_path)['smoothed']
    assert cell(markdown, 'GCN (tuned) + smoothing', 'Cora') == '82.0 ± 0.0'


def test_gains_are_of_the_same_seeds(tmp_path):
    write_result(tmp_path, 'cora', 'idgl', [0.84, 0.86, 0.84, 0.86, 0.84, 0.1])
    write_result(tmp_path, 'cora', 'idgl-noil', [0.83, 0.83, 0.83, 0.83, 0.84])
    write_result(tmp_path, 'wine', 'idgl', [0.95, 0.95], paper_splits=True)
    write_result(tmp_path, 'wine', 'idgl-noreg', [0.96] * 5, paper_splits=True)
    # Not those of other splits or settings.
    write_result(tmp_path, 'digits', 'idgl', [0.1], paper_splits=False)
    write_result(tmp_path, 'digits', 'idgl-noreg', [0.1], paper_splits=True)
    write_result(tmp_path, 'citeseer', 'idgl', [0.1])
    write_result(tmp_path, 'citeseer', 'idgl-noil', [0.1], heads=17)
    markdown = make_tables(tmp_path)['gains']
    assert cell(markdown, 'IDGL: iterating', 'Cora') == '+1.6 ± 1.3'
    assert cell(markdown, 'IDGL: regularisation', 'Wine') == '-1.0 ± 0.0, 2 runs'
    assert cell(markdown, 'IDGL: regularisation', 'Digits') == '–'
    assert cell(markdown, 'IDGL: iterating', 'Citeseer') == '–'


def test_searches_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(search, 'run', lambda *args, **kwargs: {'dev_loss': 0.5})
    argv = ['--dataset', 'wine', '--model', 'gcn-knn', '--trials', '2', '--seeds', '1']
    search.search(search.parse_args([*argv, '--results', str(tmp_path)]))
    lines = [{'params': {'lr': lr}, 'seed': s} for lr in (0.1, 0.2) for s in (0, 1)]
    file = tmp_path / 'search' / 'cora_gcn.jsonl'
    file.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
    markdown = make_tables(tmp_path)['searches']
    assert cell(markdown, 'GCN-kNN', 'Wine') == '2*'
    assert cell(markdown, 'GCN', 'Cora') == '2'
    assert cell(markdown, 'GCN', 'Pubmed') == '–'


def test_mean_and_deviation():
    assert common.mean_and_deviation([1.0, 2.0]) == '1.5 ± 0.7'
    assert common.mean_and_deviation([2.0], sign='+') == '+2.0'
    assert common.mean_and_deviation([-0.01], sign='+') == '+0.0'  # no negative zero
    assert common.mean_and_deviation([-1.0, -1.0], sign='+') == '-1.0 ± 0.0'


def test_score_cell():
    assert score_cell([]) == '–'
    assert score_cell([], 83.0) == '(83.0)'
    assert score_cell([0.8] * 5) == '80.0 ± 0.0'
    assert score_cell([0.8] * 10, 83.0) == '80.0 ± 0.0, 10 runs (83.0)'
    assert score_cell([0.8], 'out of it', ', short') == '80.0, 1 run, short (out of it)'


def test_times(tmp_path):
    folder = tmp_path / 'training_time'
    for name, seconds in {'gcn': 2.0, 'idgl': 20.0, 'lds': 9.0}.items():
        changed = {'lr': 7.0} if name == 'lds' else {}  # not its settings now
        write_result(folder, 'cora', name, [0.8], seconds=seconds, **changed)
    markdown = make_tables(tmp_path)['training-time']
    assert cell(markdown, 'GCN', 'Cora') == '2.0 s (3)'
    assert cell(markdown, 'IDGL', 'Cora') == '20.0 s, 10.0× (237)'
    assert cell(markdown, 'LDS', 'Cora') == '– (390)'


def test_speed(tmp_path):
    epoch = {'data': 'cora', 'system': 'idgl', 'seconds': {'idgl': 0.12}}
    epoch |= {'speedup': 154.2, 'gcn_epochs': 9.21, 'peak_mb': 509.0}
    epoch['reference_peak_mb'] = 6470.0
    tiled = {'data': 'pubmed', 'system': 'idgl-tiled', 'seconds': [28.0]}
    points = [{'n': 30000, 'seconds': 161.7, 'peak_mb': 898.0}]
    scaling = {'kind': 'tiled', 'points': points}
    scaling |= {'time_exponent': 2.444, 'memory_exponent': 0.5}
    arxiv = {'idgl_anch': {'seconds': [3.0, 1.0, 2.0], 'peak_mb': 5000.0}}
    arxiv |= {'gcn': {'seconds': [2.0] * 3}, 'ratio': 0.92}
    documents = {'sizes': [60, 1000], 'seconds': {'idgl': 1.0}, 'speedup': 18.0}
    documents |= {'peak_mb': 729.0, 'padded_peak_mb': 3077.0}
    content = {'epochs': [epoch, {**tiled, 'peak_mb': 605.0}], 'scaling': [scaling]}
    content |= {'arxiv': arxiv, 'documents': documents}
    common.write_json(tmp_path / 'speed.json', content)
    assert [row[2:] for row in report.speed_table(tmp_path)[1:]] == [
        ['120 ms', '154×', '9.2', '509 MB', '6,470 MB'],
        ['28,000 ms', '–', '–', '605 MB', '–'],
        ['2,000 ms', '–', '0.9', '5,000 MB', '–'],
        ['1,000 ms', '18×', '–', '729 MB', '3,077 MB'],
    ]
    row = ['tiled', '2.44', '0.50', '30,000', '161.7 s', '898 MB']
    assert report.scaling_table(tmp_path)[1:] == [row]


def test_pages(tmp_path, capsys):
    write_result(tmp_path, 'cora', 'idgl', [0.84] * 5)
    write_result(tmp_path, 'cora', 'idgl-noil', [0.83] * 5)
    page = tmp_path / 'page.md'
    page.write_text(
        'Before\n\n<!-- results:main -->\nold\n<!-- /results:main -->\n\nAfter\n'
        '<!-- results:gains -->\n<!-- /results:gains -->\n'
    )
    argv = ['--results', str(tmp_path)]
    assert report.main([*argv, '--check', str(page)]) == 1
    assert 'page.md: a table differs' in capsys.readouterr().out
    assert report.main([*argv, '--update', str(page)]) == 0
    text = page.read_text()
    assert text.startswith('Before\n\n<!-- results:main -->\n|')
    assert '<!-- /results:main -->\n\nAfter\n' in text and 'old' not in text
    assert '84.0 ± 0.0 (84.5)' in text and '| IDGL: iterating ' in text
    assert report.main([*argv, '--check', str(page)]) == 0
    page.write_text(text.replace('84.0 ± 0.0', '85.0 ± 0.0'))
    assert report.main([*argv, '--check', str(page)]) == 1
    with pytest.raises(ValueError, match=r"\(got 'nothing'\)"):
        report.update('<!-- results:nothing -->\n<!-- /results:nothing -->', {})
    capsys.readouterr()
    assert report.main(argv) == 0
    assert '## training-time\n' in capsys.readouterr().out
    assert all(page.name.endswith('.md') for page in report.pages())


def test_analyses_are_shown(tmp_path):
    page = tmp_path / 'docs' / 'page.md'
    page.parent.mkdir()
    page.write_text(
        '<!-- results:analysis-attacks -->\n<!-- /results:analysis-attacks -->\n'
        '<!-- results:analysis-lambda -->\n<!-- /results:analysis-lambda -->\n'
    )
    folder = tmp_path / 'results' / 'analysis'
    run = {'dataset': 'cora', 'system': 'idgl', 'seed': 0, 'test': 0.84}
    # Of the attacks, no option has been chosen yet.
    attack = {**run, 'rate': 0.25, 'option': 0.8, 'dev_cross_entropy': 1.0}
    common.write_json(folder / 'attacks.json', {'cells': [attack]})
    common.write_json(folder / 'lambda.json', {'cells': [{**run, 'lambda': 0.8}]})

    argv = ['--results', str(folder.parent)]
    assert report.main([*argv, '--update', str(page)]) == 0
    text = page.read_text()
    assert text.startswith(
        '<!-- results:analysis-attacks -->\n\n<!-- /results:analysis-attacks -->\n'
        '<!-- results:analysis-lambda -->\n### Weight of the initial graph\n\n'
        '![Weight of the initial graph](../results/analysis/lambda.svg)\n\n'
    )
    assert cell(text[text.index('| weight') :], 'IDGL', '0.8') == '84.0'
    assert [file.name for file in folder.glob('*.svg')] == ['lambda.svg']
    assert report.main([*argv, '--check', str(page)]) == 0
    common.write_json(folder / 'lambda.json', {'cells': [{**run, 'lambda': 0.7}]})
    assert report.main([*argv, '--check', str(page)]) == 1
