"""Weighted Gram matrices of sparse features, through pairs that occur together."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .sparse import Pattern, SparseMatrix

__all__ = ['CoOccurrences']

_MAX_PAIRS = 1 << 23  # products that are kept


class CoOccurrences:
    r"""The pairs of features that occur together in a row of a sparse matrix. They list
    the entries of :math:`\mathbf{M}(\mathbf{c}) = \mathbf{X}^{\top}
    \mathrm{diag}(\mathbf{c}) \mathbf{X}`.

    Bag-of-words rows are short, so few pairs occur, against the :math:`d^2 n` products
    of the dense form. The list depends on the places of the entries only and is reused
    when dropout changes the values. Immutable; what is cached are values of it.
    """

    def __init__(self, pattern: Pattern) -> None:
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
        self.products, perm = Pattern.from_coo(pair, pattern.row[first], shape)
        self.first, self.second = first[perm], second[perm]
        self.low, self.high = key // pattern.num_cols, key % pattern.num_cols
        self.num_cols = pattern.num_cols

    @classmethod
    def of(cls, pattern: Pattern) -> CoOccurrences | None:
        """The pairs of a pattern, if the list is short enough to be kept."""
        count = pattern.rowptr.diff()
        if int((count * (count + 1) // 2).sum()) > _MAX_PAIRS:
            return None
        return cls(pattern)

    @cached_property
    def incidence(self) -> SparseMatrix:
        """Features by pairs: one where a feature is in a pair."""
        pair = torch.arange(self.low.numel(), device=self.low.device)
        other = self.low != self.high
        row = torch.cat([self.low, self.high[other]])
        col = torch.cat([pair, pair[other]])
        value = torch.ones(row.numel(), device=row.device)
        return SparseMatrix.from_coo(row, col, value, (self.num_cols, pair.numel()))

    def matrix(self, value: Tensor) -> SparseMatrix:
        """The matrix (pairs by rows) whose product with c lists M(c)."""
        return SparseMatrix(self.products, value[self.first] * value[self.second])
