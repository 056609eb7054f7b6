r"""What IDGL asks of a graph.

Everything the algorithm does with a learned adjacency is one of a few questions: its
product with features, its degrees, its squared norm, its squared distance to another
graph, the smoothness of features on it, and its edges. A graph is therefore a linear
operator that answers them, and no model ever holds "a matrix".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_at_least
from ..ops.caching import LastTensor, cached_tensor
from ..ops.layout import Layout
from ..ops.sparse import Pattern
from .signal import Signal

__all__ = ['Affinity', 'Change', 'GraphOperator', 'Message']

MAX_ENTRIES = 1 << 27  # of a dense form (512 MB of floats)
MAX_EDGES = 1 << 25
_COLUMN_BLOCK = 256


class Change(NamedTuple):
    r"""A squared distance of two graphs, of which the norm of one may be still missing
    because it is expensive and often not needed.
    """

    known: Tensor
    missing: Affinity | None = None

    def exact(self) -> Tensor:
        """The squared distance of each graph."""
        if self.missing is None:
            return self.known
        return (self.known + self.missing.sq_norm()).clamp(min=0.0)

    def bounds(self, effort: int = 0) -> tuple[Tensor, Tensor]:
        """A lower and an upper bound of it, as :meth:`Affinity.sq_norm_bounds`."""
        if self.missing is None:
            return self.known, self.known
        lower, upper = self.missing.sq_norm_bounds(effort)
        return self.known + lower, self.known + upper


class Message(NamedTuple):
    """Features that every graph is multiplied with, alone and beside a column of ones,
    whose product is the degrees.
    """

    x: Tensor
    with_ones: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Message:
        return cls(x, torch.cat([x, x.new_ones(x.size(0), 1)], dim=1))


class GraphOperator(ABC):
    r"""A graph as a linear operator, block-diagonal over the graphs of a batch.

    Args:
        rows (Layout): The graphs the rows (receiving nodes) belong to.
        cols (Layout): The graphs the columns (sending nodes or anchors) belong to.
    """

    def __init__(self, rows: Layout, cols: Layout) -> None:
        self.rows = rows
        self.cols = cols

    @property
    def num_nodes(self) -> int:
        return self.rows.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.num_rows, self.cols.num_rows

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The number type of the entries."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        r"""Message passing :math:`\mathbf{A} \mathbf{F}`."""

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        r""":math:`w \mathbf{A} \mathbf{F}` in a tensor that is nobody else's. Where it
        can be, the number is put to something smaller than the product.
        """
        return weight * self.matmul(x)

    def row_sum(self) -> Tensor:
        r"""The degrees :math:`\mathbf{A} \mathbf{1}`, of shape :obj:`[n]`."""
        return self._row_sum

    @cached_tensor
    def _row_sum(self) -> Tensor:
        return self.matmul(self._ones(self.cols)).squeeze(1)

    def to_dense(self, max_entries: int = MAX_ENTRIES) -> Tensor:
        """The matrix itself.

        Args:
            max_entries (int, optional): Raise instead of forming a matrix with more
                entries. (default: :obj:`134217728`)
        """
        rows, cols = self.shape
        if rows * cols > max_entries:
            raise ValueError(
                f'Expected a graph with at most {max_entries:,} entries to make it '
                f'dense (got {rows:,} x {cols:,} = {rows * cols:,}); raise '
                f"'max_entries', or use 'to_edges'"
            )
        return self._dense()

    def to_edges(
        self, max_edges: int = MAX_EDGES, min_weight: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        r"""The graph as :obj:`edge_index` and :obj:`edge_weight`.

        Follows PyG's direction: the entry :math:`A_{ij}` is an edge from source
        :math:`j` to target :math:`i`.

        Args:
            max_edges (int, optional): Raise instead of returning more edges.
                (default: :obj:`33554432`)
            min_weight (float, optional): Leave out edges whose weight is not larger.
                (default: :obj:`0.`)
        """
        check_at_least('min_weight', min_weight, 0)
        sources, targets, weights, total = [], [], [], 0
        for start, block in self._column_blocks():
            target, source = (block > min_weight).nonzero(as_tuple=True)
            total += target.numel()
            if total > max_edges:
                raise ValueError(
                    f'Expected at most {max_edges:,} edges to export (got more, with '
                    f'{self.shape[1] - start:,} of {self.shape[1]:,} columns still to '
                    f"come); raise 'max_edges' or 'min_weight', or learn a sparser "
                    f"graph ('epsilon', 'top_k')"
                )
            weights.append(block[target, source])
            sources.append(source + start)
            targets.append(target)
        edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
        return edge_index, torch.cat(weights)

    def _ones(self, layout: Layout) -> Tensor:
        return torch.ones(layout.num_rows, 1, dtype=self.dtype, device=layout.device)

    def _column_blocks(self):
        """Blocks of columns, made by products with parts of the identity."""
        total = self.cols.num_rows
        for start in range(0, max(total, 1), _COLUMN_BLOCK):
            stop = min(start + _COLUMN_BLOCK, total)
            eye = torch.zeros(
                total, stop - start, dtype=self.dtype, device=self.cols.device
            )
            eye[start:stop].fill_diagonal_(1.0)
            yield start, self.matmul(eye)

    def _dense(self) -> Tensor:
        return torch.cat([block for _, block in self._column_blocks()], dim=1)

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f'{self.__class__.__name__}({rows}, {cols})'


class Affinity(GraphOperator):
    r"""A learned, non-negative similarity matrix: nodes by nodes
    (:math:`\mathbf{A}`), or nodes by anchors (:math:`\mathbf{R}`).

    Values that are sums over a graph have shape :obj:`[B]`, one for each graph.
    """

    symmetric: bool = False
    inner_rank: int = 2  # which of two operators takes their inner product: the lower

    def __init__(self, rows: Layout, cols: Layout) -> None:
        super().__init__(rows, cols)
        self._normal = LastTensor()

    @abstractmethod
    def t_matmul(self, x: Tensor) -> Tensor:
        r""":math:`\mathbf{A}^{\top} \mathbf{F}`."""

    @abstractmethod
    def sq_norm(self) -> Tensor:
        r""":math:`\|\mathbf{A}\|_F^2` of each graph."""

    def sq_norm_bounds(self, effort: int = 0) -> tuple[Tensor, Tensor]:
        """A lower and an upper bound of :meth:`sq_norm` that cost less, if any do. More
        effort brings them closer, and at last together.
        """
        norm = self.sq_norm()
        return norm, norm

    def col_sum(self) -> Tensor:
        r""":math:`\mathbf{A}^{\top} \mathbf{1}`."""
        return self.row_sum() if self.symmetric else self._col_sum

    @cached_tensor
    def _col_sum(self) -> Tensor:
        return self.t_matmul(self._ones(self.rows)).squeeze(1)

    def degree(self) -> Tensor:
        """The degrees, as the regulariser sees them: :meth:`row_sum`."""
        return self.row_sum()

    def values_at(self, pattern: Pattern) -> Tensor:
        """The entries at the places of a pattern."""
        value = torch.zeros(pattern.nnz, dtype=self.dtype, device=self.rows.device)
        for start, block in self._column_blocks():
            column = pattern.col - start
            here = ((column >= 0) & (column < block.size(1))).nonzero().squeeze(1)
            found = block[pattern.row[here], column[here]]
            value = value.index_put((here,), found)
        return value

    def inner(self, other: Affinity) -> Tensor:
        r""":math:`\langle \mathbf{A}, \mathbf{A}' \rangle_F` of each graph."""
        if other.inner_rank < self.inner_rank:
            return other.inner(self)
        total = torch.zeros(
            self.rows.num_rows, dtype=self.dtype, device=self.rows.device
        )
        blocks = zip(self._column_blocks(), other._column_blocks(), strict=True)
        for (_, mine), (_, others) in blocks:
            total = total + (mine * others).sum(1)
        return self.rows.sum(total)

    def sq_dist(self, other: Affinity) -> Tensor:
        r""":math:`\|\mathbf{A} - \mathbf{A}'\|_F^2` of each graph."""
        norms = self.sq_norm() + other.sq_norm()
        return (norms - 2.0 * self.inner(other)).clamp(min=0.0)

    def change_from(self, previous: Affinity) -> Change:
        """The squared distance to the previous graph."""
        return Change(self.sq_dist(previous))

    def gram_inner(self, signal: Signal) -> Tensor:
        r""":math:`\langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle` of each
        graph.
        """
        x = signal.to_dense()
        return self.rows.sum((self.matmul(x) * x).sum(1))

    def dirichlet_energy(self, signal: Signal) -> Tensor:
        r"""The smoothness of the features on the graph, of each graph (Eq. 10):

        .. math::
            \frac{1}{2} \sum_{i,j} A_{ij} \|\mathbf{x}_i - \mathbf{x}_j\|^2 =
            \sum_i \frac{d_i + d'_i}{2} \|\mathbf{x}_i\|^2 -
            \langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle

        with row sums :math:`d_i` and column sums :math:`d'_i`, and equal to
        :math:`\mathrm{tr}(\mathbf{X}^{\top} \mathbf{L} \mathbf{X})` when symmetric.
        """
        degree = self.row_sum()
        if not self.symmetric:
            degree = 0.5 * (degree + self.col_sum())
        return self.rows.sum(degree * signal.sq_norms) - self.gram_inner(signal)

    def observe(
        self, message: Message, signal: Signal | None, previous: Affinity | None
    ) -> None:
        r"""Announce what will be asked: :math:`\mathbf{A} \mathbf{F}` with this
        :math:`\mathbf{F}`, the degrees, the norm, the smoothness, the distance to the
        previous graph. Graphs that recompute their entries answer all in one sweep and
        keep the answers; for the others there is nothing to gain.
        """

    # The anchor graph B = R^T diag(c) R of a node-anchor affinity ---------------------

    def normal_matrix(self, weight: Tensor) -> Tensor:
        r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}` of each
        graph, padded: :obj:`[B, S, S]`. The last one is kept.
        """
        return self._normal.get(weight, self._make_normal_matrix)

    def normal_sq_norm(self, weight: Tensor) -> Tensor:
        """The squared norm of :meth:`normal_matrix`, of each graph."""
        return self.normal_matrix(weight).square().sum((1, 2))

    def normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        r""":math:`\langle \mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R},
        \mathbf{X}_U \mathbf{X}_U^{\top} \rangle =
        \|\mathrm{diag}(\mathbf{c})^{1/2} \mathbf{R} \mathbf{X}_U\|_F^2`: with the
        normal matrix, if it is known already.
        """
        if self._normal.knows(weight) and not signal.requires_grad:
            return (self.normal_matrix(weight) * signal.gram).sum((1, 2))
        return self._make_normal_gram_inner(weight, signal)

    def _make_normal_matrix(self, weight: Tensor) -> Tensor:
        dense = self.rows.pad(self._dense_columns())
        weighted = dense * self.rows.pad(weight).unsqueeze(-1)
        return weighted.transpose(1, 2) @ dense

    def _make_normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        smooth = self.matmul(signal.to_dense())
        return self.rows.sum(weight * smooth.square().sum(1))

    def _dense_columns(self) -> Tensor:
        """Entries with the columns of each graph moved to the front: :obj:`[n, S]`."""
        dense = self._dense()
        if self.cols.num_graphs == 1:
            return dense
        start = torch.tensor(self.cols.ptr[:-1], device=dense.device)[self.rows.batch]
        size = torch.tensor(self.cols.sizes, device=dense.device)[self.rows.batch]
        place = torch.arange(self.cols.max_size, device=dense.device)
        column = (start.unsqueeze(1) + place).clamp(max=max(dense.size(1) - 1, 0))
        return dense.gather(1, column) * (place < size.unsqueeze(1))
