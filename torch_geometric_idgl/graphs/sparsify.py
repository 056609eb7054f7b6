r"""Sparsification: from similarities to a sparse, non-negative adjacency."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['sparsify']


def sparsify(scores: Tensor, epsilon: float = 0.0, top_k: int | None = None) -> Tensor:
    r"""Keep the :math:`\varepsilon`-neighbourhood, the largest entries, or both.

    .. math::
        A_{ij} = \begin{cases} s_{ij} & s_{ij} > \varepsilon \\ 0 &
        \text{otherwise} \end{cases}

    The result is non-negative, and symmetric if :obj:`scores` is and :obj:`top_k` is
    not given.

    Args:
        scores (torch.Tensor): Similarities, of shape :obj:`[..., n, s]`.
        epsilon (float, optional): The threshold :math:`\varepsilon \geq 0`.
            (default: :obj:`0.`)
        top_k (int, optional): Keep only so many of the largest entries of each row, of
            equal ones the first. (default: :obj:`None`)
    """
    kept = F.threshold(scores, epsilon, 0.0)
    if top_k is None or top_k >= scores.size(-1):
        return kept
    return kept * _largest(kept.detach(), top_k)


def _largest(value: Tensor, k: int) -> Tensor:
    """Where the largest entries of each row are; of equal ones, the first (`topk` does
    not say which it returns, and that depends on the number of columns).
    """
    least = value.topk(k, dim=-1).values[..., -1:]
    larger, equal = value > least, value == least
    left = k - larger.sum(-1, keepdim=True)
    return larger | (equal & (equal.cumsum(-1, dtype=torch.int) <= left))
