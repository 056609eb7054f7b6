r"""The graph of nodes recovered from a node-anchor affinity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops.features import Features
from ..ops.numeric import (
    block_entries,
    dropout,
    refuse_second_derivatives,
    safe_reciprocal,
    symmetric_product,
)
from ..ops.sparse import SparseMatrix, sddmm
from .base import Affinity, GraphOperator
from .dense import DenseGraph
from .low_rank import FeatureGraph, LowRankGraph, project
from .sparse import SparseGraph
from .tiled import TiledGraph

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
    those of :math:`\widehat{\mathbf{B}}`, which is regularised.

    Args:
        affinity (Affinity): :math:`\mathbf{R}`, in any form.
        message (torch.Tensor, optional): What the first layer multiplies the graph with
            (if known), and a column of ones, whose product is the degrees.
        features (Features, optional): Those of the anchors, if their smoothness is
            asked for.
        previous (AnchorGraph, optional): The graph before, whose distance is asked for.
        norm (bool): Whether the squared norm is asked for.
        later (Tuple[int]): The numbers of columns of products that will follow.
        drop (float): The probability to drop an anchor from products (not from what is
            regularised), after normalising.

    Attributes:
        affinity: :math:`\mathbf{R}`, as products take it.
        matrix: :math:`\mathbf{R}` with its entries, where it has none and the
            regulariser needs them, or nothing.
        product: :math:`\mathbf{A} \mathbf{F}` with the message, or nothing.
        degree: :math:`\widehat{\mathbf{B}} \mathbf{1} = \mathbf{R}^{\top} \mathbf{1}`.
        energy: The smoothness :math:`\sum_k \Lambda_{kk} \|\mathbf{x}_k\|^2 - \langle
            \widehat{\mathbf{B}}, \mathbf{X}_U \mathbf{X}_U^{\top} \rangle` of each
            graph, or nothing.
        sq_norm: :math:`\|\widehat{\mathbf{B}}\|_F^2` of each graph, or nothing.
        sq_dist: :math:`\|\mathbf{R} - \mathbf{R}'\|_F^2` of each graph, or nothing.
        own_norm: :math:`\|\mathbf{R}\|_F^2`, which it is compared with.
    """

    affinity: Affinity
    matrix: Affinity | None
    energy: Any
    sq_norm: Any
    sq_dist: Any
    own_norm: Any
    lacks_norm = False

    def __init__(
        self,
        affinity: Affinity,
        message: Tensor | None = None,
        features: Features | None = None,
        previous: AnchorGraph | None = None,
        norm: bool = False,
        later: tuple[int, ...] = (),
        drop: float = 0.0,
    ) -> None:
        self.rows = self.cols = affinity.rows
        self.dtype = affinity.dtype
        message = self.ones() if message is None else message
        ones = message.new_ones(affinity.cols.num_rows, 1)
        found = affinity.measure(
            ones,
            message,
            previous=None if previous is None else previous.matrix or previous.affinity,
            # Back to the nodes, and there and back for every later layer.
            later=(message.size(1) - 1, *later, *later),
            whole=affinity.rows.num_graphs == 1 and (norm or features is not None),
        )
        self.affinity = found.graph
        width = message.size(1) - 1
        sent, degree = self.rows.total(found.t_product).split((width, 1), dim=1)  # type: ignore
        self.degree = degree.squeeze(1)
        self.anchor_scale = safe_reciprocal(degree)
        if drop > 0:  # what is regularised takes no scale of anchors
            mask = self.rows.same(dropout(ones, drop))
            self.anchor_scale = mask * self.anchor_scale
        node_scale = safe_reciprocal(found.product)  # type: ignore[arg-type]
        self.node_scale = node_scale
        self._transitions = None
        if isinstance(affinity, SparseGraph):
            # Scaling a few entries once spares autograd a copy of every product.
            scaled = affinity.value * node_scale[affinity.pattern.row, 0]
            self._transitions = affinity.with_value(scaled)
        if width > 0:
            self.product = self.to_nodes(self.anchor_scale * sent)
        self.sq_dist = found.sq_dist
        self.own_norm = None
        if previous is not None:
            with torch.no_grad():
                known = found.sq_norm
                self.own_norm = affinity.sq_norm() if known is None else known.detach()
                if found.lacks_norm:
                    gap = found.sq_dist + previous.affinity.sq_norm()  # type: ignore
                    self.sq_dist = gap.clamp(min=0.0)
                both = torch.stack([self.sq_dist, self.own_norm])
                self.sq_dist, self.own_norm = self.rows.total(both)
        self.matrix = None
        if isinstance(affinity, FeatureGraph) and (norm or features is not None):
            self.matrix = affinity.to_matrix()
        regularized = self.matrix or self.affinity
        self.sq_norm, inner = _regularized(regularized, node_scale, features, norm)
        self.energy = None
        if features is not None:
            degrees = affinity.cols.sum(self.degree * features.sq_norms)
            self.energy = degrees - inner  # type: ignore[operator]

    @property
    def slots(self) -> list[list[Tensor]]:
        return self.affinity.slots

    def to_anchors(self, x: Tensor) -> Tensor:
        r"""From nodes to anchors, :math:`\mathbf{\Lambda}^{-1} \mathbf{R}^{\top}
        \mathbf{F}`.
        """
        return self.anchor_scale * self.rows.total(self.affinity.t_matmul(x))

    def to_nodes(self, x: Tensor) -> Tensor:
        r"""From anchors to nodes, :math:`\mathbf{\Delta}^{-1} \mathbf{R}
        \mathbf{F}'`.
        """
        if self._transitions is not None:
            return self._transitions.matmul(x)
        return self.node_scale * self.affinity.matmul(x)

    def matmul(self, x: Tensor) -> Tensor:
        r""":math:`\mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}) = \mathbf{A} \mathbf{F}`
        (Eq. 7).
        """
        return self.weighted_matmul(x, 1.0)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        x = self.to_anchors(x)
        return self.to_nodes(x if weight == 1.0 else weight * x)


def _regularized(
    affinity: Affinity, node_scale: Tensor, features: Features | None, norm: bool
) -> tuple[Tensor | None, Tensor | None]:
    r""":math:`\|\widehat{\mathbf{B}}\|_F^2` and :math:`\langle \widehat{\mathbf{B}},
    \mathbf{X}_U \mathbf{X}_U^{\top} \rangle`, as far as asked for.
    """
    if features is None and not norm:
        return None, None
    sq_norm = inner = None
    if isinstance(affinity, LowRankGraph):
        # B = V M V^T with M = U^T Delta^-1 U, of which only M is formed.
        middle = _middle(affinity, node_scale)
        if norm:
            both = middle @ project(affinity.v, affinity.v, affinity.cols)
            sq_norm = (both * both.transpose(1, 2)).sum((1, 2))
        if features is not None:
            projected = features.blocks.t_matmul(affinity.v)  # X_U^T V
            graphs = (affinity.cols.num_graphs, features.num_features)
            projected = projected.unflatten(0, graphs)  # [B, d, K]
            inner = ((projected @ middle) * projected).sum((1, 2))
        return sq_norm, inner
    fewer = features is not None and affinity.cols.max_size <= features.num_features
    if norm or (fewer and not features.requires_grad):  # type: ignore[union-attr]
        anchor_graph = affinity.rows.total(_anchor_graph(affinity, node_scale))
        if norm:
            sq_norm = anchor_graph.square().sum((1, 2))
        if features is not None:
            inner = (anchor_graph * features.gram).sum((1, 2))
    elif isinstance(affinity, SparseGraph) and affinity.rows.num_graphs == 1:
        x, matrix = features.to_dense(), affinity.matrix  # type: ignore[union-attr]
        energy = _Energy.apply(matrix, matrix.value, node_scale, x)
        inner = affinity.rows.total(energy)
    else:
        # <B, X X^T> = |Delta^-1/2 R X|^2
        smooth = affinity.matmul(features.to_dense())  # type: ignore[union-attr]
        energy = affinity.rows.sum(node_scale[:, 0] * smooth.square().sum(1))
        inner = affinity.rows.total(energy)
    return sq_norm, inner


def _middle(affinity: LowRankGraph, node_scale: Tensor) -> Tensor:
    rows = affinity.rows
    return rows.total(project(affinity.u, node_scale * affinity.u, rows))


def _anchor_graph(affinity: Affinity, node_scale: Tensor) -> Tensor:
    """B of each graph, padded: [B, S, S]."""
    if isinstance(affinity, SparseGraph) and affinity.rows.num_graphs == 1:
        matrix = affinity.matrix
        return _SparseAnchorGraph.apply(matrix, matrix.value, node_scale).unsqueeze(0)
    if isinstance(affinity, TiledGraph) and affinity.has_matrix_slot:
        return affinity.anchor_graph(node_scale)
    if isinstance(affinity, TiledGraph | FeatureGraph):
        affinity = affinity.to_matrix()
    value = affinity.value if isinstance(affinity, DenseGraph) else _padded(affinity)
    return _DenseAnchorGraph.apply(value, affinity.rows.pad(node_scale))


def _padded(affinity: Affinity) -> Tensor:
    """The entries with the columns of each graph moved to the front: [B, N, S]."""
    dense, rows, cols = affinity.to_dense(), affinity.rows, affinity.cols
    place = torch.arange(cols.max_size, device=dense.device)
    column = cols.start[rows.batch].unsqueeze(1) + place
    real = place < torch.tensor(cols.sizes, device=dense.device)[rows.batch].unsqueeze(
        1
    )
    return rows.pad(dense.gather(1, column.clamp(max=dense.size(1) - 1)) * real)


class _DenseAnchorGraph(torch.autograd.Function):
    r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}`: forward makes
    half of the symmetric matrix, backward needs a single product.
    """

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(value, scale)
        return symmetric_product(value * scale, value)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        value, scale = ctx.saved_tensors
        both = grad + grad.transpose(1, 2)
        # A plain product is faster than a batched one.
        product = (value[0] @ both[0]).unsqueeze(0) if len(value) == 1 else value @ both
        grad_scale = 0.5 * (product * value).sum(2, keepdim=True)
        return product.mul_(scale), grad_scale


class _SparseAnchorGraph(torch.autograd.Function):
    """The same of a sparse matrix, with a few dense rows of it at a time."""

    @staticmethod
    def forward(ctx, matrix, value, scale):
        ctx.matrix = matrix
        ctx.save_for_backward(value, scale)
        found = value.new_zeros(matrix.size(1), matrix.size(1))
        for start, block in _row_blocks(matrix, matrix.size(1)):
            own = scale[start : start + block.size(0), 0]
            found += block.scaled_t_matmul(own, block.to_dense())
        return found

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        value, scale = ctx.saved_tensors
        row, both, found = ctx.matrix.pattern.row, grad + grad.t(), []
        for _, block in _row_blocks(ctx.matrix, grad.size(1)):
            place = (block.pattern.row, block.pattern.col)
            found.append(block.matmul(both)[place])
        product = torch.cat([value[:0], *found])
        grad_scale = torch.zeros_like(scale[:, 0]).index_add_(0, row, product * value)
        return None, product * scale[row, 0], 0.5 * grad_scale.unsqueeze(1)


class _Energy(torch.autograd.Function):
    r""":math:`\sum_i c_i \|(\mathbf{R} \mathbf{X})_i\|^2` of a sparse matrix, some rows
    at a time: the product is as large as the features of all nodes.
    """

    @staticmethod
    def forward(ctx, matrix, value, scale, x):
        ctx.matrix = matrix
        ctx.save_for_backward(value, scale, x)
        total = value.new_zeros(1)
        for start, block in _row_blocks(matrix, x.size(1)):
            own = scale[start : start + block.size(0), 0]
            total += own.dot(block.matmul(x).square().sum(1))
        return total

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        value, scale, x = ctx.saved_tensors
        grad_value, grad_scale = [value[:0]], [scale[:0, 0]]
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[3] else None
        for start, block in _row_blocks(ctx.matrix, x.size(1)):
            product = block.matmul(x)
            grad_scale.append(grad * product.square().sum(1))
            product *= 2.0 * grad * scale[start : start + block.size(0)]
            grad_value.append(sddmm(block.pattern, product, x))
            if grad_x is not None:
                grad_x += block.t_matmul(product)
        return None, torch.cat(grad_value), torch.cat(grad_scale).unsqueeze(1), grad_x


def _row_blocks(matrix: SparseMatrix, width: int) -> Iterator[tuple[int, SparseMatrix]]:
    """Neighbouring rows, each range with its first row's number, such that a matrix of
    so many columns and these rows is small.
    """
    height = matrix.size(0)
    step = max(1, block_entries(matrix.device) // max(1, width))
    for start in range(0, height, step):
        yield start, matrix.row_range(start, min(start + step, height))
