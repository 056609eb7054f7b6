import warnings
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.nn import GAT, GCN

from tests.training.common import QUIET, make_anch, make_data, make_gcn, make_idgl
from torch_geometric_idgl.training import accuracy, fit, loop, r2_score


def test_accuracy():
    out = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0], [0.0, 1.0]])
    y = torch.tensor([0, 1, 0, 1])
    assert accuracy(out, y) == accuracy(out, y.view(4, 1)) == 0.75
    for other in [y[:1], y[:3], y.view(1, 4), y.view(2, 2), out]:
        with pytest.raises(ValueError, match=r'\[4\] or \[4, 1\], .*\(got \['):
            accuracy(out, other)


def test_r2_score():
    y = torch.tensor([3.0, -0.5, 2.0, 7.0])
    out = torch.tensor([2.5, 0.0, 2.0, 8.0])
    assert r2_score(out, y) == pytest.approx(1 - 1.5 / 29.1875)
    assert r2_score(out.view(4, 1), y.view(4, 1)) == r2_score(out, y)
    assert r2_score(y, y) == 1.0
    assert r2_score(y.mean().expand(4), y) == pytest.approx(0.0)
    assert r2_score(-y, y) < 0
    # Two columns give their mean, and whole numbers are labels too.
    both = r2_score(torch.stack([out, y], dim=1), torch.stack([y, y], dim=1))
    assert both == pytest.approx((r2_score(out, y) + 1) / 2)
    assert r2_score(torch.tensor([1.0, 2.0]), torch.tensor([1, 3])) == 0.5
    # Single precision would lose these differences.
    assert r2_score(out.double() + 1e8, y.double() + 1e8) == pytest.approx(
        r2_score(out, y)
    )


def test_r2_score_of_constant_labels():
    y = torch.full((3,), 0.1)
    assert r2_score(y, y) == 1.0
    assert r2_score(torch.tensor([0.1, 0.1, 0.2]), y) == 0.0


@pytest.mark.parametrize(
    ('out', 'y'), [((4, 1), (4,)), ((4,), (4, 1)), ((4,), (1,)), ((), ()), ((0,), (0,))]
)
def test_r2_score_rejects_shapes_that_would_broadcast(out, y):
    with pytest.raises(ValueError, match=r'same shape \[n\] or \[n, c\] \(got \['):
        r2_score(torch.rand(out), torch.rand(y))


@pytest.mark.parametrize('make', [make_gcn, make_idgl, make_anch])
def test_fit_learns(make):
    seed_everything(0)
    data = make_data()
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # such as that of collapsed outputs
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
    assert out == '' and '2/2' in err and 'IDGL: ' in err
    for name in ['train=', 'dev=', 'score=', 'iters=']:
        assert name in err
    fit(make_gcn(), make_data(), max_epochs=2, desc='my model')
    assert 'my model: 100%' in capfd.readouterr().err


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
        ({'max_epochs': 2.5}, r"'max_epochs' to be an integer \(got 2.5\)"),
        ({'patience': 2.0}, r"'patience' to be an integer \(got 2.0\)"),
        ({'first_phase': 2.5}, r"'first_phase' to be an integer \(got 2.5\)"),
        ({'checkpoint_every': '1'}, r"'checkpoint_every' to be an integer \(got '1'"),
    ],
)
def test_fit_wrong_arguments(kwargs, match):
    with pytest.raises((TypeError, ValueError), match=match):
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
    kwargs = {'monitor': 'score', 'score_fn': lambda out, y: float('nan'), **QUIET}
    with pytest.raises(FloatingPointError, match=r"'val_score' nan in epoch 0"):
        fit(make_gcn(), make_data(), **kwargs)


class Constant(torch.nn.Module):
    """What a collapsed model gives."""

    def __init__(self, out_channels=3):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, *graph):
        return self.bias.expand(x.size(0), -1)


@pytest.mark.parametrize(
    ('make', 'match'),
    [
        (
            lambda: make_anch(scale_regularizer=False),
            "help: 'scale_regularizer=True', more anchors .* 'smoothness' .*'lr'",
        ),
        (make_anch, "'IDGLAnch' have collapsed.* help: a smaller 'smoothness' .*'lr'"),
        (make_idgl, "'IDGL' have collapsed.* help: a smaller 'smoothness' .*'lr'"),
        (
            Constant,
            "'Constant' have collapsed.* help: a smaller 'lr' or 'weight_decay'",
        ),
    ],
)
def test_fit_warns_of_collapsed_outputs(make, match):
    seed_everything(0)
    # So much weight decay that no weight stays.
    kwargs = {'lr': 0.1, 'weight_decay': 10.0, 'max_epochs': 40, **QUIET}
    with pytest.warns(UserWarning, match=match) as caught:
        fit(make(), make_data(), **kwargs)
    assert [warning.filename for warning in caught] == [__file__]


def test_fit_warns_of_collapsed_regression():
    data = make_data()
    data.y = data.x[:, :1].clone()
    kwargs = {'loss_fn': F.mse_loss, 'score_fn': lambda out, y: 0.0, **QUIET}
    with pytest.warns(UserWarning, match='have collapsed'):
        fit(Constant(1), data, max_epochs=30, **kwargs)


@pytest.mark.filterwarnings('error')
def test_fit_warns_only_of_what_has_had_a_chance():
    data = make_data()
    fit(Constant(), data, max_epochs=10, **QUIET)
    data.y = torch.ones_like(data.y)  # A constant is right.
    fit(Constant(), data, max_epochs=30, **QUIET)


def test_progress_bars_come_with_pyg():
    # They are needed, but not among the requirements of this package.
    names = metadata.requires('torch-geometric')
    assert any(name.startswith('tqdm') and 'extra' not in name for name in names)


class Around(torch.nn.Module):
    """IDGL in a module of one's own, which takes a graph by its parts or as it is."""

    def __init__(self):
        super().__init__()
        self.idgl = make_idgl()

    def forward(self, x, edge_index, return_trace=False, max_iters=None):
        options = {'return_trace': return_trace, 'max_iters': max_iters}
        return self.idgl(x, edge_index, **options)


class AroundData(Around):
    def forward(self, data, return_trace=False, max_iters=None):
        return self.idgl(data, return_trace=return_trace, max_iters=max_iters)


@pytest.mark.parametrize(
    'wrap',
    [
        Around,
        AroundData,
        lambda: torch.nn.DataParallel(make_idgl()),
        lambda: torch.compile(make_idgl(), backend='eager'),
    ],
    ids=['by parts', 'data', 'parallel', 'compiled'],
)
def test_fit_uses_the_joint_loss_of_what_is_within(wrap):
    data = make_data()
    records = []
    for make in (make_idgl, wrap):
        seed_everything(0)
        with torch.compiler.set_stance('force_eager'):  # the class alone matters
            records.append(fit(make(), data, max_epochs=3, first_phase=1, **QUIET))
    plain, wrapped = records
    assert wrapped.iterations == plain.iterations > 0
    assert wrapped.val_loss == pytest.approx(plain.val_loss, rel=1e-5)
