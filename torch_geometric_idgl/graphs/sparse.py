"""The graph that holds the entries which survive sparsification."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..checks import check_at_least
from ..ops.autograd import first_order
from ..ops.layout import Layout
from ..ops.sparse import Pattern, SparseMatrix
from .base import MAX_EDGES, Affinity
from .scores import Scores, tiles
from .signal import Signal
from .sparsify import sparsify

__all__ = ['SparseGraph']


class _NormalMatrix(torch.autograd.Function):
    r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}` of a sparse
    :math:`\mathbf{R}`, one product with it forwards and one backwards.
    """

    @staticmethod
    def forward(ctx, matrix, value, weight):
        ctx.matrix = matrix
        ctx.save_for_backward(value, weight)
        return matrix.scaled_t_matmul(weight, matrix.to_dense())

    @staticmethod
    @first_order
    def backward(ctx, grad):
        value, weight = ctx.saved_tensors
        row, col = ctx.matrix.pattern.row, ctx.matrix.pattern.col
        product = ctx.matrix.matmul(grad + grad.t())[row, col]
        grad_weight = torch.zeros_like(weight).index_add_(0, row, product * value)
        return None, product * weight[row], 0.5 * grad_weight


class SparseGraph(Affinity):
    r"""An affinity that holds only its non-zero entries: pays when few survive
    :math:`\varepsilon` or top-k, and serves as :math:`\mathbf{L}^{(0)}`.

    Gradients reach the entries, and nothing of size :math:`n^2` is formed in backward.

    Args:
        pattern (Pattern): Where the entries are.
        value (torch.Tensor): The entries, of shape :obj:`[nnz]`.
        rows (Layout): The graphs of the rows.
        cols (Layout): The graphs of the columns.
        symmetric (bool, optional): Whether the matrix is symmetric.
            (default: :obj:`False`)
    """

    inner_rank = 1

    def __init__(
        self,
        pattern: Pattern,
        value: Tensor,
        rows: Layout,
        cols: Layout,
        symmetric: bool = False,
    ) -> None:
        super().__init__(rows, cols)
        self.pattern = pattern
        self.value = value
        self.symmetric = symmetric
        self._weighted: dict[tuple[float, bool], SparseMatrix] = {}

    @classmethod
    def from_scores(
        cls, scores: Scores, epsilon: float, top_k: int | None
    ) -> SparseGraph:
        """The survivors of a sparsification, found one row tile after another."""
        rows, cols = scores.rows, scores.cols
        found_row, found_col, found_value = [], [], []
        with torch.no_grad():
            for tile in tiles(rows, cols):
                mine, others = scores.slices(tile)
                block = sparsify(scores.block(tile, scores.leaves), epsilon, top_k)
                row, col = block.nonzero(as_tuple=True)
                found_value.append(block[row, col])
                found_row.append(row + mine.start)
                found_col.append(col + others.start)
            empty = torch.zeros(0, dtype=torch.long, device=rows.device)
            row = torch.cat([empty, *found_row])
            col = torch.cat([empty, *found_col])
            value = torch.cat([scores.leaves[0].new_zeros(0), *found_value])
            shape = (rows.num_rows, cols.num_rows)
            pattern = Pattern.from_sorted(row, col, shape)
        value = scores.at(pattern, value)
        symmetric = scores.symmetric and top_k is None
        return cls(pattern, value, rows, cols, symmetric)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def with_value(self, value: Tensor) -> SparseGraph:
        """The same edges with other weights."""
        return SparseGraph(self.pattern, value, self.rows, self.cols)

    @cached_property
    def _matrix(self) -> SparseMatrix:
        return SparseMatrix(self.pattern, self.value)

    def matmul(self, x: Tensor) -> Tensor:
        return self._matrix.matmul(x)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        key = (weight, torch.is_grad_enabled())
        if key not in self._weighted:
            self._weighted[key] = SparseMatrix(self.pattern, weight * self.value)
        return self._weighted[key].matmul(x)

    def t_matmul(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return self.matmul(x)
        return self._matrix.t_matmul(x)

    def sq_norm(self) -> Tensor:
        return self._graph_sum(self.value.square())

    def _graph_sum(self, entries: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:
            return entries.sum(0, keepdim=True)
        graph = self.rows.batch[self.pattern.row]
        return entries.new_zeros(self.rows.num_graphs).index_add(0, graph, entries)

    def inner(self, other: Affinity) -> Tensor:
        if other.inner_rank < self.inner_rank:
            return other.inner(self)
        return self._graph_sum(self.value * other.values_at(self.pattern))

    def _keys(self) -> Tensor:
        return self.pattern.row * self.pattern.num_cols + self.pattern.col

    def sq_dist(self, other: Affinity) -> Tensor:
        if not isinstance(other, SparseGraph):
            return super().sq_dist(other)
        key = torch.cat([self._keys(), other._keys()])
        signed = torch.cat([self.value, -other.value])
        place, inverse = torch.unique(key, return_inverse=True)
        gap = signed.new_zeros(place.numel()).index_add(0, inverse, signed)
        if self.rows.num_graphs == 1:
            return gap.square().sum(0, keepdim=True)
        graph = self.rows.batch[place // self.pattern.num_cols]
        total = gap.new_zeros(self.rows.num_graphs)
        return total.index_add(0, graph, gap.square())

    def gram_inner(self, signal: Signal) -> Tensor:
        return self._graph_sum(self.value * signal.gram_at(self.pattern))

    def _make_normal_matrix(self, weight: Tensor) -> Tensor:
        if self.rows.num_graphs > 1:
            return super()._make_normal_matrix(weight)
        return _NormalMatrix.apply(self._matrix, self.value, weight).unsqueeze(0)

    def _make_normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        one_graph = self.rows.num_graphs == 1 and not signal.requires_grad
        if one_graph and self.shape[1] <= signal.num_features:
            return (self.normal_matrix(weight) * signal.gram).sum((1, 2))
        return super()._make_normal_gram_inner(weight, signal)

    def to_edges(
        self, max_edges: int = MAX_EDGES, min_weight: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        check_at_least('min_weight', min_weight, 0)
        keep = self.value > min_weight
        count = int(keep.sum())
        if count > max_edges:
            raise ValueError(
                f'Expected at most {max_edges:,} edges to export (got {count:,}); '
                f"raise 'max_edges' or 'min_weight', or learn a sparser graph "
                f"('epsilon', 'top_k')"
            )
        edge_index = torch.stack([self.pattern.col[keep], self.pattern.row[keep]])
        return edge_index, self.value[keep]

    def _dense(self) -> Tensor:
        dense = self.value.new_zeros(self.shape)
        index = (self.pattern.row, self.pattern.col)
        return dense.index_put(index, self.value, accumulate=True)
