r"""What messages are passed over: a learned graph with its rows normalised, the mixture
with the initial graph (Eq. 3 and 9), and the graphs of a batch side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout, safe_reciprocal
from .base import MAX_EDGES, Affinity, GraphOperator

__all__ = ['BlockGraph', 'Mixture', 'NodeGraph']


class NodeGraph(GraphOperator):
    r"""A learned graph :math:`\mathbf{A}` over which messages are passed as
    :math:`\mathrm{f}(\mathbf{A})_{ij} = A_{ij} / \sum_j A_{ij}` (empty rows stay
    empty), and which is regularised as it is.

    :class:`~torch_geometric_idgl.graphs.AnchorGraph` has the same constructor and
    attributes, so one loop serves both.

    Args:
        affinity (Affinity): :math:`\mathbf{A}`.
        message (torch.Tensor, optional): What the first layer multiplies it with (if
            known), and a column of ones, whose product is the degrees.
        features (Features, optional): The features whose smoothness is asked for.
        previous (NodeGraph, optional): The graph before, whose distance is asked for.
        norm (bool): Whether the squared norm is asked for.
        later (Tuple[int]): The numbers of columns of products that will follow.
        drop (float): The probability to drop a sending node from products (not from
            what is regularised), after normalising.

    Attributes:
        affinity: The learned matrix, not normalised.
        mask: Which sending nodes are dropped, or nothing.
        product: :math:`\mathrm{f}(\mathbf{A}) \mathbf{F}` with the message (with what
            is left of it, if nodes are dropped), or nothing.
        degree: The degrees :math:`\mathbf{A} \mathbf{1}`.
        energy: :math:`\frac{1}{2} \sum_{i,j} A_{ij} \|\mathbf{x}_i - \mathbf{x}_j\|^2`
            of each graph (Eq. 10), or nothing.
        sq_norm: :math:`\|\mathbf{A}\|_F^2` of each graph, or nothing.
        sq_dist: The squared distance to the previous graph, or nothing.
        lacks_norm: Whether the norm of the previous graph is still to be added to it.
    """

    affinity: Affinity
    energy: Any
    sq_norm: Any
    sq_dist: Any
    own_norm: Any = None  # its change is compared with the norm of the first graph

    def __init__(
        self,
        affinity: Affinity,
        message: Tensor | None = None,
        features: Features | None = None,
        previous: NodeGraph | None = None,
        norm: bool = False,
        later: tuple[int, ...] = (),
        drop: float = 0.0,
    ) -> None:
        self.rows, self.cols, self.dtype = affinity.rows, affinity.cols, affinity.dtype
        message = self.ones() if message is None else message
        self.mask = None
        if drop > 0:
            self.mask = dropout(self.ones(), drop)
            sent, ones = message[:, :-1], message[:, -1:]
            message = torch.cat([self.mask * sent, ones], dim=1)
        found = affinity.measure(
            message,
            None if affinity.symmetric or features is None else message[:, -1:],
            features=features,
            previous=None if previous is None else previous.affinity,
            norm=norm,
            later=later,
        )
        width = message.size(1) - 1
        product, degree = found.product.split((width, 1), dim=1)  # type: ignore
        self.affinity = found.graph
        self.degree = degree.squeeze(1)
        self.scale = safe_reciprocal(degree)
        if width > 0:
            self.product = self.scale * product
        self.sq_norm = found.sq_norm
        self.sq_dist = found.sq_dist
        self.lacks_norm = found.lacks_norm
        self.energy = None
        if features is not None:
            both = self.degree  # row sums, or their mean with column sums
            if not affinity.symmetric:
                both = 0.5 * (both + found.t_product[:, 0])  # type: ignore[index]
            self.energy = self.rows.sum(both * features.sq_norms) - found.gram_inner  # type: ignore

    @property
    def slots(self) -> list[list[Tensor]]:
        return self.affinity.slots

    def matmul(self, x: Tensor) -> Tensor:
        return self.weighted_matmul(x, 1.0)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        scale = self.scale if weight == 1.0 else weight * self.scale
        x = x if self.mask is None else self.mask * x
        return scale * self.affinity.matmul(x)


class Mixture(GraphOperator):
    r""":math:`\sum_i w_i \mathbf{A}_i`; sums within the sum are taken apart.

    Args:
        *terms (Tuple[float, GraphOperator]): Weights and graphs.
    """

    def __init__(self, *terms: tuple[float, GraphOperator]) -> None:
        _, first = terms[0]
        self.rows, self.cols, self.dtype = first.rows, first.cols, first.dtype
        merged: dict[int, tuple[float, GraphOperator]] = {}
        product, known = None, True
        for weight, graph in terms:
            parts = graph.terms if isinstance(graph, Mixture) else [(1.0, graph)]
            for own, part in parts:  # A graph that comes twice is multiplied once.
                before, _ = merged.get(id(part), (0.0, part))
                merged[id(part)] = (before + weight * own, part)
            if graph.product is None:
                known = False
            elif product is None:
                product = weight * graph.product
            else:
                product = product.add(graph.product, alpha=weight)
        self.terms: list[tuple[float, GraphOperator]] = list(merged.values())
        self.product = product if known else None

    @property
    def slots(self) -> list[list[Tensor]]:
        return [slots for _, graph in self.terms for slots in graph.slots]

    def matmul(self, x: Tensor) -> Tensor:
        (weight, graph), *rest = self.terms
        total = graph.weighted_matmul(x, weight)
        for weight, graph in rest:
            total = total.add_(graph.weighted_matmul(x, weight))
        return total


class BlockGraph(Affinity):
    r"""A block-diagonal matrix, whose blocks are operators of any kind.

    Args:
        blocks (Sequence[GraphOperator]): The blocks, of one or several graphs each.
        graphs (Sequence[Sequence[int]]): The graphs of each block.
        rows (Nodes): The nodes of the rows, those of empty graphs among them.
        cols (Nodes): The nodes of the columns.
    """

    def __init__(
        self,
        blocks: Sequence[GraphOperator],
        graphs: Sequence[Sequence[int]],
        rows: Nodes,
        cols: Nodes,
    ) -> None:
        self.rows, self.cols, self.dtype = rows, cols, blocks[0].dtype
        self.blocks = blocks
        self.graphs = graphs
        self.row_index = [rows.rows_of(own) for own in graphs]
        self.col_index = [cols.rows_of(own) for own in graphs]

    def matmul(self, x: Tensor) -> Tensor:
        parts = [
            block.matmul(x[col])
            for block, col in zip(self.blocks, self.col_index, strict=True)
        ]
        return x.new_empty(self.shape[0], x.size(1)).index_copy(
            0, torch.cat(self.row_index), torch.cat(parts)
        )

    def t_matmul(self, x: Tensor) -> Tensor:
        blocks: Sequence[Any] = self.blocks
        parts = [
            block.t_matmul(x[row])
            for block, row in zip(blocks, self.row_index, strict=True)
        ]
        return x.new_empty(self.shape[1], x.size(1)).index_copy(
            0, torch.cat(self.col_index), torch.cat(parts)
        )

    def sq_norm(self) -> Tensor:
        blocks: Sequence[Any] = self.blocks
        parts = torch.cat([block.sq_norm() for block in blocks])
        place = torch.tensor(list(chain(*self.graphs)), device=parts.device)
        return parts.new_zeros(self.rows.num_graphs).index_copy(0, place, parts)

    def to_edges(
        self, max_edges: int = MAX_EDGES, min_weight: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        indices, weights, total = [], [], 0
        for block, row, col in zip(
            self.blocks, self.row_index, self.col_index, strict=True
        ):
            (source, target), weight = block.to_edges(max_edges, min_weight)
            indices.append(torch.stack([col[source], row[target]]))
            weights.append(weight)
            total += weight.numel()
            if total > max_edges:
                raise ValueError(
                    f'Expected at most {max_edges:,} edges to export (got {total:,} of '
                    f"some graphs of the batch); raise 'max_edges' or 'min_weight', or "
                    f"learn a sparser graph ('epsilon', 'top_k')"
                )
        return torch.cat(indices, dim=1), torch.cat(weights)
