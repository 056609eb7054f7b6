import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_geometric_idgl.graphs import (
    DenseGraph,
    InnerScores,
    SparseGraph,
    TiledGraph,
    sparsify,
)
from torch_geometric_idgl.ops import Nodes


def scores_of(seed, n=6, s=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (n, n if s is None else s)
    return torch.rand(*shape, generator=generator) * 2 - 1


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    epsilon=st.floats(0, 1),
    top_k=st.none() | st.integers(1, 7),
)
def test_keeps_what_is_large_and_nothing_else(seed, epsilon, top_k):
    scores = scores_of(seed)
    out = sparsify(scores, epsilon, top_k)
    assert bool((out >= 0).all())
    for row, kept in zip(scores.tolist(), out.tolist(), strict=True):
        largest = sorted(row, reverse=True)[: top_k or len(row)]
        wanted = [s if s > epsilon and s in largest else 0.0 for s in row]
        assert kept == wanted


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), epsilon=st.floats(0, 1))
def test_threshold_keeps_symmetry(seed, epsilon):
    scores = scores_of(seed)
    out = sparsify(scores + scores.t(), epsilon)
    assert torch.equal(out, out.t())


def test_threshold_is_strict():
    scores = torch.tensor([[0.5, 0.25, -1.0]])
    assert sparsify(scores, 0.25).tolist() == [[0.5, 0.0, 0.0]]
    assert sparsify(scores, 0.0).tolist() == [[0.5, 0.25, 0.0]]


@pytest.mark.parametrize('top_k', [None, 1, 3])
def test_gradient_reaches_survivors_only(top_k):
    scores = scores_of(0).requires_grad_()
    out = sparsify(scores, 0.2, top_k)
    out.sum().backward()
    assert torch.equal(scores.grad, (out > 0).float())


def test_padded_batches():
    scores = torch.stack([scores_of(0), scores_of(1)])
    out = sparsify(scores, 0.1, 2)
    assert torch.equal(out[0], sparsify(scores_of(0), 0.1, 2))
    assert torch.equal(out[1], sparsify(scores_of(1), 0.1, 2))


@pytest.mark.parametrize('width', [4, 40, 4000])
def test_of_equal_entries_the_first_are_kept(width):
    """Whatever the number of columns, which is that of the largest graph of a batch."""
    scores = torch.zeros(2, width)
    scores[0, :4] = torch.tensor([0.5, 0.7, 0.5, 0.5])
    scores[1, :4] = torch.tensor([0.2, 0.2, 0.2, 0.9])
    out = sparsify(scores, top_k=2)
    assert torch.equal(out[:, :4], torch.tensor([[0.5, 0.7, 0, 0], [0.2, 0, 0, 0.9]]))
    assert not out[:, 4:].any()


@pytest.mark.parametrize('anchored', [False, True])
@pytest.mark.parametrize('size', [6, 50, 333, 1100])
def test_all_forms_keep_the_same_of_equal_entries(size, anchored):
    """Nodes with equal vectors are equally near, up to the rounding of a product."""
    generator = torch.Generator().manual_seed(size)
    u = torch.rand(-(-size // 5), 37, generator=generator)
    u = torch.nn.functional.normalize(u, dim=1).repeat(5, 1)[:size]
    nodes = Nodes((size,), u.device)
    anchors = Nodes((size // 2,), u.device) if anchored else nodes
    v = u[: size // 2] if anchored else None
    scores = InnerScores(u, v, nodes, anchors, 0.1, 3)
    forms = [
        DenseGraph(scores.dense(), nodes, anchors),
        TiledGraph(scores),
        TiledGraph(scores, keep=True),
        SparseGraph.from_scores(scores),
    ]
    kept = [form.to_dense() > 0 for form in forms]
    assert bool((kept[0].sum(1) == 3).all())
    for other in kept[1:]:
        assert torch.equal(other, kept[0])


@pytest.mark.parametrize('form', ['dense', 'tiled', 'kept', 'sparse'])
def test_graphs_of_a_batch_keep_what_they_keep_alone(form):
    u = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).repeat(6, 1)
    sizes = (9, 1, 14)

    def make(u, sizes):
        nodes = Nodes(sizes, u.device)
        scores = InnerScores(u, None, nodes, nodes, 0.0, 2)
        if form == 'dense':
            return DenseGraph(scores.dense(), nodes, nodes).to_dense()
        if form == 'sparse':
            return SparseGraph.from_scores(scores).to_dense()
        return TiledGraph(scores, keep=form == 'kept').to_dense()

    alone = [make(part, (len(part),)) for part in u.split(sizes)]
    assert torch.equal(make(u, sizes) > 0, torch.block_diag(*alone) > 0)


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_rounding_does_not_choose_among_equal_entries(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(1, 4, (5, 9), generator=generator) / 4
    noise = 1e-8 * torch.rand(5, 9, generator=generator, dtype=torch.float64)
    exact, noisy = (sparsify(s, top_k=3) > 0 for s in (scores, scores + noise))
    assert noisy.equal(exact)
