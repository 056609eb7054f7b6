"""Metrics, sparsification and dropout as arguments."""

import pytest
import torch

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    assert_same,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.nn import IDGL, Metric


class Distance(torch.nn.Module):
    """A user's metric."""

    symmetric = True

    def __init__(self, in_channels):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(in_channels))

    def forward(self, u, v):
        return torch.exp(-torch.cdist(u * self.scale, v * self.scale).square())


class Dot(Metric):
    """One that knows the factored form."""

    inner_product = True

    def embed(self, x):
        return x / 4

    def nonnegative(self, inputs_nonnegative):
        return inputs_nonnegative


@pytest.mark.parametrize('cls', MODELS)
def test_user_metrics(cls):
    x, edge_index = make_graph(dtype=torch.float64)
    u = x.unsqueeze(1)
    for metric, expected in [
        (Distance, torch.exp(-(u - x).square().sum(2))),
        (lambda channels: Distance(channels), torch.exp(-(u - x).square().sum(2))),
        (lambda channels: Dot(), x @ x.t() / 16),
        (Dot(), x @ x.t() / 16),
    ]:
        model = make_model(cls, metric=metric, tol=None, max_iters=2).double()
        result = loss_and_gradients(model, x, edge_index)
        assert all_finite(result)
        first = result[2].first.to_dense()
        if cls is IDGL:
            assert_close(first, expected, 1e-6)
        if metric is Distance:
            for name in ('feature_learner', 'embedding_learner'):
                grad = result[1][f'{name}.metric.module.scale']
                assert bool((grad != 0).any())
        for backend in ('dense', 'tiled', 'sparse'):
            other = make_model(
                cls, metric=metric, tol=None, max_iters=2, backend=backend
            )
            assert_same(loss_and_gradients(other.double(), x, edge_index), result, 1e-6)


@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
def test_what_a_user_metric_returns_is_not_modified(backend):
    class Known(torch.nn.Module):
        """Similarities that were computed before."""

        def __init__(self):
            super().__init__()
            table = torch.linspace(-1, 1, 100).view(10, 10)
            self.register_buffer('table', table.clone())

        def forward(self, u, v):
            return self.table

    x, edge_index = make_graph()
    model = make_model(IDGL, metric=Known(), epsilon=0.2, backend=backend).eval()
    out = model(x, edge_index)
    expected = torch.linspace(-1, 1, 100).view(10, 10)
    assert torch.equal(model.feature_learner.metric.module.table, expected)
    assert torch.equal(model(x, edge_index), out)


class Same(torch.nn.Module):
    """A metric for vectors of any size."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, u, v):
        return self.scale * torch.tanh(u.sum(1, keepdim=True) * v.sum(1))


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('cls', MODELS)
def test_metric_modules_are_taken_as_they_are(cls, backend):
    """Both learners share a module, and an optimizer made before trains it."""
    x, edge_index = make_graph()
    given = Same()
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    model = make_model(cls, metric=given, epsilon=0.1, backend=backend)
    assert [p for p in model.parameters() if p is given.scale] == [given.scale]
    before = model(x, edge_index)
    loss_and_gradients(model, x, edge_index)
    optimizer.step()
    assert float(given.scale.detach()) != 1.0
    assert not torch.equal(model(x, edge_index), before)


@pytest.mark.parametrize('cls', MODELS)
def test_top_k(cls):
    x, edge_index = make_graph()
    model = make_model(cls, top_k=2).eval()
    _, trace = model(x, edge_index, return_trace=True)
    assert bool(((trace.learned.to_dense() > 0).sum(1) <= 2).all())
    assert bool(((trace.first.to_dense() > 0).sum(1) <= 2).all())


@pytest.mark.parametrize('cls', MODELS)
def test_dropouts_act_in_training_only(cls):
    x, edge_index = make_graph()
    quiet = make_model(cls).eval()
    expected = quiet(x, edge_index)
    for name in ('dropout', 'iter_dropout', 'feature_dropout', 'graph_dropout'):
        model = make_model(cls, **{name: 0.5})
        assert torch.equal(model.eval()(x, edge_index), expected)
        model.train()
        torch.manual_seed(0)
        first = model(x, edge_index, max_iters=1)
        assert not torch.equal(first, model(x, edge_index, max_iters=1)), name
    model = make_model(cls, dropout=0.5)
    assert model.iter_dropout == 0.5
    assert make_model(cls, dropout=0.5, iter_dropout=0.0).iter_dropout == 0.0


def test_graph_dropout_of_the_first_mixture():
    """Each entry of a row is dropped as if by itself: the mean stays."""
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGL, graph_dropout=0.25, initial_weight=1.0, max_iters=0)
    model.double().train()
    total = 0.0
    for seed in range(300):
        torch.manual_seed(seed)
        _, trace = model(x, edge_index, return_trace=True)
        total = total + trace.mixed.to_dense()
    initial = trace.initial.to_dense()
    assert_close(total / 300, initial, 0.15)
    kept = trace.mixed.to_dense() != 0
    assert_close(trace.mixed.to_dense()[kept], initial[kept] / 0.75, 1e-9)


def test_graph_dropout_of_the_first_learned_graph():
    """Columns are dropped after normalising; what is regularised is not."""
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGL, graph_dropout=0.25, initial_weight=0.0, max_iters=0)
    model.double().train()
    torch.manual_seed(0)
    _, trace = model(x, edge_index, return_trace=True)
    learned = trace.learned.to_dense()
    whole, mixed = learned / learned.sum(1, keepdim=True), trace.mixed.to_dense()
    dropped = (mixed == 0).all(dim=0)
    assert 0 < int(dropped.sum()) < len(x)
    assert_close(mixed, whole * ~dropped / 0.75, 1e-9)
    without = make_model(IDGL, initial_weight=0.0, max_iters=0).double()
    expected = without(x, edge_index, return_trace=True)[1]
    assert_close(trace.regs[0], expected.regs[0], 1e-9)
