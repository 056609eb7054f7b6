"""Dropout and linear maps of features that may be a CSR matrix, as bags of words are:
they cost what its non-zeros cost, for each baseline alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import Linear
from torch_geometric.utils.sparse import set_sparse_value

from torch_geometric_idgl.ops.sparse import Pattern, SparseMatrix


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout on a dense tensor or on the stored values of a CSR matrix."""
    if x.layout != torch.sparse_csr:
        return F.dropout(x, p, training)
    out = set_sparse_value(x, F.dropout(x.values(), p, training))
    out.pattern = _pattern(x)
    return out


def _pattern(x: Tensor) -> Pattern:
    """Where a CSR matrix has entries; kept with it, for its transposed is sorted."""
    if not hasattr(x, 'pattern'):
        x.pattern = Pattern(x.crow_indices(), x.col_indices(), x.size(1))
    return x.pattern


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The product with a matrix, which has no gradient if it is a CSR matrix."""
    if x.layout != torch.sparse_csr:
        return x @ weight
    return _Product.apply(SparseMatrix(_pattern(x), x.values()), weight)


class _Product(torch.autograd.Function):
    # Differentiable as often as asked. Torch's own product with a CSR matrix sorts its
    # entries in every backward pass.

    @staticmethod
    def forward(ctx, matrix: SparseMatrix, dense: Tensor) -> Tensor:
        ctx.matrix = matrix
        return matrix.matmul(dense)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, _Product.apply(SparseMatrix(*ctx.matrix.turned), grad)


class FeatureLinear(Linear):
    """PyG's linear layer, for sparse features too."""

    def forward(self, x: Tensor) -> Tensor:
        out = matmul(x, self.weight.t())
        return out if self.bias is None else out + self.bias
