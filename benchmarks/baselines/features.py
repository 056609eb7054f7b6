"""Dropout and linear maps of features that may be sparse.

Bags of words are nearly all zeros. Held as a CSR matrix, their product with the first
layer's weights and their dropout cost what the non-zeros cost, for each baseline alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_geometric_idgl.ops.sparse import Pattern, SparseMatrix

__all__ = ['FeatureLinear', 'dropout', 'linear', 'matmul']


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout on a dense tensor or on the stored values of a CSR matrix."""
    if not training or p == 0.0:
        return x
    if x.layout != torch.sparse_csr:
        return F.dropout(x, p)
    out = torch.sparse_csr_tensor(
        x.crow_indices(),
        x.col_indices(),
        F.dropout(x.values(), p),
        x.shape,
        check_invariants=False,
    )
    out.pattern = _pattern(x)
    return out


def _pattern(x: Tensor) -> Pattern:
    """Where a CSR matrix has entries; kept with it, for its transposed is sorted."""
    if not hasattr(x, 'pattern'):
        x.pattern = Pattern(x.crow_indices().long(), x.col_indices().long(), x.size(1))
    return x.pattern


class _Product(torch.autograd.Function):
    """The product with a constant sparse matrix, as often differentiable as asked.

    Torch's own product with a CSR matrix sorts its entries in every backward pass.
    """

    @staticmethod
    def forward(ctx, matrix: SparseMatrix, dense: Tensor) -> Tensor:
        ctx.matrix = matrix
        return matrix.matmul(dense)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, _Product.apply(SparseMatrix(*ctx.matrix.turned), grad)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The product of features and weights; constant features if they are sparse."""
    if x.layout != torch.sparse_csr:
        return x @ weight
    return _Product.apply(SparseMatrix(_pattern(x), x.values()), weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :meth:`torch.nn.functional.linear`."""
    out = matmul(x, weight.t())
    return out if bias is None else out + bias


class FeatureLinear(torch.nn.Module):
    """The first linear map of a PyG layer, for sparse features too."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mapped features."""
        return linear(x, self.layer.weight, self.layer.bias)
