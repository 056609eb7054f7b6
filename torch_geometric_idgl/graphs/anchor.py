r"""The graph of nodes recovered from a node-anchor affinity."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.caching import cached_tensor
from ..ops.numeric import safe_reciprocal
from .base import Affinity, GraphOperator
from .signal import Signal
from .sparse import SparseGraph

__all__ = ['AnchorGraph']


class AnchorGraph(GraphOperator):
    r"""Two-step random walks over a node-anchor affinity
    :math:`\mathbf{R} \in \mathbb{R}^{n \times s}`.

    .. math::
        \mathbf{A} &= \mathbf{\Delta}^{-1} \mathbf{R} \mathbf{\Lambda}^{-1}
        \mathbf{R}^{\top} \quad \text{(Eq. 5)} \\
        \mathbf{B} &= \mathbf{\Lambda}^{-1} \mathbf{R}^{\top} \mathbf{\Delta}^{-1}
        \mathbf{R} \quad \text{(Eq. 6)} \\
        \widehat{\mathbf{B}} &= \mathbf{R}^{\top} \mathbf{\Delta}^{-1} \mathbf{R}

    with :math:`\Delta_{ii} = \sum_k R_{ik}` and :math:`\Lambda_{kk} = \sum_i R_{ik}`.
    Message passing never forms :math:`\mathbf{A}`. Norm, degrees and smoothness are
    those of :math:`\widehat{\mathbf{B}}`, which the paper regularises.

    Args:
        affinity (Affinity): :math:`\mathbf{R}`, in any form.
    """

    def __init__(self, affinity: Affinity) -> None:
        super().__init__(affinity.rows, affinity.rows)
        self.affinity = affinity

    @property
    def dtype(self) -> torch.dtype:
        return self.affinity.dtype

    @property
    def anchors(self):
        """The graphs the anchors belong to."""
        return self.affinity.cols

    @cached_tensor
    def _node_scale(self) -> Tensor:
        return safe_reciprocal(self.affinity.row_sum())

    @cached_tensor
    def _anchor_scale(self) -> Tensor:
        return safe_reciprocal(self.affinity.col_sum())

    def mp1(self, x: Tensor) -> Tensor:
        r"""From nodes to anchors, :math:`\mathbf{\Lambda}^{-1} \mathbf{R}^{\top}
        \mathbf{F}`.
        """
        return self._anchor_scale.unsqueeze(1) * self.affinity.t_matmul(x)

    def mp2(self, x: Tensor) -> Tensor:
        r"""From anchors to nodes, :math:`\mathbf{\Delta}^{-1} \mathbf{R}
        \mathbf{F}'`.
        """
        if self._transitions is not None:
            return self._transitions.matmul(x)
        return self._node_scale.unsqueeze(1) * self.affinity.matmul(x)

    @cached_tensor
    def _transitions(self) -> SparseGraph | None:
        r"""Sparse :math:`\mathbf{\Delta}^{-1} \mathbf{R}`: scaling a few entries once
        spares autograd an unscaled copy of every product.
        """
        affinity = self.affinity
        if not isinstance(affinity, SparseGraph):
            return None
        return affinity.with_value(
            affinity.value * self._node_scale[affinity.pattern.row]
        )

    def matmul(self, x: Tensor) -> Tensor:
        r""":math:`\mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}) = \mathbf{A} \mathbf{F}`
        (Eq. 7).
        """
        return self.mp2(self.mp1(x))

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        return self.mp2(weight * self.mp1(x))

    def anchor_graph(self, normalize: bool = False) -> Tensor:
        r""":math:`\widehat{\mathbf{B}}`, or :math:`\mathbf{B}` if normalised, of each
        graph, padded: :obj:`[B, S, S]`.
        """
        graph = self.affinity.normal_matrix(self._node_scale)
        if not normalize:
            return graph
        return self.anchors.pad(self._anchor_scale).unsqueeze(-1) * graph

    def degree(self) -> Tensor:
        r""":math:`\widehat{\mathbf{B}} \mathbf{1} = \mathbf{R}^{\top}
        \mathbf{\Delta}^{-1} \mathbf{R} \mathbf{1} = \mathbf{R}^{\top} \mathbf{1}`.
        """
        return self.affinity.col_sum()

    def sq_norm(self) -> Tensor:
        r""":math:`\|\widehat{\mathbf{B}}\|_F^2` of each graph."""
        return self.affinity.normal_sq_norm(self._node_scale)

    def dirichlet_energy(self, signal: Signal) -> Tensor:
        r"""The smoothness of the anchors' features on :math:`\widehat{\mathbf{B}}`:
        :math:`\sum_k \Lambda_{kk} \|\mathbf{x}_k\|^2 - \|\mathbf{\Delta}^{-1/2}
        \mathbf{R} \mathbf{X}_U\|_F^2`.
        """
        inner = self.affinity.normal_gram_inner(self._node_scale, signal)
        return self.anchors.sum(self.degree() * signal.sq_norms) - inner
