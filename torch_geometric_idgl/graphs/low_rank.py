r"""The graph of which only a factor is formed."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import widen
from ..ops.sparse import Pattern, sddmm
from .base import Affinity, GraphOperator, Measures

__all__ = ['CompleteGraph', 'LowRankGraph', 'expand', 'project']


def project(u: Tensor, x: Tensor, nodes: Nodes) -> Tensor:
    r""":math:`\mathbf{U}^{\top} \mathbf{F}` of each graph: :obj:`[n, K]` and
    :obj:`[n, f]` to :obj:`[B, K, f]`.
    """
    if nodes.num_graphs == 1:  # a plain product is faster than a batched one
        return (u.t() @ x).unsqueeze(0)
    return nodes.pad(u).transpose(1, 2) @ nodes.pad(x)


def expand(u: Tensor, coefficient: Tensor, nodes: Nodes) -> Tensor:
    r""":math:`\mathbf{U} \mathbf{C}` of each graph: :obj:`[n, K]` and
    :obj:`[B, K, f]` to :obj:`[n, f]`.
    """
    if nodes.num_graphs == 1:
        return u @ coefficient.squeeze(0)
    return nodes.unpad(nodes.pad(u) @ coefficient)


class LowRankGraph(Affinity):
    r"""An affinity :math:`\mathbf{A} = \mathbf{U} \mathbf{V}^{\top}`, exact where
    sparsification removes nothing (:math:`\varepsilon = 0` and non-negative vectors):

    .. math::
        \mathbf{A} \mathbf{F} = \mathbf{U} (\mathbf{V}^{\top} \mathbf{F}), \quad
        \|\mathbf{A}\|_F^2 = \langle \mathbf{U}^{\top} \mathbf{U},
        \mathbf{V}^{\top} \mathbf{V} \rangle, \quad
        \langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle =
        \|\mathbf{U}^{\top} \mathbf{X}\|_F^2

    Time and memory are linear in the number of nodes.

    Args:
        u (torch.Tensor): :math:`\mathbf{U}`, a vector for each row.
        v (torch.Tensor, optional): :math:`\mathbf{V}`, a vector for each column;
            :math:`\mathbf{U}` if not given.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
    """

    inner_cost = 0

    def __init__(self, u: Tensor, v: Tensor | None, rows: Nodes, cols: Nodes) -> None:
        self.rows, self.cols, self.dtype = rows, cols, u.dtype
        self.u = u
        self.v = u if v is None else v
        self.symmetric = v is None

    def matmul(self, x: Tensor) -> Tensor:
        wide = widen(x)
        out = expand(self.u, project(self.v, wide, self.cols), self.rows)
        return out if wide is x else out[:, : x.size(1)]

    def t_matmul(self, x: Tensor) -> Tensor:
        wide = widen(x)
        out = expand(self.v, project(self.u, wide, self.rows), self.cols)
        return out if wide is x else out[:, : x.size(1)]

    def sq_norm(self) -> Tensor:
        if not torch.is_grad_enabled():
            return (self._grams[0] * self._grams[1]).sum((1, 2))
        gram = project(self.u, self.u, self.rows)
        if self.symmetric:
            return gram.square().sum((1, 2))
        return (gram * project(self.v, self.v, self.cols)).sum((1, 2))

    def gram_inner(self, features: Features) -> Tensor:
        if not self.symmetric:
            return super().gram_inner(features)
        graphs = (self.rows.num_graphs, features.num_features)
        projected = features.blocks.t_matmul(self.u).unflatten(0, graphs)
        return projected.square().sum((1, 2))

    def values_at(self, pattern: Pattern) -> Tensor:
        return sddmm(pattern, self.u, self.v)

    def inner(self, other: Affinity) -> Tensor:
        # <A', U V^T> = tr(U^T A' V), for any A'.
        return self.rows.sum((other.matmul(self.v) * self.u).sum(1))

    @cached_property
    def _grams(self) -> tuple[Tensor, Tensor]:
        # Values without gradient, for distances to the graphs before and after.
        u, v = self.u.detach(), self.v.detach()
        gram = project(u, u, self.rows)
        return gram, gram if self.symmetric else project(v, v, self.cols)

    @torch.no_grad()
    def sq_dist(self, other: Affinity) -> Tensor:
        if not self._is_comparable(other):
            return super().sq_dist(other)
        # With D = U - U' and E = V - V', A - A' = D V^T + U' E^T: every term is of the
        # size of the difference, so nothing cancels near convergence.
        d, e = self.u - other.u, self.v - other.v
        d_gram, u_cross = project(d, d, self.rows), project(other.u, d, self.rows)
        e_gram, v_cross = project(e, e, self.cols), project(e, self.v, self.cols)
        (u_gram, _), (_, v_gram) = other._grams, self._grams
        total = d_gram * v_gram + e_gram * u_gram + 2.0 * u_cross * v_cross
        return total.sum((1, 2)).clamp(min=0.0)

    def measure(self, x=None, t_x=None, *, previous=None, **kwargs) -> Measures:
        if not (self.symmetric and self._is_comparable(previous)):
            return super().measure(x, t_x, previous=previous, **kwargs)
        # U'^T U', U'^T D and D^T D give all of the distance, and U^T U as well: two
        # products for each graph instead of five.
        found = super().measure(x, t_x, **kwargs)
        with torch.no_grad():
            d, gram = self.u - previous.u, previous._grams[0]
            d_gram, cross = project(d, d, self.rows), project(previous.u, d, self.rows)
            t_cross = cross.transpose(1, 2) + d_gram
            own_gram = gram + cross + t_cross
            dist = d_gram * (own_gram + gram) + 2.0 * cross * t_cross
        graph = copy.copy(self)
        graph.__dict__['_grams'] = (own_gram, own_gram)
        dist = dist.sum((1, 2)).clamp(min=0.0)
        return found._replace(graph=graph, sq_dist=dist)

    def _is_comparable(self, other: Affinity | None) -> TypeGuard[LowRankGraph]:
        return isinstance(other, LowRankGraph) and self.u.shape == other.u.shape


class CompleteGraph(GraphOperator):
    r"""The initial graph in which all :math:`n` nodes of a graph are neighbours of each
    other, each with weight :math:`1 / n`: its product is the mean of all rows.

    Args:
        nodes (Nodes): The nodes of each graph.
        dtype (torch.dtype): The number type of the entries.
    """

    def __init__(self, nodes: Nodes, dtype: torch.dtype) -> None:
        self.rows = self.cols = nodes
        self.dtype = dtype

    def matmul(self, x: Tensor) -> Tensor:
        nodes = self.rows
        if nodes.num_graphs == 1:
            return x.mean(0, keepdim=True).expand(self.num_nodes, -1)
        total = x.new_zeros(nodes.num_graphs, x.size(1)).index_add(0, nodes.batch, x)
        return (total / nodes.count.unsqueeze(1))[nodes.batch]
