from itertools import pairwise

import pytest
import torch

from tests.graphs.cases import (
    SIZES,
    bag_of_words,
    make_nodes,
    uniform,
    use_small_blocks,
)
from torch_geometric_idgl.ops import Features, Pattern, SparseMatrix
from torch_geometric_idgl.ops import features as module
from torch_geometric_idgl.ops.features import CoOccurrences


def make(batch, sparse):
    x = bag_of_words(sum(SIZES[batch]))
    value = SparseMatrix.from_dense(x) if sparse else x
    return x, Features(value, make_nodes(SIZES[batch]))


def graphs_of(batch):
    return [slice(a, b) for a, b in pairwise(make_nodes(SIZES[batch]).ptr)]


both = pytest.mark.parametrize('sparse', [False, True])
batches = pytest.mark.parametrize('batch', list(SIZES))


@both
@batches
def test_products(batch, sparse):
    x, features = make(batch, sparse)
    assert features.is_sparse == sparse
    assert features.num_features == x.size(1)
    torch.testing.assert_close(features.to_dense(), x)
    torch.testing.assert_close(features.sq_norms, x.square().sum(1))
    assert features.range == (0.0, float(x.max()))
    f, g = uniform(x.size(1), 3, seed=1), uniform(x.size(0), 3, seed=2)
    torch.testing.assert_close(features.matmul(f), x @ f)
    expected = torch.cat([x[i].t() @ g[i] for i in graphs_of(batch)])
    torch.testing.assert_close(features.blocks.t_matmul(g), expected)
    own = uniform(len(SIZES[batch]), x.size(1), 3, seed=3)
    parts = [x[i] @ own[number] for number, i in enumerate(graphs_of(batch))]
    found = features.blocks.matmul(own.flatten(0, 1))
    torch.testing.assert_close(found, torch.cat(parts))


@both
@pytest.mark.parametrize('kept', [True, False])
def test_gram(sparse, kept, monkeypatch):
    use_small_blocks(monkeypatch)
    if not kept:
        monkeypatch.setattr(module, '_MAX_GRAM', 0)
    for batch in SIZES:
        check_gram(batch, sparse, kept)


def check_gram(batch, sparse, kept):
    x, features = make(batch, sparse)
    assert features.keeps_gram == kept
    whole = torch.zeros(x.size(0), x.size(0), dtype=x.dtype)
    for g, i in enumerate(graphs_of(batch)):
        whole[i, i] = gram = x[i] @ x[i].t()
        size = SIZES[batch][g]
        torch.testing.assert_close(features.gram[g, :size, :size], gram)
        for top, bottom, left, right in [(0, size, 0, size), (1, size, 0, 1)]:
            if size > 1 or top == 0:
                tile = (g, top, bottom, left, right)
                for _ in range(2):  # made, and found again if kept
                    part = gram[top:bottom, left:right]
                    torch.testing.assert_close(features.gram_tile(tile), part)
    row, col = whole.nonzero(as_tuple=True)
    pattern = Pattern.from_sorted(row, col, (x.size(0), x.size(0)))
    expected = whole[pattern.row, pattern.col]
    torch.testing.assert_close(features.gram_at(pattern), expected)


@both
def test_rows_and_range(sparse):
    x, features = make('single', sparse)
    index = torch.tensor([3, 0])
    chosen = features.rows(index, make_nodes((2,)))
    assert torch.equal(chosen.to_dense(), x[index])
    assert chosen.nodes.sizes == (2,)
    x = x.clone()
    x[0, 0], x[1, 1] = -3.0, 5.0
    value = SparseMatrix.from_dense(x) if sparse else x
    assert Features(value, make_nodes((9,))).range == (-3.0, 5.0)
    empty = torch.zeros(0, 3)
    value = SparseMatrix.from_dense(empty) if sparse else empty
    assert Features(value, make_nodes((0,))).range == (0.0, 0.0)


@both
@batches
def test_dropout(batch, sparse):
    x, features = make(batch, sparse)
    assert features.dropout(0.0) is features
    torch.manual_seed(0)
    dropped = features.dropout(0.5)
    assert dropped.range[0] == 0.0 and dropped.range[1] >= float(2 * x.max())
    value = dropped.to_dense()
    kept = value != 0
    assert 0 < int(kept.sum()) < int((x != 0).sum())
    torch.testing.assert_close(value[kept], 2 * x[kept])
    torch.testing.assert_close(dropped.sq_norms, value.square().sum(1))
    assert torch.equal(features.to_dense(), x)
    if sparse:  # lists of places are shared
        assert dropped.value.pattern is features.value.pattern
        assert dropped.pairs is features.pairs


def test_from_tensor_takes_the_cheaper_form(monkeypatch):
    x, nodes = bag_of_words(9), make_nodes((9,))
    assert not Features.from_tensor(x, nodes).is_sparse  # too small to be worth it
    for sparse in (x.to_sparse_csr(), x.to_sparse_coo()):
        features = Features.from_tensor(sparse, nodes)
        assert features.is_sparse and torch.equal(features.to_dense(), x)
    with pytest.raises(ValueError, match='without gradient'):
        Features.from_tensor(x.to_sparse_coo().requires_grad_(), nodes)

    monkeypatch.setattr(module, '_SPARSE_ENTRIES', 1)
    monkeypatch.setattr(module, '_SPARSE_DENSITY', 0.9)
    features = Features.from_tensor(x, nodes)
    assert features.is_sparse and torch.equal(features.to_dense(), x)
    assert not Features.from_tensor(x + 1.0, nodes).is_sparse
    learned = x.clone().requires_grad_()
    features = Features.from_tensor(learned, nodes)
    assert not features.is_sparse and features.requires_grad


@pytest.mark.parametrize('convert', ['clone', 'to_sparse_csr', 'to_sparse_coo'])
@pytest.mark.parametrize('entries', [1, 1 << 16])
def test_from_tensor_copies(convert, entries, monkeypatch):
    """What happens to a tensor later does not change what was made of it."""
    monkeypatch.setattr(module, '_SPARSE_ENTRIES', entries)
    x = bag_of_words(9)
    given = getattr(x, convert)()
    features = Features.from_tensor(given, make_nodes((9,)))
    (given if convert == 'clone' else given.values()).fill_(7.0)
    assert torch.equal(features.to_dense(), x)


def test_blocks_have_columns_of_their_own():
    x, features = make('ragged', sparse=True)
    parts = [x[i] for i in graphs_of('ragged')]
    assert torch.equal(features.blocks.to_dense(), torch.block_diag(*parts))
    _, one = make('single', sparse=True)
    assert one.blocks is one.value


def test_cooccurrences():
    x = bag_of_words(9)
    x[2] = 0.0
    sparse = SparseMatrix.from_dense(x)
    pairs = CoOccurrences(sparse.pattern)
    low, high = pairs.low, pairs.high
    assert bool((low <= high).all())
    together = (x > 0).double().t() @ (x > 0).double() > 0
    assert low.numel() == int(together.triu().sum())

    weight = torch.rand(9, 3, dtype=torch.float64)
    listed = pairs.matrix(sparse.value).matmul(weight)
    for q in range(3):
        expected = x.t() @ torch.diag(weight[:, q]) @ x
        torch.testing.assert_close(listed[:, q], expected[low, high])

    incidence = pairs.incidence.to_dense()
    for pair, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        assert incidence[:, pair].nonzero().flatten().tolist() == sorted({a, b})


@pytest.mark.parametrize('less', [0, 1])
def test_long_lists_of_cooccurrences_are_not_kept(less, monkeypatch):
    sparse = SparseMatrix.from_dense(bag_of_words(9))
    count = sparse.pattern.rowptr.diff()
    total = int((count * (count + 1) / 2).sum())
    monkeypatch.setattr('torch_geometric_idgl.ops.features._MAX_PAIRS', total - less)
    assert (CoOccurrences.of(sparse.pattern) is None) == bool(less)
