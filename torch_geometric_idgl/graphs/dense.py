"""The graph that holds its matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout
from ..ops.sparse import Pattern
from .base import Affinity

__all__ = ['DenseGraph']


class DenseGraph(Affinity):
    r"""An affinity that holds its entries: small graphs, batches of them, and initial
    graphs with many edges.

    Args:
        value (torch.Tensor): The entries, padded: :obj:`[B, N, M]`, zero in the
            padding.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
        symmetric (bool, optional): Whether the matrix is symmetric.
            (default: :obj:`False`)
    """

    def __init__(
        self, value: Tensor, rows: Nodes, cols: Nodes, symmetric: bool = False
    ) -> None:
        self.rows, self.cols, self.dtype = rows, cols, value.dtype
        self.value = value
        self.symmetric = symmetric

    def matmul(self, x: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:  # a plain product is faster than a batched one
            return self.value.squeeze(0) @ x
        return self.rows.unpad(self.value @ self.cols.pad(x))

    def dropout(self, p: float, message: Tensor | None) -> DenseGraph:
        """The same graph with some of its entries dropped."""
        value = dropout(self.value, p)
        return DenseGraph(value, self.rows, self.cols).multiplied(message)

    def t_matmul(self, x: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:
            return self.value.squeeze(0).t() @ x
        return self.cols.unpad(self.value.transpose(1, 2) @ self.rows.pad(x))

    def sq_norm(self) -> Tensor:
        return self.value.square().sum((1, 2))

    @torch.no_grad()
    def sq_dist(self, other: Affinity) -> Tensor:
        if isinstance(other, DenseGraph):
            return (self.value - other.value).square_().sum((1, 2))
        return super().sq_dist(other)

    def gram_inner(self, features: Features) -> Tensor:
        if features.keeps_gram:
            return (self.value * features.gram).sum((1, 2))
        return super().gram_inner(features)

    def values_at(self, pattern: Pattern) -> Tensor:
        graph = self.rows.batch[pattern.row]
        row = pattern.row - self.rows.start[graph]
        return self.value[graph, row, pattern.col - self.cols.start[graph]]
