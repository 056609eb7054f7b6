"""Metrics against loops over pairs of nodes."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from torch_geometric_idgl.nn import (
    IDGL,
    RBF,
    Attention,
    Cosine,
    GraphLearner,
    Metric,
    WeightedCosine,
)
from torch_geometric_idgl.nn.similarity import CustomMetric, resolve_metric
from torch_geometric_idgl.ops import SparseMatrix


def cosine(a, b):
    norms = a.norm() * b.norm()
    return (a @ b) / norms if norms > 0 else torch.zeros((), dtype=a.dtype)


def weighted_cosine_loop(metric, a, b):
    return sum(cosine(w * a, w * b) for w in metric.weight) / metric.heads


def cosine_loop(metric, a, b):
    return cosine(a, b)


def rbf_loop(metric, a, b):
    gap = a @ metric.weight - b @ metric.weight
    return torch.exp(-gap.square().sum() / (2 * metric.log_bandwidth.exp() ** 2))


def attention_loop(metric, a, b):
    total = 0.0
    for w in metric.weight.view(metric.in_channels, metric.heads, -1).unbind(1):
        total = total + (a @ w).relu() @ (b @ w).relu()
    return total / (metric.heads * math.sqrt(metric.out_channels))


METRICS = {
    'weighted_cosine': (lambda: WeightedCosine(5, heads=3), weighted_cosine_loop),
    'cosine': (Cosine, cosine_loop),
    'rbf': (lambda: RBF(5, 4, bandwidth=1.5), rbf_loop),
    'attention': (lambda: Attention(5, 4, heads=2), attention_loop),
}
every_metric = pytest.mark.parametrize('name', list(METRICS))


def vectors(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 5, generator=generator, dtype=torch.float64) - 0.4


def make(name):
    torch.manual_seed(1)
    factory, loop = METRICS[name]
    return factory().double(), loop


def table(metric, loop, x, y):
    rows = [torch.stack([loop(metric, a, b) for b in y]) for a in x]
    return torch.stack(rows)


def test_repr():
    assert str(WeightedCosine(5, heads=3)) == 'WeightedCosine(5, heads=3)'
    assert str(Cosine()) == 'Cosine()'
    assert str(RBF(5, 4)) == 'RBF(5, 4)'
    assert str(Attention(5, 4, heads=2)) == 'Attention(5, 4, heads=2)'


@every_metric
def test_node_node_and_node_anchor(name):
    metric, loop = make(name)
    x, anchors = vectors(6), vectors(3, seed=1)
    square, affinity = metric(x), metric(x, anchors)
    assert square.shape == (6, 6)
    assert affinity.shape == (6, 3)
    torch.testing.assert_close(square, table(metric, loop, x, x))
    torch.testing.assert_close(affinity, table(metric, loop, x, anchors))
    torch.testing.assert_close(square, square.t())
    torch.testing.assert_close(metric(x, x[:2]), square[:, :2])


@every_metric
def test_sparse_features(name):
    metric, _ = make(name)
    x = vectors(6)
    x = x * (x > 0)
    torch.testing.assert_close(metric(SparseMatrix.from_dense(x)), metric(x))


@every_metric
def test_gradients(name):
    metric, _ = make(name)
    x, anchors = vectors(4).requires_grad_(), vectors(2, 1).requires_grad_()
    names = [key for key, _ in metric.named_parameters()]

    def run(x, anchors, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(metric, given, (x, anchors))

    assert gradcheck(run, (x, anchors, *metric.parameters()), fast_mode=True)


@pytest.mark.parametrize('name', ['weighted_cosine', 'cosine'])
def test_zero_vectors(name):
    metric, _ = make(name)
    x = vectors(3)
    x[1] = 0.0
    x.requires_grad_()
    out = metric(x)
    assert out[1].eq(0).all() and out[:, 1].eq(0).all()
    torch.testing.assert_close(out.diagonal()[[0, 2]], torch.ones(2, dtype=x.dtype))
    out.square().sum().backward()
    assert bool(torch.isfinite(x.grad).all())


@every_metric
def test_sign_promise(name):
    """What a metric says about signs decides which operator is exact."""
    metric, _ = make(name)
    for x in (vectors(8), vectors(8).abs()):
        if metric.nonnegative(bool((x >= 0).all())):
            assert bool((metric(x) >= 0).all())


def test_weighted_cosine_is_a_mean_of_cosines():
    metric = WeightedCosine(5, heads=2).double()
    x = vectors(4)
    with torch.no_grad():
        metric.weight.fill_(1.0)
    torch.testing.assert_close(metric(x), Cosine()(x))
    assert float(metric(x).detach().abs().max()) <= 1.0 + 1e-12


@every_metric
def test_reset_parameters(name):
    metric, _ = make(name)
    before = [p.clone() for p in metric.parameters()]
    with torch.no_grad():
        for p in metric.parameters():
            p.fill_(7.0)
    torch.manual_seed(1)
    metric.float().reset_parameters()
    for p, old in zip(metric.parameters(), before, strict=True):
        torch.testing.assert_close(p.double(), old)


def test_resolver():
    assert isinstance(resolve_metric('weighted_cosine', 5, 3), WeightedCosine)
    assert resolve_metric('weighted_cosine', 5, 3).weight.shape == (3, 5)
    assert isinstance(resolve_metric('cosine', 5, 3), Cosine)
    assert isinstance(resolve_metric('rbf', 5, 3), RBF)
    assert resolve_metric('attention', 5, 3).heads == 3
    assert isinstance(resolve_metric(RBF, 5, 3), RBF)
    assert isinstance(resolve_metric(Cosine, 5, 3), Cosine)
    with pytest.raises(ValueError, match=r'take 8 channels.*which takes 5'):
        resolve_metric(WeightedCosine(5), 8, 3)

    bilinear = torch.nn.Bilinear(5, 5, 1)
    custom = resolve_metric(bilinear, 5, 3)
    assert isinstance(custom, CustomMetric) and isinstance(custom, Metric)
    assert custom.module is bilinear  # taken as it is
    assert resolve_metric(custom, 5, 3) is custom


@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
def test_metrics_that_draw_random_numbers_are_refused(backend):
    class Noisy(torch.nn.Module):
        def forward(self, u, v):
            return torch.dropout((u @ v.t()).relu(), 0.5, self.training)

    model = IDGL(5, 8, 2, 3, metric=Noisy(), k=3, epsilon=0.1, backend=backend)
    with pytest.raises(RuntimeError, match=r"'metric' to be a function.*random"):
        model(vectors(6).float())
    model.eval()(vectors(6).float())  # without dropout it is one


def test_metrics_promise_nothing_by_themselves():
    metric = Metric()
    assert not metric.nonnegative(True)
    with pytest.raises(NotImplementedError):
        metric(vectors(3))


def test_bad_sizes():
    for make in (WeightedCosine, RBF, Attention):
        with pytest.raises(ValueError, match="'in_channels' to be at least 1"):
            make(0)
    with pytest.raises(ValueError, match="'heads' to be at least 1"):
        WeightedCosine(5, 0)
    with pytest.raises(ValueError, match=r"'bandwidth' .*\(got nan\)"):
        RBF(5, bandwidth=math.nan)


def test_bad_bandwidth():
    with pytest.raises(ValueError, match=r"Expected 'bandwidth' to be positive .got 0"):
        RBF(5, bandwidth=0)


def test_custom_metric_of_wrong_shape():
    class Wrong(torch.nn.Module):
        def forward(self, u, v):
            return u.sum(1)

    metric = CustomMetric(Wrong())
    with pytest.raises(
        ValueError, match=r'Expected .* of shape \[4, 4\] \(got \[4\]\)'
    ):
        metric(vectors(4))


class Cubed(WeightedCosine):
    def embed(self, x):
        return super().embed(x.to_dense() ** 3)


@pytest.mark.parametrize('form', ['dense', 'sparse'])
def test_subclasses_of_the_weighted_cosine_are_asked(form):
    # Of the class itself, weights are all that has to be known.
    torch.manual_seed(0)
    learner = GraphLearner(8, metric=Cubed)
    x = torch.rand(300, 8)
    expected = learner.metric(x)
    given = x if form == 'dense' else x.to_sparse()
    for backend in ('auto', 'dense', 'low_rank', 'tiled', 'sparse'):
        graph = learner(given, backend=backend)
        torch.testing.assert_close(graph.to_dense(), expected)


class Normed(Metric):
    """Embeds rows that depend on each other."""

    inner_product = True

    def __init__(self, in_channels):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(in_channels)

    def embed(self, x):
        return torch.nn.functional.normalize(self.norm(x.to_dense()), dim=1)


def test_anchors_are_rows_of_what_was_embedded():
    learner = GraphLearner(5, metric=Normed, epsilon=0.1)
    anchors = torch.tensor([1, 4, 7])
    graph = learner(torch.randn(10, 5), anchors=anchors).to_dense()
    torch.testing.assert_close(graph[anchors, torch.arange(3)], torch.ones(3))
    assert int(learner.metric.norm.num_batches_tracked) == 1
