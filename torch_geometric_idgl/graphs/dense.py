"""The graph that holds its matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.autograd import first_order
from ..ops.layout import Layout
from ..ops.numeric import symmetric_product
from ..ops.sparse import SparseMatrix
from .base import Affinity
from .signal import Signal

__all__ = ['DenseGraph']


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """A batched product; of a single graph a plain one, which is faster."""
    return (a[0] @ b[0]).unsqueeze(0) if a.size(0) == 1 else a @ b


class _NormalMatrix(torch.autograd.Function):
    r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}`: forward makes
    half of the symmetric matrix, backward needs a single product.
    """

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return symmetric_product(value * weight.unsqueeze(-1), value)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        value, weight = ctx.saved_tensors
        product = _matmul(value, grad + grad.transpose(1, 2))
        grad_weight = 0.5 * (product * value).sum(2)
        return product.mul_(weight.unsqueeze(-1)), grad_weight


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

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def matmul(self, x: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:  # a plain product is faster than a batched one
            return self.value[0] @ x
        return self.rows.unpad(self.value @ self.cols.pad(x))

    def t_matmul(self, x: Tensor) -> Tensor:
        if self.rows.num_graphs == 1:
            return self.value[0].t() @ x
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

    def _make_normal_matrix(self, weight: Tensor) -> Tensor:
        return _NormalMatrix.apply(self.value, self.rows.pad(weight))

    def _make_normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        if self.rows.num_graphs == 1 and isinstance(signal.x, SparseMatrix):
            smooth = signal.x.t_matmul(self.value[0].t())  # (R X_U)^T
            return (smooth.square().sum(0) * weight).sum().view(1)
        return super()._make_normal_gram_inner(weight, signal)

    def _dense(self) -> Tensor:
        if self.rows.num_graphs == 1:
            return self.value[0]
        return super()._dense()

    def _dense_columns(self) -> Tensor:
        return self.rows.unpad(self.value)
