"""The strongest edges and the shares of classes, against the whole matrix."""

import pytest
import torch

from tests.view.common import make_data, make_trace
from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.graphs import AnchorGraph
from torch_geometric_idgl.view import strongest
from torch_geometric_idgl.view.strongest import class_share_by_chance, strongest_edges


def expected(matrix, k, y):
    matrix = matrix.clone().fill_diagonal_(0.0)
    n, weights = len(matrix), {}
    for i in range(n):
        for weight, j in zip(*matrix[i].topk(min(k, n)), strict=True):
            if weight > 0:
                pair = (min(i, int(j)), max(i, int(j)))
                weights[pair] = max(weights.get(pair, 0.0), float(weight))
    known = matrix * (y >= 0) * (y >= 0).unsqueeze(1)
    within = known[y.unsqueeze(1) == y].sum() / known.sum()
    return weights, float(within)


def assert_expected(graph, matrix, number, k, y):
    pair, weight, share = strongest_edges(graph, number, k, y)
    weights, within = expected(matrix, k, y)
    found = dict(zip(map(tuple, pair.t().tolist()), weight.tolist(), strict=True))
    assert found == pytest.approx(weights)
    assert weight.tolist() == sorted(weight.tolist(), reverse=True)
    assert share == pytest.approx(within)


@pytest.mark.parametrize('backend', ['dense', 'low_rank', 'tiled', 'sparse'])
def test_all_kinds_of_graphs(backend, monkeypatch):
    monkeypatch.setattr(strongest, '_STRIP', 30)  # several strips
    data = make_data()
    data.x = data.x.abs()
    data.y[4] = -1  # unknown
    trace = make_trace(data, backend=backend)
    for graph in [trace.initial, *trace.graphs]:
        for k in [2, 3, 20]:
            assert_expected(graph, graph.to_dense(), 0, k, data.y)


@pytest.mark.parametrize('options', [{'top_k': 4}, {'metric': 'attention'}])
def test_directed(options):
    data = make_data()
    trace = make_trace(data, **options)
    assert_expected(trace.learned, trace.learned.to_dense(), 0, 3, data.y)


def test_anchors():
    data = make_data()
    graph = AnchorGraph(make_trace(data, IDGLAnch, num_anchors=5).learned)
    assert_expected(graph, graph.to_dense(), 0, 3, data.y)


def test_more_nodes_than_a_block_of_columns():
    data = make_data(300)
    data.x = data.x.abs()
    graph = make_trace(data, backend='low_rank').learned
    assert_expected(graph, graph.to_dense(), 0, 5, data.y)


def test_without_classes_or_weight():
    data = make_data()
    trace = make_trace(data, epsilon=0.9999)
    pair, weight, share = strongest_edges(trace.first, 0, 5, data.y)
    assert pair.shape == (2, 0) and weight.shape == (0,) and share is None
    assert strongest_edges(trace.initial, 0, 5)[2] is None


def test_chance():
    assert class_share_by_chance(torch.tensor([0, 0, 1, -1])) == pytest.approx(1 / 3)
    assert class_share_by_chance(torch.tensor([0])) is None
