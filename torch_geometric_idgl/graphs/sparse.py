"""The graph that holds the entries which survive sparsification."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_at_least
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout
from ..ops.sparse import Pattern, SparseMatrix
from .base import MAX_EDGES, Affinity
from .dense import DenseGraph
from .tiled import Scores, tiles

__all__ = ['SparseGraph']


class SparseGraph(Affinity):
    r"""An affinity that holds only its non-zero entries: pays when few survive
    :math:`\varepsilon` or top-k, and serves as :math:`\mathbf{L}^{(0)}`.

    Gradients reach the entries, and nothing of size :math:`n^2` is formed in backward.

    Args:
        pattern (Pattern): Where the entries are.
        value (torch.Tensor): The entries, of shape :obj:`[nnz]`.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
        symmetric (bool, optional): Whether the matrix is symmetric.
            (default: :obj:`False`)
    """

    inner_cost = 1

    def __init__(
        self,
        pattern: Pattern,
        value: Tensor,
        rows: Nodes,
        cols: Nodes,
        symmetric: bool = False,
    ) -> None:
        self.rows, self.cols, self.dtype = rows, cols, value.dtype
        self.pattern = pattern
        self.value = value
        self.matrix = SparseMatrix(pattern, value)
        self.symmetric = symmetric

    @classmethod
    def from_scores(cls, scores: Scores) -> SparseGraph:
        """The survivors of a sparsification, found one row tile after another."""
        rows, cols = scores.rows, scores.cols
        found_row, found_col, found_value = [], [], []
        with torch.no_grad():
            for tile in tiles(rows, cols):
                mine, others = scores.slices(tile)
                block = scores.block(tile)
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
        return cls(pattern, scores.at(pattern, value), rows, cols, scores.symmetric)

    def with_value(self, value: Tensor) -> SparseGraph:
        """The same edges with other weights."""
        return SparseGraph(self.pattern, value, self.rows, self.cols)

    def dropout(self, p: float, message: Tensor | None) -> SparseGraph:
        """The same graph with some of its entries dropped."""
        return self.with_value(dropout(self.value, p)).multiplied(message)

    def to_matrix(self) -> DenseGraph:
        """The same graph with all its entries, of a single graph."""
        value = self.matrix.to_dense().unsqueeze(0)
        return DenseGraph(value, self.rows, self.cols, self.symmetric)

    def of_nodes(self, index: Tensor, nodes: Nodes) -> SparseGraph:
        """The graph of some of the nodes, which has all edges that lead to them."""
        matrix = self.matrix.rows(index)
        place = torch.empty(self.num_nodes, dtype=torch.long, device=index.device)
        place[index] = torch.arange(index.numel(), device=index.device)
        pattern = matrix.pattern
        pattern = Pattern(pattern.rowptr, place[pattern.col], index.numel())
        return SparseGraph(pattern, matrix.value, nodes, nodes)

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(x)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        return SparseMatrix(self.pattern, weight * self.value).matmul(x)

    def t_matmul(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(x) if self.symmetric else self.matrix.t_matmul(x)

    def sq_norm(self) -> Tensor:
        return self._graph_sum(self.value.square())

    def _graph_sum(self, entries: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:
            return entries.sum(0, keepdim=True)
        graph = self.rows.batch[self.pattern.row]
        return entries.new_zeros(self.rows.num_graphs).index_add(0, graph, entries)

    def inner(self, other: Affinity) -> Tensor:
        return self._graph_sum(self.value * other.values_at(self.pattern))

    @torch.no_grad()
    def sq_dist(self, other: Affinity) -> Tensor:
        if not isinstance(other, SparseGraph):
            return super().sq_dist(other)
        patterns = self.pattern, other.pattern
        key = torch.cat([p.row * p.num_cols + p.col for p in patterns])
        signed = torch.cat([self.value, -other.value])
        place, inverse = torch.unique(key, return_inverse=True)
        gap = signed.new_zeros(place.numel()).index_add_(0, inverse, signed).square_()
        if self.rows.num_graphs == 1:
            return gap.sum(0, keepdim=True)
        graph = self.rows.batch[place // self.pattern.num_cols]
        return gap.new_zeros(self.rows.num_graphs).index_add_(0, graph, gap)

    def gram_inner(self, features: Features) -> Tensor:
        return self._graph_sum(self.value * features.gram_at(self.pattern))

    def values_at(self, pattern: Pattern) -> Tensor:
        mine = self.pattern.row * self.pattern.num_cols + self.pattern.col
        wanted = pattern.row * pattern.num_cols + pattern.col
        place = torch.searchsorted(mine, wanted).clamp(max=max(mine.numel() - 1, 0))
        if mine.numel() == 0:
            return self.value.new_zeros(wanted.numel())
        return torch.where(mine[place] == wanted, self.value[place], 0.0)

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
