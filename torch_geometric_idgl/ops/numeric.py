"""Divisions and logarithms that stay finite, quick products, and block sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    'block_entries',
    'reads_are_free',
    'safe_log',
    'safe_reciprocal',
    'safe_rsqrt',
    'symmetric_product',
    'widen',
]

_NARROW = 16
_BLOCK = 1 << 20  # entries of a block that stays in a CPU's cache while it is used
TINY = 1e-12  # the released code clamps sums here before dividing and in logs


def reads_are_free(device: torch.device) -> bool:
    """Whether Python may look at numbers without waiting for the device."""
    return device.type == 'cpu'


def block_entries(device: torch.device) -> int:
    """How many entries of a large matrix to hold at a time: what fits a CPU's cache, or
    a 64th of a GPU's memory.
    """
    if device.type != 'cuda':
        return _BLOCK
    return max(_BLOCK, torch.cuda.get_device_properties(device).total_memory >> 8)


def _tiny(x: Tensor, power: int = 1) -> float:
    """That power of it, but no number that half precision would round to zero or
    invert to infinity.
    """
    return max(TINY**power, torch.finfo(x.dtype).tiny)


def safe_reciprocal(x: Tensor) -> Tensor:
    r""":math:`1 / x` where :math:`x` is positive, zero with zero gradient elsewhere.

    A row that sparsification has emptied has degree zero; its normalised row is zero,
    not NaN.
    """
    return x.masked_fill(x <= _tiny(x), torch.inf).reciprocal()


def safe_rsqrt(x: Tensor) -> Tensor:
    r""":math:`x^{-1/2}` where :math:`x` is positive, zero with zero gradient
    elsewhere.
    """
    return x.masked_fill(x <= _tiny(x, 2), torch.inf).rsqrt()


def safe_log(x: Tensor) -> Tensor:
    r""":math:`\log(\max(x, 10^{-12}))`, with zero gradient where it is clamped."""
    return x.clamp(min=_tiny(x)).log()


def widen(x: Tensor) -> Tensor:
    """Pad a few columns with zeros, to 16 or 32.

    CPU libraries multiply a large matrix with 2 to 15 columns several times slower than
    with 16, most of all the transposed one, which every backward pass needs; and with
    17 slower than with 32. An epoch on Cora takes 1.2 times as long without.
    """
    width = x.size(1)
    missing = -width % _NARROW if 1 < width < 2 * _NARROW else 0
    return F.pad(x, (0, missing)) if missing else x


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    r""":math:`\mathbf{A}^{\top} \mathbf{B}` of each pair of a batch, known to be
    symmetric: only one half is multiplied, in strips.
    """
    size = b.size(2)
    out = b.new_empty(b.size(0), size, size)
    step = max(256, -(-size // 4))
    for start in range(0, size, step):
        strip, rest = slice(start, start + step), slice(start + step, None)
        left, right = a[:, :, strip].transpose(1, 2), b[:, :, start:]
        # A plain product is faster than a batched one.
        out[:, strip, start:] = left[0] @ right[0] if len(a) == 1 else left @ right
        out[:, rest, strip] = out[:, strip, rest].transpose(1, 2)
    return out
