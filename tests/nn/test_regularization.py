"""Eq. 10 and 11 against loops."""

import math

import pytest
import torch

from tests.graphs.cases import SIZES, make_case, with_ones
from tests.reference import regularizer
from torch_geometric_idgl.graphs import AnchorGraph, NodeGraph
from torch_geometric_idgl.nn.loss import graph_loss

WEIGHTS = [(0.2, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.5), (0.2, 0.3, 0.5)]
every_batch = pytest.mark.parametrize('batch', list(SIZES))


def by_loops(a, x, alpha, beta, gamma):
    n = a.size(0)
    total = 0.0
    for i in range(n):
        degree = 0.0
        for j in range(n):
            gap = float((x[i] - x[j]).square().sum())
            total += alpha / (2 * n**2) * float(a[i, j]) * gap
            total += gamma / n**2 * float(a[i, j]) ** 2
            degree += float(a[i, j])
        total -= beta / n * math.log(max(degree, 1e-12))
    return total


def loss(cls, case, weights):
    features = case.features if weights[0] else None
    ones = with_ones(case.rows.num_rows)
    graph = cls(case.make(*case.leaves), ones, features, norm=weights[2] > 0)
    return graph_loss(graph, *weights)


@every_batch
@pytest.mark.parametrize('name', ['tiled-eps/inner', 'sparse-top/inner'])
def test_node_graph(name, batch):
    case = make_case(name, batch)
    a, x = case.dense(*case.leaves), case.features.to_dense()
    for weights in WEIGHTS:
        out = loss(NodeGraph, case, weights)
        expected = [by_loops(a[i, j], x[i], *weights) for i, j in case.blocks()]
        assert out.tolist() == pytest.approx(expected)


@every_batch
@pytest.mark.parametrize('name', ['dense-eps/pair', 'low_rank'])
def test_anchor_graph(name, batch):
    case = make_case(name, batch, anchored=True)
    r, x = case.dense(*case.leaves).detach(), case.features.to_dense()
    for weights in WEIGHTS:
        expected = []
        for i, j in case.blocks():
            degree = r[i, j].sum(1)
            scale = torch.where(degree > 0, 1.0 / degree, 0.0)
            b_hat = r[i, j].t() @ torch.diag(scale) @ r[i, j]
            expected.append(by_loops(b_hat, x[j], *weights))
        out = loss(AnchorGraph, case, weights)
        assert out.tolist() == pytest.approx(expected)


def test_reference_is_the_loops():
    case = make_case('dense-eps/inner', 'single')
    a, x = case.dense(*case.leaves), case.features.to_dense()
    for weights in WEIGHTS:
        expected = by_loops(a, x, *weights)
        assert float(regularizer(a, x, *weights)) == pytest.approx(expected)


def test_no_weights_no_regulariser():
    case = make_case('dense-eps/inner', 'ragged')
    assert loss(NodeGraph, case, (0.0, 0.0, 0.0)).tolist() == [0.0] * 4
