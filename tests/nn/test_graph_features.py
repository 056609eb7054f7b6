"""Graphs that are learned from other features than those that enter the GNN."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    assert_same,
    cross_entropy,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
    reference_of,
)
from torch_geometric_idgl.nn import IDGLAnch
from torch_geometric_idgl.ops import Features, knn_graph

OPTIONS = {
    'graph_channels': 5,
    'initial_weight': 0.3,
    'update_weight': 0.6,
    'smoothness': 0.3,
    'connectivity': 0.2,
    'sparsity': 0.4,
    'tol': 1e-3,
}


def make_features(n=10, seed=7, dtype=torch.float64):
    return make_graph(n, 5, seed=seed, dtype=dtype, negative=True)[0]


@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('cls', MODELS)
def test_the_reference(cls, backend):
    x, edge_index = make_graph(dtype=torch.float64)
    graph_x = make_features().requires_grad_()
    model = make_model(cls, epsilon=0.1, backend=backend, **OPTIONS).double().eval()
    assert model.feature_learner.metric.weight.shape == (4, 5)
    anchors = torch.tensor([0, 3, 7]) if cls is IDGLAnch else None
    _, trace = model(
        x, edge_index, graph_x=graph_x, anchor_index=anchors, return_trace=True
    )
    run = reference_of(model, x, trace.initial.to_dense(), anchors, graph_x)

    assert trace.num_iters.tolist() == [run.num_iters] and run.num_iters > 0
    for out, expected in zip(trace.outs, run.outs, strict=True):
        assert_close(out, expected, 1e-9)
    for reg, expected in zip(trace.regs, run.regs, strict=True):
        assert_close(reg, expected.view(1), 1e-9)
    assert_close(trace.first.to_dense(), run.learned[0], 1e-9)
    assert_close(trace.mixed.to_dense(), run.mixed[-1], 1e-9)

    fn = cross_entropy(labels(10))
    leaves = [*model.parameters(), graph_x]
    grads = torch.autograd.grad(trace.loss(fn), leaves)
    wanted = torch.autograd.grad(run.loss(fn), leaves)
    for grad, expected in zip(grads, wanted, strict=True):
        assert_close(grad, expected, 1e-8)


@pytest.mark.parametrize('cls', MODELS)
def test_the_same_features_change_nothing(cls):
    x, edge_index = make_graph(dtype=torch.float64)
    plain = make_model(cls).double().eval()
    model = make_model(cls, graph_channels=6).double().eval()
    expected = loss_and_gradients(plain, x, edge_index)
    assert_same(loss_and_gradients(model, x, edge_index, graph_x=x), expected, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_the_knn_graph_is_of_them(cls):
    x, graph_x = make_graph(dtype=torch.float64)[0], make_features()
    model = make_model(cls, k=3, **OPTIONS).double().eval()
    _, trace = model(x, graph_x=graph_x, return_trace=True)
    centre, neighbour = knn_graph(graph_x, 3)
    expected = torch.zeros(10, 10, dtype=torch.float64)
    expected[neighbour, centre] = 1 / 3
    assert_close(trace.initial.to_dense(), expected, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_data_objects_hold_them(cls):
    model = make_model(cls, k=3, **OPTIONS).double().eval()
    graphs = []
    for seed, n in enumerate((6, 140, 20)):
        x, edge_index = make_graph(n, seed=seed, dtype=torch.float64)
        graph_x = make_features(n, seed + 50)
        graphs.append(Data(x=x, edge_index=edge_index, graph_x=graph_x))
    outs = [model(data.x, data.edge_index, graph_x=data.graph_x) for data in graphs]
    assert torch.equal(model(graphs[0]), outs[0])
    assert_close(model(Batch.from_data_list(graphs)), torch.cat(outs), 1e-9)
    # A model without a use for them passes them over.
    plain = make_model(cls).double().eval()
    data = graphs[0]
    assert torch.equal(plain(data), plain(data.x, data.edge_index))


@pytest.mark.parametrize('given', [False, True])
@pytest.mark.parametrize('cls', MODELS)
def test_cached(cls, given):
    x, edge_index = make_graph(dtype=torch.float64)
    graph = (edge_index,) if given else ()
    plain, cached = (
        make_model(cls, k=3, cached=c, **OPTIONS).double().eval() for c in (False, True)
    )
    one, other = make_features(), make_features(seed=8)
    assert not torch.allclose(
        plain(x, *graph, graph_x=one), plain(x, *graph, graph_x=other)
    )
    for graph_x in (one, one, other, one):
        expected = loss_and_gradients(plain, x, *graph, graph_x=graph_x)
        result = loss_and_gradients(cached, x, *graph, graph_x=graph_x)
        assert_same(result, expected, 1e-12)
    one[0] = 2.0  # in place
    assert_close(cached(x, *graph, graph_x=one), plain(x, *graph, graph_x=one), 1e-12)
    changed = x + 1.0
    assert_close(
        cached(changed, *graph, graph_x=one),
        plain(changed, *graph, graph_x=one),
        1e-12,
    )


@pytest.mark.parametrize('cls', MODELS)
def test_cached_features_with_gradient(cls):
    """As those of another module are, in every step others."""
    x, edge_index = make_graph(dtype=torch.float64)
    plain, cached = (
        make_model(cls, cached=c, **OPTIONS).double().eval() for c in (False, True)
    )
    for seed in (7, 8):
        grads = []
        for model in (plain, cached):
            graph_x = make_features(seed=seed).requires_grad_()
            model(x, edge_index, graph_x=graph_x).square().sum().backward()
            grads.append(graph_x.grad)
        assert_close(grads[1], grads[0], 1e-12)
        assert float(grads[0].abs().max()) > 0


@pytest.mark.parametrize('cls', MODELS)
def test_feature_dropout_is_on_both(cls, monkeypatch):
    x, edge_index = make_graph(40, dtype=torch.float64)
    graph_x = make_features(40)
    copies = x.clone(), graph_x.clone()
    dropped = []
    dropout = Features.dropout

    def spy(self, p):
        out = dropout(self, p)
        dropped.append((self.value, out.value))
        return out

    monkeypatch.setattr(Features, 'dropout', spy)
    model = make_model(cls, feature_dropout=0.5, **OPTIONS).double()
    assert all_finite(loss_and_gradients(model, x, edge_index, graph_x=graph_x))
    assert torch.equal(x, copies[0]) and torch.equal(graph_x, copies[1])
    assert len(dropped) == 2
    for given, (before, after) in zip(copies, dropped, strict=True):
        assert torch.equal(before, given)
        zero = after == 0
        assert 0.2 < float(zero[given != 0].double().mean()) < 0.8
        assert_close(after, torch.where(zero, 0.0, 2 * given), 1e-3)

    plain = make_model(cls, **OPTIONS).double().eval()
    out = model.eval()(x, edge_index, graph_x=graph_x)
    assert_close(out, plain(x, edge_index, graph_x=graph_x), 1e-12)


@pytest.mark.parametrize('cls', MODELS)
def test_errors(cls):
    x, edge_index = make_graph()
    graph_x = make_features(dtype=torch.float32)
    model = make_model(cls, **OPTIONS)
    plain = make_model(cls)
    for features, error, match in [
        (None, ValueError, r"'graph_x' beside 'x', with 5 features.*got none"),
        (graph_x[:, :4], ValueError, r"'graph_x' to have 5 features.*got 4"),
        (graph_x[:9], ValueError, r"'graph_x' to have 10 rows.*got 9"),
        (graph_x.double(), TypeError, r"'graph_x' to be of type torch.float32"),
        (graph_x.long(), TypeError, r"'graph_x' to be floating-point"),
        (graph_x / 0, ValueError, r"'graph_x' to be finite"),
        (graph_x.tolist(), TypeError, r"'graph_x' to be a 'torch.Tensor' .got 'list'"),
    ]:
        with pytest.raises(error, match=match):
            model(x, edge_index, graph_x=features)
    with pytest.raises(ValueError, match=r"no 'graph_x'.*'graph_channels'"):
        plain(x, edge_index, graph_x=graph_x)
    with pytest.raises(ValueError, match=r"'graph_x' beside 'x'"):
        model(Data(x=x, edge_index=edge_index))
    with pytest.raises(ValueError, match='as arguments besides'):
        model(Data(x=x, edge_index=edge_index), graph_x=graph_x)
    with pytest.raises(ValueError, match=r"'graph_channels' to be at least 1"):
        make_model(cls, graph_channels=0)
