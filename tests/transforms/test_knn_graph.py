import sys

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.ops.knn import knn_graph
from torch_geometric_idgl.transforms import CosineKNNGraph, LearnGraph, PerturbEdges

X = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [0.1, 2.0]])


def test_cosine_knn_graph():
    transform = CosineKNNGraph(k=2)
    assert str(transform) == 'CosineKNNGraph(k=2)'

    data = Data(x=X, y=torch.tensor([0, 0, 1, 1]))
    out = transform(data)
    assert len(out) == 3
    assert torch.equal(out.edge_index, knn_graph(X, 2))
    assert 'edge_index' not in data
    assert torch.equal(transform(Data(x=X.to_sparse_csr())).edge_index, out.edge_index)


def test_cosine_knn_graph_options():
    data = Data(x=X)
    out = CosineKNNGraph(k=1, include_self=False)(data)
    assert out.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 1, 2]]
    out = CosineKNNGraph(k=1, include_self=False, force_undirected=True)(data)
    assert out.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]


def test_approximate_cosine_knn_graph(monkeypatch):
    calls = []

    def record(*args, **kwargs):
        calls.append(kwargs['approximate'])
        return knn_graph(*args, **{**kwargs, 'approximate': False})

    module = sys.modules[CosineKNNGraph.__module__]
    monkeypatch.setattr(module, 'knn_graph', record)
    for approximate in (False, True):
        out = CosineKNNGraph(k=2, approximate=approximate)(Data(x=X))
        assert torch.equal(out.edge_index, knn_graph(X, 2))
    assert calls == [False, True]


def test_pairs_to_predict_are_not_edges():
    """PyG's splits of edges leave as many labelled pairs as there are edges."""
    data = Data(x=torch.rand(20, 3), edge_index=torch.randint(20, (2, 40)))
    split = RandomLinkSplit(is_undirected=True, num_val=0.0, num_test=0.0)
    data, _, _ = split(data.coalesce())
    data.edge_label = torch.rand(data.num_edges)
    data.edge_label_index = torch.randint(20, (2, data.num_edges))
    data.neg_edge_index = torch.randint(20, (2, data.num_edges))
    keys = ['edge_label', 'edge_label_index', 'neg_edge_index']
    for transform in [
        CosineKNNGraph(k=3),
        PerturbEdges(delete=0.5),
        PerturbEdges(add=0.1),
        LearnGraph(IDGL(3, 4, 2, 2), top_k=3),
    ]:
        out = transform(data)
        assert all(torch.equal(out[key], data[key]) for key in keys)


@pytest.mark.parametrize('num_weights', [2, 3, 4])
def test_cosine_knn_graph_replaces_edges(num_weights):
    data = Data(
        x=X,
        y=torch.zeros(2),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        edge_attr=torch.ones(2, 3),
        edge_kind=torch.ones(2),
        edge_weight=torch.ones(num_weights),  # Perhaps of other edges.
    )
    keys = set(data.keys())
    out = CosineKNNGraph(k=2)(data)
    assert set(out.keys()) == {'x', 'y', 'edge_index'}
    assert set(data.keys()) == keys and data.edge_index.size(1) == 2


@pytest.mark.parametrize('force_undirected', [False, True])
def test_cosine_knn_graph_batch(force_undirected):
    transform = CosineKNNGraph(k=2, force_undirected=force_undirected)
    graphs = [
        Data(x=X[:3], edge_index=torch.tensor([[0], [1]])),
        Data(x=X[3:], edge_index=torch.tensor([[0], [0]])),
        Data(x=X, edge_index=torch.tensor([[0], [1]])),
    ]
    batch = Batch.from_data_list(graphs)
    out = transform(batch)
    for graph, part in zip(graphs, out.to_data_list(), strict=True):
        assert torch.equal(part.edge_index, transform(graph).edge_index)
    for graph, part in zip(graphs, batch.to_data_list(), strict=True):
        assert torch.equal(part.edge_index, graph.edge_index)

    # Graphs that had no edges before, and ids with gaps.
    gaps = Data(x=batch.x, batch=10**12 * batch.batch)
    assert torch.equal(transform(gaps).edge_index, out.edge_index)
    out = transform(Batch.from_data_list([Data(x=graph.x) for graph in graphs]))
    for graph, part in zip(graphs, out.to_data_list(), strict=True):
        assert torch.equal(part.edge_index, transform(graph).edge_index)


def test_cosine_knn_graph_errors():
    with pytest.raises(ValueError, match=r"'k' to be at least 1 \(got 0\)"):
        CosineKNNGraph(k=0)
    with pytest.raises(ValueError, match=r"'data' to hold 'x' \(got \['num_nodes'\]\)"):
        CosineKNNGraph()(Data(num_nodes=3))
    with pytest.raises(TypeError, match="got 'HeteroData'"):
        CosineKNNGraph()(HeteroData())
    with pytest.raises(ValueError, match="'batch' to be sorted"):
        CosineKNNGraph()(Data(x=X, batch=torch.tensor([0, 1, 0, 1])))
