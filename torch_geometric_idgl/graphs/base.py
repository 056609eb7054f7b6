r"""What IDGL asks of a graph.

Everything the algorithm does with a learned adjacency is one of a few questions: its
product with features, its degrees, its squared norm, its squared distance to another
graph, the smoothness of features on it, and its edges. A graph is therefore a linear
operator that answers them, and no model ever holds "a matrix".
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..checks import check_at_least
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout
from ..ops.sparse import Pattern

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ['Affinity', 'GraphOperator', 'Measures']

MAX_ENTRIES = 1 << 27  # of a dense form (512 MB of floats)
MAX_EDGES = 1 << 25
_COLUMN_BLOCK = 256


class GraphOperator(ABC):
    r"""A graph as a linear operator, block-diagonal over the graphs of a batch.

    Operators are immutable: a method never changes what another one answers.

    Attributes:
        rows: The receiving nodes.
        cols: The sending nodes, or anchors.
        dtype: The number type of the entries.
        product: The product with the message that all iterations share, where it is
            known.
    """

    rows: Nodes
    cols: Nodes
    dtype: torch.dtype
    product: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return self.rows.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.num_rows, self.cols.num_rows

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        r"""Message passing :math:`\mathbf{A} \mathbf{F}`."""

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        r""":math:`w \mathbf{A} \mathbf{F}` in a tensor that is nobody else's. Where it
        can be, the number is put to something smaller than the product, which is large
        at the size of ogbn-arxiv.
        """
        return weight * self.matmul(x)

    @property
    def slots(self) -> list[list[Tensor]]:
        """What tiled graphs within it hand to later products, each once; see
        :mod:`~torch_geometric_idgl.graphs.tiled`.
        """
        return []

    def multiplied(self, message: Tensor | None) -> Self:
        """The same graph, with its product with a message."""
        graph = copy.copy(self)
        graph.product = None if message is None else self.matmul(message)
        return graph

    def dropout(self, p: float, message: Tensor | None) -> GraphOperator:
        """The same graph with some of its sending nodes dropped, and its product with a
        message.
        """
        return DroppedGraph(self, p).multiplied(message)

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
        return torch.cat([block for _, block in self.column_blocks()], dim=1)

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
        for start, block in self.column_blocks():
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

    def ones(self) -> Tensor:
        """A column of ones, whose product is the degrees."""
        return torch.ones(self.num_nodes, 1, dtype=self.dtype, device=self.rows.device)

    def column_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Blocks of columns, made by products with parts of the identity."""
        if self.cols.spread:
            raise ValueError(
                'Expected a graph whose nodes are all in this process to export it '
                '(got one of several processes)'
            )
        total, device = self.cols.num_rows, self.cols.device
        for start in range(0, max(total, 1), _COLUMN_BLOCK):
            stop = min(start + _COLUMN_BLOCK, total)
            eye = torch.zeros(total, stop - start, dtype=self.dtype, device=device)
            eye[start:stop].fill_diagonal_(1.0)
            yield start, self.matmul(eye)

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f'{self.__class__.__name__}({rows}, {cols})'


class DroppedGraph(GraphOperator):
    """A graph some of whose sending nodes are dropped, and the others scaled up.

    Args:
        graph (GraphOperator): The graph.
        p (float): The probability to drop a node.
    """

    def __init__(self, graph: GraphOperator, p: float) -> None:
        self.rows, self.cols, self.dtype = graph.rows, graph.cols, graph.dtype
        self.graph = graph
        self.mask = dropout(graph.ones(), p)

    @property
    def slots(self) -> list[list[Tensor]]:
        return self.graph.slots

    def matmul(self, x: Tensor) -> Tensor:
        return self.graph.matmul(self.mask * x)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        return self.graph.weighted_matmul(self.mask * x, weight)


class Measures(NamedTuple):
    r"""What :meth:`Affinity.measure` has found out; :obj:`None` where not asked."""

    graph: Affinity  # the matrix, for further products
    product: Tensor | None = None  # A F
    t_product: Tensor | None = None  # A^T H
    sq_norm: Tensor | None = None  # |A|^2 of each graph
    gram_inner: Tensor | None = None  # <A, X X^T> of each graph
    sq_dist: Tensor | None = None  # |A - A'|^2 of each graph, without gradient
    # Whether |A'|^2 has still to be added to the distance: it is expensive, and often
    # stopping can be decided without.
    lacks_norm: bool = False


class Affinity(GraphOperator):
    r"""A learned, non-negative similarity matrix: nodes by nodes
    (:math:`\mathbf{A}`), or nodes by anchors (:math:`\mathbf{R}`).

    Values that are sums over a graph have shape :obj:`[B]`, one for each graph.
    """

    symmetric: bool = False
    inner_cost: int = 2  # Of two matrices the one with the lower cost takes `inner`.
    has_expensive_norm: bool = False

    @abstractmethod
    def t_matmul(self, x: Tensor) -> Tensor:
        r""":math:`\mathbf{A}^{\top} \mathbf{F}`."""

    @abstractmethod
    def sq_norm(self) -> Tensor:
        r""":math:`\|\mathbf{A}\|_F^2` of each graph."""

    def sq_norm_bounds(self, degree: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bounds of :meth:`sq_norm`, from cheap ones to ever closer ones, at last the
        norm itself twice.

        Args:
            degree (torch.Tensor): The sums of the rows.
        """
        norm = self.sq_norm()
        yield norm, norm

    def gram_inner(self, features: Features) -> Tensor:
        r""":math:`\langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle` of each
        graph.
        """
        x = features.to_dense()
        return self.rows.sum((self.matmul(x) * x).sum(1))

    def light(self) -> Affinity:
        """The same matrix without entries that can be made again."""
        return self

    def values_at(self, pattern: Pattern) -> Tensor:
        """The entries at the places of a pattern."""
        value = torch.zeros(pattern.nnz, dtype=self.dtype, device=self.rows.device)
        for start, block in self.column_blocks():
            column = pattern.col - start
            here = ((column >= 0) & (column < block.size(1))).nonzero().squeeze(1)
            found = block[pattern.row[here], column[here]]
            value = value.index_put((here,), found)
        return value

    def inner(self, other: Affinity) -> Tensor:
        r""":math:`\langle \mathbf{A}, \mathbf{A}' \rangle_F` of each graph, without
        gradient.
        """
        total = torch.zeros(self.num_nodes, dtype=self.dtype, device=self.rows.device)
        blocks = zip(self.column_blocks(), other.column_blocks(), strict=True)
        for (_, mine), (_, others) in blocks:
            total += (mine * others).sum(1)
        return self.rows.sum(total)

    @torch.no_grad()
    def sq_dist(self, other: Affinity) -> Tensor:
        r""":math:`\|\mathbf{A} - \mathbf{A}'\|_F^2` of each graph, without gradient:
        only stopping asks for it.
        """
        return (self._sq_dist_but_norm(other) + other.sq_norm()).clamp(min=0.0)

    @torch.no_grad()
    def _sq_dist_but_norm(self, other: Affinity) -> Tensor:
        cheaper = self.inner_cost <= other.inner_cost
        inner = self.inner(other) if cheaper else other.inner(self)
        return self.sq_norm() - 2.0 * inner

    def measure(
        self,
        x: Tensor | None = None,
        t_x: Tensor | None = None,
        *,
        features: Features | None = None,
        previous: Affinity | None = None,
        norm: bool = False,
        later: tuple[int, ...] = (),
        whole: bool = False,
    ) -> Measures:
        r"""Answers all that an iteration asks of a learned matrix, and only that. A
        matrix that recomputes its entries does it in one walk over them.

        Args:
            x (torch.Tensor, optional): For :math:`\mathbf{A} \mathbf{F}`.
            t_x (torch.Tensor, optional): For :math:`\mathbf{A}^{\top} \mathbf{H}`.
            features (Features, optional): For :math:`\langle \mathbf{A}, \mathbf{X}
                \mathbf{X}^{\top} \rangle`.
            previous (Affinity, optional): For :math:`\|\mathbf{A} -
                \mathbf{A}'\|_F^2`.
            norm (bool, optional): For :math:`\|\mathbf{A}\|_F^2` with gradient.
            later (Tuple[int], optional): The numbers of columns of products that will
                follow, which can then share one backward pass with these.
            whole (bool, optional): Whether the graph of the anchors will follow.
        """
        dist, lacks_norm = None, False
        if previous is not None:
            lacks_norm = previous.has_expensive_norm
            dist = (self._sq_dist_but_norm if lacks_norm else self.sq_dist)(previous)
        return Measures(
            self,
            None if x is None else self.matmul(x),
            None if t_x is None else self.t_matmul(t_x),
            self.sq_norm() if norm else None,
            None if features is None else self.gram_inner(features),
            dist,
            lacks_norm,
        )
