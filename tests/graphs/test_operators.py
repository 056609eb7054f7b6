"""One test case for all operators: each is held to its dense form."""

import pytest
import torch
from torch.autograd import gradcheck

from tests.graphs.cases import (
    BUILDERS,
    MAIN,
    assert_grads_close,
    make_case,
    make_nodes,
    parametrize,
    uniform,
    use_no_tables,
    use_small_blocks,
)
from torch_geometric_idgl.graphs import (
    DenseGraph,
    FeatureGraph,
    InnerScores,
    LowRankGraph,
    SparseGraph,
    TiledGraph,
)
from torch_geometric_idgl.ops import Features, Pattern

# Those that ask for Gram matrices or lists of pairs of features:
TABLES = [*MAIN, 'feature/dense', 'feature/sparse', 'feature/learned']

TILED = ['tiled', 'kept-eps', 'tiled-top']

every_case = parametrize(
    [(name, batch) for name in BUILDERS for batch in ('single', 'ragged')]
    + [(name, batch) for name in TABLES for batch in ('regular', 'uneven')]
)
# One of each way to compute gradients:
GRADIENTS = [
    name
    for name in BUILDERS
    if name in TABLES or name.endswith(('/pair', '/weighted', '-top/inner'))
]
nodes_and_anchors = (False, True)


def places(case, a):
    """A pattern of some places, zeros among them."""
    mask = torch.zeros_like(a, dtype=torch.bool)
    for i, j in case.blocks():
        mask[i, j] = uniform(*mask[i, j].shape, seed=9) > 0.4
    return Pattern.from_sorted(*mask.nonzero(as_tuple=True), tuple(a.shape))


def questions(case):
    """For every question: how an operator answers, and what its matrix says."""
    f = uniform(case.cols.num_rows, 2, seed=1)
    g = uniform(case.rows.num_rows, 2, seed=2)
    pattern = places(case, case.dense(*case.leaves))
    asked = {
        'matmul': (lambda op: op.matmul(f), lambda a: a @ f),
        't_matmul': (lambda op: op.t_matmul(g), lambda a: a.t() @ g),
        'sq_norm': (lambda op: op.sq_norm(), lambda a: case.graph_sums(a.square())),
        'to_dense': (lambda op: op.to_dense(), lambda a: a),
        'to_edges': (lambda op: op.to_edges()[1].square(), edge_squares),
        'values_at': (
            lambda op: op.values_at(pattern),
            lambda a: a[pattern.row, pattern.col],
        ),
    }
    if case.square:
        x = case.features.to_dense()
        other = uniform(*x.shape, seed=5)
        for name, features, value in [
            ('own', case.features, x),
            ('other', Features(other, case.rows), other),
        ]:
            asked[f'gram_inner of {name} features'] = (
                lambda op, features=features: op.gram_inner(features),
                lambda a, v=value: case.graph_sums(a * (v @ v.t())),
            )
    return asked


def edge_squares(a):
    return a[a.detach() > 0].square()


def check(case, asked, note='plain'):
    """Values and gradients of answers against the dense form."""
    leaves = case.fresh_leaves()
    matrix = case.dense(*leaves)
    for name, (ask, plain) in asked.items():
        actual, expected = ask(case.make(*leaves)), plain(matrix)
        if name == 'to_edges':  # in another order
            actual, expected = actual.sort().values, expected.sort().values
        name = f'{name}, {note}'
        torch.testing.assert_close(actual, expected, msg=lambda m, n=name: f'{n}: {m}')
        with torch.no_grad():
            again = ask(case.make(*leaves))
        assert not again.requires_grad
        again = again.sort().values if 'to_edges' in name else again
        torch.testing.assert_close(again, expected.detach())
        cotangent = uniform(*expected.shape, seed=4) + 0.5
        sums = (actual * cotangent).sum(), (expected * cotangent).sum()
        assert_grads_close(*sums, [*leaves, *case.parameters], name)


@every_case
def test_answers(given, monkeypatch):
    case = make_case(*given)
    check(case, questions(case))
    check_edges_and_shape(case)
    check_bounds(case)
    use_small_blocks(monkeypatch)
    case = make_case(*given)
    check(case, questions(case), 'small blocks')
    if given[0] in TABLES:
        use_no_tables(monkeypatch)
        case = make_case(*given)
        check(case, questions(case), 'no tables')


def check_edges_and_shape(case):
    op, a = case.make(*case.leaves), case.dense(*case.leaves)
    rows, cols = a.shape
    assert op.shape == (rows, cols) and op.num_nodes == rows
    assert op.dtype == torch.float64
    assert str(op) == f'{type(op).__name__}({rows}, {cols})'
    if op.symmetric:
        torch.testing.assert_close(a, a.t())

    with torch.no_grad():
        (source, target), weight = op.to_edges()
        back = torch.zeros_like(a)
        back[target, source] = weight  # A_ij sends from j to i
        torch.testing.assert_close(back, a.detach())
        count = weight.numel()
        assert count == int((a > 0).sum())
        op.to_edges(max_edges=count)
        with pytest.raises(ValueError, match='at most'):
            op.to_edges(max_edges=count - 1)
        bound = float(weight.median()) - 1e-6
        assert torch.equal(op.to_edges(min_weight=bound)[1], weight[weight > bound])
        with pytest.raises(ValueError, match=r"'min_weight' .* at least 0 .got -1"):
            op.to_edges(min_weight=-1)
        op.to_dense(max_entries=rows * cols)
        with pytest.raises(ValueError, match=f'at most {rows * cols - 1} entries'):
            op.to_dense(max_entries=rows * cols - 1)


def check_bounds(case):
    """Those of the norm, the last of which are the norm."""
    op, a = case.make(*case.leaves), case.dense(*case.leaves).detach()
    norm = case.graph_sums(a.square())
    for low, high in op.sq_norm_bounds(a.sum(1)):
        assert bool((low <= norm + 1e-9).all() and (norm <= high + 1e-9).all())
    torch.testing.assert_close(low.detach(), norm)
    torch.testing.assert_close(high.detach(), norm)


# Everything at once -------------------------------------------------------------------

# Widths that are announced, and the products that follow: in any order, of the same
# width, more than announced, and fewer.
LATER = {
    'one by one': ((2, 3), [('matmul', 2), ('matmul', 3)]),
    'other order': ((2, 3), [('t_matmul', 3), ('matmul', 2)]),
    'same widths': ((2, 2, 2), [('matmul', 2), ('t_matmul', 2), ('matmul', 2)]),
    'too many': ((2,), [('matmul', 2), ('matmul', 2), ('t_matmul', 2), ('matmul', 5)]),
    'unused': ((2, 3, 4), [('t_matmul', 3)]),
    'none': ((), [('matmul', 2), ('t_matmul', 1)]),
}


def answers_at_once(case, leaves, factors, later, products, previous, features):
    """All that `measure` finds out and what follows, of an operator and its matrix."""
    f, g, *others = factors
    op = case.make(*leaves)
    found = op.measure(
        f,
        None if op.symmetric else g,  # the same as the product otherwise
        features=features,
        previous=previous,
        norm=True,
        later=later,
    )
    a = case.dense(*leaves)
    pairs = [(found.product, a @ f), (found.sq_norm, case.graph_sums(a.square()))]
    if not op.symmetric:
        pairs.append((found.t_product, a.t() @ g))
    if features is not None:
        x = features.to_dense()
        pairs.append((found.gram_inner, case.graph_sums(a * (x @ x.t()))))
    if previous is not None:
        dist = found.sq_dist
        assert not dist.requires_grad
        dist = dist + previous.sq_norm().detach() if found.lacks_norm else dist
        gap = (a - previous.to_dense()).detach().square()
        torch.testing.assert_close(dist, case.graph_sums(gap))
    for (kind, _), x in zip(products, others, strict=True):
        matrix = a if kind == 'matmul' else a.t()
        pairs.append((getattr(found.graph, kind)(x), matrix @ x))
    return pairs


def make_factors(case, products):
    sizes = [(case.cols.num_rows, 2), (case.rows.num_rows, 3)]
    for kind, width in products:
        nodes = case.cols if kind == 'matmul' else case.rows
        sizes.append((nodes.num_rows, width))
    return [uniform(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]


def check_at_once(case, later, products, features=None, wanted=()):
    leaves, factors = case.fresh_leaves(), make_factors(case, products)
    previous = case.make(*[leaf + 0.1 for leaf in case.leaves])
    args = (case, leaves, factors, later, products, previous, features)
    pairs = answers_at_once(*args)
    totals = [0.0, 0.0]
    for place, both in enumerate(pairs):
        torch.testing.assert_close(*both)
        weight = uniform(*both[1].shape, seed=place) + 0.5
        totals = [total + (weight * one).sum() for total, one in zip(totals, both)]  # noqa: B905
    inputs = [*leaves, *case.parameters, *factors, *wanted]
    for _ in range(2):  # backward may be asked for twice
        assert_grads_close(*totals, inputs, 'of all')
    assert_grads_close(*totals, factors, 'of what is multiplied')  # or for a part
    with torch.no_grad():
        for actual, expected in answers_at_once(*args):
            assert not actual.requires_grad
            torch.testing.assert_close(actual, expected)


@parametrize([(name, batch) for name in BUILDERS for batch in ('single', 'ragged')])
def test_measure(given, monkeypatch):
    use_small_blocks(monkeypatch)
    case = make_case(*given)
    features = case.features if case.square else None
    check_at_once(case, *LATER['one by one'], features)


@pytest.mark.parametrize('later', [key for key in LATER if key != 'one by one'])
@pytest.mark.parametrize('form', TILED)
def test_later_products(form, later, monkeypatch):
    """Whatever was announced and comes: only its cost may depend on it."""
    use_small_blocks(monkeypatch)
    for anchored in nodes_and_anchors:
        check_at_once(make_case(f'{form}/inner', 'single', anchored), *LATER[later])


@pytest.mark.parametrize('name', [*MAIN, 'tiled-top/inner', 'feature/dense'])
def test_measure_with_learned_features(name, monkeypatch):
    use_small_blocks(monkeypatch)
    case = make_case(name, 'ragged')
    x = uniform(case.rows.num_rows, 3, seed=3).requires_grad_()
    check_at_once(case, (), [], Features(x, case.rows), [x])


@pytest.mark.parametrize('name', ['tiled-eps/inner', 'kept-eps/inner'])
def test_transposed_product_of_half_a_matrix(name):
    case = make_case(name, 'single')
    a, g = case.dense(*case.leaves), uniform(9, 2, seed=1)
    found = case.make(*case.leaves).measure(t_x=g)
    torch.testing.assert_close(found.t_product, a.t() @ g)


@pytest.mark.parametrize('form', TILED)
def test_products_after_a_measurement_without_gradient(form):
    """What was announced without gradients may be wanted with them."""
    case = make_case(f'{form}/inner', 'single')
    leaves = case.fresh_leaves()
    f, g = uniform(9, 2, seed=1), uniform(9, 3, seed=2).requires_grad_()
    graph = case.make(*leaves)
    with torch.no_grad():
        graph = graph.measure(f, later=(2, 3)).graph
    actual, a = graph.matmul(f).sum() + graph.t_matmul(g).sum(), case.dense(*leaves)
    assert_grads_close(actual, (a @ f).sum() + (a.t() @ g).sum(), [*leaves, g])


@pytest.mark.parametrize('name', GRADIENTS)
def test_gradcheck(name):
    for anchored in nodes_and_anchors:
        check_gradients(make_case(name, 'ragged', anchored))


def check_gradients(case):
    products = [('matmul', 1)]
    factors = [factor.detach() for factor in make_factors(case, products)]
    features = case.features if case.square else None

    def answers(f, *leaves):
        op = case.make(*leaves)
        g = None if op.symmetric else factors[1]
        found = op.measure(f, g, features=features, norm=True, later=(1,))
        later = found.graph.matmul(factors[2])
        asked = [found.product, found.sq_norm, later]
        asked += [] if op.symmetric else [found.t_product]
        asked += [] if features is None else [found.gram_inner]
        return torch.cat([answer.flatten() for answer in asked])

    inputs = [t.clone().requires_grad_() for t in (factors[0], *case.leaves)]
    assert gradcheck(answers, inputs, fast_mode=True)


# Distances ----------------------------------------------------------------------------


@pytest.mark.parametrize('name', list(BUILDERS))
def test_distances(name, monkeypatch):
    """To the same kind and to all others."""
    use_small_blocks(monkeypatch)
    for anchored in nodes_and_anchors:
        check_distances(name, anchored)


def check_distances(own, anchored):
    case = make_case(own, 'ragged', anchored)
    a, op = case.dense(*case.leaves).detach(), case.make(*case.leaves)
    for name in (own, *MAIN, 'feature/sparse'):
        other = make_case(name, 'ragged', anchored, seed=7)
        b, other_op = other.dense(*other.leaves).detach(), other.make(*other.leaves)
        distance = case.graph_sums((a - b).square())
        for one, two in [(op, other_op), (other_op, op)]:
            found = one.sq_dist(two)
            assert not found.requires_grad
            torch.testing.assert_close(found, distance)
            found = one.measure(previous=two, norm=False)
            rest = two.sq_norm().detach() if found.lacks_norm else 0.0
            torch.testing.assert_close(found.sq_dist + rest, distance)
    zero = torch.zeros(case.rows.num_graphs, dtype=torch.float64)
    same = op.sq_dist(case.make(*case.leaves))
    torch.testing.assert_close(same, zero, rtol=0, atol=1e-12)


@pytest.mark.parametrize('anchored', [False, True])
@pytest.mark.parametrize('name', MAIN)
def test_near_graphs_keep_their_distance_in_single_precision(name, anchored):
    """The stopping value must not drown in rounding near convergence."""
    case = make_case(name, 'single', anchored)
    leaves = [leaf.float() for leaf in case.leaves]
    near = [leaf + 1e-5 * (uniform(*leaf.shape, seed=8) - 0.5) for leaf in leaves]
    near = [leaf.float() for leaf in near]
    exact = case.dense(*[leaf.double() for leaf in near])
    exact = exact - case.dense(*[leaf.double() for leaf in leaves])
    distance = case.make(*near).sq_dist(case.make(*leaves))
    assert float(distance) == pytest.approx(float(exact.square().sum()), rel=0.1)


def test_distance_of_graphs_with_other_tiles():
    """A thresholded graph is symmetric, one of the largest entries is not."""
    u, nodes = uniform(7, 3, seed=0), make_nodes((7,))
    halved = TiledGraph(InnerScores(u, None, nodes, nodes, 0.3, None))
    whole = TiledGraph(InnerScores(u, None, nodes, nodes, 0.0, 2))
    expected = (halved.to_dense() - whole.to_dense()).square().sum()
    assert expected > 1.0
    for a, b in [(halved, whole), (whole, halved)]:
        torch.testing.assert_close(a.sq_dist(b), expected.view(1))
        torch.testing.assert_close(a.measure(previous=b).sq_dist, expected.view(1))


# Corners ------------------------------------------------------------------------------


def test_graphs_without_nodes():
    u, nodes = torch.zeros(0, 3), make_nodes((0,))
    pattern = Pattern.from_sorted(*torch.zeros(2, 0, dtype=torch.long), (0, 0))
    scores = InnerScores(u, None, nodes, nodes, 0.1)
    for graph in [
        DenseGraph(scores.dense(), nodes, nodes),
        TiledGraph(scores),
        SparseGraph.from_scores(scores),
        LowRankGraph(u, None, nodes, nodes),
        FeatureGraph(Features(u, nodes), torch.ones(2, 3)),
    ]:
        assert graph.values_at(pattern).shape == (0,)
        assert graph.sq_norm().tolist() == [0.0]
        assert graph.to_dense().shape == (0, 0)
        assert graph.to_edges()[0].shape == (2, 0)
        with torch.no_grad():
            assert graph.values_at(pattern).shape == (0,)
            assert graph.matmul(u).shape == (0, 3)


def test_equal_nodes_are_one():
    u = uniform(5, 3, seed=0)
    graph = TiledGraph(InnerScores(u, None, make_nodes((5,)), make_nodes((5,)), 0.1))
    ones = torch.ones(5, 1, dtype=u.dtype)
    torch.testing.assert_close(graph.t_matmul(ones)[:, 0], graph.to_dense().sum(0))


def test_no_entry_is_left():
    """Of a sparse graph, whose values are looked up then."""
    u, nodes = uniform(5, 3, seed=0), make_nodes((5,))
    empty = SparseGraph.from_scores(InnerScores(u, None, nodes, nodes, 100.0))
    assert empty.pattern.nnz == 0 and not empty.to_dense().any()
    pattern = Pattern.from_sorted(torch.arange(5), torch.arange(5), (5, 5))
    assert empty.values_at(pattern).tolist() == [0.0] * 5
    full = SparseGraph.from_scores(InnerScores(u, None, nodes, nodes))
    torch.testing.assert_close(full.sq_dist(empty), full.sq_norm())


def test_large_graphs_of_features_have_close_bounds():
    """Where norms are expensive, subspaces bound them ever closer."""
    nodes = make_nodes((300,))
    x = uniform(300, 40, seed=0).pow(4)
    w = uniform(3, 40, seed=1) + 0.2
    state = torch.random.get_rng_state()
    for dtype, steps in [(torch.double, 4), (torch.float, 4), (torch.bfloat16, 2)]:
        graph = FeatureGraph(Features(x.to(dtype), nodes), w.to(dtype))
        degree = graph.matmul(torch.ones(300, 1, dtype=dtype))[:, 0]
        norm = graph.sq_norm()
        bounds = list(graph.sq_norm_bounds(degree))
        assert len(bounds) == steps
        for low, high in bounds[:-1] if dtype != torch.bfloat16 else []:
            assert bool((low <= norm).all() and (norm <= high).all())
        gaps = [float(high - low) for low, high in bounds]
        assert gaps == sorted(gaps, reverse=True) and gaps[-1] == 0.0
    assert torch.equal(state, torch.random.get_rng_state())
