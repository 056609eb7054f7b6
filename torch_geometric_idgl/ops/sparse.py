r"""Sparse matrices as weighted bag sums.

A product of a CSR matrix with a dense one *is* a weighted bag sum, and
:func:`torch.nn.functional.embedding_bag` is the fastest exact route to it on CPUs
that we know of (ahead of :func:`torch.sparse.mm`, and far ahead of gather and
scatter). Everything sparse in this package (:math:`\mathbf{L}^{(0)}`,
bag-of-words features, learned edges) goes through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .numeric import block_entries, refuse_second_derivatives

__all__ = ['Pattern', 'SparseMatrix', 'csr_without_warning', 'sddmm']


@contextmanager
def csr_without_warning() -> Iterator[None]:
    """Keeps PyTorch from saying that the CSR layout is in beta state."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Sparse CS. tensor support is in beta')
        yield


_DENSE_DOTS = 0.01  # share of places above which `_pair_dot` multiplies dense tiles
# Wide matrices are multiplied by few columns at a time: a CPU's cache then holds the
# rows that many bags share. It takes half the time with the features of Pubmed.
_WIDE, _COLUMNS = 512, 128


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the entries of a sparse matrix are, in CSR order. Immutable; what is cached
    are values of it.
    """

    rowptr: Tensor  # [num_rows + 1]
    col: Tensor  # [nnz]
    num_cols: int

    @classmethod
    def from_coo(
        cls, row: Tensor, col: Tensor, shape: tuple[int, int]
    ) -> tuple[Pattern, Tensor]:
        """The pattern, and the permutation that brings values into its order."""
        perm = torch.argsort(row * shape[1] + col, stable=True)
        return cls.from_sorted(row[perm], col[perm], shape), perm

    @classmethod
    def from_sorted(cls, row: Tensor, col: Tensor, shape: tuple[int, int]) -> Pattern:
        """The pattern of entries that are already sorted by row."""
        rowptr = torch.zeros(shape[0] + 1, dtype=torch.long, device=row.device)
        rowptr[1:].scatter_add_(0, row, torch.ones_like(row))  # `bincount` reads back
        torch.cumsum(rowptr, 0, out=rowptr)
        return cls(rowptr, col, shape[1])

    @property
    def num_rows(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def nnz(self) -> int:
        return self.col.numel()

    @property
    def is_canonical(self) -> bool:
        """Whether the columns of each row ascend, so that no place comes twice."""
        ascending = self.col.diff() > 0
        starts = self.rowptr[1:-1]
        starts = starts[(starts > 0) & (starts < self.nnz)]
        ascending[starts - 1] = True  # from row to row they need not
        return bool(ascending.all())

    @cached_property
    def row(self) -> Tensor:
        """The row of each entry."""
        count = self.rowptr.diff()
        index = torch.arange(count.numel(), device=count.device)
        return index.repeat_interleave(count, output_size=self.col.numel())

    @cached_property
    def host_rowptr(self) -> np.ndarray:
        """:obj:`rowptr` on the host, read once, for loops over ranges of rows."""
        return self.rowptr.cpu().numpy()

    def places(self, start: int, stop: int) -> slice:
        """The entries of neighbouring rows."""
        return slice(int(self.host_rowptr[start]), int(self.host_rowptr[stop]))

    @cached_property
    def transposed(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and the permutation of the values."""
        perm = torch.argsort(self.col, stable=True)
        shape = (self.num_cols, self.rowptr.numel() - 1)
        return Pattern.from_sorted(self.col[perm], self.row[perm], shape), perm


def _multiply(pattern: Pattern, value: Tensor, dense: Tensor) -> Tensor:
    """The product of a sparse and a dense matrix: bags are rows."""
    if dense.size(1) > _WIDE and not dense.is_cuda:
        blocks = dense.split(_COLUMNS, dim=1)
        return torch.cat([_multiply(pattern, value, b) for b in blocks], dim=1)
    return F.embedding_bag(
        pattern.col,
        dense.contiguous(),
        pattern.rowptr,
        mode='sum',
        per_sample_weights=value,
        include_last_offset=True,
    )


def _pair_dot(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """The inner products of rows of a and b at the places of a pattern."""
    width = max(1, a.size(1))
    if width > 1 and pattern.nnz > _DENSE_DOTS * a.size(0) * b.size(0):
        return _dense_pair_dot(pattern, a, b)
    row, col = pattern.row, pattern.col
    # Blocks that fit the cache: larger ones were new memory from the system each time,
    # up to a fifth more of an epoch at 10^5 nodes.
    step = max(1, block_entries(a.device) // width)
    if row.numel() <= step:
        return (a[row] * b[col]).sum(-1)
    dots = [
        (a[r] * b[c]).sum(-1)
        for r, c in zip(row.split(step), col.split(step), strict=True)
    ]
    return torch.cat(dots)


def _dense_pair_dot(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """The same by dense row tiles: reading rows for every place is slower than
    multiplying, unless places are few.
    """
    if a.size(0) < b.size(0):  # Tall tiles are faster than wide ones.
        transposed, perm = pattern.transposed
        found = a.new_empty(pattern.nnz)
        found[perm] = _dense_pair_dot(transposed, b, a)
        return found
    step = max(1, block_entries(a.device) // max(1, b.size(0)))
    dots = []
    for start in range(0, a.size(0), step):
        stop = min(start + step, a.size(0))
        places = pattern.places(start, stop)
        block = a[start:stop] @ b.t()
        dots.append(block[pattern.row[places] - start, pattern.col[places]])
    return torch.cat(dots)


class _SpMM(torch.autograd.Function):
    r""":math:`\mathbf{M} \mathbf{F}` or :math:`\mathbf{M}^{\top} \mathbf{F}`. Nothing
    of size rows times columns is formed in backward, as :func:`torch.sparse.mm` does
    for the values.
    """

    @staticmethod
    def forward(ctx, matrix, transposed, value, dense):
        ctx.matrix, ctx.transposed = matrix, transposed
        ctx.save_for_backward(dense if ctx.needs_input_grad[2] else None)
        pattern, value = matrix.turned if transposed else (matrix.pattern, value)
        return _multiply(pattern, value.contiguous(), dense)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        grad_value = grad_dense = None
        if ctx.needs_input_grad[2]:
            (dense,) = ctx.saved_tensors
            left, right = (dense, grad) if ctx.transposed else (grad, dense)
            grad_value = _pair_dot(ctx.matrix.pattern, left, right)
        if ctx.needs_input_grad[3]:
            matrix = ctx.matrix
            pattern, value = matrix.turned
            if ctx.transposed:
                pattern, value = matrix.pattern, matrix.value.detach().contiguous()
            grad_dense = _multiply(pattern, value, grad)
        return None, None, grad_value, grad_dense


class _SDDMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pattern, a, b, known):
        ctx.pattern = pattern
        ctx.save_for_backward(a, b)
        return _pair_dot(pattern, a, b) if known is None else known.clone()

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        a, b = ctx.saved_tensors
        pattern, grad = ctx.pattern, grad.contiguous()
        grad_a = grad_b = None
        if ctx.needs_input_grad[1]:
            grad_a = _multiply(pattern, grad, b)
        if ctx.needs_input_grad[2]:
            transposed, perm = pattern.transposed
            grad_b = _multiply(transposed, grad[perm], a)
        return None, grad_a, grad_b, None


def sddmm(
    pattern: Pattern, a: Tensor, b: Tensor, known: Tensor | None = None
) -> Tensor:
    r"""The entries of :math:`\mathbf{A} \mathbf{B}^{\top}` at the places of a pattern.

    Args:
        pattern (Pattern): The places wanted.
        a (torch.Tensor): Left factor, of shape :obj:`[num_rows, f]`.
        b (torch.Tensor): Right factor, of shape :obj:`[num_cols, f]`.
        known (torch.Tensor, optional): The entries, where they have been computed
            already and lack only a gradient. (default: :obj:`None`)
    """
    return _SDDMM.apply(pattern, a, b, known)


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A sparse matrix: a pattern and its values. Immutable; what is cached are values
    of it.
    """

    pattern: Pattern
    value: Tensor

    @classmethod
    def from_coo(
        cls, row: Tensor, col: Tensor, value: Tensor, shape: tuple[int, int]
    ) -> SparseMatrix:
        """From entries in any order; entries at the same place add up in products."""
        pattern, perm = Pattern.from_coo(row, col, shape)
        return cls(pattern, value[perm])

    @classmethod
    def from_dense(cls, dense: Tensor) -> SparseMatrix:
        """The non-zero entries of a dense matrix."""
        row, col = dense.nonzero(as_tuple=True)
        shape = (dense.size(0), dense.size(1))
        return cls(Pattern.from_sorted(row, col, shape), dense[row, col])

    @classmethod
    @csr_without_warning()
    def from_torch(cls, matrix: Tensor) -> SparseMatrix:
        """From a torch sparse tensor of any layout, whose values are copied."""
        matrix = matrix.detach()
        if matrix.layout == torch.sparse_csr:
            rowptr = matrix.crow_indices().long()
            pattern = Pattern(rowptr, matrix.col_indices().long(), matrix.size(1))
            if pattern.is_canonical:
                return cls(pattern, matrix.values().clone())
        coo = matrix.to_sparse_coo()  # which takes CSR to be without duplicates
        matrix = torch.sparse_coo_tensor(
            coo._indices(),
            coo._values(),
            coo.shape,
            is_coalesced=False,
            check_invariants=False,
        ).coalesce()
        row, col = matrix.indices()
        shape = (matrix.size(0), matrix.size(1))
        return cls(Pattern.from_sorted(row, col, shape), matrix.values().clone())

    def size(self, dim: int) -> int:
        return self.pattern.num_rows if dim == 0 else self.pattern.num_cols

    @property
    def shape(self) -> tuple[int, int]:
        return self.pattern.num_rows, self.pattern.num_cols

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    def with_value(self, value: Tensor) -> SparseMatrix:
        """The same places with other values."""
        return SparseMatrix(self.pattern, value)

    @cached_property
    def turned(self) -> tuple[Pattern, Tensor]:
        """Places and values of the transposed matrix."""
        pattern, perm = self.pattern.transposed
        return pattern, self.value.detach()[perm]

    def matmul(self, dense: Tensor) -> Tensor:
        """The product with a dense matrix. Gradients reach values and matrix."""
        return _SpMM.apply(self, False, self.value, dense)

    def t_matmul(self, dense: Tensor) -> Tensor:
        """The product of the transposed matrix with a dense one."""
        return _SpMM.apply(self, True, self.value, dense)

    def scaled_t_matmul(self, scale: Tensor, dense: Tensor) -> Tensor:
        r""":math:`\mathbf{M}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{F}`."""
        scaled = SparseMatrix(self.pattern, self.value * scale[self.pattern.row])
        return scaled.t_matmul(dense)

    def rows(self, index: Tensor) -> SparseMatrix:
        """The chosen rows, in the order given."""
        rowptr = self.pattern.rowptr
        count = rowptr[index + 1] - rowptr[index]
        ptr = torch.zeros(index.numel() + 1, dtype=torch.long, device=index.device)
        torch.cumsum(count, 0, out=ptr[1:])
        shift = (rowptr[index] - ptr[:-1]).repeat_interleave(count)
        entry = torch.arange(shift.numel(), device=index.device) + shift
        pattern = Pattern(ptr, self.pattern.col[entry], self.pattern.num_cols)
        return SparseMatrix(pattern, self.value[entry])

    def row_range(self, start: int, stop: int) -> SparseMatrix:
        """Neighbouring rows. Where these are most of all rows, the transposed matrix is
        not sorted anew: its product is one with the transposed whole.
        """
        if start == 0 and stop == self.pattern.rowptr.numel() - 1:
            return self
        places = self.pattern.places(start, stop)
        rowptr = self.pattern.rowptr[start : stop + 1] - places.start
        pattern = Pattern(rowptr, self.pattern.col[places], self.pattern.num_cols)
        return _RowRange(pattern, self.value[places], self, start)

    def to_dense(self) -> Tensor:
        """The dense matrix."""
        dense = self.value.new_zeros(self.shape)
        index = (self.pattern.row, self.pattern.col)
        return dense.index_put(index, self.value, accumulate=True)


@dataclass(frozen=True, eq=False)
class _RowRange(SparseMatrix):
    whole: SparseMatrix
    start: int

    @property
    def _is_large(self) -> bool:
        return 2 * self.pattern.nnz > self.whole.pattern.nnz

    def t_matmul(self, dense: Tensor) -> Tensor:
        if not self._is_large:
            return super().t_matmul(dense)
        above, height = self.start, self.whole.size(0)
        below = height - above - self.size(0)
        return self.whole.t_matmul(F.pad(dense, (0, 0, above, below)))

    def scaled_t_matmul(self, scale: Tensor, dense: Tensor) -> Tensor:
        if not self._is_large:
            return super().scaled_t_matmul(scale, dense)
        return self.t_matmul(scale.unsqueeze(1) * dense)
