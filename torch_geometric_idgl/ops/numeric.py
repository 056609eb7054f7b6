"""Divisions and logarithms that stay finite, forwards and backwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['safe_log', 'safe_reciprocal', 'safe_rsqrt', 'widen']

_NARROW = 16
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


def widen(x: Tensor) -> Tensor:
    """Pad a few columns to sixteen with zeros.

    CPU libraries multiply a large matrix with 2 to 15 columns several times slower than
    with 16, most of all the transposed one, which every backward pass needs.
    """
    missing = _NARROW - x.size(1)
    return F.pad(x, (0, missing)) if 0 < missing < _NARROW - 1 else x
