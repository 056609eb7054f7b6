"""The graph that holds its matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.autograd import first_order
from ..ops.layout import Layout
from .base import Affinity
from .signal import Signal

__all__ = ['DenseGraph']


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """A batched product; of a single graph a plain one, which is faster."""
    return (a[0] @ b[0]).unsqueeze(0) if a.size(0) == 1 else a @ b


class _NormalTerms(torch.autograd.Function):
    r"""With :math:`\mathbf{B} = \mathbf{R}^{\top} \mathrm{diag}(\mathbf{c})
    \mathbf{R}`: :math:`\|\mathbf{B}\|_F^2` and :math:`\langle \mathbf{B},
    \mathbf{K} \rangle`. Forward makes half of the symmetric matrix, backward needs a
    single product.
    """

    @staticmethod
    def forward(ctx, value, weight, gram):
        weighted = value * weight.unsqueeze(-1)
        size = value.size(2)
        normal = value.new_empty(value.size(0), size, size)
        step = max(256, -(-size // 4))
        for start in range(0, size, step):
            block = weighted[:, :, start : start + step].transpose(1, 2)
            product = _matmul(block, value[:, :, start:])
            normal[:, start : start + step, start:] = product
            upper = normal[:, start : start + step, start + step :]
            normal[:, start + step :, start : start + step] = upper.transpose(1, 2)
        ctx.save_for_backward(value, weight, normal, gram)
        norm = normal.square().sum((1, 2))
        inner = norm.new_zeros(norm.shape)
        if gram is not None:
            inner = (normal * gram).sum((1, 2))
        return norm, inner

    @staticmethod
    @first_order
    def backward(ctx, grad_norm, grad_inner):
        value, weight, normal, gram = ctx.saved_tensors
        outer = 2.0 * grad_norm.view(-1, 1, 1) * normal
        if gram is not None:
            outer = outer + grad_inner.view(-1, 1, 1) * gram
        product = _matmul(value, outer)
        grad_weight = (product * value).sum(2)
        return product.mul_(2.0 * weight.unsqueeze(-1)), grad_weight, None


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
        self._normal: tuple | None = None  # weight, signal, terms

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

    def normal_matrix(self, weight: Tensor) -> Tensor:
        weighted = self.value * self.rows.pad(weight).unsqueeze(-1)
        return weighted.transpose(1, 2) @ self.value

    def normal_sq_norm(self, weight: Tensor) -> Tensor:
        return self._normal_terms(weight, None)[0]

    def normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        if signal.num_features <= self.cols.max_size or signal.requires_grad:
            return super().normal_gram_inner(weight, signal)
        return self._normal_terms(weight, signal)[1]

    def _normal_terms(self, weight: Tensor, signal: Signal | None):
        """Norm and inner product together: one symmetric product serves both."""
        known = self._normal
        if known is not None and known[0] is weight and (signal in (None, known[1])):
            return known[2]
        gram = None if signal is None else signal.gram
        terms = _NormalTerms.apply(self.value, self.rows.pad(weight), gram)
        self._normal = (weight, signal, terms)
        return terms

    def _dense(self) -> Tensor:
        if self.rows.num_graphs == 1:
            return self.value[0]
        return super()._dense()

    def _dense_columns(self) -> Tensor:
        return self.rows.unpad(self.value)
