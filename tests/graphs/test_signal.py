from itertools import pairwise

import pytest
import torch

from tests.graphs.cases import SIZES, bag_of_words, layout, uniform
from torch_geometric_idgl.graphs import Signal
from torch_geometric_idgl.graphs import signal as module
from torch_geometric_idgl.ops import Pattern, SparseMatrix


def make(batch, sparse):
    x = bag_of_words(sum(SIZES[batch]))
    features = SparseMatrix.from_dense(x) if sparse else x
    return x, Signal(features, layout(SIZES[batch]))


def graphs_of(batch):
    ptr = layout(SIZES[batch]).ptr
    return [slice(a, b) for a, b in pairwise(ptr)]


both = pytest.mark.parametrize('sparse', [False, True])
batches = pytest.mark.parametrize('batch', list(SIZES))


@both
@batches
def test_products(batch, sparse):
    x, signal = make(batch, sparse)
    assert signal.is_sparse == sparse
    assert signal.num_features == x.size(1)
    torch.testing.assert_close(signal.to_dense(), x)
    torch.testing.assert_close(signal.sq_norms, x.square().sum(1))
    g = uniform(x.size(0), 3, seed=2)
    expected = torch.stack([x[i].t() @ g[i] for i in graphs_of(batch)])
    torch.testing.assert_close(signal.t_matmul(g), expected)


@both
@batches
@pytest.mark.parametrize('kept', [True, False])
def test_gram(batch, sparse, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(module, '_MAX_GRAM', 0)
        monkeypatch.setattr(module, '_ROW_BLOCK', 2)
    x, signal = make(batch, sparse)
    assert signal.keeps_gram == kept
    whole = torch.zeros(x.size(0), x.size(0), dtype=x.dtype)
    for g, i in enumerate(graphs_of(batch)):
        gram = x[i] @ x[i].t()
        size = SIZES[batch][g]
        whole[i, i] = gram
        torch.testing.assert_close(signal.gram[g, :size, :size], gram)
        for _ in range(2):  # made, and found again if kept
            torch.testing.assert_close(signal.gram_tile(g, 0, size, 0, size), gram)
            if size > 1:
                tile = signal.gram_tile(g, 1, size, 1, size)
                torch.testing.assert_close(tile, gram[1:, 1:])
    row, col = whole.nonzero(as_tuple=True)
    pattern, _ = Pattern.from_coo(row, col, (x.size(0), x.size(0)))
    expected = whole[pattern.row, pattern.col]
    torch.testing.assert_close(signal.gram_at(pattern), expected)


@both
def test_rows(sparse):
    x, signal = make('single', sparse)
    index = torch.tensor([3, 0])
    chosen = signal.rows(index, layout((2,)))
    assert torch.equal(chosen.to_dense(), x[index])
    assert chosen.layout.sizes == (2,)


@both
def test_sign(sparse):
    x, signal = make('single', sparse)
    assert signal.nonnegative
    x = x.clone()
    x[0, 0] = -1.0
    features = SparseMatrix.from_dense(x) if sparse else x
    assert not Signal(features, layout((5,))).nonnegative


@both
@batches
def test_dropout(batch, sparse):
    x, signal = make(batch, sparse)
    assert signal.dropout(0.5, training=False) is signal
    assert signal.dropout(0.0, training=True) is signal
    torch.manual_seed(0)
    dropped = signal.dropout(0.5, training=True)
    assert dropped.nonnegative
    value = dropped.to_dense()
    kept = value != 0
    assert 0 < int(kept.sum()) < int((x != 0).sum())
    torch.testing.assert_close(value[kept], 2 * x[kept])
    torch.testing.assert_close(dropped.sq_norms, value.square().sum(1))
    assert torch.equal(signal.to_dense(), x)


@batches
@pytest.mark.parametrize('form', ['pairs', 'blocks', 'dense'])
def test_gram_energy_and_norm(batch, form, monkeypatch):
    """The two forms of weighted Gram matrices, against loops over heads."""
    monkeypatch.setattr(module, '_ROW_BLOCK', 2)
    x, signal = make(batch, sparse=form != 'dense')
    if form == 'blocks':
        signal.__dict__['pairs'] = None
    weight = uniform(x.size(0), 3, seed=1).requires_grad_()
    left = uniform(3, x.size(1), seed=2).requires_grad_()
    energy, norm = [], []
    for i in graphs_of(batch):
        energy.append(torch.zeros((), dtype=x.dtype))
        norm.append(torch.zeros((), dtype=x.dtype))
        for p in range(3):
            gram = x[i].t() @ torch.diag(weight[i, p]) @ x[i]
            energy[-1] = energy[-1] + (left[p].unsqueeze(1) * gram**2).sum()
            for q in range(3):
                both = weight[i, p] * weight[i, q]
                gram = x[i].t() @ torch.diag(both) @ x[i]
                norm[-1] = norm[-1] + left[p] @ gram**2 @ left[q]
    for actual, expected in [
        (signal.gram_energy(weight, left), torch.stack(energy)),
        (signal.gram_norm(weight, left), torch.stack(norm)),
    ]:
        torch.testing.assert_close(actual, expected)
        cotangent = uniform(*expected.shape, seed=3)
        grads = torch.autograd.grad((actual * cotangent).sum(), (weight, left))
        wanted = torch.autograd.grad((expected * cotangent).sum(), (weight, left))
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)
