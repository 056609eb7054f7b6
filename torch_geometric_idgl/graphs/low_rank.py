r"""Graphs of which no entry is formed: a product of factors, and the same with factors
that are made of raw features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import (
    block_entries,
    refuse_second_derivatives,
    safe_rsqrt,
    weighted_unit_vectors,
    widen,
)
from ..ops.sparse import Pattern, SparseMatrix, sddmm
from .base import Affinity, GraphOperator, Measures
from .dense import DenseGraph
from .tiled import InnerScores, Scores, WeightedScores

__all__ = ['CompleteGraph', 'FeatureGraph', 'LowRankGraph', 'expand', 'project']

_SUBSPACES = (16, 64)  # dimensions, for bounds of the norm
_ROUNDING = 1e-4


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


class FeatureGraph(Affinity):
    r"""Multi-head weighted cosines of raw features that are not negative, with
    :math:`\varepsilon = 0`: :math:`\mathbf{A} = \mathbf{U} \mathbf{U}^{\top}` with

    .. math::
        \mathbf{U} = \frac{1}{\sqrt{m}} \big\Vert_{p=1}^{m} \mathrm{diag}(\mathbf{r}_p)
        \, \mathbf{X} \, \mathrm{diag}(\mathbf{w}_p), \qquad
        \mathbf{r}_p = \big(\mathbf{X}^{2} \mathbf{w}_p^2\big)^{-1/2}

    (or :math:`\mathbf{R} = \mathbf{U} \mathbf{U}_U^{\top}` with the rows of anchors).
    Every product with it is a product with :math:`\mathbf{X}`, which is sparse for
    bags of words.

    Args:
        features (Features): The raw features.
        weight (torch.Tensor): The head weights, of shape :obj:`[m, d]`.
        index (torch.Tensor, optional): The anchors. (default: :obj:`None`)
        cols (Nodes, optional): The graphs of the anchors. (default: :obj:`None`)
    """

    has_expensive_norm = True

    def __init__(
        self,
        features: Features,
        weight: Tensor,
        index: Tensor | None = None,
        cols: Nodes | None = None,
    ) -> None:
        self.rows, self.cols = features.nodes, cols or features.nodes
        self.dtype = weight.dtype
        self.features = features
        self.weight = weight
        self.index = index
        self.symmetric = index is None
        self.heads = weight.size(0)
        sq_weight = weight.square()
        self.sq_weight = sq_weight / self.heads  # [m, d]
        self.scale = safe_rsqrt(features.squared.matmul(sq_weight.t()))  # [n, m]
        self._mine = self._others = (features.blocks, self.scale.unsqueeze(-1))
        if index is not None:
            anchors = features.rows(index, self.cols)
            self._others = anchors.blocks, self._mine[1][index]

    def matmul(self, x: Tensor, transposed: bool = False) -> Tensor:
        (left, left_scale), (right, right_scale) = self._mine, self._others
        if transposed:
            (left, left_scale), (right, right_scale) = self._others, self._mine
        # Both factors carry w_p: it is squared and applied once, between them.
        shape = (self.heads, x.size(1))
        spread = (right_scale * x.unsqueeze(1)).flatten(1)  # [n, m f]
        graphs = (self.rows.num_graphs, self.features.num_features)
        by_head = right.t_matmul(spread).view(*graphs, *shape)
        by_head = by_head * self.sq_weight.t().unsqueeze(-1)  # [B, d, m, f]
        out = left.matmul(by_head.flatten(2).flatten(0, 1))
        return (out.unflatten(1, shape) * left_scale).sum(1)

    def t_matmul(self, x: Tensor) -> Tensor:
        return self.matmul(x, transposed=True)

    def to_matrix(self) -> DenseGraph:
        """The same affinity with its entries."""
        features, cols = self.features, self.cols
        scores: Scores
        if features.is_sparse:
            scores = WeightedScores(features, self.weight, self.index, cols)
        else:
            u = weighted_unit_vectors(features.to_dense(), self.weight)
            v = None if self.index is None else u[self.index]
            scores = InnerScores(u, v, self.rows, cols)
        return DenseGraph(scores.dense(), self.rows, cols, self.symmetric)

    # Norm and smoothness: sums over pairs of features -------------------------------

    def gram_inner(self, features: Features) -> Tensor:
        r""":math:`\langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle = \sum_p
        \sum_{k,l} \frac{w_{pk}^2}{m} (\mathbf{X}^{\top} \mathrm{diag}(\mathbf{r}_p)
        \mathbf{X})_{kl}^2` with the features the graph is made of.
        """
        if features is not self.features or self.index is not None:
            return super().gram_inner(features)
        pairs = features.pairs
        if pairs is None:
            totals = [
                (grams.square().sum(2) * self.sq_weight).sum()
                for grams in self._weighted_grams(self.scale)
            ]
            return torch.stack(totals)
        squares = self.features.pair_matrix.matmul(self.scale).square()  # [pairs, m]
        incidence = pairs.incidence
        if incidence.dtype != squares.dtype:
            incidence = incidence.with_value(incidence.value.to(squares.dtype))
        rows = incidence.matmul(squares)  # sums over l, for each k: [B * d, m]
        rows = rows.view(self.rows.num_graphs, features.num_features, self.heads)
        return (rows * self.sq_weight.t()).sum((1, 2))

    def sq_norm(self) -> Tensor:
        r""":math:`\|\mathbf{A}\|_F^2 = \sum_{p,q} \sum_{k,l} \frac{w_{pk}^2
        w_{ql}^2}{m^2} (\mathbf{X}^{\top} \mathrm{diag}(\mathbf{r}_p \odot \mathbf{r}_q)
        \mathbf{X})_{kl}^2`
        """
        if self.index is not None:
            return self.to_matrix().sq_norm()
        p, q = torch.triu_indices(self.heads, self.heads, device=self.scale.device)
        weight = self.scale[:, p] * self.scale[:, q]
        times = torch.where(p == q, 1.0, 2.0).to(weight.dtype)
        pairs, features = self.features.pairs, self.features.num_features
        if pairs is None:
            totals = []
            for grams in self._weighted_grams(weight):
                half = torch.einsum('qkl,ql->qk', grams.square(), self.sq_weight[q])
                totals.append(((half * self.sq_weight[p]).sum(1) * times).sum())
            return torch.stack(totals)
        near = self.sq_weight.t()[pairs.low % features]  # [pairs, m]
        far = self.sq_weight.t()[pairs.high % features]
        squares = (
            self.features.pair_matrix.matmul(weight).square() * times
        )  # [pairs, Q]
        both = near[:, p] * far[:, q] + far[:, p] * near[:, q]
        total = (both * squares).sum(1)
        total = torch.where(pairs.low == pairs.high, 0.5 * total, total)
        if self.rows.num_graphs == 1:
            return total.sum(0, keepdim=True)
        graph = pairs.low // features
        return total.new_zeros(self.rows.num_graphs).index_add(0, graph, total)

    def _weighted_grams(self, weight: Tensor) -> Iterator[Tensor]:
        r"""All :math:`\mathbf{X}^{\top} \mathrm{diag}(\mathbf{c}_q) \mathbf{X}`, graph
        by graph: :obj:`[Q, d, d]`.
        """
        x = self.features.value
        for first, last in zip(self.rows.ptr[:-1], self.rows.ptr[1:], strict=True):
            if isinstance(x, SparseMatrix):
                yield _WeightedGrams.apply(x.row_range(first, last), weight[first:last])
            elif self.features.requires_grad:
                own, c = x[first:last], weight[first:last].t().unsqueeze(-1)
                yield own.t() @ (c * own)
            else:
                yield _WeightedGrams.apply(x[first:last], weight[first:last])

    # Bounds -------------------------------------------------------------------------

    @torch.no_grad()
    def sq_norm_bounds(self, degree: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # Weighted cosines are at most one, and s |R|^2 >= |R 1|^2 (Cauchy-Schwarz).
        low = self.rows.sum(degree.square()) / self.cols.count
        high = self.rows.sum(degree)
        yield low, high
        # The list of co-occurring features makes the norm cheap, as few nodes do.
        large = self.num_nodes >= 4 * max(_SUBSPACES) and self.features.pairs is None
        precise = self.dtype in (torch.float, torch.double)  # others have no QR
        if large and precise and self.symmetric and self.rows.num_graphs == 1:
            for dimension in _SUBSPACES:
                lower, upper = self._bounds_on_subspace(dimension)
                yield torch.maximum(low, lower), torch.minimum(high, upper)
        norm = self.sq_norm()
        yield norm, norm

    def _bounds_on_subspace(self, dimension: int) -> tuple[Tensor, Tensor]:
        r"""Let :math:`\mathbf{Q}` be an orthonormal basis of :math:`\mathbf{A}
        \mathbf{F}`, and :math:`\mathbf{C} = \mathbf{Q}^{\top} \mathbf{A} \mathbf{Q}`.
        Of :math:`\mathbf{A}` in a basis that goes on from :math:`\mathbf{Q}`, all is
        known but the remaining diagonal block, and that is positive semi-definite too,
        so that its norm is at most its trace:

        .. math::
            0 \leq \|\mathbf{A}\|_F^2 - \big(2 \|\mathbf{A} \mathbf{Q}\|_F^2 -
            \|\mathbf{C}\|_F^2\big) \leq \big(\mathrm{tr}(\mathbf{A}) -
            \mathrm{tr}(\mathbf{C})\big)^2
        """

        def multiply(x: Tensor) -> Tensor:  # in parts: products are heads times wider
            parts = x.split(_SUBSPACES[0], dim=1)
            return torch.cat([self.matmul(part) for part in parts], dim=1)

        generator = torch.Generator().manual_seed(0)  # the caller's is left alone
        size = (self.num_nodes, dimension)
        start = torch.randn(size, generator=generator, dtype=self.dtype)
        basis = torch.linalg.qr(multiply(start.to(self.rows.device))).Q
        image = multiply(basis)
        inner = basis.t() @ image
        known = 2.0 * image.square().sum() - inner.square().sum()
        rest = (self.num_nodes - inner.trace()).clamp(min=0.0).square()
        return known * (1.0 - _ROUNDING), (known + rest) * (1.0 + _ROUNDING)


class _WeightedGrams(torch.autograd.Function):
    r"""All :math:`\mathbf{X}^{\top} \mathrm{diag}(\mathbf{c}_q) \mathbf{X}`, in row
    blocks; backward keeps nothing but :math:`\mathbf{X}`.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x
        out = weight.new_zeros(weight.size(1), x.size(1), x.size(1))
        for rows, block in _row_blocks(x):
            for q, c in enumerate(weight[rows].t()):
                out[q].addmm_(block.t(), c.unsqueeze(1) * block)
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        parts = [
            torch.stack([((block @ g) * block).sum(1) for g in grad], dim=1)
            for _, block in _row_blocks(ctx.x)
        ]
        return None, torch.cat(parts)


def _row_blocks(x: Tensor | SparseMatrix) -> Iterator[tuple[slice, Tensor]]:
    step = max(1, block_entries(x.device) // max(1, x.size(1)))
    for start in range(0, max(x.size(0), 1), step):
        rows = slice(start, min(start + step, x.size(0)))
        if isinstance(x, SparseMatrix):
            yield rows, x.row_range(rows.start, rows.stop).to_dense()
        else:
            yield rows, x[rows]
