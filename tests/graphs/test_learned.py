"""Learned graphs with what one look at them has found out: of all pairs of nodes, and
recovered from a node-anchor affinity (Eq. 5 to 7).
"""

import pytest
import torch

from tests.graphs.cases import (
    ANCHORS,
    SIZES,
    assert_grads_close,
    make_case,
    make_features,
    make_nodes,
    uniform,
    use_small_blocks,
    with_ones,
)
from torch_geometric_idgl.graphs import AnchorGraph, DenseGraph, NodeGraph
from torch_geometric_idgl.ops import Features

ANCHORED = ['dense-eps/inner', 'tiled-eps/inner', 'sparse-eps/inner', 'low_rank']
ANCHORED += ['feature/sparse', 'feature/dense']


def inverse(degree):
    return torch.where(degree > 1e-12, 1.0 / degree.clamp(min=1e-12), 0.0)


def check(pairs, inputs):
    """Values, and gradients of all at once."""
    totals = [0.0, 0.0]
    for place, (actual, expected) in enumerate(pairs):
        torch.testing.assert_close(actual, expected)
        weight = uniform(*expected.shape, seed=place) + 0.5
        totals[0] = totals[0] + (weight * actual).sum()
        totals[1] = totals[1] + (weight * expected).sum()
    assert_grads_close(*totals, inputs)


# All pairs of nodes -------------------------------------------------------------------


def pairwise_energy(a, x):
    """Eq. 10 without its factor 1/n^2, pair by pair."""
    gap = (x.unsqueeze(1) - x).square().sum(2)
    return 0.5 * (a * gap).sum()


@pytest.mark.parametrize('name', [*ANCHORED, 'tiled-top/inner', 'sparse-top/inner'])
def test_node_graph(name, monkeypatch):
    use_small_blocks(monkeypatch)
    for batch in SIZES:
        check_node_graph(make_case(name, batch))


def check_node_graph(case):
    leaves, n = case.fresh_leaves(), case.rows.num_rows
    message, later = (uniform(n, 3, seed=s).requires_grad_() for s in (1, 2))
    x = case.features.to_dense()
    before = NodeGraph(case.make(*[leaf + 0.1 for leaf in case.leaves]), with_ones(n))
    both = with_ones(message)
    graph = NodeGraph(case.make(*leaves), both, case.features, before, True, (3,))
    a = case.dense(*leaves)
    f = inverse(a.sum(1)).unsqueeze(1) * a
    energy = [pairwise_energy(a[i, j], x[i]) for i, j in case.blocks()]
    pairs = [
        (graph.product, f @ message),
        (graph.degree, a.sum(1)),
        (graph.energy, torch.stack(energy)),
        (graph.sq_norm, case.graph_sums(a.square())),
        (graph.matmul(later), f @ later),
        (graph.to_dense(), f),
        (graph.affinity.to_dense(), a),
    ]
    check(pairs, [*leaves, message, later])
    distance = graph.sq_dist
    if graph.lacks_norm:
        distance = distance + before.affinity.sq_norm().detach()
    gap = (a - before.affinity.to_dense()).detach()
    torch.testing.assert_close(distance, case.graph_sums(gap.square()))
    assert graph.own_norm is None
    assert str(graph) == f'NodeGraph({n}, {n})'


@pytest.mark.parametrize('cls', [NodeGraph, AnchorGraph])
def test_only_what_is_asked_for(cls):
    case = make_case('dense-eps/inner', 'single', cls is AnchorGraph)
    graph = cls(case.make(*case.leaves), with_ones(9))
    assert graph.product is graph.energy is graph.sq_norm is graph.sq_dist is None


def test_empty_rows_stay_empty():
    case = make_case('dense-eps/inner', 'single')
    u = case.leaves[0].clone()
    u[1] = 0.0
    u.requires_grad_()
    out = NodeGraph(case.make(u), with_ones(9)).to_dense()
    assert out[1].eq(0).all() and out[:, 1].eq(0).all()
    out.square().sum().backward()
    assert bool(torch.isfinite(u.grad).all())


# Nodes and anchors --------------------------------------------------------------------


def recovered(case, r):
    """The matrices A and B-hat of the paper, of each graph."""
    for i, j in case.blocks():
        block = r[i, j]
        delta, lam = (
            torch.diag(inverse(block.sum(1))),
            torch.diag(inverse(block.sum(0))),
        )
        yield delta @ block @ lam @ block.t(), block.t() @ delta @ block


@pytest.mark.parametrize('features', ['dense', 'sparse', 'learned', 'wide'])
@pytest.mark.parametrize('name', ANCHORED)
def test_anchor_graph(name, features, monkeypatch):
    """Messages by Eq. 7; norm, degrees and smoothness are those of B-hat."""
    use_small_blocks(monkeypatch)
    for batch in SIZES:
        check_anchor_graph(name, batch, features)


def check_anchor_graph(name, batch, features):
    case = make_case(name, batch, anchored=True)
    leaves, n = case.fresh_leaves(), case.rows.num_rows
    message, later = (uniform(n, 3, seed=s).requires_grad_() for s in (1, 2))
    x = make_features(case.cols, sparse=features == 'sparse')
    if features in ('learned', 'wide'):  # fewer features than anchors, and more
        width = 1 if features == 'learned' else 9
        x = Features(uniform(case.cols.num_rows, width, seed=3), case.cols)
    inputs = [*leaves, message, later]
    if features == 'learned':
        x = Features(x.value.requires_grad_(), case.cols)
        inputs.append(x.value)
    before = case.make(*[leaf + 0.1 for leaf in case.leaves])
    before = AnchorGraph(before, with_ones(n))
    both = with_ones(message)
    graph = AnchorGraph(case.make(*leaves), both, x, before, True, (3,))
    r, value = case.dense(*leaves), x.to_dense()
    pairs_of_graphs = list(recovered(case, r))
    a = torch.block_diag(*[a for a, _ in pairs_of_graphs])
    energy, norm = [], []
    for (_, b), (_, j) in zip(pairs_of_graphs, case.blocks(), strict=True):
        laplacian = torch.diag(b.sum(1)) - b
        energy.append(torch.trace(value[j].t() @ laplacian @ value[j]))
        norm.append(b.square().sum())
    pairs = [
        (graph.product, a @ message),
        (graph.degree, r.sum(0)),
        (graph.energy, torch.stack(energy)),
        (graph.sq_norm, torch.stack(norm)),
        (graph.matmul(later), a @ later),
        (graph.to_nodes(graph.to_anchors(later)), a @ later),
        (graph.to_dense(), a),
    ]
    check(pairs, inputs)
    gap = (r - before.affinity.to_dense()).detach()
    torch.testing.assert_close(graph.sq_dist, case.graph_sums(gap.square()))
    torch.testing.assert_close(graph.own_norm, case.graph_sums(r.square()).detach())
    assert graph.shape == (n, n)
    if batch != 'uneven':
        assert graph.affinity.cols.sizes == ANCHORS[batch]

    # The smoothness alone may go through features, where they are fewer.
    alone = AnchorGraph(case.make(*leaves), with_ones(n), x)
    check(
        [(alone.energy, torch.stack(energy))],
        inputs[:-1] if x.requires_grad else leaves,
    )
    assert alone.sq_norm is None


def test_nodes_and_anchors_without_affinity_stay_finite():
    value = torch.tensor([[[0.5, 0.0], [0.0, 0.0], [0.25, 0.0]]], requires_grad=True)
    nodes, anchors = make_nodes((3,)), make_nodes((2,))
    x = Features(torch.rand(2, 4), anchors)
    affinity = DenseGraph(value, nodes, anchors)
    graph = AnchorGraph(affinity, with_ones(torch.eye(3)), x, norm=True)
    assert graph.product[1].tolist() == [0.0, 0.0, 0.0]
    (graph.product.sum() + graph.sq_norm.sum() + graph.energy.sum()).backward()
    assert bool(torch.isfinite(value.grad).all())


# Dropout ------------------------------------------------------------------------------


@pytest.mark.parametrize('cls', [NodeGraph, AnchorGraph])
def test_dropout_comes_once_after_normalising(cls):
    """Of the sending nodes, or of the anchors; what is regularised stays as it was."""
    case = make_case('dense-eps/inner', 'single', cls is AnchorGraph)
    message = uniform(9, 2, seed=1)
    affinity = case.make(*case.leaves)
    whole = cls(affinity, with_ones(message), norm=True)
    torch.manual_seed(0)
    dropped = cls(affinity, with_ones(message), norm=True, drop=0.5)
    if cls is NodeGraph:
        mask = dropped.mask
    else:
        mask = (dropped.anchor_scale * whole.degree.unsqueeze(1)).round()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    if cls is NodeGraph:
        expected = whole.to_dense() * mask.squeeze(1)
    else:
        r = case.dense(*case.leaves)
        scaled = inverse(r.sum(0)).unsqueeze(1) * r.t()
        expected = inverse(r.sum(1)).unsqueeze(1) * (r @ (mask * scaled))
    torch.testing.assert_close(dropped.to_dense(), expected)
    torch.testing.assert_close(dropped.product, expected @ message)
    torch.testing.assert_close(dropped.degree, whole.degree)
    torch.testing.assert_close(dropped.sq_norm, whole.sq_norm)
    assert cls(affinity, drop=0.5).product is None
