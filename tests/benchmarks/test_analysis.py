import analysis
import pytest
import torch
from analysis import ANALYSES, chosen, main, results_file
from common import read_json
from torch_geometric.data import Data
from torch_geometric.utils import erdos_renyi_graph


def make_data(*args, **kwargs):
    """Thirty nodes of three classes, whose words are mostly those of the class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    rate = 0.1 + 0.6 * torch.eye(3)[y].repeat_interleave(4, dim=1)
    x = torch.bernoulli(rate, generator=generator)
    torch.manual_seed(0)
    data = Data(x=x, y=y, edge_index=erdos_renyi_graph(30, 0.2))
    for i, split in enumerate(('train', 'val', 'test')):
        data[f'{split}_mask'] = torch.arange(30) // 10 == i
    return data


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs an analysis on small data; returns its results file."""
    monkeypatch.setattr(analysis, 'load_data', make_data)
    monkeypatch.setattr(analysis, 'AttackedGraph', lambda *a, **k: [make_data()])

    def run(name, *argv):
        argv = [name, '--quick', '--quiet', '--root', str(tmp_path), *argv]
        assert main([*argv, '--results', str(tmp_path)]) == 0
        return results_file(name, tmp_path, quick=True)

    return run


@pytest.mark.parametrize(
    ('name', 'argv', 'count'),
    [
        ('edges', ['--dataset', 'cora', '--rates', '0.25'], 8),
        ('attacks', ['--dataset', 'citeseer', '--rates', '0.25'], 22),
        ('convergence', ['--dataset', 'cora'], 1),
        ('stopping', ['--dataset', 'cora', '--values', '0', '2'], 2),
        ('lambda', ['--systems', 'idgl'], 5),
        ('anchors', ['--dataset', 'pubmed', '--values', '100'], 2),
        ('graphs', [], 2),
    ],
)
def test_analyses(name, argv, count, command, capsys):
    file = command(name, *argv)
    content = read_json(file)
    assert len(content['cells']) == count
    for cell in content['cells']:
        assert 0.0 <= cell['test'] <= 1.0
        assert {'dataset', 'system', 'seed', 'seconds'} <= set(cell)
    assert analysis.make_table(name, content['cells']) in capsys.readouterr().out
    plot = file.with_suffix('.svg').read_text()
    assert plot.startswith('<?xml') and len(plot) > 10_000


@pytest.mark.parametrize(
    ('name', 'argv', 'wrong'),
    [
        ('lambda', ['--dataset', 'Cora'], 'Cora'),
        ('lambda', ['--systems', 'gcn'], 'gcn'),
        ('lambda', ['--values', '0.33'], '0.33'),
        ('convergence', ['--values', '1'], '1.0'),
    ],
)
def test_what_is_not_there_is_named(name, argv, wrong, tmp_path, capsys):
    assert main([name, *argv, '--results', str(tmp_path)]) == 1
    assert wrong in capsys.readouterr().err


def test_cells_are_not_run_again(command, monkeypatch, capsys):
    trained, train = [], analysis.train

    def spy(cell, args):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(cell['lambda'])
        return train(cell, args)

    monkeypatch.setattr(analysis, 'train', spy)
    with pytest.raises(KeyboardInterrupt):
        command('lambda', '--systems', 'idgl')
    trained[:] = [None]
    file = command('lambda', '--systems', 'idgl')
    assert trained == [None, 0.6, 0.5]  # the others were there
    plot = file.with_suffix('.svg').read_bytes()
    capsys.readouterr()
    command('lambda', '--show')
    assert trained == [None, 0.6, 0.5]
    assert '| IDGL ' in capsys.readouterr().out
    assert file.with_suffix('.svg').read_bytes() == plot


def test_nothing_to_show(command, capsys):
    file = command('lambda', '--show')
    assert capsys.readouterr().out == 'Nothing to show yet\n'
    assert not file.exists()


def attacked(option, seed, loss):
    cell = {'dataset': 'cora', 'system': 'idgl', 'rate': 0.25, 'test': 0.5}
    return {**cell, 'option': option, 'seed': seed, 'dev_cross_entropy': loss}


def test_options_are_chosen_by_dev_cross_entropy():
    assert chosen([]) == []
    losses = dict(zip(analysis.WEIGHTS, [5.0, 4.0, 1.0, 3.0, 2.0], strict=True))
    found = [attacked(option, 0, loss) for option, loss in losses.items()]
    assert chosen(found[:-1]) == []  # the last one may be the best
    assert chosen(found) == [0.25]
    # Other seeds do not choose.
    assert chosen([*found, attacked(0.8, 2, 0.0), attacked(0.8, 1, 0.0)]) == [0.25]


def test_other_seeds_take_what_was_chosen():
    losses = dict(zip(analysis.WEIGHTS, [5.0, 4.0, 1.0, 3.0, 2.0], strict=True))
    found = [attacked(option, 0, loss) for option, loss in losses.items()]
    cells = [
        (cell['seed'], cell['option'])
        for cell in ANALYSES['attacks'].list_cells([0, 2, 3], found)
        if (cell['dataset'], cell['system'], cell['rate']) == ('cora', 'idgl', 0.25)
    ]
    first = [(0, option) for option in analysis.WEIGHTS]
    assert cells == [*first, (2, 0.25), (3, 0.25)]
    (panel,) = analysis.make_panels('attacks', found)
    assert panel.lines['IDGL'] == {0.25: [50.0]}
    assert panel.lines.keys() - panel.dashed == {'IDGL'}
    assert 'Pro-GNN (published)' in panel.dashed


@pytest.mark.parametrize('name', ANALYSES)
def test_cells_differ(name):
    cells = list(ANALYSES[name].list_cells([0, 1, 2], []))
    assert len({str(cell) for cell in cells}) == len(cells) > 0


def test_options_are_explained(capsys):
    with pytest.raises(SystemExit):
        main(['weather'])
    assert "invalid choice: 'weather'" in capsys.readouterr().err
