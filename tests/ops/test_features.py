import pytest
import torch

from torch_geometric_idgl.ops import Layout, SparseMatrix, to_features
from torch_geometric_idgl.ops import features as module
from torch_geometric_idgl.ops.features import (
    FeatureGram,
    dropout,
    is_nonnegative,
    matmul,
    rows,
    spread,
    square,
)


def bag_of_words(n=6, d=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    return x * (x > 0.5)


def test_to_features_takes_the_cheaper_form(monkeypatch):
    x = bag_of_words()
    assert to_features(x) is x  # too small to be worth it
    for sparse in (x.to_sparse_csr(), x.to_sparse_coo()):
        features = to_features(sparse)
        assert isinstance(features, SparseMatrix)
        assert torch.equal(features.to_dense(), x)

    monkeypatch.setattr(module, '_SPARSE_ENTRIES', 1)
    monkeypatch.setattr(module, '_SPARSE_DENSITY', 0.9)
    features = to_features(x)
    assert isinstance(features, SparseMatrix)
    assert torch.equal(features.to_dense(), x)
    full = x + 1.0
    assert to_features(full) is full
    learned = x.clone().requires_grad_()
    assert to_features(learned) is learned  # gradients need all entries


def test_functions_agree_on_both_forms():
    x = bag_of_words()
    sparse = SparseMatrix.from_dense(x)
    f = torch.rand(5, 2).double()
    index = torch.tensor([4, 1])
    for features in (x, sparse):
        torch.testing.assert_close(matmul(features, f), x @ f)
    assert torch.equal(square(sparse).to_dense(), square(x))
    assert torch.equal(rows(sparse, index).to_dense(), rows(x, index))
    assert is_nonnegative(x) and is_nonnegative(sparse)
    assert not is_nonnegative(-x)
    assert not is_nonnegative(sparse.with_value(-sparse.value))
    empty = torch.zeros(0, 3)
    assert is_nonnegative(empty) and is_nonnegative(SparseMatrix.from_dense(empty))


@pytest.mark.parametrize('sparse', [False, True])
def test_dropout(sparse):
    x = torch.ones(50, 40)
    features = SparseMatrix.from_dense(x) if sparse else x
    assert dropout(features, 0.5, training=False) is features
    assert dropout(features, 0.0, training=True) is features
    torch.manual_seed(0)
    out = dropout(features, 0.75, training=True)
    out = out.to_dense() if sparse else out
    assert set(out.unique().tolist()) == {0.0, 4.0}
    assert 0.2 < (out > 0).float().mean() < 0.3


def test_spread():
    x = bag_of_words()
    layout = Layout((2, 0, 4), torch.device('cpu'))
    wide = spread(SparseMatrix.from_dense(x), layout)
    expected = torch.block_diag(x[:2], torch.zeros(0, 5, dtype=x.dtype), x[2:])
    assert torch.equal(wide.to_dense(), expected)
    one = SparseMatrix.from_dense(x)
    assert spread(one, Layout((6,), torch.device('cpu'))) is one


def test_feature_gram():
    x = bag_of_words()
    x[2] = 0.0
    sparse = SparseMatrix.from_dense(x)
    gram = FeatureGram(sparse.pattern)
    low, high = gram.pairs
    assert bool((low <= high).all())
    together = (x > 0).double().t() @ (x > 0).double() > 0
    assert low.numel() == int(together.triu().sum())

    weight = torch.rand(6, 3, dtype=torch.float64)
    listed = gram.matrix(sparse.value).matmul(weight)
    for q in range(3):
        expected = x.t() @ torch.diag(weight[:, q]) @ x
        torch.testing.assert_close(listed[:, q], expected[low, high])

    incidence = gram.incidence.to_dense()
    for pair, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        assert incidence[:, pair].nonzero().flatten().tolist() == sorted({a, b})

    count = (x > 0).sum(1)
    assert FeatureGram.num_products(sparse.pattern) == int(
        (count * (count + 1) / 2).sum()
    )
    assert FeatureGram.affordable(sparse.pattern)
