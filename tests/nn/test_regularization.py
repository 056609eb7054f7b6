"""Eq. 10 and 11 against loops."""

import math
from itertools import combinations

import pytest
import torch
from torch.autograd import gradcheck

from tests.graphs.cases import (
    SIZES,
    assert_grads_close,
    make_case,
    make_nodes,
    uniform,
    with_ones,
)
from tests.reference import regularizer
from torch_geometric_idgl.graphs import AnchorGraph, DenseGraph, NodeGraph
from torch_geometric_idgl.nn.loss import graph_loss
from torch_geometric_idgl.ops import Features

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


def loss(cls, case, weights, leaves=None, scaled=False):
    features = case.features if weights[0] else None
    ones = with_ones(case.rows.num_rows)
    affinity = case.make(*(case.leaves if leaves is None else leaves))
    graph = cls(affinity, ones, features, norm=weights[2] > 0)
    return graph_loss(graph, *weights, scaled=scaled)


def anchor_graph(r, scaled):
    """B-hat of the paper, or s / n times it."""
    degree = r.sum(1)
    b_hat = r.t() @ torch.diag(torch.where(degree > 0, 1.0 / degree, 0.0)) @ r
    return r.size(1) / max(r.size(0), 1) * b_hat if scaled else b_hat


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
@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize('name', ['dense-eps/pair', 'low_rank'])
def test_anchor_graph(name, scaled, batch):
    """Every graph of a batch has an s and an n of its own."""
    case = make_case(name, batch, anchored=True)
    r, x = case.dense(*case.leaves).detach(), case.features.to_dense()
    for weights in WEIGHTS:
        expected = [
            by_loops(anchor_graph(r[i, j], scaled), x[j], *weights)
            for i, j in case.blocks()
        ]
        out = loss(AnchorGraph, case, weights, scaled=scaled)
        assert out.tolist() == pytest.approx(expected)


@every_batch
@pytest.mark.parametrize(
    'name', ['dense-eps/inner', 'tiled-eps/inner', 'sparse-eps/inner', 'low_rank']
)
def test_gradients_of_the_scaled_anchor_graph(name, batch):
    case = make_case(name, batch, anchored=True)
    leaves, x = case.fresh_leaves(), case.features.to_dense()
    r = case.dense(*leaves)
    for weights in WEIGHTS:
        out = loss(AnchorGraph, case, weights, leaves, scaled=True)
        expected = [
            regularizer(anchor_graph(r[i, j], True), x[j], *weights)
            for i, j in case.blocks()
        ]
        torch.testing.assert_close(out, torch.stack(expected))
        weight = uniform(out.numel(), seed=1) + 0.5
        totals = (weight * out).sum(), (weight * torch.stack(expected)).sum()
        assert_grads_close(*totals, leaves)


@pytest.mark.parametrize('batch', ['single', 'ragged'])
def test_gradcheck_of_the_scaled_anchor_graph(batch):
    case = make_case('low_rank', batch, anchored=True)

    def value(*leaves):
        return loss(AnchorGraph, case, WEIGHTS[-1], leaves, scaled=True)

    assert gradcheck(value, case.fresh_leaves())


def regularized(a, anchors, x, weights, scaled):
    """The regulariser with some of the columns of A as the affinity."""
    nodes, few = make_nodes((a.size(0),)), make_nodes((len(anchors),))
    affinity = DenseGraph(a[:, anchors].unsqueeze(0), nodes, few)
    features = Features(x[anchors], few)
    graph = AnchorGraph(affinity, with_ones(a.size(0)), features, norm=True)
    return float(graph_loss(graph, *weights, scaled=scaled))


def test_with_all_nodes_as_anchors_scaling_changes_nothing():
    a, x = uniform(9, 9, seed=0), uniform(9, 3, seed=1)
    a, anchors = a + a.t(), list(range(9))
    scaled, plain = (
        regularized(a, anchors, x, WEIGHTS[-1], scaled) for scaled in (True, False)
    )
    assert scaled == pytest.approx(plain)
    # Two steps on A, which keep its sums.
    two_steps = a @ torch.diag(1.0 / a.sum(1)) @ a
    torch.testing.assert_close(two_steps.sum(1), a.sum(1))
    assert scaled == pytest.approx(float(regularizer(two_steps, x, *WEIGHTS[-1])))


@pytest.mark.parametrize('s', [1, 2, 4, 6])
def test_what_scaling_estimates_without_bias(s):
    """Over all draws of anchors: the mean similarity, and the mean log degree but for a
    constant.
    """
    n = 6
    a, x = uniform(n, n, seed=0), uniform(n, 3, seed=1)
    a = a + a.t()
    draws = [list(anchors) for anchors in combinations(range(n), s)]
    means = [float(anchor_graph(a[:, anchors], True).mean()) for anchors in draws]
    assert sum(means) / len(draws) == pytest.approx(float(a.mean()))
    barrier = (0.0, 1.0, 0.0)
    values = [regularized(a, anchors, x, barrier, True) for anchors in draws]
    expected = float(regularizer(a, x, *barrier)) + math.log(n / s)
    assert sum(values) / len(draws) == pytest.approx(expected)


@pytest.mark.parametrize('weights', [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
def test_scaled_regulariser_does_not_grow_with_fewer_anchors(weights):
    """On bags of words: smoothness and norm stay what they are with all nodes."""
    n = 400
    x = (uniform(n, 200, seed=0) < 0.1).double()
    unit = torch.nn.functional.normalize(x, dim=1)
    a = unit @ unit.t()
    whole = regularized(a, list(range(n)), x, weights, True)
    generator = torch.Generator().manual_seed(0)
    for s in (20, 50, 100, 200):
        draws = [torch.randperm(n, generator=generator)[:s].tolist() for _ in range(5)]
        scaled, plain = (
            sum(regularized(a, anchors, x, weights, scaled) for anchors in draws) / 5
            for scaled in (True, False)
        )
        growth = n / s if weights[0] else (n / s) ** 2
        assert plain == pytest.approx(growth * scaled)
        assert 0.85 < scaled / whole < 1.15


def test_reference_is_the_loops():
    case = make_case('dense-eps/inner', 'single')
    a, x = case.dense(*case.leaves), case.features.to_dense()
    for weights in WEIGHTS:
        expected = by_loops(a, x, *weights)
        assert float(regularizer(a, x, *weights)) == pytest.approx(expected)


def test_no_weights_no_regulariser():
    case = make_case('dense-eps/inner', 'ragged')
    assert loss(NodeGraph, case, (0.0, 0.0, 0.0)).tolist() == [0.0] * 4
