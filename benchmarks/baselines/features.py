"""Dropout on features that may be sparse.

Bags of words are nearly all zeros. Held as a CSR matrix, their product with the first
layer's weights and their dropout cost what the non-zeros cost, for each baseline alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['dropout']


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout on a dense tensor or on the stored values of a CSR matrix."""
    if not training or p == 0.0:
        return x
    if x.layout != torch.sparse_csr:
        return F.dropout(x, p)
    return torch.sparse_csr_tensor(
        x.crow_indices(),
        x.col_indices(),
        F.dropout(x.values(), p),
        x.shape,
        check_invariants=False,
    )
