import pytest
import torch

from tests.graphs.cases import SIZES, anchor_case, square_case, uniform
from torch_geometric_idgl.graphs import (
    AnchorGraph,
    ColumnScaled,
    GraphOperator,
    Memoized,
    Mixture,
    RowNormalized,
)


class Counting(GraphOperator):
    """Counts its products."""

    def __init__(self, graph):
        super().__init__(graph.rows, graph.cols)
        self.graph = graph
        self.count = 0

    @property
    def dtype(self):
        return self.graph.dtype

    def matmul(self, x):
        self.count += 1
        return self.graph.matmul(x)


def test_row_normalized():
    for batch in SIZES:
        case = square_case('dense/inner', batch)
        graph = RowNormalized(case.make(*case.leaves))
        a = case.dense(*case.leaves)
        expected = a / a.sum(1, keepdim=True)
        torch.testing.assert_close(graph.to_dense(), expected)
        ones = torch.ones(a.size(0), dtype=a.dtype)
        torch.testing.assert_close(graph.row_sum(), ones)
        (source, target), weight = graph.to_edges()
        back = torch.zeros_like(a)
        back[target, source] = weight
        torch.testing.assert_close(back, expected)
        assert str(graph) == f'RowNormalized({a.size(0)}, {a.size(0)})'


def test_row_normalized_keeps_empty_rows_empty():
    case = square_case('dense/inner', 'single')
    u = case.leaves[0].abs()
    u[1] = 0.0
    u.requires_grad_()
    out = RowNormalized(case.make(u)).to_dense()
    assert out[1].eq(0).all() and out[:, 1].eq(0).all()
    out.square().sum().backward()
    assert bool(torch.isfinite(u.grad).all())


@pytest.mark.parametrize('batch', list(SIZES))
def test_mixture_of_different_kinds(batch):
    square = [square_case(name, batch) for name in ('sparse-eps/inner', 'tiled/inner')]
    anchors = anchor_case('low_rank/factor', batch)
    walk = AnchorGraph(anchors.make(*anchors.leaves))
    terms = [(0.5, square[0].make(*square[0].leaves))]
    terms += [(0.3, RowNormalized(square[1].make(*square[1].leaves))), (0.2, walk)]
    mixture = Mixture(terms)
    expected = sum(weight * graph.to_dense() for weight, graph in terms)
    torch.testing.assert_close(mixture.to_dense(), expected)
    f = uniform(mixture.num_nodes, 2, seed=1)
    torch.testing.assert_close(mixture.matmul(f), expected @ f)
    torch.testing.assert_close(mixture.row_sum(), expected.sum(1))
    assert mixture.dtype == torch.float64

    scaled = Mixture(mixture.scaled(0.5))
    torch.testing.assert_close(scaled.to_dense(), 0.5 * expected)


def test_mixture_multiplies_a_repeated_graph_once():
    case = square_case('dense/inner', 'single')
    graph, other = (Counting(case.make(*case.leaves)) for _ in range(2))
    mixture = Mixture([(0.5, graph), (0.0, other), (0.25, graph)])
    f = uniform(5, 2, seed=1)
    torch.testing.assert_close(mixture.matmul(f), 0.75 * graph.graph.matmul(f))
    assert (graph.count, other.count) == (1, 0)


def test_mixture_of_nothing_but_zeros():
    case = square_case('dense/inner', 'single')
    mixture = Mixture([(0.0, case.make(*case.leaves))])
    assert mixture.matmul(uniform(5, 2, seed=1)).eq(0).all()


def test_memoized_computes_a_known_product_once():
    case = square_case('dense/inner', 'single')
    graph = Counting(case.make(*case.leaves))
    memo = Memoized(graph)
    f, g = uniform(5, 2, seed=1), uniform(5, 2, seed=2)
    first = memo.matmul(f)
    assert memo.matmul(f) is first
    assert graph.count == 1
    torch.testing.assert_close(memo.matmul(g), graph.graph.matmul(g))
    torch.testing.assert_close(memo.matmul(f), graph.graph.matmul(f))
    torch.testing.assert_close(memo.to_dense(), graph.graph.to_dense())
    assert memo.dtype == torch.float64


def test_column_scaled_transposes_affinities_only():
    case = square_case('dense/inner', 'single')
    graph = RowNormalized(case.make(*case.leaves))
    scaled = ColumnScaled(graph, torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(scaled.to_dense(), graph.to_dense())
    with pytest.raises(TypeError, match=r"Expected an 'Affinity'.*got 'RowNorm"):
        scaled.t_matmul(torch.ones(5, 1, dtype=torch.float64))


@pytest.mark.parametrize('batch', list(SIZES))
def test_weighted_products(batch):
    """Wherever the number goes: values and gradients are those of the product."""
    cases = {name: square_case(f'{name}/inner', batch) for name in ('dense', 'sparse')}
    anchors = anchor_case('sparse/inner', batch)
    makers = [
        (cases['dense'].leaves, lambda *u: RowNormalized(cases['dense'].make(*u))),
        (cases['sparse'].leaves, cases['sparse'].make),
        (anchors.leaves, lambda *u: AnchorGraph(anchors.make(*u))),
    ]
    for leaves, make in makers:
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        x = uniform(make(*leaves).shape[1], 2, seed=3)
        actual = make(*leaves).weighted_matmul(x, 0.3)
        expected = 0.3 * make(*leaves).matmul(x)
        torch.testing.assert_close(actual, expected)
        cotangent = uniform(*actual.shape, seed=4)
        grads = torch.autograd.grad(actual, leaves, cotangent)
        wanted = torch.autograd.grad(expected, leaves, cotangent)
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)


def test_sums_leave_remembered_products_alone():
    case = square_case('dense/inner', 'single')
    graph = case.make(*case.leaves)
    dense, x = case.dense(*case.leaves), uniform(case.rows.num_rows, 2, seed=1)
    shared = Memoized(graph)
    before = shared.matmul(x).clone()
    own = RowNormalized(graph)
    for _ in range(2):
        out = Mixture([(1.0, shared), (0.5, own)]).matmul(x)
        expected = (dense + 0.5 * own.to_dense()) @ x
        torch.testing.assert_close(out, expected)
        alone = Mixture([(1.0, shared)]).matmul(x)
        alone += 1.0
        assert torch.equal(shared.matmul(x), before)
    # A sum that is remembered itself is taken apart.
    outer = Mixture([(1.0, Memoized(Mixture([(2.0, shared)]))), (1.0, own)])
    assert outer.shared_terms() == [(2.0, shared)]


def test_terms_of_a_remembered_sum_are_all_shared():
    case = square_case('dense/inner', 'single')
    graph = case.make(*case.leaves)
    inner = Mixture([(0.5, graph), (0.25, Memoized(graph))])
    found = Mixture([(2.0, Memoized(inner))]).shared_terms()
    assert [weight for weight, _ in found] == [1.0, 0.5]
    assert found[0][1] is graph


def test_weights_that_cancel():
    case = square_case('dense/inner', 'single')
    graph = case.make(*case.leaves)
    x = uniform(case.rows.num_rows, 2, seed=1)
    assert not Mixture([(1.0, graph), (-1.0, graph)]).matmul(x).any()


def test_remembered_products_have_gradients_where_they_are_wanted():
    case = square_case('dense/inner', 'single')
    leaves = [leaf.detach().clone().requires_grad_() for leaf in case.leaves]
    graph = Memoized(case.make(*leaves))
    x = uniform(case.rows.num_rows, 2, seed=1)
    with torch.no_grad():
        assert not graph.matmul(x).requires_grad
    assert graph.matmul(x).requires_grad
    with torch.no_grad():
        graph.matmul(x)
    assert graph.matmul(x).requires_grad
