"""Eq. 10 and 11 against loops."""

import math

import pytest
import torch

from tests.graphs.cases import (
    BUILDERS,
    SIZES,
    anchor_case,
    blocks,
    square_case,
)
from tests.reference import regularizer
from torch_geometric_idgl.graphs import AnchorGraph
from torch_geometric_idgl.nn import graph_regularization

ANCHORED = ['dense/inner', 'sparse/inner', 'low_rank/factor', 'low_rank/sparse-x']
WEIGHTS = [(0.2, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.5), (0.2, 0.3, 0.5)]


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


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('batch', list(SIZES))
@pytest.mark.parametrize('name', list(BUILDERS))
def test_node_graph(name, batch, weights):
    case = square_case(name, batch)
    a, x = case.dense(*case.leaves), case.signal.to_dense()
    out = graph_regularization(case.make(*case.leaves), case.signal, *weights)
    expected = [
        by_loops(a[i, j], x[i], *weights) for i, j in blocks(case.rows, case.cols)
    ]
    assert out.tolist() == pytest.approx(expected)


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('batch', list(SIZES))
@pytest.mark.parametrize('name', list(ANCHORED))
def test_anchor_graph(name, batch, weights):
    case = anchor_case(name, batch)
    leaves = [leaf.abs() for leaf in case.leaves]
    r, x = case.dense(*leaves), case.signal.to_dense()
    graph = AnchorGraph(case.make(*leaves))
    out = graph_regularization(graph, case.signal, *weights)
    expected = []
    for i, j in blocks(case.rows, case.cols):
        block = r[i, j]
        b_hat = block.t() @ torch.diag(1.0 / block.sum(1)) @ block
        expected.append(by_loops(b_hat, x[j], *weights))
    assert out.tolist() == pytest.approx(expected)


def test_reference_is_the_loops():
    case = square_case('dense-eps/inner', 'single')
    a, x = case.dense(*case.leaves), case.signal.to_dense()
    for weights in WEIGHTS:
        assert float(regularizer(a, x, *weights)) == pytest.approx(
            by_loops(a, x, *weights)
        )


def test_no_weights_no_regulariser():
    case = square_case('dense/inner', 'ragged')
    leaf = case.leaves[0].clone().requires_grad_()
    out = graph_regularization(case.make(leaf), case.signal, 0.0, 0.0, 0.0)
    assert out.tolist() == [0.0] * 4
