r"""Graph regularisation (Eq. 10 and 11)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..checks import check_at_least
from ..graphs import Affinity, AnchorGraph, Signal
from ..ops.numeric import safe_log

__all__ = ['graph_regularization']


def graph_regularization(
    graph: Affinity | AnchorGraph,
    signal: Signal,
    smoothness: float,
    connectivity: float,
    sparsity: float,
) -> Tensor:
    r"""The regulariser of every graph of a batch, of shape :obj:`[B]`:

    .. math::
        \mathcal{L}_{\mathcal{G}} = \alpha \, \Omega(\mathbf{A}, \mathbf{X}) -
        \frac{\beta}{n} \mathbf{1}^{\top} \log(\mathbf{A} \mathbf{1}) +
        \frac{\gamma}{n^2} \|\mathbf{A}\|_F^2, \qquad
        \Omega(\mathbf{A}, \mathbf{X}) = \frac{1}{2 n^2} \sum_{i,j} A_{ij}
        \|\mathbf{x}_i - \mathbf{x}_j\|^2

    on :math:`\mathbf{A}` against :math:`\mathbf{X}` for IDGL, and on
    :math:`\widehat{\mathbf{B}}` against :math:`\mathbf{X}_U` (with :math:`s` for
    :math:`n`) for an :class:`~torch_geometric_idgl.graphs.AnchorGraph`.

    Args:
        graph (Affinity or AnchorGraph): The learned graph, not normalised.
        signal (Signal): The raw features of the nodes, or of the anchors.
        smoothness (float): The weight :math:`\alpha` of the Dirichlet energy.
        connectivity (float): The weight :math:`\beta` of the log barrier on degrees.
        sparsity (float): The weight :math:`\gamma` of the squared norm.
    """
    check_at_least('smoothness', smoothness, 0)
    check_at_least('connectivity', connectivity, 0)
    check_at_least('sparsity', sparsity, 0)
    layout = signal.layout
    terms = []
    if connectivity > 0:
        barrier = layout.sum(safe_log(graph.degree()))
        terms.append(layout.per_row(barrier, -connectivity))
    if sparsity > 0:
        terms.append(layout.per_row(graph.sq_norm(), sparsity, 2))
    if smoothness > 0:  # The last, for it profits from what the norm has made.
        energy = graph.dirichlet_energy(signal)
        terms.append(layout.per_row(energy, smoothness, 2))
    if not terms:
        return torch.zeros(layout.num_graphs, dtype=graph.dtype, device=layout.device)
    return functools.reduce(torch.add, terms)
