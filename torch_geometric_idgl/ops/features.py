r"""Raw node features, dense or sparse, with what is computed from them only once."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import Nodes
from .numeric import block_entries, dropout, reads_are_free
from .sparse import Pattern, SparseMatrix, sddmm

__all__ = ['CoOccurrences', 'Features', 'RowBlocks']

_SPARSE_DENSITY = 0.15  # below it, sparse products win on CPUs
_SPARSE_ENTRIES = 1 << 16  # below it, nothing is worth a conversion
_MAX_COPY = 1 << 22
_MAX_PAIRS = 1 << 23  # products of co-occurring features that are kept
_MAX_GRAM = 1 << 26  # entries of a Gram matrix that is kept (256 MB)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _count_nonzero(x: Tensor) -> Tensor:
    """The number of entries that are not +0. As whole numbers, which CPUs count three
    times as fast.
    """
    return torch.count_nonzero(x.view(_BITS[x.element_size()]))


class RowBlocks:
    """A matrix of which only some rows at a time are on the device.

    Args:
        matrix (torch.Tensor): The matrix, wherever it is. A sparse one is moved to the
            device as it is.
        device (torch.device): Where rows are wanted.
        block_size (int): The number of rows at a time.
    """

    requires_grad = False

    def __init__(self, matrix: Tensor, device: torch.device, block_size: int) -> None:
        self.matrix: Tensor | SparseMatrix = matrix
        if matrix.layout != torch.strided:
            self.matrix = SparseMatrix.from_torch(matrix.to(device))
        self.device = device
        self.dtype = matrix.dtype
        self.shape = tuple(matrix.shape)
        self.block_size = block_size

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Chosen rows, dense and on the device."""
        if not isinstance(self.matrix, SparseMatrix):
            if isinstance(index, Tensor):
                index = index.to(self.matrix.device)
            return self.matrix[index].to(self.device)
        if isinstance(index, slice):
            return self.matrix.row_range(*index.indices(self.shape[0])[:2]).to_dense()
        return self.matrix.rows(index).to_dense()

    def matmul(self, dense: Tensor) -> Tensor:
        """The product with a matrix on the device."""
        if isinstance(self.matrix, SparseMatrix):
            return self.matrix.matmul(dense)
        out = dense.new_empty(self.shape[0], dense.size(1))
        for start in range(0, self.shape[0], self.block_size):
            rows = slice(start, start + self.block_size)
            torch.mm(self[rows], dense, out=out[rows])
        return out

    def to_dense(self) -> Tensor:
        """All rows, for those who cannot do with some."""
        return self[:]


class DenseBlocks(NamedTuple):
    """A block-diagonal matrix of the dense features of each graph, whose products are
    those of a :class:`SparseMatrix`.
    """

    value: Tensor
    nodes: Nodes

    def matmul(self, dense: Tensor) -> Tensor:
        r"""From :obj:`[B d, f]` to :obj:`[n, f]`."""
        if self.nodes.num_graphs == 1:
            return self.value @ dense
        own = dense.unflatten(0, (self.nodes.num_graphs, self.value.size(1)))
        return self.nodes.unpad(self.nodes.pad(self.value) @ own)

    def t_matmul(self, dense: Tensor) -> Tensor:
        r"""From :obj:`[n, f]` to :obj:`[B d, f]`."""
        if self.nodes.num_graphs == 1:
            return self.value.t() @ dense
        padded = self.nodes.pad(self.value)
        return (padded.transpose(1, 2) @ self.nodes.pad(dense)).flatten(0, 1)


class Features:
    r"""Raw features :math:`\mathbf{X}` of the nodes of one graph or a batch.

    Bag-of-words features are mostly zeros, and every product with them is cheaper in
    sparse form. Immutable; what is cached are values of it (squared row norms, the Gram
    matrix :math:`\mathbf{X} \mathbf{X}^{\top}`, the list of co-occurring features),
    which all iterations share.

    Args:
        value (torch.Tensor or SparseMatrix or RowBlocks): The features, of shape
            :obj:`[n, d]`.
        nodes (Nodes): The graphs the rows belong to.
    """

    def __init__(self, value: Any, nodes: Nodes) -> None:
        self.value = value
        # Affinities are made for so many nodes at a time, if only they are at hand.
        self.block_size = value.block_size if isinstance(value, RowBlocks) else None
        self.nodes = nodes
        self.is_sparse = isinstance(value, SparseMatrix)
        if isinstance(value, SparseMatrix):
            entries, self.num_features = value.value, value.pattern.num_cols
        else:
            entries, self.num_features = value, value.size(1)
        self.requires_grad = not self.is_sparse and entries.requires_grad
        self.dtype = entries.dtype
        self.device = entries.device
        self._original: Tensor | None = None
        self._kept_tiles: dict[tuple[int, ...], Tensor] = {}

    @classmethod
    def from_tensor(cls, x: Tensor, nodes: Nodes) -> Features:
        """Takes a copy of a tensor, in the form whose products are the cheapest.

        Sparse tensors become a :class:`SparseMatrix`; so do dense ones that are large,
        mostly zero, and need no gradient.
        """
        if x.layout != torch.strided:
            if x.requires_grad:
                raise ValueError(
                    'Expected sparse features without gradient (got '
                    'requires_grad=True); pass them dense to get one'
                )
            return cls(SparseMatrix.from_torch(x), nodes)
        # Processes that have some of the nodes each would choose differently.
        if x.requires_grad or nodes.spread or x.numel() < _SPARSE_ENTRIES:
            return cls(x.clone(), nodes)
        if int(_count_nonzero(x)) > _SPARSE_DENSITY * x.numel():
            return cls(x.clone(), nodes)
        return cls(SparseMatrix.from_dense(x), nodes)

    def remember(self, x: Tensor) -> None:
        """Keeps a copy of small dense features that have become sparse: no other way to
        know them again is as quick. An epoch on Cora with :obj:`cached=True` takes 1.1
        times as long without.
        """
        small = x.layout == torch.strided and x.numel() <= _MAX_COPY
        numbers = x.dtype != torch.bfloat16  # which NumPy does not have
        if self.is_sparse and small and numbers and reads_are_free(x.device):
            self._original = x.clone()

    def holds(self, x: Tensor) -> bool:
        """Whether these are the features of a tensor."""
        if (x.dtype, x.device, x.shape) != (self.dtype, self.device, self.value.shape):
            return False
        if not isinstance(self.value, SparseMatrix):
            return x.layout == torch.strided and torch.equal(x, self.value)
        pattern, value = self.value.pattern, self.value.value
        if x.layout == torch.strided and self._original is not None:
            return np.array_equal(x.numpy(), self._original.numpy())
        if x.layout == torch.strided:
            found = x[pattern.row, pattern.col]
            same = (found == value).all() & (_count_nonzero(x) == pattern.nnz)
            return bool(same)  # one look at the device
        if x.layout != torch.sparse_csr:
            other = SparseMatrix.from_torch(x)
            rowptr, col, found = other.pattern.rowptr, other.pattern.col, other.value
        else:
            rowptr, col, found = x.crow_indices(), x.col_indices(), x.values()
        if col.shape != pattern.col.shape:
            return False
        same = (rowptr == pattern.rowptr).all() & (col == pattern.col).all()
        return bool(same & (found == value).all())

    @cached_property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest entry, zero among them."""
        value = self.value.value if isinstance(self.value, SparseMatrix) else self.value
        if value.numel() == 0:
            return 0.0, 0.0
        low, high = torch.stack(value.detach().aminmax()).tolist()
        return min(low, 0.0), max(high, 0.0)

    def dropout(self, p: float) -> Features:
        """The same rows with entries dropped; index structures are shared."""
        if p == 0.0:
            return self
        if isinstance(self.value, SparseMatrix):  # Zeros stay zeros.
            dropped = self.value.with_value(dropout(self.value.value, p))
            features = Features(dropped, self.nodes)
            features.__dict__['pairs'] = self.pairs
        else:
            features = Features(dropout(self.value, p), self.nodes)
        features.__dict__['range'] = tuple(bound / (1.0 - p) for bound in self.range)
        return features

    def rows(self, index: Tensor, nodes: Nodes) -> Features:
        """The features of chosen nodes (the anchors)."""
        if isinstance(self.value, SparseMatrix):
            return Features(self.value.rows(index), nodes)
        return Features(self.nodes.take(self.value, index), nodes)

    def to_dense(self) -> Tensor:
        """The features as a dense matrix."""
        return self.value.to_dense()

    # Products -----------------------------------------------------------------------

    def matmul(self, dense: Tensor) -> Tensor:
        r""":math:`\mathbf{X} \mathbf{F}`."""
        return self.value.matmul(dense)

    @cached_property
    def blocks(self) -> SparseMatrix | DenseBlocks:
        r"""The features with columns of its own for each graph: :obj:`[n, B d]`.

        Row :math:`i` of graph :math:`g` has its entries moved from column :math:`k` to
        :math:`g d + k`. Then :math:`\mathbf{X}^{\top} \mathbf{F}` is the stack of the
        products of the single graphs, and graphs never mix.
        """
        x = self.value
        if not isinstance(x, SparseMatrix):
            return DenseBlocks(x, self.nodes)
        if self.nodes.num_graphs == 1:
            return x
        pattern = x.pattern
        col = pattern.col + self.nodes.batch[pattern.row] * pattern.num_cols
        num_cols = pattern.num_cols * self.nodes.num_graphs
        return SparseMatrix(Pattern(pattern.rowptr, col, num_cols), x.value)

    @cached_property
    def pairs(self) -> CoOccurrences | None:
        """The co-occurring features of sparse ones, where the list is affordable."""
        if not isinstance(self.blocks, SparseMatrix):
            return None
        return CoOccurrences.of(self.blocks.pattern)

    @cached_property
    def pair_matrix(self) -> SparseMatrix:
        r"""Pairs by rows: its product with :math:`\mathbf{c}` lists
        :math:`\mathbf{X}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{X}`.
        """
        assert self.pairs is not None and isinstance(self.value, SparseMatrix)
        return self.pairs.matrix(self.value.value)

    @cached_property
    def squared(self) -> Tensor | SparseMatrix:
        """The elementwise square."""
        if isinstance(self.value, SparseMatrix):
            return self.value.with_value(self.value.value.square())
        return self.value.square()

    # Norms and Gram matrices --------------------------------------------------------

    @cached_property
    def sq_norms(self) -> Tensor:
        """The squared norm of every row, of shape :obj:`[n]`."""
        squared = self.squared
        if not isinstance(squared, SparseMatrix):
            return squared.sum(1)
        norms = squared.value.new_zeros(self.nodes.num_rows)
        return norms.index_add(0, squared.pattern.row, squared.value)

    @property
    def keeps_gram(self) -> bool:
        """Whether the Gram matrix is small enough to be kept."""
        return self.nodes.num_graphs * self.nodes.max_size**2 <= _MAX_GRAM

    @cached_property
    def gram(self) -> Tensor:
        r""":math:`\mathbf{X} \mathbf{X}^{\top}` of each graph, padded:
        :obj:`[B, N, N]`.
        """
        nodes = self.nodes
        if not isinstance(self.value, SparseMatrix):
            padded = nodes.pad(self.value)
            return padded @ padded.transpose(1, 2)
        size = nodes.max_size
        gram = self.value.value.new_zeros(nodes.num_graphs, size, size)
        step = max(1, block_entries(nodes.device) // max(size, 1))
        for graph, n in enumerate(nodes.sizes):
            for start in range(0, n, step):
                stop = min(start + step, n)
                gram[graph, start:stop, :n] = self._gram_block(graph, start, stop, 0, n)
        return gram

    def gram_tile(self, tile: tuple[int, int, int, int, int]) -> Tensor:
        """A rectangle of the Gram matrix (graph, top, bottom, left, right), without
        gradient; kept, if the matrix is small enough.
        """
        if not self.keeps_gram:
            return self._gram_block(*tile)
        if tile not in self._kept_tiles:
            self._kept_tiles[tile] = self._gram_block(*tile).contiguous()
        return self._kept_tiles[tile]

    @torch.no_grad()
    def _gram_block(
        self, graph: int, top: int, bottom: int, left: int, right: int
    ) -> Tensor:
        first = self.nodes.ptr[graph]
        mine, others = (first + top, first + bottom), (first + left, first + right)
        if not isinstance(self.value, SparseMatrix):
            return self.value[slice(*mine)] @ self.value[slice(*others)].t()
        if bottom - top < right - left:  # The fewer rows become the dense matrix.
            few = self.value.row_range(*mine).to_dense()
            return self.value.row_range(*others).matmul(few.t()).t()
        few = self.value.row_range(*others).to_dense()
        return self.value.row_range(*mine).matmul(few.t())

    def gram_at(self, pattern: Pattern) -> Tensor:
        """The inner products of the rows at the places of a pattern."""
        nodes = self.nodes
        if self.keeps_gram:
            batch = nodes.batch[pattern.row]
            offset = nodes.start[batch]
            return self.gram[batch, pattern.row - offset, pattern.col - offset]
        if not isinstance(self.value, SparseMatrix):
            return sddmm(pattern, self.value, self.value)
        value = self.value.value.new_empty(pattern.nnz)
        for graph, size in enumerate(nodes.sizes):
            first = nodes.ptr[graph]
            step = max(1, block_entries(nodes.device) // max(size, 1))
            for start in range(0, size, step):
                stop = min(start + step, size)
                block = self._gram_block(graph, start, stop, 0, size)
                places = pattern.places(first + start, first + stop)
                row, col = pattern.row[places], pattern.col[places]
                value[places] = block[row - first - start, col - first]
        return value


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
