r"""Graphs made of graphs: a weighted sum (Eq. 3 and 9), and the graphs of a batch that
were learned one after another, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..ops.batch import Nodes
from .base import MAX_EDGES, Affinity, GraphOperator

__all__ = ['BlockGraph', 'Mixture']


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
