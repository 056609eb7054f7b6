"""Norms of matrices that are known by their products only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ['psd_sq_norm_bounds']

_ROUNDING = 1e-4


def psd_sq_norm_bounds(
    matmul: Callable[[Tensor], Tensor], start: Tensor, trace: float
) -> tuple[Tensor, Tensor]:
    r"""Bounds of :math:`\|\mathbf{A}\|_F^2` for a positive semi-definite matrix.

    Let :math:`\mathbf{Q}` be an orthonormal basis of :math:`\mathbf{A} \mathbf{F}`, and
    :math:`\mathbf{C} = \mathbf{Q}^{\top} \mathbf{A} \mathbf{Q}`. Of :math:`\mathbf{A}`
    in a basis that goes on from :math:`\mathbf{Q}`, all is known but the remaining
    diagonal block, and that is positive semi-definite too, so that its norm is at most
    its trace:

    .. math::
        0 \leq \|\mathbf{A}\|_F^2 - \big(2 \|\mathbf{A} \mathbf{Q}\|_F^2 -
        \|\mathbf{C}\|_F^2\big) \leq \big(\mathrm{tr}(\mathbf{A}) -
        \mathrm{tr}(\mathbf{C})\big)^2

    Args:
        matmul (callable): Gives :math:`\mathbf{A} \mathbf{F}`.
        start (torch.Tensor): Any :math:`\mathbf{F}` with no more columns than rows. The
            more columns, the tighter the bounds.
        trace (float): The trace of :math:`\mathbf{A}`, or an upper bound of it.
    """
    basis = torch.linalg.qr(matmul(start)).Q
    image = matmul(basis)
    inner = basis.t() @ image
    known = 2.0 * image.square().sum() - inner.square().sum()
    rest = (trace - inner.trace()).clamp(min=0.0).square()
    return known * (1.0 - _ROUNDING), (known + rest) * (1.0 + _ROUNDING)
