import json
import re
import shlex
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import common
import documents
import node_classification
import pytest
import report
import search
import systems
import training_time
from common import TABLES, read_json, read_yaml
from node_classification import all_pairs, results_file, run_pair
from report import accuracy_cell, make_tables, update
from systems import System, load_settings

from torch_geometric_idgl.datasets import load


@pytest.fixture
def config(tmp_path):
    file = tmp_path / 'short.yaml'
    file.write_text(
        'gcn-knn: {wine: {max_epochs: 4}}\n'
        'idgl: {wine: {max_epochs: 4, first_phase: 1}}\n'
    )
    return str(file)


def record(**kwargs):
    values = {'test': 0.8, 'dev': 0.7, 'epochs': 3, 'seconds': 1.0}
    return {**values, 'dev_loss': 0.5, 'iterations': 2.0, **kwargs}


# node_classification.py


def test_node_classification(tmp_path, config, capsys):
    argv = ['--dataset', 'wine', '--model', 'idgl', '--runs', '2', '--quiet']
    argv += ['--root', str(tmp_path / 'data'), '--config', config]
    argv += ['--results', str(tmp_path / 'results')]
    assert node_classification.main(argv) == 0
    out = capsys.readouterr().out
    assert 'wine idgl-short seed 0: test ' in out
    assert 'wine idgl-short seed 1: test ' in out
    assert '| mean ± std' in out

    system = System.parse('idgl', config)
    content = read_json(results_file('wine', system, tmp_path / 'results'))
    assert [run['seed'] for run in content['runs']] == [0, 1]
    assert content['settings']['max_epochs'] == 4
    for run in content['runs']:
        assert 0.0 < run['test'] <= 1.0
        assert run['epochs'] == 4
        assert run['peak_memory_mb'] > 10
        versions = {'python', 'torch', 'torch_geometric', 'torch_geometric_idgl'}
        versions |= {'numpy', 'scipy', 'scikit_learn'}
        assert versions <= set(run['versions']) <= {*versions, 'commit'}
    # A result can be repeated from its file, which names no path of this machine.
    assert content['command'] == (
        'python benchmarks/node_classification.py --dataset wine --model idgl --runs 2 '
        '--config short.yaml'
    )
    assert str(tmp_path) not in json.dumps(content)


def test_paper_splits(tmp_path, config, monkeypatch, capsys):
    system = System.parse('gcn-knn', config)
    splits = read_yaml(systems.CONFIGS / 'paper.yaml')['splits']['wine']
    seen = []
    load_data = systems.load_data

    def spy(*args):
        data = load_data(*args)
        seen.append(data.train_mask)
        return data

    monkeypatch.setattr(systems, 'load_data', spy)
    run_pair('wine', system, 2, str(tmp_path), paper_splits=True, folder=tmp_path)
    content = read_json(results_file('wine', system, tmp_path, paper_splits=True))
    assert content['settings']['splits'] == splits
    assert content['command'].endswith('--splits paper')
    assert not results_file('wine', system, tmp_path).exists()
    for mask, split in zip(seen, splits[:2], strict=True):
        assert mask.equal(load('wine', tmp_path, seed=split).train_mask)

    argv = ['--dataset', 'cora', '--model', 'gcn', '--splits', 'paper']
    assert node_classification.main([*argv, '--root', str(tmp_path)]) == 1
    assert "whose splits are drawn (got 'cora'" in capsys.readouterr().err


def test_finished_seeds_are_not_run_again(tmp_path, monkeypatch, capsys):
    seeds = []

    def fake(system, dataset, seed, root, **kwargs):
        if seed == 2 and 2 not in seeds:
            seeds.append(seed)
            raise KeyboardInterrupt
        seeds.append(seed)
        return record()

    monkeypatch.setattr(node_classification, 'run', fake)
    system = System('gcn-knn')
    with pytest.raises(KeyboardInterrupt):
        run_pair('wine', system, 3, 'data', folder=tmp_path)
    file = results_file('wine', system, tmp_path)
    assert [run['seed'] for run in read_json(file)['runs']] == [0, 1]
    capsys.readouterr()
    run_pair('wine', system, 4, 'data', folder=tmp_path)
    assert seeds == [0, 1, 2, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(' (stored, not run)') for line in lines] == [1, 1, 0, 0]
    # What is shown is what was asked for, not all there is.
    found = run_pair('wine', system, 2, 'data', first=1, folder=tmp_path)
    assert [run['seed'] for run in found] == [1, 2]
    assert [run['seed'] for run in read_json(file)['runs']] == [0, 1, 2, 3]
    assert not list(tmp_path.rglob('*.tmp'))


def test_other_settings_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(node_classification, 'run', lambda *a, **k: record())
    run_pair('wine', System('gcn-knn'), 1, 'data', folder=tmp_path)
    file = results_file('wine', System('gcn-knn'), tmp_path)
    content = read_json(file)
    content['settings']['lr'] = 7.0
    common.write_json(file, content)
    with pytest.raises(ValueError, match=r"\{'lr': \(7.0, 0.01\)\}"):
        run_pair('wine', System('gcn-knn'), 2, 'data', folder=tmp_path)


def test_settings_that_change_meanwhile(tmp_path, monkeypatch):
    # A search may write new tuned settings while a run with the old ones goes on.
    system = System('gcn-knn')
    before = load_settings(system, 'wine')

    def fake(*args, settings, **kwargs):
        changed = {**before, 'lr': 7.0}
        monkeypatch.setattr(
            node_classification, 'load_settings', lambda *a, **k: changed
        )
        return record(test=settings['lr'])

    monkeypatch.setattr(node_classification, 'run', fake)
    node_classification.run_seed('wine', system, 0, 'data', folder=tmp_path)
    content = read_json(results_file('wine', system, tmp_path))
    assert content['settings'] == before
    assert [run['test'] for run in content['runs']] == [before['lr']]
    with pytest.raises(ValueError, match='Expected the settings that wine_gcn-knn'):
        node_classification.run_seed('wine', system, 1, 'data', folder=tmp_path)


@pytest.mark.parametrize(
    'argv',
    [
        ['--dataset', 'wine', '--runs', '0'],
        ['--all', '--model', 'gcn'],
        ['--all', '--splits', 'paper'],
        ['--dataset', 'wine', '--settings', 'tuned', '--config', 'mine.yaml'],
        [],
    ],
)
def test_contradictory_options(argv, capsys):
    with pytest.raises(SystemExit):
        node_classification.main(argv)
    assert 'error: ' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('script', 'argv', 'message'),
    [
        (search, ['--dataset', 'cora', '--model', 'gin'], "(got 'gin')"),
        (search, ['--dataset', 'wine', '--model', 'gcn'], "(got 'wine'"),
        (node_classification, ['--dataset', 'wine', '--source', 'no'], "no' to read"),
        (training_time, ['--datasets', 'cora', '--models', 'gcn'], 'ind.cora.allx'),
    ],
)
def test_errors_are_explained(script, argv, message, tmp_path, capsys):
    argv = [*argv, '--root', str(tmp_path), '--results', str(tmp_path)]
    argv += ['--runs', '1', '--here'] if script is training_time else []
    assert script.main(argv) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('content', [b'', b'{"runs": [{"seed": 0', b'\xff'])
def test_corrupt_results_are_named(content, tmp_path):
    file = results_file('wine', System('gcn-knn'), tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"wine_gcn-knn.json' to be a JSON file of"):
        node_classification.read_results('wine', System('gcn-knn'), tmp_path)
    assert file.read_bytes() == content


def test_diverged_run_is_explained(tmp_path, monkeypatch, capsys):
    def diverges(*args, **kwargs):
        raise FloatingPointError('Expected a finite loss')

    monkeypatch.setattr(node_classification, 'run', diverges)
    argv = ['--dataset', 'wine', '--root', str(tmp_path), '--results', str(tmp_path)]
    assert node_classification.main(argv) == 1
    assert 'Expected a finite loss' in capsys.readouterr().err


def test_commit(monkeypatch):
    answers = {'rev-parse': '0123456789', 'status': ''}
    monkeypatch.setattr(common, '_git', lambda name, *_: answers[name])
    assert common.commit() == '0123456789'
    answers['status'] = ' M torch_geometric_idgl/nn/idgl.py'
    assert common.commit() == '0123456789-dirty'
    monkeypatch.undo()
    monkeypatch.setenv('PATH', '')
    assert common.commit() == ''  # No git: no commit, and no error.


def test_machine_says_how_memory_is_treated(monkeypatch):
    for name in common.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert 'environment' not in common.machine('cpu')
    monkeypatch.setenv('MALLOC_MMAP_MAX_', '0')
    assert common.machine('cpu')['environment'] == {'MALLOC_MMAP_MAX_': '0'}


def test_unsupported_pair_is_explained(tmp_path, capsys):
    argv = ['--dataset', 'wine', '--model', 'gcn', '--results', str(tmp_path)]
    assert node_classification.main(argv) == 1
    assert "for 'gcn' (got 'wine'" in capsys.readouterr().err


def test_missing_data_is_explained(tmp_path, capsys):
    argv = ['--dataset', 'cora', '--model', 'gcn', '--root', str(tmp_path)]
    assert node_classification.main([*argv, '--results', str(tmp_path)]) == 1
    assert 'ind.cora.allx' in capsys.readouterr().err
    assert not list(tmp_path.rglob('*.json'))


def test_all_pairs_are_supported():
    pairs = [(dataset, str(system)) for dataset, system in all_pairs()]
    assert len(pairs) == len(set(pairs))
    assert ('cora', 'idgl') in pairs
    assert ('digits', 'idgl-anch-noil') in pairs
    assert ('wine', 'logreg') in pairs
    for dataset, name in pairs:
        systems.check_supported(System.parse(name), dataset)


def test_all_runs_each_pair_in_its_own_process(tmp_path, monkeypatch, capsys):
    commands = []

    def fake(command):
        commands.append(command)
        failed = 'ogbn-arxiv' in command
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(node_classification.subprocess, 'run', fake)
    argv = ['--all', '--runs', '2', '--first', '5']
    argv += ['--root', str(tmp_path), '--quiet']
    assert node_classification.main(argv) == 1
    drawn = [s for d, s in all_pairs() if d in TABLES and s.is_published]  # on both
    assert len(commands) == len(all_pairs()) + len(drawn)
    for command in commands:
        args = node_classification.parse_args(command[2:])
        assert args.splits == 'seeds' or args.dataset in TABLES
        assert (args.runs, args.first) == (2, 5)
        assert args.root == str(tmp_path) and args.quiet
        systems.check_supported(System.parse(args.model), args.dataset)
    # The rest goes on where one fails.
    assert 'Not finished (see above): ogbn-arxiv gcn' in capsys.readouterr().out


def test_half_finished_seed_goes_on(tmp_path, config, monkeypatch):
    system = System.parse('gcn-knn', config)
    files = []

    def fake(*args, checkpoint, **kwargs):
        files.append(checkpoint)
        return record()

    monkeypatch.setattr(node_classification, 'run', fake)
    for folder in ['a', 'b']:
        run_pair('wine', system, 1, str(tmp_path), folder=tmp_path / folder)
    run_pair('wine', System('gcn-knn'), 1, str(tmp_path), folder=tmp_path)
    # The same run finds its checkpoint, one with other settings does not.
    assert files[0] == files[1] != files[2]


# report.py


def write_result(folder, dataset, name, scores, paper_splits=False, **changed):
    system = System.parse(name)
    runs = [record(seed=i, test=score) for i, score in enumerate(scores)]
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


def test_seeds_may_begin_anywhere(tmp_path, monkeypatch):
    calls = []

    def fake(system, dataset, seed, root, **kwargs):
        calls.append(seed)
        return record()

    monkeypatch.setattr(node_classification, 'run', fake)
    argv = ['--dataset', 'wine', '--model', 'gcn-knn', '--results', str(tmp_path)]
    for more, command in [
        (['--runs', '2', '--first', '3'], '--runs 2 --first 3'),
        (['--runs', '2'], '--runs 5'),  # those of the first call as well
        ([], '--runs 5'),
    ]:
        assert node_classification.main([*argv, *more]) == 0
        content = node_classification.read_results(
            'wine', System('gcn-knn'), folder=tmp_path
        )
        assert content['command'].endswith(f'gcn-knn {command}')
    assert calls == [3, 4, 0, 1, 2]


def test_report(tmp_path):
    write_result(tmp_path, 'cora', 'idgl', [0.84, 0.85, 0.84, 0.85, 0.84])
    write_result(tmp_path, 'cora', 'gcn', [0.81, 0.82])
    write_result(tmp_path, 'wine', 'idgl', [0.98], paper_splits=True)
    write_result(tmp_path, 'wine', 'idgl', [0.96, 0.96])
    write_result(tmp_path, 'cora', 'idgl-noil', [0.8] * 5)
    write_result(tmp_path, 'cora', 'appnp', [0.8] * 5, dropout=0.123)
    tables = make_tables(tmp_path)

    markdown, missing = tables['main']
    assert cell(markdown, 'IDGL', 'Cora') == '84.4 ± 0.5 (84.5)'
    assert cell(markdown, 'GCN', 'Cora') == '81.5 ± 0.7, 2 runs (81.5)'
    assert cell(markdown, 'IDGL', 'Wine') == '98.0, 1 run (97.8)'
    assert cell(markdown, 'GAT', 'Cora') == 'missing (83.0)'
    assert cell(markdown, 'IDGL', 'Pubmed') == 'missing (out of memory)'
    assert cell(markdown, 'IDGL', 'ogbn-arxiv') == '(out of memory)'
    assert cell(markdown, 'GAT', 'Wine') == '–'
    assert cell(markdown, 'GCN (tuned)', 'Cora') == 'missing'
    assert cell(markdown, 'IDGL-Anch (tuned)', 'Digits') == 'missing'
    assert ('IDGL-Anch (tuned)', 'Digits') in missing
    assert 'RBF SVM (tuned)' not in markdown  # it is always chosen on the dev set
    assert cell(markdown, 'APPNP', 'Cora') == '80.0 ± 0.0, with other settings'
    assert ('APPNP', 'Cora') in missing
    assert ('GAT', 'Cora') in missing and ('GCN', 'Cora') in missing
    assert ('IDGL', 'Cora') not in missing and ('GAT', 'Wine') not in missing

    # The paper's figures are not those of other splits.
    markdown, missing = tables['random-splits']
    assert cell(markdown, 'IDGL', 'Wine') == '96.0 ± 0.0, 2 runs'
    assert ('IDGL', 'Wine') in missing and 'Cora' not in markdown

    markdown, missing = tables['ablations']
    assert cell(markdown, 'IDGL w/o IL', 'Cora') == '80.0 ± 0.0 (83.5)'
    assert cell(markdown, 'IDGL w/o graph reg.', 'Cora') == 'missing (84.3)'
    assert ('IDGL w/o IL', 'Cora') not in missing
    assert ('IDGL w/o graph reg.', 'Cora') in missing
    assert tables['documents'] == documents.make_table(tmp_path)


def test_report_compares_the_same_seeds(tmp_path):
    write_result(tmp_path, 'cora', 'idgl', [0.84, 0.86, 0.84, 0.86, 0.84, 0.1])
    write_result(tmp_path, 'cora', 'idgl-noil', [0.83, 0.83, 0.83, 0.83, 0.84])
    write_result(tmp_path, 'wine', 'idgl', [0.95, 0.95], paper_splits=True)
    write_result(tmp_path, 'wine', 'idgl-noreg', [0.96] * 5, paper_splits=True)
    # Not those of other splits or settings.
    write_result(tmp_path, 'digits', 'idgl', [0.1], paper_splits=False)
    write_result(tmp_path, 'digits', 'idgl-noreg', [0.1], paper_splits=True)
    write_result(tmp_path, 'citeseer', 'idgl', [0.1])
    write_result(tmp_path, 'citeseer', 'idgl-noil', [0.1], heads=17)
    markdown, missing = make_tables(tmp_path)['gains']
    assert cell(markdown, 'IDGL: iterating', 'Cora') == '+1.6 ± 1.3'
    assert ('IDGL: iterating', 'Cora') not in missing
    assert cell(markdown, 'IDGL: regularisation', 'Wine') == '-1.0 ± 0.0, 2 runs'
    assert ('IDGL: regularisation', 'Wine') in missing
    assert cell(markdown, 'IDGL: regularisation', 'Digits') == 'missing'
    assert cell(markdown, 'IDGL: iterating', 'Citeseer') == 'missing'
    assert cell(markdown, 'IDGL-Anch: iterating', 'Cora') == 'missing'


def test_report_lists_searches(tmp_path, configs, monkeypatch):
    write_result(tmp_path, 'cora', 'gcn', [0.8] * 2)
    monkeypatch.setattr(search, 'run', lambda *args, **kwargs: record(dev=0.75))
    options = {'given': [{'lr': 0.5, 'dropout': 0.5}], 'folder': tmp_path}
    search.search('gcn', 'cora', 'data', 1, 2, **options)
    chosen = {'lr': 0.5, 'dropout': load_settings(System('gcn'), 'cora')['dropout']}
    search.write_winner('gcn', 'cora', chosen, configs / 'tuned.yaml')
    markdown, missing = report.searches_table(tmp_path)
    assert cell(markdown, 'GCN', 'data') == 'Cora'
    assert cell(markdown, 'GCN', 'trials') == cell(markdown, 'GCN', 'seeds') == '2'
    assert cell(markdown, 'GCN', 'to the end') == '2'
    assert cell(markdown, 'GCN', 'dev, published') == '75.0 ± 0.0'
    assert cell(markdown, 'GCN', 'dev, chosen') == '75.0 ± 0.0'
    assert cell(markdown, 'GCN', 'changes') == 'lr: 0.5'
    assert ('GCN', 'Cora') not in missing and ('GCN', 'Citeseer') in missing


def test_mean_and_deviation():
    assert common.mean_and_deviation([1.0, 2.0]) == '1.5 ± 0.7'
    assert common.mean_and_deviation([2.0], sign='+') == '+2.0'
    assert common.mean_and_deviation([-0.01], sign='+') == '+0.0'  # no negative zero
    assert common.mean_and_deviation([-1.0, -1.0], sign='+') == '-1.0 ± 0.0'


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder of settings whose `tuned.yaml` is a test's own."""
    folder = tmp_path / 'configs'
    shutil.copytree(common.CONFIGS, folder)
    (folder / 'tuned.yaml').unlink()
    for module in (report, systems):
        monkeypatch.setattr(module, 'CONFIGS', folder)
    return folder


def test_report_names_what_tuned_models_change(tmp_path, configs):
    for dataset in ('cora', 'citeseer', 'pubmed'):
        search.write_winner('idgl', dataset, {'lr': 0.5}, configs / 'tuned.yaml')
    write_result(tmp_path, 'cora', 'idgl-tuned', [0.8] * 5, max_iters=0)
    write_result(tmp_path, 'citeseer', 'idgl-tuned', [0.7] * 5)
    write_result(tmp_path, 'pubmed', 'idgl-tuned', [0.7] * 5, backbone='appnp')
    markdown, _ = make_tables(tmp_path)['main']
    assert cell(markdown, 'IDGL (tuned)', 'Cora').endswith(', w/o IL')
    assert cell(markdown, 'IDGL (tuned)', 'Citeseer') == '70.0 ± 0.0'
    assert cell(markdown, 'IDGL (tuned)', 'Pubmed').endswith(', APPNP layers')


def test_report_knows_searches_that_change_nothing(tmp_path, configs):
    search.write_winner('idgl', 'wine', {}, configs / 'tuned.yaml')
    write_result(tmp_path, 'wine', 'idgl', [0.9] * 5, paper_splits=True)
    markdown, missing = make_tables(tmp_path)['main']
    assert cell(markdown, 'IDGL (tuned)', 'Wine') == '90.0 ± 0.0, as published'
    assert ('IDGL (tuned)', 'Wine') not in missing
    assert cell(markdown, 'IDGL (tuned)', 'Cora') == 'missing'


def test_describe():
    missing = [('A', 'x'), ('B', 'x'), ('B', 'y')]
    assert report.describe(missing) == 'Missing, or with too few runs: A: x; B: x, y.'
    assert report.describe([]) == 'Complete.'


def test_accuracy_cell():
    assert accuracy_cell(None, None, offered=False) == ('–', True)
    assert accuracy_cell(None, 83.0, offered=True) == ('missing (83.0)', False)
    assert accuracy_cell({'runs': []}, None, offered=True) == ('missing', False)
    ten = {'runs': [{'test': 0.8}] * 10}
    assert accuracy_cell(ten, 83.0, offered=True) == (
        '80.0 ± 0.0, 10 runs (83.0)',
        True,
    )


def test_report_of_times(tmp_path):
    def timed(name, seed, seconds, **changed):
        settings = {**load_settings(System.parse(name), 'cora'), **changed}
        run = {'system': name, 'dataset': 'cora', 'seed': seed, 'seconds': seconds}
        return {**run, 'settings': settings}

    runs = [timed('gcn', seed, 1.5 + seed) for seed in range(2)]
    runs += [timed('idgl', seed, 19.5 + seed) for seed in range(2)]
    # Of other seeds, the time counts, but not for the ratio; of other settings, not.
    runs += [timed('idgl', 2, 50.0), timed('idgl', 3, 99.0, max_iters=1)]
    runs += [timed('lds', seed, 100.0) for seed in range(5)]
    common.write_json(tmp_path / 'training_time.json', {'runs': runs})
    markdown, missing = make_tables(tmp_path)['training-time']
    assert cell(markdown, 'GCN', 'Cora') == '2.0 ± 0.7 s, 2 runs (3)'
    assert cell(markdown, 'IDGL', 'Cora') == '30.0 ± 17.3 s, 10.0×, 3 runs (237)'
    assert cell(markdown, 'LDS', 'Cora') == '100.0 ± 0.0 s, 50.0× (390)'
    assert ('IDGL', 'Cora') in missing and ('LDS', 'Cora') not in missing
    assert cell(markdown, 'GAT', 'Cora') == 'missing (26)'
    assert cell(markdown, 'LDS', 'Pubmed') == '–'
    assert ('GAT', 'Cora') in missing and ('LDS', 'Pubmed') not in missing


def test_update_readme(tmp_path, capsys):
    write_result(tmp_path, 'cora', 'idgl', [0.84] * 5)
    readme = tmp_path / 'README.md'
    start = 'Before\n\n<!-- results:main -->\nold\n<!-- /results:main -->\n\nAfter\n'
    readme.write_text(start)
    argv = ['--results', str(tmp_path), '--update', str(readme)]
    assert report.main(argv) == 0
    text = readme.read_text()
    assert text.startswith('Before\n\n<!-- results:main -->\n|')
    assert text.endswith('<!-- /results:main -->\n\nAfter\n')
    assert 'old' not in text
    assert '84.0 ± 0.0 (84.5)' in text
    cells = 'GCN: Cora, Citeseer, Pubmed, ogbn-arxiv; GCN (tuned): '
    assert f'Missing, or with too few runs: {cells}' in text
    assert (
        'No markers anywhere for: random-splits, ablations, gains, searches, tr'
        in capsys.readouterr().out
    )
    # Tables may be spread over files.
    other = tmp_path / 'other.md'
    other.write_text('<!-- results:gains --><!-- /results:gains -->')
    assert report.main([*argv, str(other)]) == 0
    assert '| IDGL: iterating ' in other.read_text()
    assert (
        'anywhere for: random-splits, ablations, searches, tr'
        in capsys.readouterr().out
    )
    # Once more changes nothing.
    assert update(text, make_tables(tmp_path))[0] == text


# search.py


def test_draw_trials():
    space = {'a': [1, 2, 3], 'b': [0.1, 0.2]}
    drawn = search.draw_trials(space, 4)
    assert drawn[0] == {}
    assert drawn == search.draw_trials(space, 10)[:4]
    assert len(search.draw_trials(space, 100)) == 7
    assert all(trial['a'] in space['a'] for trial in drawn[1:])


def test_trials_are_distinct_settings():
    space, published = {'a': [1, 2], 'b': [0.1, 0.2]}, {'a': 1, 'b': 0.1, 'c': 7}
    for change in (0.5, 1.0):
        drawn = search.draw_trials(space, 100, change=change, published=published)
        assert drawn[0] == {}
        made = {search.as_key({**published, **trial}) for trial in drawn}
        assert len(made) == len(drawn) == 4


def test_draw_trials_near_the_published_setting():
    space = {name: [1, 2, 3] for name in 'abcdefghij'}
    drawn = search.draw_trials(space, 200, change=0.3)
    assert drawn[0] == {}
    assert drawn == search.draw_trials(space, 300, change=0.3)[:200]
    assert len({json.dumps(trial) for trial in drawn}) == 200
    assert 2.5 < sum(map(len, drawn)) / 200 < 3.5
    drawn = search.draw_trials({**space, 'k': [5]}, 20, change=0.3)
    assert all(trial['k'] == 5 for trial in drawn[1:])


def test_search_halves(tmp_path, monkeypatch):
    calls = []

    def fake(system, dataset, seed, root, *, settings, **kwargs):
        calls.append((seed, settings['dropout']))
        return record(dev=0.8 - abs(settings['dropout'] - 0.7), test=0.123)

    monkeypatch.setattr(search, 'run', fake)
    arguments = ('gcn', 'cora', 'data', 12, 3)
    ranked = search.search(*arguments, halve=True, change=0.5, folder=tmp_path)
    counts = [sum(seed == s for seed, _ in calls) for s in range(3)]
    assert counts == [12, 6, 3]
    assert len(ranked) == 3
    # Those that go on are the best of the round before.
    for s in (0, 1):
        gone_on = [-abs(dropout - 0.7) for seed, dropout in calls if seed == s + 1]
        all_of_round = sorted(-abs(d - 0.7) for seed, d in calls if seed == s)
        assert sorted(gone_on) == all_of_round[-len(gone_on) :]
    search.search(*arguments, halve=True, change=0.5, folder=tmp_path)
    assert len(calls) == 21
    log = search.read_log(tmp_path / 'search' / 'cora_gcn.jsonl')
    assert 'test' not in {key for line in log for key in line}
    assert log[0]['command'].endswith('--trials 12 --seeds 3 --change 0.5 --halve')


def test_rank():
    def line(params, seed, dev, loss):
        scores = {'dev': dev, 'dev_loss': loss}
        return {'params': params, 'settings': params, 'seed': seed, **scores}

    log = [line({'a': 1}, 0, 0.8, 0.5), line({'a': 1}, 1, 0.6, 0.5)]
    log += [line({'a': 2}, 0, 0.7, 0.4), line({'a': 2}, 1, 0.7, 0.4)]
    log += [line({'a': 3}, 0, 0.9, 0.1)]  # Not all seeds.
    log += [line({'a': 4}, 0, 0.6, 0.1), line({'a': 4}, 1, 0.6, 0.1)]
    ranked = search.rank(log, seeds=2)
    assert [trial['params']['a'] for trial in ranked] == [2, 1, 4]


def test_search(tmp_path, monkeypatch, capsys):
    calls = []

    def fake(system, dataset, seed, root, *, settings, hide_test, **kwargs):
        assert hide_test
        calls.append(seed)
        if len(calls) == 4:
            raise KeyboardInterrupt
        # The best dropout is 0.7, whatever else is chosen.
        return record(dev=0.8 - abs(settings['dropout'] - 0.7), test=0.123)

    monkeypatch.setattr(search, 'run', fake)
    tuned = tmp_path / 'tuned.yaml'
    tuned.write_text('# A comment.\nidgl: {wine: {lr: 0.1}}\n')
    argv = ['--dataset', 'cora', '--model', 'gcn', '--trials', '30', '--seeds', '2']
    argv += ['--results', str(tmp_path), '--tuned', str(tuned)]
    with pytest.raises(KeyboardInterrupt):
        search.main(argv)
    assert search.main(argv) == 0
    assert len(calls) == 30 * 2 + 1
    assert search.main(argv) == 0
    assert len(calls) == 30 * 2 + 1

    log = search.read_log(tmp_path / 'search' / 'cora_gcn.jsonl')
    assert len(log) == 60
    assert 'test' not in {key for line in log for key in line}
    assert {'params', 'dev', 'dev_loss'} <= set(log[0])
    assert tuned.read_text().startswith('# A comment.\n')
    content = read_yaml(tuned)
    assert content['idgl'] == {'wine': {'lr': 0.1}}
    assert content['gcn']['cora']['dropout'] == 0.7


def test_search_knows_the_published_runs(tmp_path, monkeypatch):
    calls = []

    def fake(system, dataset, seed, root, **kwargs):
        calls.append(seed)
        return record(dev=0.6, dev_cross_entropy=0.5)

    monkeypatch.setattr(node_classification, 'run', fake)
    run_pair('cora', System('gcn'), 1, str(tmp_path), folder=tmp_path)
    monkeypatch.setattr(search, 'run', fake)
    search.search('gcn', 'cora', 'data', 2, 2, folder=tmp_path)
    assert calls == [0, 0, 1, 1]  # one run before; the first of four is not repeated
    log = search.read_log(tmp_path / 'search' / 'cora_gcn.jsonl')
    assert [(line['trial'], line['seed']) for line in log] == [
        *[(0, 0), (1, 0), (0, 1), (1, 1)]
    ]
    assert 'test' not in {key for line in log for key in line}


def test_search_halves_but_for_published_runs(tmp_path, monkeypatch):
    """The published setting is compared as long as it costs nothing, and does not take
    the place of another trial.
    """
    calls = []

    def fake(system, dataset, seed, root, *, settings, **kwargs):
        published = settings == load_settings(System('gcn'), 'cora')
        calls.append(('published' if published else settings['lr'], seed))
        dev = [0.5, 0.9][seed] if published else 0.5 + settings['lr'] / 10
        return record(dev=dev, dev_cross_entropy=0.5)

    monkeypatch.setattr(node_classification, 'run', fake)
    run_pair('cora', System('gcn'), 2, str(tmp_path), folder=tmp_path)
    assert calls == [('published', 0), ('published', 1)]
    calls.clear()
    monkeypatch.setattr(search, 'run', fake)
    given = [{'lr': lr} for lr in (0.1, 0.2, 0.3)]
    options = {'halve': True, 'given': given, 'folder': tmp_path}
    ranked = search.search('gcn', 'cora', 'data', 1, 2, **options)
    assert calls == [(0.1, 0), (0.2, 0), (0.3, 0), (0.2, 1), (0.3, 1)]
    assert [trial['params'] for trial in ranked] == [{}, {'lr': 0.3}, {'lr': 0.2}]
    # A trial with fewer seeds does not replace the winner of those.
    options['given'] = [{'lr': 4.0}]
    assert search.search('gcn', 'cora', 'data', 1, 1, **options) == ranked
    assert calls[5:] == [(4.0, 0)]


def test_search_that_was_stopped_decides_nothing():
    def runs(lr, *devs):
        line = {'params': {'lr': lr}, 'settings': {'lr': lr}, 'dev_loss': 1.0}
        return [{**line, 'seed': seed, 'dev': dev} for seed, dev in enumerate(devs)]

    # The first trial had begun a third seed.
    log = runs(0.1, 0.5, 0.5, 0.5) + runs(0.2, 0.9, 0.9)
    assert search.most_seeds(log) == 2
    ranked = search.rank(log, search.most_seeds(log))
    assert [trial['params'] for trial in ranked] == [{'lr': 0.2}, {'lr': 0.1}]
    assert search.most_seeds([]) == search.most_seeds(runs(0.1, 0.5)) == 0
    # A run that is logged twice counts once.
    log += runs(0.2, 0.3)
    assert search.rank(log, 2) == ranked


def test_search_forgets_runs_of_other_published_settings(tmp_path, monkeypatch):
    calls = []

    def fake(system, dataset, seed, root, *, settings, checkpoint, **kwargs):
        calls.append((settings, checkpoint))
        return record(dev=0.6)

    monkeypatch.setattr(search, 'run', fake)
    search.search('gcn', 'cora', 'data', 3, 1, folder=tmp_path)
    changed = {**load_settings(System('gcn'), 'cora'), 'patience': 7}
    monkeypatch.setattr(search, 'load_settings', lambda *args, **kwargs: changed)
    search.search('gcn', 'cora', 'data', 3, 1, folder=tmp_path)
    assert [settings['patience'] for settings, _ in calls] == [100] * 3 + [7] * 3
    # Each goes on from a checkpoint of its own, which no other run has.
    files = {checkpoint for _, checkpoint in calls}
    assert len(files) == 6 and {file.parent.name for file in files} == {'search'}


def test_search_tries_what_is_given(tmp_path, monkeypatch, capsys):
    calls = []

    def fake(system, dataset, seed, root, *, settings, **kwargs):
        calls.append(settings['dropout'])
        return record(dev=settings['dropout'])

    monkeypatch.setattr(search, 'run', fake)
    tuned = tmp_path / 'tuned.yaml'
    argv = ['--dataset', 'cora', '--model', 'gcn', '--trials', '1', '--seeds', '1']
    argv += ['--results', str(tmp_path), '--tuned', str(tuned)]
    given = ['--try', 'dropout: 0.9, lr: 0.02', '--try', 'dropout: 0.5']
    assert search.main([*argv, *given]) == 0
    assert calls == [0.5, 0.9]  # the last is the published setting
    assert read_yaml(tuned)['gcn']['cora'] == {'dropout': 0.9, 'lr': 0.02}
    log = search.read_log(tmp_path / 'search' / 'cora_gcn.jsonl')
    command = shlex.split(log[1]['command'])[2:]
    assert search.parse_args(command).given == [
        {'dropout': 0.9, 'lr': 0.02},
        {'dropout': 0.5},
    ]
    # A later search does not forget what an earlier one has found.
    assert search.main([*argv, '--try', 'dropout: 0.8']) == 0
    assert calls == [0.5, 0.9, 0.8]
    assert read_yaml(tuned)['gcn']['cora'] == {'dropout': 0.9, 'lr': 0.02}
    assert search.main([*argv, '--try', 'droput: 0.8']) == 1
    assert '(got droput)' in capsys.readouterr().err
    assert search.main([*argv, '--try', 'monitor: score']) == 1
    assert '(got monitor)' in capsys.readouterr().err
    # Nor is such a trial chosen that is in a log.
    line = {**log[1], 'params': {'monitor': 'score'}, 'dev': 1.0}
    line['settings'] = {**load_settings(System('gcn'), 'cora'), 'monitor': 'score'}
    search.append_log(tmp_path / 'search' / 'cora_gcn.jsonl', line)
    assert search.main(argv) == 0
    assert read_yaml(tuned)['gcn']['cora'] == {'dropout': 0.9, 'lr': 0.02}
    for text in ['dropout', 'dropout=0.5', '{', '']:
        with pytest.raises(SystemExit):
            search.parse_args([*argv, '--try', text])
        assert f'(got {text!r})' in capsys.readouterr().err


def test_search_tries_arguments_of_the_model(tmp_path, monkeypatch, capsys):
    calls = []

    def fake(system, dataset, seed, root, *, settings, **kwargs):
        calls.append(settings.get('backbone'))
        return record()

    monkeypatch.setattr(search, 'run', fake)
    argv = ['--dataset', 'cora', '--trials', '1', '--seeds', '1']
    argv += ['--results', str(tmp_path), '--tuned', str(tmp_path / 'tuned.yaml')]
    given = ['--try', 'backbone: appnp']
    for model in ['idgl', 'idgl-anch']:
        assert search.main([*argv, '--model', model, *given]) == 0
    assert calls == [None, 'appnp'] * 2
    assert search.main([*argv, '--model', 'gcn', *given]) == 1
    assert '(got backbone)' in capsys.readouterr().err
    assert search.main([*argv, '--model', 'idgl', '--try', 'in_channels: 3']) == 1
    assert '(got in_channels)' in capsys.readouterr().err


def test_search_log_survives_a_cut(tmp_path):
    file = tmp_path / 'log.jsonl'
    search.append_log(file, {'a': 1})
    file.write_text(file.read_text() + '{"a": 2, "b"')
    search.append_log(file, {'a': 3})
    assert [line['a'] for line in search.read_log(file)] == [1, 3]


def test_search_wants_plain_systems():
    for name in ['gcn-tuned', 'idgl-noil']:
        with pytest.raises(ValueError, match='without suffixes'):
            search.search(name, 'cora', 'data', 2, 1)
    with pytest.raises(ValueError, match=r"\(got 'logreg'\)"):
        search.search('logreg', 'wine', 'data', 2, 1)


# training_time.py


def test_training_time(tmp_path, monkeypatch, capsys):
    order = []

    def fake(system, dataset, seed, root, **kwargs):
        order.append((str(system), seed))
        return record(seconds={'gcn': 2.0}.get(str(system), 8.0))

    def here(command, env):  # In place of a process of its own.
        # It keeps freed memory, unless it is told otherwise.
        assert env['MALLOC_MMAP_MAX_'] == '7'
        assert int(env['MALLOC_TRIM_THRESHOLD_']) >= 1 << 40
        return subprocess.CompletedProcess(command, training_time.main(command[2:]))

    monkeypatch.setenv('MALLOC_MMAP_MAX_', '7')
    monkeypatch.delenv('MALLOC_TRIM_THRESHOLD_', raising=False)
    monkeypatch.setattr(node_classification, 'run', fake)
    monkeypatch.setattr(training_time.subprocess, 'run', here)
    argv = ['--datasets', 'pubmed', '--runs', '2', '--results', str(tmp_path)]
    argv += ['--root', str(tmp_path / 'data')]
    assert training_time.main(argv) == 0
    # Seed by seed, and without LDS, which Pubmed is too large for.
    names = ['gcn', 'gat', 'idgl', 'idgl-noil', 'idgl-anch', 'idgl-anch-noil']
    assert order == [(name, seed) for seed in range(2) for name in names]
    assert '8.0 ± 0.0 s, 4.0×, 2 runs (323)' in capsys.readouterr().out
    assert training_time.main(argv) == 0
    assert len(order) == 12

    # Scores are kept as well, and a seed that has one is timed all the same.
    content = read_json(results_file('pubmed', System('gcn'), tmp_path))
    assert [run['seed'] for run in content['runs']] == [0, 1]
    (tmp_path / 'training_time.json').unlink()
    argv = [*argv, '--models', 'gcn', '--first', '1', '--runs', '1']
    assert training_time.main(argv) == 0
    assert order[12:] == [('gcn', 1)]
    assert read_json(results_file('pubmed', System('gcn'), tmp_path)) == content
    timed = read_json(tmp_path / 'training_time.json')['runs']
    assert [(run['system'], run['seed']) for run in timed] == [('gcn', 1)]
    assert datetime.fromisoformat(timed[0]['started']).tzinfo is not None


def test_training_time_goes_on_where_one_fails(tmp_path, monkeypatch, capsys):
    def fails(command, env):
        return subprocess.CompletedProcess(command, int('gat' in command))

    monkeypatch.setattr(training_time.subprocess, 'run', fails)
    argv = ['--datasets', 'pubmed', '--runs', '1', '--results', str(tmp_path)]
    assert training_time.main(argv) == 1
    assert 'Not finished (see above): pubmed gat seed 0\n' in capsys.readouterr().out


@pytest.mark.parametrize('argv', [['--datasets', 'wine'], ['--models', 'gnc']])
def test_training_time_says_what_it_knows(argv, capsys):
    with pytest.raises(SystemExit):
        training_time.main(argv)
    assert 'choose from' in capsys.readouterr().err


# What the documentation says


SCRIPTS = (documents, node_classification, report, search, training_time)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('script', SCRIPTS)
def test_documented_commands_are_understood(script):
    pages = [ROOT / 'README.md', ROOT / 'benchmarks' / 'README.md']
    text = script.__doc__ + ''.join(page.read_text(encoding='utf-8') for page in pages)
    name = Path(script.__file__).name
    lines = re.findall(rf'python benchmarks/{name}([^#`\n]*)', text)
    commands = [shlex.split(arguments) for arguments in lines if arguments.strip()]
    assert commands
    for arguments in commands:
        args = script.parse_args(arguments)
        if script is documents:
            documents.find_system(args.model)
        elif getattr(args, 'model', None):
            systems.check_supported(System.parse(args.model), args.dataset)
