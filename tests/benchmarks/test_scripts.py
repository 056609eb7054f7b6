import itertools
import json
import re
import shlex
from pathlib import Path

import analysis
import common
import documents
import node_classification
import pytest
import report
import search
import systems
from common import read_json, read_yaml
from node_classification import results_file
from systems import SUPPORTED, System, load_settings

from torch_geometric_idgl.datasets import load


@pytest.fixture
def short(monkeypatch):
    """All systems stop after four epochs."""
    published = node_classification.load_settings

    def load_settings(*args, **kwargs):
        settings = published(*args, **kwargs) | {'max_epochs': 4}
        return settings | ({'first_phase': 1} if 'first_phase' in settings else {})

    monkeypatch.setattr(node_classification, 'load_settings', load_settings)


def record(**kwargs):
    values = {'test': 0.8, 'dev': 0.7, 'epochs': 3, 'seconds': 1.0}
    return {**values, 'dev_loss': 0.5, 'iterations': 2.0, **kwargs}


def run_pair(system, seeds, results, *options, root='data'):
    """Runs a system on Wine."""
    argv = ['--dataset', 'wine', '--model', str(system), '--runs', str(len(seeds))]
    argv += ['--first', str(seeds[0]), '--root', str(root), '--results', str(results)]
    args = node_classification.parse_args([*argv, '--device', 'cpu', *options])
    return node_classification.run_pair('wine', system, args)


# node_classification.py


def test_node_classification(tmp_path, short, capsys):
    argv = ['--dataset', 'wine', '--model', 'idgl', 'gcn-knn', '--runs', '2', '--quiet']
    argv += ['--root', str(tmp_path / 'data'), '--results', str(tmp_path / 'results')]
    assert node_classification.main(argv) == 0
    out = capsys.readouterr().out
    for name in ('idgl', 'gcn-knn'):
        assert f'wine {name} seed 0: test ' in out
        assert f'wine {name} seed 1: test ' in out
    assert '| wine | IDGL ' in out and '| wine | GCN-kNN, smoothed ' in out

    content = read_json(results_file('wine', System('idgl'), tmp_path / 'results'))
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
        'python benchmarks/node_classification.py --dataset wine --model idgl --runs 2'
    )
    assert str(tmp_path) not in json.dumps(content)


def test_paper_splits(tmp_path, short, monkeypatch, capsys):
    system = System('gcn-knn')
    splits = read_yaml(systems.CONFIGS / 'paper.yaml')['splits']['wine']
    seen = []
    load_data = systems.load_data

    def spy(*args):
        data = load_data(*args)
        seen.append(data.train_mask)
        return data

    monkeypatch.setattr(systems, 'load_data', spy)
    run_pair(system, range(2), tmp_path, '--splits', 'paper', root=tmp_path)
    content = read_json(results_file('wine', system, tmp_path, paper_splits=True))
    assert content['settings']['splits'] == splits
    assert content['command'].endswith('--splits paper --runs 2')
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
        run_pair(system, range(3), tmp_path)
    file = results_file('wine', system, tmp_path)
    assert [run['seed'] for run in read_json(file)['runs']] == [0, 1]
    capsys.readouterr()
    run_pair(system, range(4), tmp_path)
    assert seeds == [0, 1, 2, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(' (stored, not run)') for line in lines] == [1, 1, 0, 0]
    # What is shown is what was asked for, not all there is.
    found = run_pair(system, range(1, 3), tmp_path)
    assert [run['seed'] for run in found] == [1, 2]
    assert [run['seed'] for run in read_json(file)['runs']] == [0, 1, 2, 3]
    assert not list(tmp_path.rglob('*.tmp'))


def test_authors_seeds_are_run_once_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node_classification, 'run', lambda *a, **k: record())
    argv = ['--model', 'idgl-authors', '--results', str(tmp_path), '--dataset']
    for dataset, seeds in [('cora', [0, 1, 2, 3, 4]), ('citeseer', [0])]:
        assert node_classification.main([*argv, dataset]) == 0
        content = read_json(results_file(dataset, System('idgl', 'authors'), tmp_path))
        assert [run['seed'] for run in content['runs']] == seeds
        assert len(content['settings']['seeds']) == len(seeds)


def test_smoothed_scores_are_shown(tmp_path, monkeypatch, capsys):
    smoothed = {'dev': 0.75, 'test': 0.85, 'alpha': 0.8, 'steps': 5}
    found = record(smoothed=smoothed)
    monkeypatch.setattr(node_classification, 'run', lambda *a, **k: found)
    argv = ['--dataset', 'cora', '--runs', '2', '--results', str(tmp_path)]
    assert node_classification.main(argv) == 0
    assert (
        '| cora | IDGL, smoothed | 75.0 ± 0.0 | 85.0 ± 0.0 | 2 '
        in capsys.readouterr().out
    )
    content = read_json(results_file('cora', System('idgl'), tmp_path))
    assert content['runs'][0]['smoothed'] == smoothed


def test_other_settings_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(node_classification, 'run', lambda *a, **k: record())
    run_pair(System('gcn-knn'), range(1), tmp_path)
    file = results_file('wine', System('gcn-knn'), tmp_path)
    content = read_json(file)
    content['settings']['lr'] = 7.0
    common.write_json(file, content)
    with pytest.raises(ValueError, match=r"\{'lr': \(7.0, 0.01\)\}"):
        run_pair(System('gcn-knn'), range(2), tmp_path)


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
    run_pair(system, range(1), tmp_path)
    content = read_json(results_file('wine', system, tmp_path))
    assert content['settings'] == before
    assert [run['test'] for run in content['runs']] == [before['lr']]
    with pytest.raises(ValueError, match='Expected the settings that wine_gcn-knn'):
        run_pair(system, range(2), tmp_path)


@pytest.mark.parametrize(
    ('script', 'argv', 'message'),
    [
        (search, ['--dataset', 'cora', '--model', 'logreg'], "(got 'logreg')"),
        (node_classification, ['--dataset', 'wine', '--source', 'no'], "no' to read"),
        (node_classification, ['--dataset', 'wine', '--model', 'gcn'], "(got 'wine'"),
        (node_classification, ['--dataset', 'cora'], 'ind.cora.allx'),
    ],
)
def test_errors_are_explained(script, argv, message, tmp_path, capsys):
    argv = [*argv, '--root', str(tmp_path), '--results', str(tmp_path)]
    assert script.main(argv) == 1
    assert message in ''.join(capsys.readouterr())
    assert not list(tmp_path.rglob('*.json'))


@pytest.mark.parametrize('content', [b'', b'{"runs": [{"seed": 0', b'\xff'])
def test_corrupt_results_are_named(content, tmp_path):
    file = results_file('wine', System('gcn-knn'), tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"wine_gcn-knn.json' to be a JSON file of"):
        run_pair(System('gcn-knn'), range(1), tmp_path)
    assert file.read_bytes() == content


def test_diverged_run_is_explained(tmp_path, monkeypatch, capsys):
    def diverges(*args, **kwargs):
        raise FloatingPointError('Expected a finite loss')

    monkeypatch.setattr(node_classification, 'run', diverges)
    argv = ['--dataset', 'wine', '--root', str(tmp_path), '--results', str(tmp_path)]
    assert node_classification.main(argv) == 1
    assert 'Expected a finite loss' in capsys.readouterr().err


def test_commit(monkeypatch):
    answers = {'rev-parse': '0123456789\n', 'status': ''}
    monkeypatch.setattr(
        common.subprocess, 'check_output', lambda command, **_: answers[command[3]]
    )
    assert common.commit() == '0123456789'
    answers['status'] = ' M torch_geometric_idgl/nn/idgl.py\n'
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


def test_half_finished_seed_goes_on(tmp_path, monkeypatch):
    system = System('gcn-knn')
    files = []

    def fake(*args, checkpoint, **kwargs):
        files.append(checkpoint)
        return record()

    monkeypatch.setattr(node_classification, 'run', fake)
    for folder in ['a/results', 'b/results', 'b/timed']:
        run_pair(system, range(1), tmp_path / folder, root=tmp_path)
    changed = {**load_settings(system, 'wine'), 'lr': 7.0}
    monkeypatch.setattr(node_classification, 'load_settings', lambda *a: changed)
    run_pair(system, range(1), tmp_path, root=tmp_path)
    # The same run finds its checkpoint; one with other settings, or for another folder
    # of results, has its own.
    assert files[0] == files[1]
    assert len({*files}) == 3


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
        content = read_json(results_file('wine', System('gcn-knn'), tmp_path))
        assert content['command'].endswith(f'gcn-knn {command}')
    assert calls == [3, 4, 0, 1, 2]


# What the documentation says


SCRIPTS = (analysis, documents, node_classification, report, search)
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
            assert args.model in documents.SYSTEMS
        elif getattr(args, 'model', None):
            given = (args.dataset, args.model)
            given = [[x] if isinstance(x, str) else x for x in given]
            for dataset, model in itertools.product(*given):
                assert dataset in SUPPORTED[System.parse(model).base]
