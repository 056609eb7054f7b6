"""The graph that holds its matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.layout import Layout
from .base import Affinity
from .signal import Signal

__all__ = ['DenseGraph']


class DenseGraph(Affinity):
    r"""An affinity that holds its entries: always exact, for small graphs and for
    node-anchor affinities.

    Args:
        value (torch.Tensor): The entries, padded: :obj:`[B, N, M]`, zero in the
            padding.
        rows (Layout): The graphs of the rows.
        cols (Layout): The graphs of the columns.
        symmetric (bool, optional): Whether the matrix is symmetric.
            (default: :obj:`False`)
    """

    def __init__(
        self, value: Tensor, rows: Layout, cols: Layout, symmetric: bool = False
    ) -> None:
        super().__init__(rows, cols)
        self.value = value
        self.symmetric = symmetric
        self._normal: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def matmul(self, x: Tensor) -> Tensor:
        return self.rows.unpad(self.value @ self.cols.pad(x))

    def t_matmul(self, x: Tensor) -> Tensor:
        return self.cols.unpad(self.value.transpose(1, 2) @ self.rows.pad(x))

    def sq_norm(self) -> Tensor:
        return self.value.square().sum((1, 2))

    def sq_dist(self, other: Affinity) -> Tensor:
        if isinstance(other, DenseGraph):
            return (self.value - other.value).square().sum((1, 2))
        return super().sq_dist(other)

    def gram_inner(self, signal: Signal) -> Tensor:
        if signal.keeps_gram:
            return (self.value * signal.gram).sum((1, 2))
        return super().gram_inner(signal)

    def normal_matrix(self, weight: Tensor) -> Tensor:
        if self._normal is None or self._normal[0] is not weight:
            half = self.value * self.rows.pad(weight).sqrt().unsqueeze(-1)
            self._normal = (weight, half.transpose(1, 2) @ half)
        return self._normal[1]

    def normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        if signal.num_features > self.cols.max_size:
            return (self.normal_matrix(weight) * signal.gram).sum((1, 2))
        return super().normal_gram_inner(weight, signal)

    def _dense(self) -> Tensor:
        if self.rows.num_graphs == 1:
            return self.value[0]
        return super()._dense()

    def _dense_columns(self) -> Tensor:
        return self.rows.unpad(self.value)
