"""One test case for all operators: each is held to its dense form."""

import pytest
import torch
from torch.autograd import gradcheck

from tests.graphs.cases import (
    BUILDERS,
    SIZES,
    Case,
    anchor_case,
    blocks,
    square_case,
    uniform,
)
from torch_geometric_idgl.graphs import Message, base, scores, signal, sweep
from torch_geometric_idgl.graphs.factors import DenseFactor
from torch_geometric_idgl.graphs.low_rank import LowRankGraph
from torch_geometric_idgl.graphs.scores import InnerScores
from torch_geometric_idgl.graphs.tiled import TiledGraph
from torch_geometric_idgl.ops import Layout, Pattern, features, sparse
from torch_geometric_idgl.ops.caching import cached_tensor

# One of each class, to compare with all the others:
EMBEDDED = ['dense-eps/inner', 'tiled-eps/inner', 'sparse-eps/inner', 'low_rank/factor']
MAIN = [*EMBEDDED, 'low_rank/sparse-x']
# Those that make use of Gram matrices or of lists of feature pairs:
KEEPING = [name for name in BUILDERS if '-eps/' in name or '-x' in name]


def parametrize(cases):
    """Over (name, batch), for node-node graphs and for node-anchor affinities."""
    params = [(square_case, *case, 'nodes') for case in cases]
    params += [(anchor_case, *case, 'anchors') for case in cases]
    return pytest.mark.parametrize(
        'case',
        [pytest.param(p[:3], id='-'.join(p[1:])) for p in params],
        indirect=True,
    )


every_case = parametrize(
    [(name, batch) for name in BUILDERS for batch in ('single', 'ragged')]
    + [(name, 'regular') for name in MAIN]
)
every_ragged_case = parametrize([(name, 'ragged') for name in BUILDERS])


@pytest.fixture
def case(request) -> Case:
    build, name, batch = request.param
    return build(name, batch)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two rows or columns, so that tiny graphs need several."""
    monkeypatch.setattr(scores.tiles, '__defaults__', (6,))
    monkeypatch.setattr(sweep, '_KEPT_TILE', 6)
    monkeypatch.setattr(sweep, '_PASSING_TILE', 6)
    monkeypatch.setattr(sweep, '_BRIEFLY_KEPT', 0)
    monkeypatch.setattr(base, '_COLUMN_BLOCK', 2)
    monkeypatch.setattr(signal, '_ROW_BLOCK', 2)
    monkeypatch.setattr(sparse, '_CHUNK', 7)


@pytest.fixture
def no_kept_tables(monkeypatch):
    """Neither Gram matrices nor lists of feature pairs are affordable."""
    monkeypatch.setattr(signal, '_MAX_GRAM', 0)
    monkeypatch.setattr(features, '_MAX_PAIRS', -1)


def per_graph(case, entries):
    return torch.stack([entries[i, j].sum() for i, j in blocks(case.rows, case.cols)])


def padded(case, matrices):
    size = case.cols.max_size
    out = [
        torch.nn.functional.pad(m, (0, size - m.size(0), 0, size - m.size(0)))
        for m in matrices
    ]
    return torch.stack(out)


def normal(case, a, c):
    """R^T diag(c) R of each graph."""
    pieces = [(a[i, j], c[i]) for i, j in blocks(case.rows, case.cols)]
    return [r.t() @ torch.diag(weight) @ r for r, weight in pieces]


def pairwise_energy(a, x):
    """Eq. 10 without its factor 1/n^2, pair by pair."""
    total = 0.0
    for i in range(a.size(0)):
        for j in range(a.size(1)):
            total = total + 0.5 * a[i, j] * (x[i] - x[j]).square().sum()
    return torch.as_tensor(total, dtype=a.dtype)


def questions(case):
    """For every question: how an operator answers, and what its matrix says."""
    n, s = case.rows.num_rows, case.cols.num_rows
    f, g = uniform(s, 2, seed=1), uniform(n, 2, seed=2)
    c = uniform(n, seed=3) + 0.1
    x = case.signal.to_dense()
    asked = {
        'matmul': (lambda op: op.matmul(f), lambda a: a @ f),
        't_matmul': (lambda op: op.t_matmul(g), lambda a: a.t() @ g),
        'row_sum': (lambda op: op.row_sum(), lambda a: a.sum(1)),
        'col_sum': (lambda op: op.col_sum(), lambda a: a.sum(0)),
        'degree': (lambda op: op.degree(), lambda a: a.sum(1)),
        'sq_norm': (lambda op: op.sq_norm(), lambda a: per_graph(case, a.square())),
        'to_dense': (lambda op: op.to_dense(), lambda a: a),
        'normal_matrix': (
            lambda op: op.normal_matrix(c),
            lambda a: padded(case, normal(case, a, c)),
        ),
        'normal_sq_norm': (
            lambda op: op.normal_sq_norm(c),
            lambda a: torch.stack([b.square().sum() for b in normal(case, a, c)]),
        ),
        'normal_gram_inner': (
            lambda op: op.normal_gram_inner(c, case.signal),
            lambda a: torch.stack(
                [
                    (b * (x[j] @ x[j].t())).sum()
                    for b, (_, j) in zip(
                        normal(case, a, c), blocks(case.rows, case.cols), strict=True
                    )
                ]
            ),
        ),
    }
    if case.square:
        asked['gram_inner'] = (
            lambda op: op.gram_inner(case.signal),
            lambda a: per_graph(case, a * (x @ x.t())),
        )
        asked['dirichlet_energy'] = (
            lambda op: op.dirichlet_energy(case.signal),
            lambda a: torch.stack(
                [
                    pairwise_energy(a[i, j], x[i])
                    for i, j in blocks(case.rows, case.cols)
                ]
            ),
        )
    return asked


def check(case, asked, prepare=lambda op: None):
    """Values and gradients of answers against the dense form."""
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    matrix = case.dense(*leaves)
    for name, (ask, plain) in asked.items():
        op = case.make(*leaves)
        prepare(op)
        actual, expected = ask(op), plain(matrix)
        torch.testing.assert_close(actual, expected, msg=lambda m, n=name: f'{n}: {m}')
        cotangent = uniform(*expected.shape, seed=4) + 0.5
        grads = torch.autograd.grad((actual * cotangent).sum(), leaves)
        wanted = torch.autograd.grad(
            (expected * cotangent).sum(), leaves, retain_graph=True
        )
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(
                grad, other, msg=lambda m, n=name: f'gradient of {n}: {m}'
            )


@every_case
def test_shape_and_repr(case):
    op = case.make(*case.leaves)
    rows, cols = case.rows.num_rows, case.cols.num_rows
    assert op.shape == (rows, cols)
    assert op.num_nodes == rows
    assert op.dtype == torch.float64
    assert str(op) == f'{type(op).__name__}({rows}, {cols})'


@every_case
def test_answers_and_gradients(case):
    check(case, questions(case))


@parametrize([(name, batch) for name in BUILDERS for batch in ('single', 'ragged')])
def test_answers_in_small_blocks(case, small_blocks):
    check(case, questions(case))


@parametrize([(name, 'ragged') for name in KEEPING])
def test_answers_without_kept_tables(case, small_blocks, no_kept_tables):
    check(case, questions(case))


@every_case
def test_gradient_reaches_the_multiplied_matrix(case):
    a = case.dense(*case.leaves)
    op = case.make(*case.leaves)
    f = uniform(case.cols.num_rows, 2, seed=1).requires_grad_()
    g = uniform(case.rows.num_rows, 2, seed=2).requires_grad_()
    cotangent, t_cotangent = g.detach(), f.detach()
    (grad,) = torch.autograd.grad((op.matmul(f) * cotangent).sum(), f)
    torch.testing.assert_close(grad, a.t() @ cotangent)
    (grad,) = torch.autograd.grad((op.t_matmul(g) * t_cotangent).sum(), g)
    torch.testing.assert_close(grad, a @ t_cotangent)


@every_case
def test_partial_gradients_leave_nothing_behind(case):
    """A gradient of some inputs, then of others: the second is the same as alone."""
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    f = uniform(case.cols.num_rows, 2, seed=1).requires_grad_()
    product = case.make(*leaves).matmul(f).square().sum()
    torch.autograd.grad(product, f, retain_graph=True)
    expected = (case.dense(*leaves) @ f).square().sum()
    wanted = torch.autograd.grad(expected, leaves)
    for _ in range(2):
        grads = torch.autograd.grad(product, leaves, retain_graph=True)
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)


@every_ragged_case
def test_observed_answers_are_the_same(case):
    """Announced are A F, or R^T F for node-anchor affinities."""
    f = uniform(case.rows.num_rows, 2, seed=6)
    previous = case.make(*[leaf + 0.1 for leaf in case.leaves])
    seen = case.signal if case.square else None

    def prepare(op):
        op.observe(Message.of(f), seen, previous)

    if case.square:
        known = lambda op: op.matmul(f), lambda a: a @ f
    else:
        known = lambda op: op.t_matmul(f), lambda a: a.t() @ f
    check(case, questions(case) | {'announced': known}, prepare)
    gap = (case.dense(*case.leaves) - previous.to_dense()).square()
    expected = per_graph(case, gap).detach()
    op = case.make(*case.leaves)
    prepare(op)
    torch.testing.assert_close(op.sq_dist(previous).detach(), expected)
    with torch.no_grad():
        torch.testing.assert_close(op.sq_dist(previous), expected)
        torch.testing.assert_close(op.change_from(previous).exact(), expected)
        low, high = op.change_from(previous).bounds()
        assert bool((low <= expected + 1e-9).all() and (expected <= high + 1e-9).all())


@every_case
def test_bounds_of_the_norm(case):
    op = case.make(*case.leaves)
    norm = per_graph(case, case.dense(*case.leaves).square())
    for effort in range(4):
        low, high = op.sq_norm_bounds(effort)
        assert bool((low <= norm + 1e-9).all() and (norm <= high + 1e-9).all())
    torch.testing.assert_close(low, high)


@every_ragged_case
def test_values_at_places(case, small_blocks):
    a = case.dense(*case.leaves)
    mask = torch.zeros_like(a, dtype=torch.bool)
    for i, j in blocks(case.rows, case.cols):
        mask[i, j] = uniform(*mask[i, j].shape, seed=9) > 0.4
    row, col = mask.nonzero(as_tuple=True)
    pattern, _ = Pattern.from_coo(row, col, tuple(a.shape))
    known = {
        'values_at': (
            lambda op: op.values_at(pattern),
            lambda a: a[pattern.row, pattern.col],
        )
    }
    check(case, known)
    with torch.no_grad():
        value = case.make(*case.leaves).values_at(pattern)
    torch.testing.assert_close(value, a.detach()[pattern.row, pattern.col])


@every_ragged_case
def test_gradcheck(case):
    f = uniform(case.cols.num_rows, 2, seed=1)
    asked = questions(case)

    def answers(f, *leaves):
        op = case.make(*leaves)
        answers = [op.matmul(f), *(ask(op) for ask, _ in asked.values())]
        return torch.cat([answer.flatten() for answer in answers])

    inputs = [tensor.clone().requires_grad_() for tensor in (f, *case.leaves)]
    assert gradcheck(answers, inputs, fast_mode=True)


@every_case
def test_to_edges(case):
    op = case.make(*case.leaves)
    a = case.dense(*case.leaves)
    (source, target), weight = op.to_edges()
    assert source.dtype == torch.long
    assert bool((weight > 0).all())
    assert weight.numel() == int((a > 0).sum())
    back = torch.zeros_like(a)
    back[target, source] = weight  # A_ij sends from j to i
    torch.testing.assert_close(back, torch.where(a > 0, a, 0.0))

    count = weight.numel()
    op.to_edges(max_edges=count)
    with pytest.raises(ValueError, match='at most'):
        op.to_edges(max_edges=count - 1)

    bound = float(weight.detach().median()) - 1e-6
    (source, target), weight = op.to_edges(min_weight=bound)
    back = torch.zeros_like(a)
    back[target, source] = weight
    torch.testing.assert_close(back, torch.where(a > bound, a, 0.0), rtol=0, atol=1e-9)


@every_case
def test_to_edges_keeps_gradients(case):
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    _, weight = case.make(*leaves).to_edges()
    grads = torch.autograd.grad(weight.square().sum(), leaves, allow_unused=True)
    dense = case.dense(*leaves)
    wanted = torch.autograd.grad(dense.square().sum(), leaves, allow_unused=True)
    if bool((dense >= 0).all()):
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)


@every_case
def test_to_dense_refuses_what_is_too_large(case):
    op = case.make(*case.leaves)
    entries = case.rows.num_rows * case.cols.num_rows
    op.to_dense(max_entries=entries)
    with pytest.raises(ValueError, match=f'at most {entries - 1} entries'):
        op.to_dense(max_entries=entries - 1)


@every_case
def test_sq_dist_to_the_same_kind(case, small_blocks):
    leaves = [leaf + 0.1 for leaf in case.leaves]
    other, b = case.make(*leaves), case.dense(*leaves).detach()
    known = {
        'sq_dist': (
            lambda op: op.sq_dist(other),
            lambda a: per_graph(case, (a - b).square()),
        )
    }
    check(case, known)
    zero = torch.zeros(case.rows.num_graphs, dtype=torch.float64)
    torch.testing.assert_close(
        other.sq_dist(case.make(*leaves)).detach(), zero, rtol=0, atol=1e-12
    )


@every_ragged_case
def test_sq_dist_to_other_kinds(case, small_blocks):
    a, op = case.dense(*case.leaves), case.make(*case.leaves)
    for name in MAIN:
        other = (square_case if case.square else anchor_case)(name, 'ragged', seed=7)
        b, other_op = other.dense(*other.leaves), other.make(*other.leaves)
        distance = per_graph(case, (a - b).square())
        torch.testing.assert_close(op.sq_dist(other_op), distance)
        torch.testing.assert_close(other_op.sq_dist(op), distance)
        torch.testing.assert_close(op.inner(other_op), per_graph(case, a * b))


@pytest.mark.parametrize('batch', list(SIZES))
@pytest.mark.parametrize(
    'name', [n for n in BUILDERS if square_case(n, 'single').symmetric]
)
def test_smoothness_is_the_trace_form_when_symmetric(name, batch):
    case = square_case(name, batch)
    op = case.make(*case.leaves)
    a, x = case.dense(*case.leaves), case.signal.to_dense()
    torch.testing.assert_close(a, a.t())
    expected = []
    for i, j in blocks(case.rows, case.cols):
        laplacian = torch.diag(a[i, j].sum(1)) - a[i, j]
        expected.append(torch.trace(x[i].t() @ laplacian @ x[i]))
    torch.testing.assert_close(op.dirichlet_energy(case.signal), torch.stack(expected))


@pytest.mark.parametrize('name', EMBEDDED)
@pytest.mark.parametrize('build', [square_case, anchor_case])
def test_near_graphs_keep_their_distance_in_single_precision(build, name):
    """The stopping value must not drown in rounding near convergence."""
    case = build(name, 'single')
    leaves = [leaf.float() for leaf in case.leaves]
    near = [leaf + 1e-5 * (uniform(*leaf.shape, seed=8) - 0.5) for leaf in leaves]
    near = [leaf.float() for leaf in near]
    exact = case.dense(*[leaf.double() for leaf in near])
    exact = exact - case.dense(*[leaf.double() for leaf in leaves])
    distance = case.make(*near).sq_dist(case.make(*leaves))
    assert float(distance) == pytest.approx(float(exact.square().sum()), rel=0.1)


@every_case
@pytest.mark.parametrize('before', [None, 'normal_matrix', 'normal_sq_norm'])
def test_normal_matrix_is_kept_but_never_without_its_gradient(case, before):
    """Whatever was asked before, and with or without gradients: the same answers, and
    gradients of affinity and weights.
    """
    leaves = [leaf.clone().requires_grad_() for leaf in case.leaves]
    c = (uniform(case.rows.num_rows, seed=3) + 0.1).requires_grad_()
    x = case.signal.to_dense()
    op = case.make(*leaves)
    with torch.no_grad():
        op.normal_sq_norm(c)
    if before is not None:
        getattr(op, before)(c)
    actual = op.normal_gram_inner(c, case.signal) + op.normal_sq_norm(c)
    parts = zip(
        normal(case, case.dense(*leaves), c), blocks(case.rows, case.cols), strict=True
    )
    expected = torch.stack(
        [(b * (x[j] @ x[j].t()) + b.square()).sum() for b, (_, j) in parts]
    )
    torch.testing.assert_close(actual, expected)
    grads = torch.autograd.grad(actual.sum(), [*leaves, c])
    wanted = torch.autograd.grad(expected.sum(), [*leaves, c])
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, other)


@torch.no_grad()
def test_distance_of_graphs_with_other_tiles():
    """A thresholded graph is symmetric, one of the largest entries is not."""
    u = uniform(7, 3, seed=0)
    layout = Layout((7,), u.device)
    halved = TiledGraph(InnerScores(u, None, layout, layout), epsilon=0.3)
    whole = TiledGraph(InnerScores(u, None, layout, layout), top_k=2)
    expected = (halved.to_dense() - whole.to_dense()).square().sum()
    assert expected > 1.0
    for a, b in [(halved, whole), (whole, halved)]:
        torch.testing.assert_close(a.sq_dist(b), expected.view(1))


def test_equal_layouts_are_one():
    u = uniform(5, 3, seed=0)
    layouts = [Layout((5,), u.device) for _ in range(2)]
    graph = TiledGraph(InnerScores(u, None, *layouts), epsilon=0.1)
    dense = graph.to_dense()
    torch.testing.assert_close(graph.col_sum(), dense.sum(0))
    torch.testing.assert_close(graph.row_sum(), dense.sum(1))


@torch.no_grad()
def test_values_of_no_nodes():
    u = torch.zeros(0, 3)
    layout = Layout((0,), u.device)
    graph = TiledGraph(InnerScores(u, None, layout, layout), epsilon=0.1)
    pattern = Pattern.from_sorted(*torch.zeros(2, 0, dtype=torch.long), (0, 0))
    assert graph.values_at(pattern).shape == (0,)


def test_a_message_without_gradient_gets_one():
    u = uniform(6, 3, seed=0)
    layout = Layout((6,), u.device)
    for graph in [
        TiledGraph(InnerScores(u, None, layout, layout), epsilon=0.1),
        LowRankGraph(DenseFactor(u, layout)),
    ]:
        x = uniform(6, 2, seed=1).requires_grad_()
        with torch.no_grad():
            graph.observe(Message.of(x), None, None)
            graph.matmul(x)
        (grad,) = torch.autograd.grad(graph.matmul(x).sum(), x)
        expected = graph.to_dense().sum(0).detach()
        torch.testing.assert_close(grad, expected.unsqueeze(1).expand(-1, 2))


def test_caches_can_be_looked_at():
    assert isinstance(DenseFactor.gram, cached_tensor)
