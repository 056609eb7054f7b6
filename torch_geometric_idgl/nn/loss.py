r"""The loss of a graph (Eq. 10 and 11), and when it has changed little enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..graphs import AnchorGraph, NodeGraph
from ..ops.numeric import reads_are_free, safe_log

__all__ = ['Stopping', 'graph_loss']


def graph_loss(
    graph: NodeGraph | AnchorGraph,
    smoothness: float,
    connectivity: float,
    sparsity: float,
    scaled: bool = False,
) -> Tensor:
    r"""The regulariser of every graph of a batch, of shape :obj:`[B]`:

    .. math::
        \mathcal{L}_{\mathcal{G}} = \alpha \, \Omega(\mathbf{A}, \mathbf{X}) -
        \frac{\beta}{n} \mathbf{1}^{\top} \log(\mathbf{A} \mathbf{1}) +
        \frac{\gamma}{n^2} \|\mathbf{A}\|_F^2, \qquad
        \Omega(\mathbf{A}, \mathbf{X}) = \frac{1}{2 n^2} \sum_{i,j} A_{ij}
        \|\mathbf{x}_i - \mathbf{x}_j\|^2

    on :math:`\mathbf{A}` against :math:`\mathbf{X}` for IDGL, and on
    :math:`\widehat{\mathbf{B}}` or :math:`\frac{s}{n} \widehat{\mathbf{B}}` against
    :math:`\mathbf{X}_U` (with :math:`s` for :math:`n`) for IDGL-Anch.

    Args:
        graph (NodeGraph or AnchorGraph): The learned graph, with the answers that the
            weights ask for.
        smoothness (float): The weight :math:`\alpha` of the Dirichlet energy.
        connectivity (float): The weight :math:`\beta` of the log barrier on degrees.
        sparsity (float): The weight :math:`\gamma` of the squared norm.
        scaled (bool, optional): Whether the graph of the anchors is multiplied by
            :math:`s / n`. (default: :obj:`False`)
    """
    anchors = graph.affinity.cols  # or all nodes
    # Of (s / n) B, energy / s² is that of B / (s n), and norm / s² that of B / n².
    nodes = graph.affinity.rows if scaled else anchors
    s: Any = max(anchors.num_total, 1)
    n: Any = max(nodes.num_total, 1)
    if anchors.num_graphs > 1:
        s, n = anchors.count.to(graph.dtype), nodes.count.to(graph.dtype)
    total = torch.zeros(anchors.num_graphs, dtype=graph.dtype, device=anchors.device)
    if smoothness > 0:
        total = total + graph.energy * (smoothness / (s * n))
    if connectivity > 0:
        degree = graph.degree
        if scaled:
            scale = s / n
            degree = degree * (
                scale if anchors.num_graphs == 1 else scale[anchors.batch]
            )
        total = total - anchors.sum(safe_log(degree)) * (connectivity / s)
    if sparsity > 0:
        total = total + graph.sq_norm * (sparsity / n**2)
    return total


class Stopping:
    r"""The criterion of Algorithm 1, for the graphs of one forward pass:
    :math:`\|\mathbf{A}^{(t)} - \mathbf{A}^{(t-1)}\|_F^2 \leq \delta
    \|\mathbf{A}^{(1)}\|_F^2`, or :math:`\delta \|\mathbf{R}^{(t)}\|_F^2` with anchors.

    The norm of a graph of raw features is expensive, and bounds of it usually decide.
    Where they do not, closer ones are asked for, and at last the norm: an epoch on Cora
    takes 1.7 times as long without bounds. Deciding reads values of tensors, which is
    free on CPUs only; elsewhere the norm is computed at once.

    Args:
        first (NodeGraph or AnchorGraph): The first learned graph.
        tol (float): The tolerance :math:`\delta`.
    """

    def __init__(self, first: NodeGraph | AnchorGraph, tol: float) -> None:
        self.tol = tol
        self._closer = _norm_bounds(first)  # of the first graph
        self._bounds: tuple[Tensor, Tensor] | None = None  # the closest so far

    @torch.no_grad()
    def still_changing(
        self, graph: NodeGraph | AnchorGraph, active: Tensor
    ) -> tuple[Tensor, bool]:
        """Which of the active graphs go on, and whether any does."""
        if isinstance(graph, AnchorGraph):
            surely = active & (graph.sq_dist > self.tol * graph.own_norm)
            return surely, bool(surely.any())
        low, high = self._bounds or next(self._closer)
        while True:
            # A distance that lacks the norm of the first graph has its bounds added.
            least = graph.sq_dist + low if graph.lacks_norm else graph.sq_dist
            most = graph.sq_dist + high if graph.lacks_norm else graph.sq_dist
            surely = active & (least > self.tol * high)
            perhaps = active & (most > self.tol * low) & ~surely
            if low is high:
                going_on, undecided = bool(surely.any()), False
            else:
                both = torch.stack([surely.any(), perhaps.any()])
                going_on, undecided = both.tolist()
            if not undecided:
                self._bounds = low, high
                return surely, going_on
            low, high = next(self._closer)


def _norm_bounds(graph: NodeGraph | AnchorGraph) -> Iterator[tuple[Tensor, Tensor]]:
    if graph.sq_norm is not None or not reads_are_free(graph.rows.device):
        norm = graph.affinity.sq_norm() if graph.sq_norm is None else graph.sq_norm
        norm = norm.detach()
        yield norm, norm
    else:
        yield from graph.affinity.sq_norm_bounds(graph.degree)
