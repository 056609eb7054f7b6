r"""IDGL-Anch: what differs from IDGL when a few anchors stand for all nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_at_least, check_unit_interval
from ..graphs import (
    Affinity,
    AnchorGraph,
    ColumnScaled,
    GraphOperator,
    Memoized,
    Mixture,
    column_mask,
)
from ..ops.layout import Layout
from .anchors import Anchors, given_anchors, sample_anchors
from .idgl import IDGL

__all__ = ['IDGLAnch']


class IDGLAnch(IDGL):
    r"""The anchor-based scalable IDGL-Anch model from the `"Iterative Deep Graph
    Learning for Graph Neural Networks: Better and Robust Node Embeddings"
    <https://arxiv.org/abs/2006.13009>`_ paper.

    Learns an affinity :math:`\mathbf{R}` of nodes and anchors instead of a graph of
    all pairs, and passes messages through the anchors:

    .. math::
        \mathrm{MP}_a(\mathbf{F}) = \lambda \mathbf{L}^{(0)} \mathbf{F} + (1 - \lambda)
        \left\{ \eta \, \mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}^{(t)}) + (1 - \eta) \,
        \mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}^{(1)}) \right\}

    With :obj:`graph_dropout`, anchors of the first affinity are dropped.

    Args:
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        num_layers (int): Number of message passing layers.
        *args: Further arguments of :class:`IDGL`.
        num_anchors (int, optional): The number :math:`s` of anchors of each graph (at
            most all its nodes). (default: :obj:`1000`)
        anchor_ratio (float, optional): The share of nodes that are anchors, instead of
            a number. (default: :obj:`None`)
        anchor_sampling (str, optional): :obj:`"resample"` draws anchors anew at each
            forward (as the paper does), :obj:`"seeded"` does so in training and takes
            the same ones whenever it evaluates, :obj:`"fixed"` always takes the same.
            (default: :obj:`"resample"`)
        anchor_seed (int, optional): The seed of seeded and fixed anchors.
            (default: :obj:`0`)
        tol (float, optional): See :class:`IDGL`. (default: :obj:`8.5e-5`)
        sparsity (float, optional): See :class:`IDGL`. (default: :obj:`0.1`)
        **kwargs: Further keyword arguments of :class:`IDGL`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        *args: Any,
        num_anchors: int = 1000,
        anchor_ratio: float | None = None,
        anchor_sampling: str = 'resample',
        anchor_seed: int = 0,
        tol: float | None = 8.5e-5,
        sparsity: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            *args,
            tol=tol,
            sparsity=sparsity,
            **kwargs,
        )
        check_at_least('num_anchors', num_anchors, 1, integer=True)
        check_at_least('anchor_seed', anchor_seed, 0, integer=True)
        if anchor_ratio is not None:
            check_unit_interval('anchor_ratio', anchor_ratio, open_left=True)
        choices = ('resample', 'seeded', 'fixed')
        if anchor_sampling not in choices:
            raise ValueError(
                f"Expected 'anchor_sampling' to be one of {list(choices)} "
                f"(got '{anchor_sampling}')"
            )
        self.num_anchors = num_anchors
        self.anchor_ratio = anchor_ratio
        self.anchor_sampling = anchor_sampling
        self.anchor_seed = anchor_seed

    def _draw_anchors(self, layout: Layout, index: Tensor | None) -> Anchors:
        if index is not None:
            return given_anchors(layout, index)
        generator = None
        seeded = self.anchor_sampling == 'seeded' and not self.training
        if seeded or self.anchor_sampling == 'fixed':
            generator = torch.Generator().manual_seed(self.anchor_seed)
        return sample_anchors(layout, self.num_anchors, self.anchor_ratio, generator)

    def _mix_first(
        self, initial: Memoized, first: Affinity, graph: GraphOperator
    ) -> Mixture:
        if self.training and self.graph_dropout > 0:
            mask = column_mask(first, self.graph_dropout)
            graph = AnchorGraph(ColumnScaled(first, mask))
        lam = self.initial_weight
        return Mixture([(lam, initial), (1.0 - lam, Memoized(graph))])

    def _regularized(self, affinity: Affinity) -> AnchorGraph:
        return AnchorGraph(affinity)

    def _message_graph(self, graph: Affinity | AnchorGraph) -> GraphOperator:
        return graph

    def _stopping_scale(self, learned: Affinity, first: Affinity) -> Affinity:
        return learned
