r"""Node features that are either dense or sparse, behind the same few functions.

Bag-of-words features are mostly zeros, and every product with them is cheaper in
sparse form. A raw feature matrix is therefore a :class:`torch.Tensor` or a
:class:`~torch_geometric_idgl.ops.SparseMatrix`, and these functions take both.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from . import numeric
from .layout import Layout
from .sparse import Pattern, SparseMatrix

__all__ = [
    'FeatureGram',
    'Features',
    'dropout',
    'is_nonnegative',
    'matmul',
    'rows',
    'spread',
    'square',
    'to_features',
]

Features = Tensor | SparseMatrix

_SPARSE_DENSITY = 0.15  # below it, sparse products win on CPUs
_SPARSE_ENTRIES = 1 << 16  # below it, nothing is worth a conversion
_MAX_PAIRS = 1 << 23  # co-occurrences kept by `FeatureGram`


def to_features(x: Tensor) -> Features:
    """Bring features into the form whose products are the cheapest.

    Sparse tensors become :class:`SparseMatrix`; so do dense ones that are large, mostly
    zero, and need no gradient.
    """
    if x.layout != torch.strided:
        if x.requires_grad:
            raise ValueError(
                'Expected sparse features without gradient (got requires_grad=True); '
                'pass them dense to get one'
            )
        return SparseMatrix.from_torch(x)
    if x.requires_grad or x.numel() < _SPARSE_ENTRIES:
        return x
    if int(torch.count_nonzero(x)) > _SPARSE_DENSITY * x.numel():
        return x
    return SparseMatrix.from_dense(x)


def matmul(x: Features, dense: Tensor) -> Tensor:
    r""":math:`\mathbf{X} \mathbf{F}`."""
    return x.matmul(dense)


def square(x: Features) -> Features:
    """The elementwise square."""
    if isinstance(x, SparseMatrix):
        return x.with_value(x.value.square())
    return x.square()


def dropout(x: Features, p: float, training: bool) -> Features:
    """Dropout of the entries; zeros stay zeros, so only stored entries are drawn."""
    if not training or p == 0.0:
        return x
    if isinstance(x, SparseMatrix):
        return x.with_value(numeric.dropout(x.value, p))
    return numeric.dropout(x, p)


def rows(x: Features, index: Tensor) -> Features:
    """The chosen rows."""
    return x.rows(index) if isinstance(x, SparseMatrix) else x[index]


def is_nonnegative(x: Features) -> bool:
    """Whether no entry is negative."""
    value = x.value if isinstance(x, SparseMatrix) else x
    return value.numel() == 0 or bool(value.min() >= 0)


def spread(x: SparseMatrix, layout: Layout) -> SparseMatrix:
    r"""Give every graph of a batch columns of its own.

    Row :math:`i` of graph :math:`g` moves its entries from column :math:`k` to
    :math:`g d + k`. Then :math:`\mathbf{X}^{\top} \mathbf{F}` is the stack of the
    products of the single graphs, and graphs never mix.
    """
    if layout.num_graphs == 1:
        return x
    pattern = x.pattern
    offset = layout.batch[pattern.row] * pattern.num_cols
    num_cols = pattern.num_cols * layout.num_graphs
    return SparseMatrix(
        Pattern(pattern.rowptr, pattern.col + offset, num_cols), x.value
    )


class FeatureGram:
    r"""Weighted Gram matrices of sparse features,
    :math:`\mathbf{M}(\mathbf{c}) = \mathbf{X}^{\top} \mathrm{diag}(\mathbf{c})
    \mathbf{X}`, through the list of feature pairs that occur together in a row.

    Bag-of-words rows are short, so few pairs occur, against the :math:`d^2 n` products
    of the dense form. The list depends on the places of the
    entries only and is reused when dropout changes the values.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._places: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def num_products(pattern: Pattern) -> int:
        """How many products the list would hold."""
        count = pattern.rowptr.diff()
        return int((count * (count + 1) // 2).sum())

    @classmethod
    def affordable(cls, pattern: Pattern) -> bool:
        """Whether the list is short enough to be kept."""
        return cls.num_products(pattern) <= _MAX_PAIRS

    @cached_property
    def _structure(self) -> tuple[Pattern, Tensor, Tensor, Tensor, Tensor]:
        pattern = self.pattern
        end = pattern.rowptr[1:][pattern.row]
        here = torch.arange(pattern.nnz, device=end.device)
        partners = end - here  # entries of my row from here on, myself included
        first = here.repeat_interleave(partners)
        start = torch.cumsum(partners, 0) - partners
        step = torch.arange(first.numel(), device=first.device) - start[first]
        second = first + step
        a, b = pattern.col[first], pattern.col[second]
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        key, pair = torch.unique(low * pattern.num_cols + high, return_inverse=True)
        shape = (key.numel(), pattern.num_rows)
        products, perm = Pattern.from_coo(pair, pattern.row[first], shape)
        low, high = key // pattern.num_cols, key % pattern.num_cols
        return products, first[perm], second[perm], low, high

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The pairs of features, the lower index first."""
        *_, low, high = self._structure
        return low, high

    def places(self, num_features: int) -> tuple[Tensor, Tensor, Tensor]:
        """The graph of each pair, and its two features within that graph."""
        if self._places is None:
            low, high = self.pairs
            self._places = low // num_features, low % num_features, high % num_features
        return self._places

    @cached_property
    def incidence(self) -> SparseMatrix:
        """Features by pairs: one where a feature is in a pair."""
        low, high = self.pairs
        pair = torch.arange(low.numel(), device=low.device)
        other = low != high
        row = torch.cat([low, high[other]])
        col = torch.cat([pair, pair[other]])
        value = torch.ones(row.numel(), device=low.device)
        shape = (self.pattern.num_cols, low.numel())
        return SparseMatrix.from_coo(row, col, value, shape)

    def matrix(self, value: Tensor) -> SparseMatrix:
        """The matrix (pairs by rows) whose product with c lists M(c)."""
        products, first, second, *_ = self._structure
        return SparseMatrix(products, value[first] * value[second])
