"""Divisions and logarithms that stay finite, and quick dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['dropout', 'safe_log', 'safe_reciprocal', 'safe_rsqrt', 'widen']

_NARROW = 16
_STEPS = 1 << 16  # of the probabilities of `dropout`
TINY = 1e-12  # the released code clamps sums here before dividing and in logs


def safe_reciprocal(x: Tensor) -> Tensor:
    r""":math:`1 / x` where :math:`x` is positive, zero with zero gradient elsewhere.

    A row that sparsification has emptied has degree zero; its normalised row is zero,
    not NaN.
    """
    return x.masked_fill(x <= TINY, torch.inf).reciprocal()


def safe_rsqrt(x: Tensor) -> Tensor:
    r""":math:`x^{-1/2}` where :math:`x` is positive, zero with zero gradient
    elsewhere.
    """
    return x.masked_fill(x <= TINY * TINY, torch.inf).rsqrt()


def safe_log(x: Tensor) -> Tensor:
    r""":math:`\log(\max(x, 10^{-12}))`, with zero gradient where it is clamped."""
    return x.clamp(min=TINY).log()


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    r"""The dropout of :func:`torch.nn.functional.dropout`, several times faster on
    CPUs: one random number of 64 bits decides about four entries, so :math:`p` is
    rounded to a multiple of :math:`2^{-16}` (and the scale follows it).
    """
    share = round(p * _STEPS)
    quick = x.device.type == 'cpu' and 0 < share < _STEPS
    if not training or not quick or torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.long).random_(-(2**63), None)
    kept = bits.view(torch.short)[: x.numel()] >= share - _STEPS // 2
    mask = kept.view(x.shape).to(x.dtype).mul_(_STEPS / (_STEPS - share))
    return x * mask


def widen(x: Tensor) -> Tensor:
    """Pad a few columns with zeros, to 16 or 32.

    CPU libraries multiply a large matrix with 2 to 15 columns several times slower than
    with 16, most of all the transposed one, which every backward pass needs; and with
    17 slower than with 32.
    """
    width = x.size(1)
    missing = -width % _NARROW if 1 < width < 2 * _NARROW else 0
    return F.pad(x, (0, missing)) if missing else x
