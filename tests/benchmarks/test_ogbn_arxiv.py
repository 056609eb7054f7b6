import gzip
import re
import shutil
import statistics

import ogbn_arxiv
import pytest
import torch
from baselines import make_gnn
from common import read_json, write_json
from ogbn_arxiv import FEATURES, MODELS, parse_args, run_seeds, settings_of
from torch_geometric.utils import is_undirected

from torch_geometric_idgl.training import accuracy

pytest.importorskip('ogb')

N, CLASSES = 60, 3


def write_csv(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = ''.join(','.join(str(value) for value in row) + '\n' for row in rows)
    file.write_bytes(gzip.compress(text.encode()))


def write_arxiv(folder):
    """Three rings with a few links between them, laid out as OGB does, with generated
    features.
    """
    g = torch.Generator().manual_seed(0)
    y = [i % CLASSES for i in range(N)]
    edges = [(i, (i + step) % N) for i in range(N) for step in (3, 6)]
    edges += [(i, i + 1) for i in range(0, N - 1, 10)]
    x = torch.randn(N, 128, generator=g) + torch.eye(128)[y]
    order = torch.randperm(N, generator=g).tolist()
    write_csv(folder / 'raw/edge.csv.gz', edges)
    write_csv(folder / 'raw/node-feat.csv.gz', x.tolist())
    write_csv(folder / 'raw/node-label.csv.gz', [[label] for label in y])
    write_csv(folder / 'raw/node_year.csv.gz', [[2015 + i % 5] for i in range(N)])
    write_csv(folder / 'raw/num-node-list.csv.gz', [[N]])
    write_csv(folder / 'raw/num-edge-list.csv.gz', [[len(edges)]])
    for name, part in [('train', (0, 30)), ('valid', (30, 45)), ('test', (45, N))]:
        rows = [[i] for i in order[slice(*part)]]
        write_csv(folder / f'split/time/{name}.csv.gz', rows)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp('made')
    write_arxiv(root / 'ogb' / 'ogbn_arxiv')
    return root


@pytest.fixture
def root(made, tmp_path):
    """A folder of its own for each test, in OGB's layout."""
    shutil.copytree(made / 'ogb', tmp_path / 'data' / 'ogb')
    return tmp_path / 'data'


def results_file(model, features, folder):
    return folder / 'ogbn_arxiv' / f'{features}-features_{model}.json'


def arguments(root, *more):
    results = ['--root', str(root), '--results', str(root / 'results')]
    return [*results, '--device', 'cpu', *map(str, more)]


@pytest.mark.parametrize('model', MODELS)
def test_prints_what_ogb_prints(root, model, capsys):
    argv = arguments(root, '--model', model, '--runs', 2, '--max-epochs', 3)
    assert ogbn_arxiv.main(argv) == 0
    out = capsys.readouterr().out
    number = r'\d+\.\d\d'
    for run in ('01', '02'):
        for epoch in ('01', '02', '03'):
            line = rf'^Run: {run}, Epoch: {epoch}, Loss: \d+\.\d{{4}}, Train: {number}%'
            line += rf', Valid: {number}% Test: {number}%$'
            assert re.search(line, out, re.M)
        line = rf'^Run {run}:\nHighest Train: {number}\nHighest Valid: {number}\n'
        line += rf'  Final Train: {number}\n   Final Test: {number}$'
        assert re.search(line, out, re.M)
    assert re.search(
        rf'^All runs:\nHighest Train: {number} ± {number}\n'
        rf'Highest Valid: {number} ± {number}\n  Final Train: {number} ± {number}\n'
        rf'   Final Test: {number} ± {number}$',
        out,
        re.M,
    )
    content = read_json(results_file(model, 'ogb', root / 'results'))
    runs = content['runs']
    assert [run['seed'] for run in runs] == [0, 1]
    assert content['settings']['features'] == "OGB's node features"
    assert all(run['cut_short'] and run['epochs'] == 3 for run in runs)
    tests = [run['final_test'] for run in runs]
    mean, std = statistics.mean(tests), statistics.stdev(tests)
    # The submission form.
    for line in [
        f'Method: {ogbn_arxiv.TITLES[MODELS[model]]}',
        'Dataset: ogbn-arxiv',
        f'Test accuracy: {mean:.4f} ± {std:.4f}',
        f'Parameters: {runs[0]["parameters"]}',
        f'Hardware: {runs[0]["hardware"]}',
        f'Command: python benchmarks/ogbn_arxiv.py --model {model} --features ogb '
        f'--max-epochs 3 --runs 2',
    ]:
        assert f'\n{line}\n' in out
    assert re.search(r'^Validation accuracy: [01]\.\d{4} ± 0\.\d{4}$', out, re.M)
    assert re.search(r'^Versions: python .*torch .*torch_geometric .*ogb 1', out, re.M)
    assert 'OGB asks for 10 runs; runs were cut short' in out
    assert str(root) not in results_file(model, 'ogb', root / 'results').read_text()


def test_lines_agree_with_the_figures(root, capsys):
    argv = arguments(root, '--model', 'gcn', '--runs', 1, '--max-epochs', 6)
    (run,) = run_seeds(parse_args(argv))['runs']
    lines = [line for line in capsys.readouterr().out.splitlines() if 'Epoch' in line]
    found = [[float(x) for x in re.findall(r'([\d.]+)%', line)] for line in lines]
    valid = [values[1] for values in found]
    best = valid.index(max(valid))
    assert run['best_epoch'] == best
    keys = ['final_train', 'highest_valid', 'final_test']
    assert [round(100 * run[key], 2) for key in keys] == found[best]
    highest = max(values[0] for values in found)
    assert round(100 * run['highest_train'], 2) == highest
    assert run['epochs'] == 6 and run['seconds'] > 0
    assert 0 < run['cpu_seconds_per_epoch'] < 10


def test_settings():
    ogb = {'hidden_channels': 256, 'num_layers': 3, 'dropout': 0.5, 'batch_norm': True}
    ogb |= {'input_dropout': 0.0, 'lr': 0.01, 'weight_decay': 0.0}
    ogb |= {'max_epochs': 500, 'patience': 500, 'monitor': 'score'}
    assert settings_of('gcn') == settings_of('sage') == ogb
    paper = {'hidden_channels': 256, 'num_layers': 3, 'norm': 'batch_norm'}
    paper |= {'num_anchors': 300, 'epsilon': 0.9, 'max_iters': 2, 'dropout': 0.3}
    paper |= {'initial_weight': 0.8, 'update_weight': 0.1, 'smoothness': 0.2}
    paper |= {'weight_decay': 0.0, 'lr': 0.01, 'patience': 50}
    assert settings_of('idgl-anch').items() >= paper.items()
    args = parse_args([])
    assert (args.model, args.features) == ('idgl-anch', 'ogb')
    assert (args.runs, args.first, args.max_epochs) == (10, 0, None)


@pytest.mark.parametrize(('model', 'expected'), [('gcn', 110_120), ('sage', 218_664)])
def test_parameters_are_those_of_the_leaderboard(model, expected):
    settings = settings_of(model)
    kwargs = {k: v for k, v in settings.items() if k not in ogbn_arxiv.FIT}
    network = make_gnn(MODELS[model], 128, 40, **kwargs)
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize('model', ['gcn', 'sage'])
def test_matrix_gives_what_edges_give(root, model):
    data = ogbn_arxiv.load_data('ogb', str(root))
    network = make_gnn(MODELS[model], 128, CLASSES, hidden_channels=8).eval()
    edges = network(data.x, data.edge_index)
    data = ogbn_arxiv.with_matrix(data, model)
    assert data.edge_index.layout == torch.sparse_csr
    matrix = network(data.x, data.edge_index)
    assert torch.allclose(matrix, edges, atol=1e-5)
    weights = list(network.parameters())
    for grad, expected in zip(
        torch.autograd.grad(matrix.sin().sum(), weights),
        torch.autograd.grad(edges.sin().sum(), weights),
        strict=True,
    ):
        assert torch.allclose(grad, expected, atol=1e-4)


def test_accuracy_is_that_of_ogb():
    out = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([1, 1, 1])
    assert ogbn_arxiv.ogb_accuracy(out, y) == pytest.approx(2 / 3)
    assert ogbn_arxiv.ogb_accuracy(out, y) == accuracy(out, y)


@pytest.mark.parametrize('model', ['gcn', 'idgl-anch'])
def test_stopped_run_goes_on(root, model, monkeypatch, capsys):
    monkeypatch.setattr(ogbn_arxiv, 'CHECKPOINT_EVERY', 2)
    argv = arguments(root, '--model', model, '--runs', 1, '--max-epochs', 5)
    assert ogbn_arxiv.main([*argv, '--results', str(root / 'whole')]) == 0
    whole = [x for x in capsys.readouterr().out.splitlines() if 'Epoch' in x]
    assert not list((root / 'checkpoints').rglob('*.pt'))

    step, steps = torch.optim.Adam.step, []

    def stop(*args, **kwargs):
        steps.append(None)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, 'step', stop)
    with pytest.raises(KeyboardInterrupt):
        ogbn_arxiv.main(argv)
    file = results_file(model, 'ogb', root / 'results')
    assert not file.exists()
    monkeypatch.setattr(torch.optim.Adam, 'step', step)
    capsys.readouterr()
    assert ogbn_arxiv.main(argv) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if 'Epoch' in x]
    assert lines == whole[2:]  # after the last checkpoint
    runs = read_json(file)['runs']
    others = read_json(results_file(model, 'ogb', root / 'whole'))['runs']
    for key in ('final_test', 'highest_valid', 'best_epoch', 'epochs'):
        assert runs[0][key] == others[0][key]


def test_finished_runs_are_not_run_again(root, monkeypatch, capsys):
    argv = arguments(root, '--model', 'gcn', '--max-epochs', 2, '--quiet')
    assert ogbn_arxiv.main([*argv, '--runs', '1', '--first', '1']) == 0
    assert ogbn_arxiv.main([*argv, '--runs', '2']) == 0
    out = capsys.readouterr().out
    assert 'Epoch:' not in out  # quiet
    content = read_json(results_file('gcn', 'ogb', root / 'results'))
    assert sorted(run['seed'] for run in content['runs']) == [0, 1]
    assert content['command'].endswith('--max-epochs 2 --runs 2')

    monkeypatch.setattr(ogbn_arxiv, 'load_data', None)  # not even loaded
    assert ogbn_arxiv.main([*argv, '--runs', '2']) == 0
    again = capsys.readouterr().out
    assert 'Run 01:' in again and 'Run 02:' in again


def test_other_settings_are_refused(root, monkeypatch, capsys):
    argv = arguments(root, '--model', 'gcn', '--runs', 1, '--max-epochs', 1)
    assert ogbn_arxiv.main(argv) == 0
    file = results_file('gcn', 'ogb', root / 'results')
    content = read_json(file)
    content['settings']['lr'] = 7.0
    write_json(file, content)
    capsys.readouterr()
    assert ogbn_arxiv.main(argv) == 1
    assert 'Expected the settings that' in capsys.readouterr().err


def test_whole_run_is_not_cut_short(root, monkeypatch):
    monkeypatch.setattr(
        ogbn_arxiv,
        'settings_of',
        lambda model: {**settings_of(model), 'max_epochs': 3, 'patience': 3},
    )
    argv = arguments(root, '--model', 'gcn', '--runs', 1, '--quiet')
    content = run_seeds(parse_args(argv))
    assert content['runs'][0]['epochs'] == 3
    assert not content['runs'][0]['cut_short']
    assert 'max-epochs' not in content['command']


# Features from the graph alone


@pytest.mark.parametrize('model', ['sage', 'idgl-anch'])
def test_structural_features(root, model, capsys):
    folder = root / 'ogb' / 'ogbn_arxiv'
    (folder / 'raw' / 'node-feat.csv.gz').unlink()
    argv = arguments(root, '--model', model, '--features', 'structural', '--runs', 1)
    assert ogbn_arxiv.main([*argv, '--max-epochs', '2']) == 0
    out = capsys.readouterr().out
    name = FEATURES['structural']
    assert name.startswith('structural: made from the graph alone')
    assert f'\nFeatures: {name}\n' in out
    assert f'\nogbn-arxiv, features: {name}\n' in out
    assert "Not to be submitted: the features are not OGB's; OGB asks" in out
    content = read_json(results_file(model, 'structural', root / 'results'))
    assert content['settings']['features'] == name
    assert '--features structural' in content['command']
    assert not results_file(model, 'ogb', root / 'results').exists()


def test_structural_features_are_kept(root, monkeypatch):
    (root / 'ogb/ogbn_arxiv/raw/node-feat.csv.gz').unlink()
    data = ogbn_arxiv.load_data('structural', str(root))
    assert data.x.size() == (N, 128) and data.x.isfinite().all()
    assert is_undirected(data.edge_index, num_nodes=N)
    assert int(data.train_mask.sum()) == 30
    used = data.x.abs().sum(dim=0) > 0
    assert torch.allclose(data.x[:, used].mean(dim=0), torch.zeros(1), atol=1e-4)

    assert (root / 'ogb/ogbn_arxiv/processed/structural_features.pt').exists()
    calls = []
    make = ogbn_arxiv.structural_features

    def spy(*args):
        calls.append(args)
        return make(*args)

    monkeypatch.setattr(ogbn_arxiv, 'structural_features', spy)
    assert torch.equal(ogbn_arxiv.load_data('structural', str(root)).x, data.x)
    assert calls == []
    monkeypatch.setitem(FEATURES, 'structural', 'another recipe')
    assert torch.equal(ogbn_arxiv.load_data('structural', str(root)).x, data.x)
    assert len(calls) == 1


def test_structural_features_tell_communities_apart():
    # Two cliques with one link, and a node without any.
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    pairs += [(i + 5, j + 5) for i, j in pairs] + [(4, 5), (5, 4)]
    x = ogbn_arxiv.structural_features(torch.tensor(pairs).t(), 11)
    assert x.size() == (11, 128) and x.isfinite().all()
    dist = torch.cdist(x[:10], x[:10])
    same = torch.arange(10).div(5, rounding_mode='floor')
    same = same.unsqueeze(0) == same.unsqueeze(1)
    assert dist[same].max() < dist[~same].min()


# What can go wrong


@pytest.mark.parametrize('features', FEATURES)
@pytest.mark.parametrize('part', ['raw/edge.csv.gz', 'split/time/valid.csv.gz'])
def test_truncated_file_is_named(root, features, part, capsys):
    file = root / 'ogb/ogbn_arxiv' / part
    file.write_bytes(file.read_bytes()[:-12])
    argv = arguments(root, '--model', 'gcn', '--features', features)
    assert ogbn_arxiv.main(argv) == 1
    assert f'Cut short or damaged: {part}. Remove' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('features', 'part'),
    [('ogb', 'raw/node-feat.csv.gz'), ('structural', 'raw/node-label.csv.gz')],
)
def test_missing_file_is_named(root, features, part, capsys):
    (root / 'ogb/ogbn_arxiv' / part).unlink()
    assert ogbn_arxiv.main(arguments(root, '--features', features)) == 1
    err = capsys.readouterr().err
    assert err.strip().endswith(f'Put these files there: {part}')
    assert not list(root.rglob('*.json'))


def test_table(root, capsys):
    values = {'highest_train': 0.8, 'final_train': 0.8, 'lowest_loss_test': 0.4}
    values |= {'epochs': 500, 'seconds': 1250.0, 'parameters': 110_120}
    values |= {'cpu_seconds_per_epoch': 1.5}
    run = {**values, 'highest_valid': 0.7, 'cut_short': False, 'peak_memory_mb': 2000.0}

    def write(model, features, runs):
        content = {'model': model, 'settings': {'features': FEATURES[features]}}
        write_json(results_file(model, features, root), {**content, 'runs': runs})

    write('gcn', 'structural', [{**run, 'final_test': test} for test in (0.5, 0.6)])
    run |= {'cut_short': True, 'cpu_seconds_per_epoch': None}
    write('idgl-anch', 'ogb', [{**run, 'final_test': 0.7}])
    assert ogbn_arxiv.main(['--table', '--results', str(root)]) == 0
    out = capsys.readouterr().out
    lines = [[c.strip() for c in line.split('|')] for line in out.splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) > 1}
    assert cells['GCN'] == (
        ['70.00 ± 0.00', '55.00 ± 7.07', '40.00 ± 0.00', '2', '500', '2.5', '1.5']
        + ['2,000', '110,120']
    )
    assert cells['IDGL-Anch'][:5] == ['70.00', '70.00', '40.00', '1', '500 (cut short)']
    assert cells['IDGL-Anch'][6] == '–'  # all epochs were those of a killed process
    titles = [line for line in out.splitlines() if line.startswith('ogbn-arxiv, ')]
    assert titles == [f'ogbn-arxiv, features: {text}' for text in FEATURES.values()]
    ogbn_arxiv.main(['--table', '--results', str(root / 'none')])
    assert 'There are no results yet.' in capsys.readouterr().out
