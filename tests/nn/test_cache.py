"""What `cached=True` keeps, and what it does not."""

import pytest
import torch

from tests.nn.common import (
    MODELS,
    assert_close,
    assert_same,
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
