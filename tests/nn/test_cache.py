"""What `cached=True` keeps, and what it does not."""

import pytest
import torch

from tests.nn.common import (
    MODELS,
    assert_close,
    assert_same,
    joint_loss,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.nn import IDGL


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
def test_cached(cls, sparse):
    x, edge_index = make_graph(dtype=torch.float64)
    x = x.to_sparse_csr() if sparse else x
    options = {'dropout': 0.5, 'feature_dropout': 0.3, 'graph_dropout': 0.3}
    plain = make_model(cls, **options).double()
    cached = make_model(cls, cached=True, **options).double()
    for step in range(3):
        results = []
        for model in (plain, cached):
            torch.manual_seed(step)
            model.train(step < 2)
            results.append(loss_and_gradients(model, x, edge_index))
        assert_same(results[1], results[0], 1e-12)

    other, other_index = make_graph(11, dtype=torch.float64)
    with pytest.raises(ValueError, match=r'shape \[10, 6\] .got \[11, 6\].'):
        cached(other, other_index)
    cached.reset_parameters()
    assert cached(other, other_index).shape == (11, 3)


@pytest.mark.parametrize('cls', MODELS)
def test_cache_holds_for_the_graph_and_the_knn_graph(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True).eval()
    out = model(x, edge_index)
    assert torch.equal(model(x), out)  # as GCNConv: later graphs are not looked at
    model = make_model(cls, cached=True, k=3).eval()
    out = model(x)
    assert torch.equal(model(x), out)
    assert_close(out, make_model(cls, k=3).eval()(x))


@pytest.mark.parametrize('cls', MODELS)
def test_cache_sees_other_features(cls):
    x, edge_index = make_graph()
    other = torch.rand_like(x)
    plain, cached = (make_model(cls, cached=c, k=3).eval() for c in (False, True))
    for graph in [(edge_index,), ()]:
        cached._cache = None
        for features in (x, other, x):
            assert_close(cached(features, *graph), plain(features, *graph))
        changed = x.clone()
        cached(changed, *graph)
        changed[0] = 7.0
        assert_close(cached(changed, *graph), plain(changed, *graph))
    # The graph that was given stays, whatever comes later.
    cached._cache = None
    cached(x, edge_index)
    assert_close(cached(other), plain(other, edge_index))


@pytest.mark.parametrize('cls', MODELS)
def test_cache_and_gradients(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True)
    with torch.inference_mode():
        model.eval()(x, edge_index)
    model.train()(x, edge_index).sum().backward()

    features = x.clone().requires_grad_()
    model(features, edge_index).sum().backward()
    assert features.grad.abs().sum() > 0

    # Gradients reach learned edge weights in every step.
    model = make_model(cls, cached=True)
    weight = torch.rand(edge_index.size(1), requires_grad=True)
    for _ in range(2):
        weight.grad = None
        model(x, edge_index, weight).sum().backward()
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize('cls', MODELS)
def test_cache_and_number_types(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True).eval()
    model(x, edge_index)
    with pytest.raises(TypeError, match="'x' to be a 'torch"):
        model([1, 2], edge_index)
    model.double()
    assert model(x.double(), edge_index).dtype == torch.double
    with pytest.raises(TypeError, match=r'type torch.float64.*\(got torch.float32\)'):
        model(x, edge_index)


@pytest.mark.parametrize('cls', MODELS)
def test_mixed_precision_before_the_model(cls):
    x, edge_index = make_graph()
    encoder, model = torch.nn.Linear(6, 6), make_model(cls)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        h = encoder(x)
        assert h.dtype == torch.bfloat16
        out = model(h, edge_index)
    assert out.dtype == torch.float
    out.sum().backward()
    assert encoder.weight.grad.isfinite().all()


def test_cached_with_gradient_to_features():
    model = IDGL(8, 16, 2, 3, cached=True)
    x = torch.rand(4, 8, requires_grad=True)
    for _ in range(2):
        model(x, make_graph(4, 8)[1]).sum().backward()
    assert x.grad.isfinite().all()


def test_features_that_want_gradients_by_now():
    x, edge_index = make_graph(dtype=torch.float64)
    cached, plain = (make_model(IDGL, cached=c).double() for c in (True, False))
    cached(x, edge_index)
    x.requires_grad_()
    grads = []
    for model in (cached, plain):
        loss, _ = joint_loss(model, x, edge_index)
        grads.append(torch.autograd.grad(loss, x)[0])
    assert_close(grads[0], grads[1], 1e-12)


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
def test_evaluation_in_inference_mode_leaves_nothing_behind(cls, sparse):
    x, edge_index = make_graph(dtype=torch.float64)
    x = x.to_sparse_csr() if sparse else x
    model = make_model(cls, cached=True, feature_dropout=0.3).double()
    loss_and_gradients(model, x, edge_index)
    model.eval()
    with torch.inference_mode():
        out = model(x, edge_index)
    plain = make_model(cls, feature_dropout=0.3).double().eval()
    actual = loss_and_gradients(model, x, edge_index)
    assert_same(actual, loss_and_gradients(plain, x, edge_index), 1e-12)
    assert_close(out, plain(x, edge_index), 1e-12)


def test_a_given_graph_is_not_replaced_by_neighbours():
    x, edge_index = make_graph()
    model = make_model(IDGL, cached=True)
    model(x, edge_index)
    model.double()
    with pytest.raises(ValueError, match=r"'edge_index' once more.*torch.float32"):
        model(x.double())
    expected = model(x.double(), edge_index)
    assert_close(model(x.double()), expected, 1e-12)


def held(model):
    """The numbers that the cache of a model keeps, whoever else holds them."""
    seen, total, todo = set(), 0, [model._cache]
    while todo:
        item = todo.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            total += item.numel()
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        elif hasattr(item, '__dict__'):
            todo += vars(item).values()
    return total


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('backend', ['auto', 'tiled'])
@pytest.mark.parametrize('cls', MODELS)
def test_cache_does_not_grow(cls, backend, sparse):
    """Whatever else changes from call to call: weights, anchors, dropout."""
    x, edge_index = make_graph(30)
    x = x.to_sparse_csr() if sparse else x
    sampling = {} if cls is IDGL else {'anchor_sampling': 'seeded'}
    options = {'feature_dropout': 0.2, 'graph_dropout': 0.2, 'epsilon': 0.1}
    model = make_model(cls, cached=True, backend=backend, **options, **sampling)
    sizes = []
    for step in range(12):
        model.initial_weight, model.update_weight = 0.9 - 0.05 * step, 0.1 + 0.05 * step
        model.train(step % 3 > 0)
        loss_and_gradients(model, x, edge_index)
        sizes.append(held(model))
    assert sizes[0] > 0
    assert len(set(sizes[4:])) == 1
