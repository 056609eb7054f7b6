r"""Raw node features as graph signals, with what is computed from them only once."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..ops.autograd import first_order
from ..ops.caching import cached_tensor
from ..ops.features import (
    FeatureGram,
    Features,
    dropout,
    is_nonnegative,
    matmul,
    rows,
    spread,
    square,
)
from ..ops.layout import Layout
from ..ops.sparse import Pattern, SparseMatrix, sddmm

__all__ = ['Signal']

_MAX_GRAM = 1 << 26  # entries of a Gram matrix that is kept (256 MB)
_ROW_BLOCK = 2048


class _WeightedGrams(torch.autograd.Function):
    r"""All :math:`\mathbf{X}^{\top} \mathrm{diag}(\mathbf{c}_q) \mathbf{X}`, in row
    blocks; backward keeps nothing but :math:`\mathbf{X}`.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        num_cols = x.size(1)
        out = weight.new_zeros(weight.size(1), num_cols, num_cols)
        for block, c in _row_blocks(x, weight):
            for q in range(c.size(1)):
                out[q].addmm_(block.t(), c[:, q : q + 1] * block)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        parts = [
            torch.stack([((block @ g) * block).sum(1) for g in grad], dim=1)
            for block, _ in _row_blocks(ctx.x)
        ]
        return None, torch.cat(parts)


def _row_blocks(x: Features, weight: Tensor | None = None):
    for start in range(0, max(x.size(0), 1), _ROW_BLOCK):
        stop = min(start + _ROW_BLOCK, x.size(0))
        if isinstance(x, SparseMatrix):
            index = torch.arange(start, stop, device=x.device)
            block = x.rows(index).to_dense()
        else:
            block = x[start:stop]
        yield block, None if weight is None else weight[start:stop]


class Signal:
    r"""Raw features :math:`\mathbf{X}` of the nodes of one graph or a batch.

    Holds what several iterations (and, when cached, several steps) share: squared row
    norms, the Gram matrix :math:`\mathbf{X} \mathbf{X}^{\top}`, and the list of
    co-occurring features.

    Args:
        x (torch.Tensor or SparseMatrix): The features, of shape :obj:`[n, d]`.
        layout (Layout): The graphs the rows belong to.
    """

    def __init__(
        self, x: Features, layout: Layout, pairs: FeatureGram | None = None
    ) -> None:
        self.x = x
        self.layout = layout
        self._pairs = pairs
        self._gram_tiles: dict[tuple[int, ...], Tensor] = {}

    @property
    def num_features(self) -> int:
        return self.x.size(1)

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.x, SparseMatrix)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are to reach the features."""
        return isinstance(self.x, Tensor) and self.x.requires_grad

    @cached_property
    def nonnegative(self) -> bool:
        """Whether no feature is negative, so that no cosine is."""
        return is_nonnegative(self.x)

    def dropout(self, p: float, training: bool) -> Signal:
        """The same rows with entries dropped; index structures are shared."""
        if not training or p == 0.0:
            return self
        pairs = self.pairs if self.is_sparse else None
        signal = Signal(dropout(self.x, p, training), self.layout, pairs)
        signal.__dict__['nonnegative'] = self.nonnegative
        return signal

    def rows(self, index: Tensor, layout: Layout) -> Signal:
        """The signal of chosen nodes (the anchors)."""
        return Signal(rows(self.x, index), layout)

    @cached_property
    def blocks(self) -> Features:
        """The features with a set of columns of its own for each graph."""
        if isinstance(self.x, SparseMatrix):
            return spread(self.x, self.layout)
        return self.x

    @cached_property
    def pairs(self) -> FeatureGram | None:
        """The co-occurring features, where the list is affordable."""
        if self._pairs is not None:
            return self._pairs
        blocks = self.blocks
        if isinstance(blocks, SparseMatrix) and FeatureGram.affordable(blocks.pattern):
            return FeatureGram(blocks.pattern)
        return None

    @cached_tensor
    def sq_norms(self) -> Tensor:
        """The squared norm of every row, of shape :obj:`[n]`."""
        ones = torch.ones(
            self.num_features, 1, dtype=self.x.dtype, device=self.x.device
        )
        return matmul(square(self.x), ones).squeeze(1)

    def t_matmul(self, dense: Tensor) -> Tensor:
        r""":math:`\mathbf{X}^{\top} \mathbf{F}` of each graph: :obj:`[B, d, f]`."""
        blocks = self.blocks
        if isinstance(blocks, SparseMatrix):
            out = blocks.t_matmul(dense)
            return out.view(self.layout.num_graphs, self.num_features, dense.size(1))
        if self.layout.is_ragged:
            parts = zip(*map(self.layout.split, (blocks, dense)), strict=True)
            return torch.stack([own.t() @ value for own, value in parts])
        padded = self.layout.pad(blocks)
        return padded.transpose(1, 2) @ self.layout.pad(dense)

    def to_dense(self) -> Tensor:
        """The features as a dense matrix."""
        return self.x.to_dense() if isinstance(self.x, SparseMatrix) else self.x

    # Gram matrices ------------------------------------------------------------------

    @property
    def keeps_gram(self) -> bool:
        """Whether the Gram matrix is small enough to be kept."""
        return self.layout.num_padded * self.layout.max_size <= _MAX_GRAM

    @cached_tensor
    def gram(self) -> Tensor:
        r""":math:`\mathbf{X} \mathbf{X}^{\top}` of each graph, padded:
        :obj:`[B, N, N]`.
        """
        layout = self.layout
        if not isinstance(self.x, SparseMatrix):
            padded = layout.pad(self.x)
            return padded @ padded.transpose(1, 2)
        size = layout.max_size
        gram = self.x.value.new_zeros(layout.num_graphs, size, size)
        for graph, n in enumerate(layout.sizes):
            for start in range(0, n, _ROW_BLOCK):
                stop = min(start + _ROW_BLOCK, n)
                gram[graph, start:stop, :n] = self._gram_block(graph, start, stop, 0, n)
        return gram

    def gram_tile(
        self, graph: int, top: int, bottom: int, left: int, right: int
    ) -> Tensor:
        """A rectangle of the Gram matrix of one graph; kept, if the matrix is small
        enough.
        """
        tile = (graph, top, bottom, left, right)
        if not self.keeps_gram:
            return self._gram_block(*tile)
        if tile not in self._gram_tiles:
            self._gram_tiles[tile] = self._gram_block(*tile).contiguous()
        return self._gram_tiles[tile]

    def _gram_block(
        self, graph: int, top: int, bottom: int, left: int, right: int
    ) -> Tensor:
        first = self.layout.ptr[graph]
        mine, others = (first + top, first + bottom), (first + left, first + right)
        if not isinstance(self.x, SparseMatrix):
            return self.x[slice(*mine)] @ self.x[slice(*others)].t()
        if bottom - top < right - left:  # The fewer rows become the dense matrix.
            few = self.x.row_range(*mine).to_dense()
            return self.x.row_range(*others).matmul(few.t()).t()
        few = self.x.row_range(*others).to_dense()
        return self.x.row_range(*mine).matmul(few.t())

    def _graph_rows(self, graph: int) -> SparseMatrix:
        assert isinstance(self.x, SparseMatrix)
        return self.x.row_range(self.layout.ptr[graph], self.layout.ptr[graph + 1])

    def gram_at(self, pattern: Pattern) -> Tensor:
        """The inner products of the rows at the places of a pattern."""
        layout = self.layout
        if self.keeps_gram:
            batch = layout.batch[pattern.row]
            offset = torch.tensor(layout.ptr, device=batch.device)[batch]
            return self.gram[batch, pattern.row - offset, pattern.col - offset]
        if not isinstance(self.x, SparseMatrix):
            return sddmm(pattern, self.x, self.x)
        value = self.x.value.new_empty(pattern.nnz)
        for graph, size in enumerate(layout.sizes):
            first = layout.ptr[graph]
            for start in range(0, size, _ROW_BLOCK):
                stop = min(start + _ROW_BLOCK, size)
                block = self._gram_block(graph, start, stop, 0, size)
                places = slice(
                    int(pattern.rowptr[first + start]),
                    int(pattern.rowptr[first + stop]),
                )
                row, col = pattern.row[places], pattern.col[places]
                value[places] = block[row - first - start, col - first]
        return value

    @cached_property
    def _pair_matrix(self) -> SparseMatrix:
        assert self.pairs is not None and isinstance(self.x, SparseMatrix)
        return self.pairs.matrix(self.x.value)

    def gram_energy(self, weight: Tensor, left: Tensor) -> Tensor:
        r"""For every graph :math:`\sum_p \sum_{k,l} a_{pk} \, (\mathbf{X}^{\top}
        \mathrm{diag}(\mathbf{c}_p) \mathbf{X})_{kl}^2`.

        Args:
            weight (torch.Tensor): Row weights c, of shape :obj:`[n, m]`.
            left (torch.Tensor): Feature weights a, of shape :obj:`[m, d]`.
        """
        if self.pairs is None:
            totals = [
                (grams.square().sum(2) * left).sum()
                for grams in self._graph_grams(weight)
            ]
            return torch.stack(totals)
        squares = self._pair_matrix.matmul(weight).square()  # [pairs, m]
        incidence = self.pairs.incidence
        if incidence.dtype != squares.dtype:
            incidence = incidence.with_value(incidence.value.to(squares.dtype))
        rows = incidence.matmul(squares)  # sums over l, for each k: [B * d, m]
        rows = rows.view(self.layout.num_graphs, self.num_features, -1)
        return (rows * left.t()).sum((1, 2))

    def gram_norm(self, weight: Tensor, left: Tensor) -> Tensor:
        r"""For every graph :math:`\sum_{p,q} \sum_{k,l} a_{pk} a_{ql} \,
        (\mathbf{X}^{\top} \mathrm{diag}(\mathbf{c}_p \odot \mathbf{c}_q)
        \mathbf{X})_{kl}^2`; the arguments are those of :meth:`gram_energy`.
        """
        heads = weight.size(1)
        p, q = torch.triu_indices(heads, heads, device=weight.device)
        times = torch.where(p == q, 1.0, 2.0).to(weight.dtype)
        weight = weight[:, p] * weight[:, q]
        if self.pairs is None:
            totals = []
            for grams in self._graph_grams(weight):
                half = torch.einsum('qkl,ql->qk', grams.square(), left[q])
                totals.append(((half * left[p]).sum(1) * times).sum())
            return torch.stack(totals)
        graph, near_index, far_index = self.pairs.places(self.num_features)
        squares = self._pair_matrix.matmul(weight).square()  # [pairs, Q]
        columns = squares.t().contiguous().unbind(0)
        near = left.index_select(1, near_index).unbind(0)
        far = left.index_select(1, far_index).unbind(0)
        total = torch.zeros_like(columns[0])
        for column, a, b, scale in zip(
            columns, p.tolist(), q.tolist(), times.tolist(), strict=True
        ):
            both = torch.addcmul(near[a] * far[b], far[a], near[b])
            total = torch.addcmul(total, both, column, value=scale)
        total = torch.where(near_index == far_index, 0.5 * total, total)
        if self.layout.num_graphs == 1:
            return total.sum(0, keepdim=True)
        return total.new_zeros(self.layout.num_graphs).index_add(0, graph, total)

    def _graph_grams(self, weight: Tensor):
        for graph in range(self.layout.num_graphs):
            first, last = self.layout.ptr[graph], self.layout.ptr[graph + 1]
            sparse = isinstance(self.x, SparseMatrix)
            x = self._graph_rows(graph) if sparse else self.x[first:last]  # type: ignore
            if self.requires_grad:
                c = weight[first:last].t().unsqueeze(-1)  # [Q, n, 1]
                yield x.t() @ (c * x)  # type: ignore[union-attr, operator]
            else:
                yield _WeightedGrams.apply(x, weight[first:last])  # [Q, d, d]
