"""All forms of features and graphs that the models take."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from tests.nn.common import (
    BACKENDS,
    MODELS,
    assert_close,
    assert_same,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.graphs import DenseGraph, SparseGraph
from torch_geometric_idgl.nn import IDGL, IDGLAnch, inputs


@pytest.mark.parametrize('cls', MODELS)
def test_data_objects(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    expected = model(x, edge_index)
    data = Data(x=x, edge_index=edge_index)
    assert torch.equal(model(data), expected)
    out, trace = model(data, return_trace=True, max_iters=1)
    assert trace.num_iters.tolist() == [1]
    assert_close(out, model(x, edge_index, max_iters=1))

    edge_weight = torch.rand(edge_index.size(1))
    weighted = Data(x=x, edge_index=edge_index, edge_weight=edge_weight)
    assert torch.equal(model(weighted), model(x, edge_index, edge_weight))
    assert torch.equal(model(Data(x=x)), model(x))

    adj_t = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(edge_index.size(1)), (10, 10)
    )
    assert_close(model(Data(x=x, adj_t=adj_t.coalesce())), expected)
    assert_close(model(Data(x=x, adj_t=adj_t.to_sparse_csr())), expected)


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('weighted', [False, True])
def test_forms_of_the_graph(cls, weighted):
    x, edge_index = make_graph(dtype=torch.float64)
    edge_index = edge_index[:, :-3]  # not symmetric: a wrong direction shows
    size = edge_index.size(1)
    value = torch.linspace(0.2, 1.0, size, dtype=torch.float64)
    weight = value if weighted else None
    value = value if weighted else torch.ones(size, dtype=torch.float64)
    model = make_model(cls).double().eval()
    expected = model(x, edge_index, weight)

    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    shuffled = model(x, edge_index[:, order], None if weight is None else weight[order])
    assert_close(shuffled, expected, 1e-9)
    assert_close(model(x, edge_index.int(), weight), expected, 1e-9)
    index = EdgeIndex(edge_index, sparse_size=(10, 10))
    assert_close(model(x, index, weight), expected, 1e-9)
    index, perm = index.sort_by('col')
    sorted_weight = None if weight is None else weight[perm]
    assert_close(model(x, index, sorted_weight), expected, 1e-9)

    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), value, (10, 10))
    for form in (adj_t, adj_t.coalesce(), adj_t.to_sparse_csr(), adj_t.to_sparse_csc()):
        assert_close(model(x, form), expected, 1e-9)
    if weighted:
        assert_close(model(x, edge_index, weight.view(-1, 1)), expected, 1e-9)
        assert_close(model(x, edge_index, weight.float()), expected, 1e-6)


@pytest.mark.sparse
@pytest.mark.parametrize('cls', MODELS)
def test_sparse_tensor(cls):
    torch_sparse = pytest.importorskip('torch_sparse')
    x, edge_index = make_graph(dtype=torch.float64)
    edge_index = edge_index[:, :-3]
    value = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    model = make_model(cls).double().eval()
    source, target = edge_index
    for weight in (None, value):
        adj_t = torch_sparse.SparseTensor(
            row=target, col=source, value=weight, sparse_sizes=(10, 10)
        )
        expected = model(x, edge_index, weight)
        assert_close(model(x, adj_t), expected, 1e-9)
        assert_close(model(Data(x=x, adj_t=adj_t)), expected, 1e-9)
    with pytest.raises(
        ValueError, match=r'Expected .* shape \[10, 10\].*got \[10, 11\]'
    ):
        wrong = torch_sparse.SparseTensor(row=target, col=source, sparse_sizes=(10, 11))
        model(x, wrong)


@pytest.mark.parametrize('backend', ['auto', 'low_rank', 'tiled'])
@pytest.mark.parametrize('cls', MODELS)
def test_sparse_features(cls, backend):
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(cls, backend=backend, k=3).double().eval()
    expected = loss_and_gradients(model, x, edge_index)
    coo = x.to_sparse_coo()
    for form in (coo, x.to_sparse_csr(), x.to_sparse_csc()):
        assert_same(loss_and_gradients(model, form, edge_index), expected, 1e-9)
    assert_close(model(coo), model(x), 1e-9)  # a kNN graph of sparse features


@pytest.mark.parametrize('cls', MODELS)
def test_large_bags_of_words_become_sparse(cls):
    """Conversion inside of the model changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 900, generator=generator, dtype=torch.float64)
    x = x * (x > 0.97)
    model = make_model(cls, 900, 8, 2, 3).double().eval()
    dense = make_model(cls, 900, 8, 2, 3, backend='dense').double().eval()
    _, edge_index = make_graph(80)
    learned = x.clone().requires_grad_()  # stays dense
    expected = loss_and_gradients(dense, learned, edge_index)
    assert_same(loss_and_gradients(model, x, edge_index), expected, 1e-8)


@pytest.mark.parametrize('cls', MODELS)
def test_non_contiguous_inputs(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    expected = model(x, edge_index)
    wide = torch.stack([x, x], dim=2)[..., 0]
    tall = x.t().contiguous().t()
    pairs = edge_index.t().contiguous().t()
    assert not (wide.is_contiguous() or tall.is_contiguous() or pairs.is_contiguous())
    for form in (wide, tall):
        assert_close(model(form, pairs), expected)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_inputs_are_not_modified(cls, backend):
    x, edge_index = make_graph()
    edge_weight = torch.rand(edge_index.size(1))
    batch = torch.tensor([0] * 10)
    anchors = torch.tensor([7, 2]) if cls is IDGLAnch else None
    given = [x, edge_index, edge_weight, batch] + ([] if anchors is None else [anchors])
    copies = [tensor.clone() for tensor in given]
    versions = [tensor._version for tensor in given]
    model = make_model(
        cls, backend=backend, dropout=0.5, feature_dropout=0.5, graph_dropout=0.5
    )
    loss_and_gradients(
        model, x, edge_index, edge_weight, batch=batch, anchor_index=anchors
    )
    model(x.to_sparse_csr(), edge_index)
    for tensor, copied, version in zip(given, copies, versions, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor._version == version

    data = Data(x=x, edge_index=edge_index)
    model(data)
    assert set(data.keys()) == {'x', 'edge_index'}


@pytest.mark.parametrize('cls', MODELS)
def test_edge_attributes_are_ignored(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    edge_attr = torch.rand(edge_index.size(1), 4)
    assert torch.equal(model(x, edge_index, edge_attr=edge_attr), model(x, edge_index))
    data = Data(x=x, edge_index=edge_index, edge_attr=edge_attr)
    assert torch.equal(model(data), model(x, edge_index))


def test_data_and_arguments_together_are_refused():
    model = IDGL(8, 16, 2, 3)
    data = Data(x=torch.rand(4, 8), edge_index=torch.tensor([[0, 1], [1, 0]]))
    for name, value in [
        ('edge_index', data.edge_index),
        ('edge_weight', torch.ones(2)),
        ('batch', torch.zeros(4, dtype=torch.long)),
    ]:
        with pytest.raises(ValueError, match='data object'):
            model(data, **{name: value})


def test_numpy_numbers_are_numbers():
    model = IDGL(np.int64(8), 16, 2, 3, heads=np.int64(2), epsilon=np.float32(0.5))
    assert model(torch.rand(5, 8), tiny_graph()).shape == (5, 3)


def tiny_graph():
    return torch.tensor([[0, 1], [1, 0]])


def test_sparse_features_with_gradient_are_refused():
    x = torch.rand(4, 8).to_sparse_csr().requires_grad_()
    with pytest.raises(ValueError, match='requires_grad'):
        IDGL(8, 16, 2, 3)(x, tiny_graph())


@pytest.mark.sparse
@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
def test_neighbour_sampling(cls):
    pytest.importorskip('torch_sparse')
    torch.manual_seed(0)
    edge_index = torch.randint(40, (2, 200))
    data = Data(x=torch.rand(40, 8), edge_index=edge_index, y=torch.arange(40) % 3)
    model = cls(8, 16, 2, 3)
    loader = NeighborLoader(data, num_neighbors=[5, 5], batch_size=10)
    seen = 0
    for batch in loader:
        out, trace = model(batch, return_trace=True)
        assert out.shape == (batch.num_nodes, 3)
        seeds = slice(batch.batch_size)
        trace.loss(lambda o: F.cross_entropy(o[seeds], batch.y[seeds])).backward()  # noqa: B023
        seen += batch.batch_size
    assert seen == 40
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
def test_given_graph_with_many_edges_is_a_matrix(cls, monkeypatch):
    torch.manual_seed(0)
    x, n = torch.rand(20, 6), 20
    edge_index = (torch.rand(n, n) < 0.6).nonzero().t()
    found = []
    for largest, kind in [(1 << 24, DenseGraph), (0, SparseGraph)]:
        monkeypatch.setattr(inputs, '_MATRIX', (n, largest))
        torch.manual_seed(1)
        model = cls(6, 8, 2, 3, max_iters=2, tol=None)
        weight = torch.linspace(0.5, 1.5, edge_index.size(1)).requires_grad_()
        out, trace = model(x, edge_index, weight, return_trace=True)
        assert type(trace.initial) is kind
        out.square().sum().backward()
        found.append([out, weight.grad, *(p.grad for p in model.parameters())])
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(dense, sparse)
