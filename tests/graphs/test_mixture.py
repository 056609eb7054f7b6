import pytest
import torch

from tests.graphs.cases import SIZES, assert_grads_close, make_case, uniform, with_ones
from torch_geometric_idgl.graphs import AnchorGraph, GraphOperator, Mixture, NodeGraph


class Counting(GraphOperator):
    """Counts its products."""

    def __init__(self, graph):
        self.rows, self.cols, self.dtype = graph.rows, graph.cols, graph.dtype
        self.graph = graph
        self.count = 0

    def matmul(self, x):
        self.count += 1
        return self.graph.matmul(x)


@pytest.mark.parametrize('batch', list(SIZES))
def test_graphs_of_different_kinds(batch):
    given, tiled, anchored = (
        make_case('sparse-eps/inner', batch),
        make_case('tiled/inner', batch),
        make_case('low_rank', batch, anchored=True),
    )
    leaves = [case.fresh_leaves() for case in (given, tiled, anchored)]
    x, f = (uniform(given.rows.num_rows, 2, seed=s).requires_grad_() for s in (1, 2))
    terms = [
        (0.5, given.make(*leaves[0]).multiplied(x)),
        (0.3, NodeGraph(tiled.make(*leaves[1]), with_ones(x))),
        (0.2, AnchorGraph(anchored.make(*leaves[2]), with_ones(x))),
    ]
    mixture = Mixture(*terms)
    expected = sum(weight * graph.to_dense() for weight, graph in terms)
    torch.testing.assert_close(mixture.to_dense(), expected)
    assert mixture.dtype == torch.float64
    inputs = [x, f, *leaves[0], *leaves[1], *leaves[2]]
    for actual, right in [(mixture.product, x), (mixture.matmul(f), f)]:
        torch.testing.assert_close(actual, expected @ right)
        weight = uniform(*actual.shape, seed=3)
        sums = (weight * actual).sum(), (weight * (expected @ right)).sum()
        assert_grads_close(*sums, inputs)


def test_sums_within_the_sum_are_taken_apart():
    """A graph that comes twice is multiplied once."""
    case = make_case('dense-eps/inner', 'single')
    first, other = (Counting(case.make(*case.leaves)) for _ in range(2))
    inner = Mixture((0.5, first), (0.25, other))
    mixture = Mixture((2.0, inner), (3.0, first))
    assert mixture.terms == [(4.0, first), (0.5, other)]
    f = uniform(9, 2, seed=1)
    torch.testing.assert_close(mixture.matmul(f), 4.5 * first.graph.matmul(f))
    assert (first.count, other.count) == (1, 1)


def test_product_with_the_message():
    case = make_case('sparse-eps/inner', 'single')
    graph, x = case.make(*case.leaves), uniform(9, 2, seed=1)
    known = graph.multiplied(x)
    assert graph.product is None and graph.multiplied(None).product is None
    assert Mixture((0.5, graph), (0.5, graph)).product is None
    mixture = Mixture((0.5, known), (0.5, known))
    torch.testing.assert_close(mixture.product, graph.matmul(x))
    before = known.product.clone()
    mixture.product.add_(1.0)
    mixture.matmul(x).add_(1.0)
    assert torch.equal(known.product, before)
    torch.testing.assert_close(graph.matmul(x), before)


def test_weights_that_cancel():
    case = make_case('dense-eps/inner', 'single')
    graph, x = case.make(*case.leaves), uniform(9, 2, seed=1)
    assert not Mixture((1.0, graph), (-1.0, graph)).matmul(x).any()
