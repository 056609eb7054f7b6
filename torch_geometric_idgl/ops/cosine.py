r"""Normalised, weighted vectors for multi-head cosines."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numeric import safe_rsqrt

__all__ = ['weighted_unit_vectors']

_SHORT = 128


class _WeightedUnitVectors(torch.autograd.Function):
    """In closed form: autograd would keep and walk over several n x m x d products."""

    @staticmethod
    def forward(ctx, x, weight):
        heads = weight.size(0)
        scale = safe_rsqrt(x.square() @ weight.square().t() * heads)  # [n, m]
        ctx.save_for_backward(x, weight, scale)
        out = scale.unsqueeze(-1) * weight  # [n, m, d]
        return out.mul_(x.unsqueeze(1)).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        heads, channels = weight.shape
        scaled = grad.view(-1, heads, channels) * scale.unsqueeze(-1)  # g r
        moment = scaled * x.unsqueeze(1)  # g r x
        # r = q^{-1/2} with q = m sum_k w_k^2 x_k^2, so dq = -r^2 (sum_k g r w x) / 2.
        by_head = torch.block_diag(*weight.unsqueeze(-1).unbind(0))  # [m d, m]
        grad_q = (moment.flatten(1) @ by_head) * scale.square() * -heads
        grad_x = None
        if ctx.needs_input_grad[0]:
            if channels > _SHORT:
                grad_x = (scaled * weight).sum(1)
            else:  # A product with all the diagonal matrices is the fastest way.
                grad_x = scaled.flatten(1) @ torch.diag_embed(weight).flatten(0, 1)
            grad_x = grad_x.addcmul(x, grad_q @ weight.square())
        grad_weight = moment.sum(0).addcmul(weight, grad_q.t() @ x.square())
        return grad_x, grad_weight


def weighted_unit_vectors(x: Tensor, weight: Tensor) -> Tensor:
    r"""Concatenate :math:`(\mathbf{w}_p \odot \mathbf{x}_i) / (\sqrt{m} \,
    \|\mathbf{w}_p \odot \mathbf{x}_i\|)` over the heads :math:`p`.

    The inner product of two such vectors is the mean of the :math:`m` weighted cosines.
    Zero vectors stay zero, and get no gradient.

    Args:
        x (torch.Tensor): Vectors, of shape :obj:`[n, d]`.
        weight (torch.Tensor): The weights of the heads, of shape :obj:`[m, d]`.
    """
    return _WeightedUnitVectors.apply(x, weight)
