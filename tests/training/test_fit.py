import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.training import FitRecord, accuracy, fit, loop, run_seeds

QUIET = {'progress': False}


class Stopped(Exception):
    """What stands for the end of a process."""


def make_data(seed=0, num_nodes=30):
    """Three classes, in features and in edges."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % 3
    noise = torch.rand(num_nodes, 6, generator=generator)
    x = F.one_hot(y, 6) + 0.8 * noise
    row, col = torch.randint(num_nodes, (2, 8 * num_nodes), generator=generator)
    edge_index = torch.stack([row, col])[:, (y[row] == y[col]) & (row < col)]
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    part = torch.randperm(num_nodes, generator=generator) % 3
    data = Data(x=x, edge_index=edge_index, y=y)
    data.train_mask, data.val_mask, data.test_mask = part == 0, part == 1, part == 2
    return data


def make_gcn(data=None):
    return GCN(6, 16, num_layers=2, out_channels=3, dropout=0.5, norm='batch_norm')


def make_idgl(data=None, **kwargs):
    kwargs = {'dropout': 0.5, 'max_iters': 3, **kwargs}
    return IDGL(6, 16, num_layers=2, out_channels=3, **kwargs)


def make_anch(data=None):
    return IDGLAnch(
        6, 16, num_layers=2, out_channels=3, dropout=0.5, max_iters=3, num_anchors=9
    )


def equal_records(first, second):
    first, second = ({**asdict(r), 'seconds': 0} for r in (first, second))
    return first == second


def test_accuracy():
    out = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0], [0.0, 1.0]])
    assert accuracy(out, torch.tensor([0, 1, 0, 1])) == 0.75


@pytest.mark.parametrize('make', [make_gcn, make_idgl, make_anch])
def test_fit_learns(make):
    seed_everything(0)
    data = make_data()
    model = make()
    record = fit(model, data, max_epochs=60, patience=20, history=True, **QUIET)
    assert record.test_score > 0.7 and record.val_score > 0.7
    assert record.seconds > 0
    assert len(record.history) == record.epochs <= 60

    # Stopped on the dev loss, after exactly `patience` epochs without a better one.
    losses = [values['val_loss'] for values in record.history]
    assert record.val_loss == min(losses)
    assert record.best_epoch == losses.index(min(losses))
    assert record.epochs in {60, record.best_epoch + 20 + 1}
    best = record.history[record.best_epoch]
    assert record.val_score == best['val_score']
    assert record.test_score == best['test_score']
    assert record.train_score == best['train_score']

    if make is make_gcn:
        assert record.iterations is None and 'iterations' not in best
    else:
        iterations = [values['iterations'] for values in record.history]
        assert record.iterations == pytest.approx(sum(iterations) / len(iterations))
        assert 1 <= record.iterations <= 3


@pytest.mark.parametrize('make', [make_gcn, make_idgl])
def test_fit_restores_the_best_weights(make):
    seed_everything(0)
    data, model, states = make_data(), make(), {}

    def keep(epoch, values):
        states[epoch] = {k: v.clone() for k, v in model.state_dict().items()}

    # So large a learning rate that later weights are worse.
    record = fit(model, data, lr=1.0, max_epochs=30, patience=8, callback=keep, **QUIET)
    assert record.best_epoch < record.epochs - 1
    best, last = states[record.best_epoch], states[record.epochs - 1]
    for key, value in model.state_dict().items():
        assert torch.equal(value, best[key])
    assert any(not torch.equal(best[key], last[key]) for key in best)
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    assert accuracy(out[data.test_mask], data.y[data.test_mask]) == record.test_score


def test_fit_uses_the_joint_loss():
    seed_everything(0)
    data, model = make_data(), make_idgl(dropout=0.0)
    model.train()

    def loss(mask):
        _, trace = model(data.x, data.edge_index, return_trace=True)
        return trace.loss(lambda out: F.cross_entropy(out[mask], data.y[mask]))

    expected = loss(data.train_mask).item()
    values = {}
    fit(
        model,
        data,
        max_epochs=1,
        callback=lambda epoch, record: values.update(record),
        **QUIET,
    )
    assert values['train_loss'] == pytest.approx(expected)
    model.eval()
    assert values['val_loss'] == pytest.approx(loss(data.val_mask).item())
    with torch.no_grad():
        plain = model(data.x, data.edge_index)[data.val_mask]
    assert values['val_loss'] > float(F.cross_entropy(plain, data.y[data.val_mask]))


def test_fit_first_phase():
    seed_everything(0)
    # A falling score: the best epoch would be in the first phase if that counted.
    scores = iter(range(10_000, 0, -1))
    record = fit(
        make_idgl(),
        make_data(),
        first_phase=6,
        max_epochs=40,
        patience=3,
        monitor='score',
        score_fn=lambda out, y: next(scores),
        history=True,
        **QUIET,
    )
    assert record.best_epoch == 6 and record.epochs == 6 + 3 + 1
    iterations = [values['iterations'] for values in record.history]
    assert iterations[:6] == [0.0] * 6 and min(iterations[6:]) >= 1
    assert record.iterations == pytest.approx(sum(iterations[6:]) / 4)


def test_fit_monitors_the_score():
    seed_everything(0)
    data = make_data()
    kwargs = {'max_epochs': 40, 'patience': 40, 'history': True, **QUIET}
    record = fit(make_gcn(), data, monitor='score', **kwargs)
    scores = [values['val_score'] for values in record.history]
    assert record.val_score == max(scores)
    assert record.best_epoch == scores.index(max(scores))


def test_fit_regression():
    seed_everything(0)
    data = make_data()
    data.y = data.x[:, :1].clone()
    model = GCN(6, 8, num_layers=2, out_channels=1)

    def score(out, y):
        return -float((out - y).abs().mean())

    record = fit(
        model,
        data,
        loss_fn=F.mse_loss,
        score_fn=score,
        max_epochs=100,
        history=True,
        **QUIET,
    )
    with torch.no_grad():
        out = model.eval()(data.x, data.edge_index)[data.val_mask]
    y = data.y[data.val_mask]
    assert record.val_score == pytest.approx(score(out, y))
    assert record.val_loss == pytest.approx(float(F.mse_loss(out, y)))
    assert record.val_loss < 0.5 * record.history[0]['val_loss']


def test_bar_ends_where_patience_ends(monkeypatch):
    totals = []

    class Bar(loop.tqdm):
        def update(self, n=1):
            totals.append(self.total)
            return super().update(n)

    monkeypatch.setattr(loop, 'tqdm', Bar)
    seed_everything(0)
    record = fit(make_gcn(), make_data(), patience=5, max_epochs=200)
    assert len(totals) == totals[-1] == record.epochs < 200
    assert totals == sorted(totals) and totals[0] == 6


def test_fit_passes_edge_weights():
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(6, 3)

        def forward(self, x, *graph):
            seen.append(graph)
            return self.lin(x)

    data = make_data()
    fit(Model(), data, max_epochs=1, **QUIET)
    assert [len(graph) for graph in seen] == [1, 1]
    data.edge_weight = torch.ones(data.num_edges)
    fit(Model(), data, max_epochs=1, **QUIET)
    assert [len(graph) for graph in seen[2:]] == [2, 2]
    assert seen[-1][0] is data.edge_index and seen[-1][1] is data.edge_weight

    # A model of PyG that has no use for weights, and IDGL, which does.
    fit(GAT(6, 8, num_layers=1, out_channels=3), data, max_epochs=1, **QUIET)
    data.edge_weight = 3 * torch.rand(data.num_edges)
    losses = []
    for edge_weight in [None, data.edge_weight]:
        data.edge_weight = edge_weight
        seed_everything(0)
        losses.append(fit(make_idgl(), data, max_epochs=1, **QUIET).val_loss)
    assert losses[0] != losses[1]


def test_fit_without_edges_and_test_mask():
    seed_everything(0)
    data = make_data()
    del data.edge_index, data.test_mask
    record = fit(make_idgl(k=4), data, max_epochs=2, **QUIET)
    assert record.test_score is None
    with pytest.raises(ValueError, match=r"missing \['edge_index'\].*CosineKNNGraph"):
        fit(make_gcn(), data, max_epochs=2, **QUIET)


def test_fit_sparse_features():
    data, sparse = make_data(), make_data()
    sparse.x = data.x.to_sparse_csr()
    records = []
    for value in [data, sparse]:
        seed_everything(0)
        records.append(fit(make_idgl(dropout=0.0), value, max_epochs=4, **QUIET))
    assert records[0].val_loss == pytest.approx(records[1].val_loss, rel=1e-4)


def test_fit_progress(capfd):
    fit(make_gcn(), make_data(), max_epochs=2, **QUIET)
    assert capfd.readouterr() == ('', '')
    fit(make_idgl(), make_data(), max_epochs=2)
    out, err = capfd.readouterr()
    assert out == '' and '2/2' in err
    for name in ['train=', 'dev=', 'score=', 'iters=']:
        assert name in err


@pytest.mark.parametrize('make', [make_gcn, make_idgl, make_anch])
@pytest.mark.parametrize('stop', [1, 4, 8, 11])
def test_fit_resumes(make, stop, tmp_path):
    kwargs = {'max_epochs': 16, 'patience': 6, 'checkpoint_every': 3, 'history': True}
    kwargs = {**kwargs, **QUIET, 'first_phase': 0 if make is make_gcn else 5}

    seed_everything(0)
    model = make()
    record = fit(model, make_data(), **kwargs)
    assert record.epochs > stop

    def kill(epoch, values):
        if epoch == stop:
            raise Stopped

    path = tmp_path / 'folder' / 'run.pt'
    seed_everything(0)
    with pytest.raises(Stopped):
        fit(make(), make_data(), checkpoint=path, callback=kill, **kwargs)
    assert path.exists() == (stop >= 2)

    epochs = []
    seed_everything(0 if stop < 2 else 77)  # The state of the generators is restored.
    resumed = make()
    again = fit(
        resumed,
        make_data(),
        checkpoint=path,
        callback=lambda epoch, values: epochs.append(epoch),
        **kwargs,
    )
    assert epochs == list(range((stop + 1) // 3 * 3, record.epochs))
    assert equal_records(again, record)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])
    assert list(path.parent.iterdir()) == []


def test_fit_rejects_another_checkpoint(tmp_path):
    def kill(epoch, values):
        raise Stopped

    kwargs = {'checkpoint': tmp_path / 'run.pt', 'max_epochs': 4, **QUIET}
    with pytest.raises(Stopped):
        fit(make_gcn(), make_data(), checkpoint_every=1, callback=kill, **kwargs)
    with pytest.raises(ValueError, match=r"run.pt' to be of a run with .*'lr': 0.5"):
        fit(make_gcn(), make_data(), lr=0.5, **kwargs)
    with pytest.raises(ValueError, match=r"'model': 'IDGL'.*\(got .*'model': 'GCN'"):
        fit(make_idgl(), make_data(), **kwargs)


@pytest.mark.parametrize('make', [make_idgl, make_anch])
def test_fit_rejects_a_checkpoint_of_another_model_or_split(make, tmp_path):
    def kill(epoch, values):
        raise Stopped

    kwargs = {'checkpoint': tmp_path / 'run.pt', 'max_epochs': 4, **QUIET}
    with pytest.raises(Stopped):
        fit(make(), make_data(), checkpoint_every=1, callback=kill, **kwargs)
    other = make()
    other.smoothness = 5.0
    with pytest.raises(ValueError, match=r"\{'smoothness': 5.0\} \(got .*: 0.2\}"):
        fit(other, make_data(), **kwargs)
    data = make_data()
    data.train_mask, data.test_mask = data.test_mask, data.train_mask
    with pytest.raises(ValueError, match=r"a run with \{'data': "):
        fit(make(), data, **kwargs)
    assert fit(make(), make_data(), **kwargs).epochs == 4


def test_checkpoint_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / 'run.pt'
    save = torch.save

    def half(content, file):
        file.write_bytes(b'half')
        if content['progress']['epoch'] == 2:
            raise Stopped
        save(content, file)

    monkeypatch.setattr(torch, 'save', half)
    kwargs = {'max_epochs': 3, 'checkpoint': path, 'checkpoint_every': 1, **QUIET}
    with pytest.raises(Stopped):
        fit(make_gcn(), make_data(), **kwargs)
    assert [file.name for file in tmp_path.iterdir()] == ['run.pt']
    monkeypatch.undo()
    assert torch.load(path, weights_only=True)['progress']['epoch'] == 1
    assert fit(make_gcn(), make_data(), **kwargs).epochs == 3


@pytest.mark.parametrize(
    ('kwargs', 'match'),
    [
        ({'monitor': 'f1'}, r"'monitor' to be one of 'loss', 'score' \(got 'f1'\)"),
        ({'max_epochs': 0}, r"'max_epochs' to be at least 1 \(got 0\)"),
        ({'patience': 0}, r"'patience' to be at least 1 \(got 0\)"),
        ({'first_phase': -1}, r"'first_phase' to be at least 0 \(got -1\)"),
        ({'checkpoint_every': 0}, r"'checkpoint_every' to be at least 1 \(got 0\)"),
        ({'first_phase': 5, 'max_epochs': 5}, r"larger than 'first_phase'.*5 and 5"),
        ({'first_phase': 5}, r"'first_phase' to be 0 .*\(got 5 for 'GCN'\)"),
    ],
)
def test_fit_wrong_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        fit(make_gcn(), make_data(), **QUIET, **kwargs)


def test_fit_wrong_data():
    data = make_data()
    del data.val_mask
    with pytest.raises(ValueError, match=r"missing \['val_mask'\]"):
        fit(make_gcn(), data, **QUIET)
    data.val_mask = torch.zeros(30, dtype=torch.bool)
    with pytest.raises(ValueError, match="'val_mask' to select a node"):
        fit(make_gcn(), data, **QUIET)
    data.val_mask = torch.ones(30, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r'boolean vector of 30 .*\[30, 2\]'):
        fit(make_gcn(), data, **QUIET)
    data = make_data()
    data.x[3] = float('nan')
    with pytest.raises(FloatingPointError, match=r"'train_loss' nan in epoch 0"):
        fit(make_gcn(), data, **QUIET)


def test_run_seeds(tmp_path):
    path, seen = tmp_path / 'results' / 'gcn.json', []

    def data_of(seed):
        seen.append(seed)
        return make_data(seed)

    kwargs = {'max_epochs': 5, **QUIET}
    records = run_seeds(make_gcn, data_of, [0, 1], path, **kwargs)
    assert [type(record) for record in records] == [FitRecord] * 2
    assert records[0] != records[1]
    rows = json.loads(path.read_text())
    assert [row.pop('seed') for row in rows] == [0, 1]
    assert [FitRecord(**row) for row in rows] == records

    # Only the new seed is run; the same seed gives the same elsewhere.
    assert run_seeds(make_gcn, data_of, [2, 1, 0], path, **kwargs)[1:] == records[::-1]
    assert seen == [0, 1, 2]
    (other,) = run_seeds(make_gcn, data_of, [1], tmp_path / 'other.json', **kwargs)
    assert equal_records(other, records[1])
    assert [file.name for file in path.parent.iterdir()] == ['gcn.json']


def test_run_seeds_continues(tmp_path):
    kwargs = {'max_epochs': 12, 'checkpoint_every': 2, **QUIET}
    expected = run_seeds(
        make_idgl, make_data, range(3), tmp_path / 'expected.json', **kwargs
    )

    seen = []

    def kill(epoch, values):
        seen.append(epoch)
        if len(seen) == 12 + 7:  # In the middle of the second seed.
            raise Stopped

    path, checkpoint = tmp_path / 'results.json', tmp_path / 'state' / 'run.pt'
    kwargs.update(checkpoint=checkpoint, callback=kill)
    with pytest.raises(Stopped):
        run_seeds(make_idgl, make_data, range(3), path, **kwargs)
    assert [row['seed'] for row in json.loads(path.read_text())] == [0]
    assert [file.name for file in checkpoint.parent.iterdir()] == ['run-seed1.pt']

    records = run_seeds(make_idgl, make_data, range(3), path, **kwargs)
    assert seen[12 + 7] == 6
    for record, other in zip(records, expected, strict=True):
        assert equal_records(record, other)
    assert list(checkpoint.parent.iterdir()) == []
