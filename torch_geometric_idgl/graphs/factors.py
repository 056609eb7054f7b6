r"""Factors :math:`\mathbf{U}` of graphs :math:`\mathbf{A} = \mathbf{U}
\mathbf{V}^{\top}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..ops.caching import cached_tensor
from ..ops.cosine import weighted_unit_vectors
from ..ops.features import matmul, square
from ..ops.layout import Layout
from ..ops.numeric import safe_rsqrt
from ..ops.sparse import SparseMatrix
from .signal import Signal

__all__ = ['DenseFactor', 'Factor', 'SelectedFactor', 'WeightedFactor']


class Factor(ABC):
    r"""One vector for each node; the similarity of two nodes is their inner product."""

    layout: Layout

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The number type."""

    @abstractmethod
    def expand(self, coefficient: Tensor) -> Tensor:
        r""":math:`\mathbf{U} \mathbf{C}`, from coefficients to nodes."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        r""":math:`\mathbf{U}^{\top} \mathbf{F}`, from nodes to coefficients."""


class DenseFactor(Factor):
    r"""An explicit factor, small: node embeddings times heads.

    Args:
        value (torch.Tensor): The vectors, of shape :obj:`[n, K]`.
        layout (Layout): The graphs of the rows.
    """

    def __init__(self, value: Tensor, layout: Layout) -> None:
        self.value = value
        self.layout = layout

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @cached_tensor
    def padded(self) -> Tensor:
        """The vectors, padded: :obj:`[B, N, K]`."""
        return self.layout.pad(self.value)

    @cached_tensor
    def gram(self) -> Tensor:
        r""":math:`\mathbf{U}^{\top} \mathbf{U}` of each graph: :obj:`[B, K, K]`."""
        return self.project(self.value)

    def expand(self, coefficient: Tensor) -> Tensor:  # [B, K, f] -> [n, f]
        if self.layout.num_graphs == 1:  # a plain product is faster than a batched one
            return self.value @ coefficient[0]
        if self.layout.is_ragged:
            parts = zip(self.layout.split(self.value), coefficient, strict=True)
            return torch.cat([value @ own for value, own in parts])
        return self.layout.unpad(self.padded @ coefficient)

    def project(self, x: Tensor) -> Tensor:  # [n, f] -> [B, K, f]
        if self.layout.num_graphs == 1:
            return (self.value.t() @ x).unsqueeze(0)
        if self.layout.is_ragged:
            values, others = map(self.layout.split, (self.value, x))
            parts = zip(values, others, strict=True)
            return torch.stack([value.t() @ own for value, own in parts])
        return self.padded.transpose(1, 2) @ self.layout.pad(x)


class WeightedFactor(Factor):
    r"""The factor of multi-head weighted cosines of raw features, never formed:

    .. math::
        \mathbf{U} = \frac{1}{\sqrt{m}} \big\Vert_{p=1}^{m} \mathrm{diag}(\mathbf{r}_p)
        \, \mathbf{X} \, \mathrm{diag}(\mathbf{w}_p), \qquad
        \mathbf{r}_p = \big(\mathbf{X}^{2} \mathbf{w}_p^2\big)^{-1/2}

    Every product with it is a product with :math:`\mathbf{X}`, which is sparse for
    bags of words.

    Args:
        signal (Signal): The raw features.
        weight (torch.Tensor): The head weights, of shape :obj:`[m, d]`.
    """

    def __init__(self, signal: Signal, weight: Tensor) -> None:
        self.signal = signal
        self.layout = signal.layout
        self.heads = weight.size(0)
        self.weight = weight
        self.sq_weight = weight.square() / self.heads  # [m, d]
        norms = matmul(square(signal.x), weight.square().t())
        self.scale = safe_rsqrt(norms)  # [n, m]

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    # A coefficient is kept per feature, head and column: [B, d, m * f]. Both factors
    # of a product carry w_p, so `project` leaves it out and `expand` squares it.

    def project(self, x: Tensor) -> Tensor:
        scaled = self.scale.unsqueeze(-1) * x.unsqueeze(1)  # [n, m, f]
        return self.signal.t_matmul(scaled.flatten(1))

    def expand(self, coefficient: Tensor) -> Tensor:
        graphs, features, _ = coefficient.shape
        width = coefficient.size(2) // self.heads
        by_head = coefficient.view(graphs, features, self.heads, width)
        by_head = by_head * self.sq_weight.t().unsqueeze(-1)
        blocks, layout = self.signal.blocks, self.layout
        if isinstance(blocks, SparseMatrix):
            out = blocks.matmul(by_head.flatten(2).flatten(0, 1))
        elif layout.is_ragged:
            parts = zip(layout.split(blocks), by_head.flatten(2), strict=True)
            out = torch.cat([own @ value for own, value in parts])
        else:
            out = layout.unpad(layout.pad(blocks) @ by_head.flatten(2))
        out = out.view(layout.num_rows, self.heads, width)
        return (out * self.scale.unsqueeze(-1)).sum(1)

    def sq_norm(self) -> Tensor:
        r""":math:`\|\mathbf{U} \mathbf{U}^{\top}\|_F^2 = \sum_{p,q} \sum_{k,l}
        \frac{w_{pk}^2 w_{ql}^2}{m^2} \big(\sum_i r_{pi} r_{qi} x_{ik} x_{il}\big)^2`
        """
        return self.signal.gram_norm(self.scale, self.sq_weight)

    def gram_inner(self) -> Tensor:
        r""":math:`\langle \mathbf{U} \mathbf{U}^{\top}, \mathbf{X} \mathbf{X}^{\top}
        \rangle` with the features the factor is made of.
        """
        return self.signal.gram_energy(self.scale, self.sq_weight)

    def affinity(self, index: Tensor | None, cols: Layout) -> Tensor:
        """The affinity of nodes and anchors, padded: :obj:`[B, N, S]`."""
        from .scores import InnerScores, WeightedScores

        if self.signal.is_sparse:
            return WeightedScores(self, index, cols).dense()
        u = weighted_unit_vectors(self.signal.to_dense(), self.weight)
        v = u if index is None else u[index]
        return InnerScores(u, v, self.layout, cols).dense()


class SelectedFactor(WeightedFactor):
    """The rows of a weighted factor that belong to the anchors.

    Args:
        factor (WeightedFactor): The factor of all nodes.
        index (torch.Tensor): The anchors.
        layout (Layout): The graphs of the anchors.
    """

    def __init__(self, factor: WeightedFactor, index: Tensor, layout: Layout) -> None:
        self.index = index
        self.signal = factor.signal.rows(index, layout)
        self.layout = layout
        self.heads = factor.heads
        self.weight = factor.weight
        self.sq_weight = factor.sq_weight
        self.scale = factor.scale[index]
