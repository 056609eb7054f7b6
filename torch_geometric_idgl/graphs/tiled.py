r"""The graph that makes its entries when asked, and forgets or keeps them.

Autograd would answer every product :math:`\mathbf{Y} = \mathbf{A} \mathbf{F}` with a
gradient :math:`\mathbf{G} \mathbf{F}^{\top}` of the size of :math:`\mathbf{A}`. Here
the gradient

.. math::
    \mathrm{d}\mathbf{A} = [\mathbf{G}_1, \mathbf{G}_2, \ldots]
    [\mathbf{F}_1, \mathbf{F}_2, \ldots]^{\top} + \ldots

is formed once for all products, tile by tile, and goes straight on to the tensors that
the entries are made of. For this, the first walk over the tiles returns *slots* beside
its answers: zero matrices of the size of :math:`[\mathbf{G}; \mathbf{F}]`, expanded
from one number, so that they take no memory. Each later product takes a slot as an
argument, and returns :math:`[\mathbf{G}; \mathbf{F}]` as the gradient of it. So
autograd itself brings the factors of all products to the backward of the walk.

Of a symmetric matrix only one half is made: a tile begins at the diagonal with a
square, and what is below the square stands for what is right of it as well.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.features import Features
from ..ops.numeric import block_entries, symmetric_product, widen
from ..ops.sparse import Pattern
from .base import Affinity, Measures
from .dense import DenseGraph
from .scores import InnerScores, Scores, Tile, add_gradients, half_tiles, tiles

__all__ = ['TiledGraph']


class TiledGraph(Affinity):
    r"""A thresholded affinity in tiles: always exact.

    Tiles are made, thresholded, used and dropped, and made again in backward, so that
    memory is :math:`\mathcal{O}(n \cdot \mathrm{tile})`. With :obj:`keep`, they are
    kept instead: the fastest form of a matrix that fits.

    Args:
        scores (Scores): What makes the tiles.
        keep (bool, optional): Whether to keep tiles. (default: :obj:`False`)
    """

    def __init__(self, scores: Scores, keep: bool = False) -> None:
        self.rows, self.cols, self.dtype = scores.rows, scores.cols, scores.dtype
        self.scores = scores
        self.symmetric = scores.symmetric
        self.entries = _Entries(scores, keep)
        self._slots: list[Tensor] = []
        self._matrix_slot: Tensor | None = None

    def light(self) -> TiledGraph:
        return TiledGraph(self.scores)

    def measure(
        self,
        x: Tensor | None = None,
        t_x: Tensor | None = None,
        *,
        features: Features | None = None,
        previous: Affinity | None = None,
        norm: bool = True,
        later: tuple[int, ...] = (),
        whole: bool = False,
    ) -> Measures:
        if self.symmetric and t_x is not None:  # A^T is A, of which there is one half.
            both = t_x if x is None else torch.cat([x, t_x], dim=1)
            found = self.measure(
                both, features=features, previous=previous, norm=norm, later=later
            )
            width = both.size(1) - t_x.size(1)
            parts = found.product.split((width, t_x.size(1)), dim=1)  # type: ignore
            return found._replace(product=parts[0], t_product=parts[1])
        nothing = self.scores.leaves[0].new_zeros(max(self.shape), 0)
        x = nothing[: self.cols.num_rows] if x is None else x
        t_x = nothing[: self.rows.num_rows] if t_x is None else t_x
        by_tiles = features is not None and not features.requires_grad
        before = previous.entries if self._has_same_tiles(previous) else None
        sizes = [(sum(self.shape), width) for width in later]
        out, t_out, norm_, inner, dist, *slots = _walk(
            self.entries,
            features if by_tiles else None,
            before,
            [*sizes, self.shape] if whole else sizes,
            x,
            t_x,
        )
        # Whoever has the graph may spend each slot once. Only the cost of a product
        # depends on whether there is one left, never its result.
        graph = TiledGraph.__new__(TiledGraph)
        graph.__dict__.update(self.__dict__)
        graph._matrix_slot = slots.pop() if whole else None
        graph._slots = slots if torch.is_grad_enabled() else []
        if features is not None and not by_tiles:
            inner = self.gram_inner(features)
        if previous is not None and before is None:
            dist = self.sq_dist(previous)
        return Measures(graph, out, t_out, norm_, inner, dist)

    def matmul(self, x: Tensor) -> Tensor:
        return self._product(x, transposed=False)

    def t_matmul(self, x: Tensor) -> Tensor:
        return self._product(x, transposed=not self.symmetric)

    def _product(self, x: Tensor, transposed: bool) -> Tensor:
        if not torch.is_grad_enabled():
            return self.entries.matmul(x, transposed)
        fitting = [slot.size(1) for slot in self._slots if slot.size(1) >= x.size(1)]
        for place, slot in enumerate(self._slots):
            if slot.size(1) == min(fitting, default=-1):
                del self._slots[place]
                return _later_product(self.entries, slot, x, transposed)
        if transposed:
            return self.measure(t_x=x).t_product  # type: ignore[return-value]
        return self.measure(x).product  # type: ignore[return-value]

    def sq_norm(self) -> Tensor:
        return self.measure().sq_norm  # type: ignore[return-value]

    def gram_inner(self, features: Features) -> Tensor:
        if features.requires_grad:
            return super().gram_inner(features)
        return self.measure(features=features).gram_inner  # type: ignore[return-value]

    @torch.no_grad()
    def sq_dist(self, other: Affinity) -> Tensor:
        if self._has_same_tiles(other):
            return self.measure(previous=other).sq_dist  # type: ignore[return-value]
        return super().sq_dist(other)

    def _has_same_tiles(self, other: Affinity | None) -> TypeGuard[TiledGraph]:
        return (
            isinstance(other, TiledGraph) and other.entries.tiles == self.entries.tiles
        )

    def values_at(self, pattern: Pattern) -> Tensor:
        if torch.is_grad_enabled():
            return self.to_matrix().values_at(pattern)
        found = [torch.empty(0, dtype=self.dtype, device=self.rows.device)]
        for tile in tiles(self.rows, self.cols):
            rows, cols = self.scores.slices(tile)
            places = pattern.places(rows.start, rows.stop)
            row = pattern.row[places] - rows.start
            col = pattern.col[places] - cols.start
            found.append(self.scores.block(tile)[row, col])
        return torch.cat(found)

    def anchor_graph(self, scale: Tensor) -> Tensor:
        r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}` of a single
        node-anchor affinity that was measured with :obj:`whole=True`.
        """
        assert self._matrix_slot is not None
        return _AnchorGraph.apply(self.entries, self._matrix_slot, scale)

    @property
    def has_matrix_slot(self) -> bool:
        """Whether there is a slot, and one with gradients if they are wanted."""
        slot = self._matrix_slot
        if slot is None or slot.requires_grad or not torch.is_grad_enabled():
            return slot is not None
        return not any(leaf.requires_grad for leaf in self.scores.leaves)

    def to_matrix(self) -> DenseGraph:
        """The same graph with its whole matrix in autograd's hands."""
        return DenseGraph(self.scores.dense(), self.rows, self.cols, self.symmetric)


class _Entries:
    """The entries of a thresholded score matrix, tile by tile.

    Tiles are values of an immutable object, so keeping them changes no result. Small
    matrices are kept from the walk over them until the walk over the next graph, which
    is compared with them, and once more in the backward pass.

    Args:
        scores (Scores): What makes the tiles.
        keep (bool): Whether tiles are kept for good.
    """

    def __init__(self, scores: Scores, keep: bool) -> None:
        self.scores = scores
        self.halved = scores.symmetric
        sizes = zip(scores.rows.sizes, scores.cols.sizes, strict=True)
        entries = sum(n * s for n, s in sizes) // (2 if self.halved else 1)
        block = block_entries(scores.rows.device)
        self.keep = keep
        self.keep_briefly = keep or entries <= 16 * block
        if scores.tile_rows is not None:
            self.keep_briefly = keep
            size = scores.tile_rows * scores.cols.max_size
            self.tiles = list(tiles(scores.rows, scores.cols, size))
        elif scores.top_k is not None:  # as everywhere, that all keep the same entries
            self.tiles = list(tiles(scores.rows, scores.cols))
        elif self.halved:
            size = 2 * block if self.keep_briefly else block // 2
            self.tiles = list(half_tiles(scores.rows, size))
        else:
            size = 2 * block if self.keep_briefly else block // 2
            self.tiles = list(tiles(scores.rows, scores.cols, size))
        self._kept: dict[Tile, Tensor] = {}

    @torch.no_grad()
    def tile(self, tile: Tile) -> Tensor:
        """The entries of one of the tiles, without gradient."""
        if not self.keep_briefly:
            return self.scores.block(tile)
        if tile not in self._kept:
            self._kept[tile] = self.scores.block(tile)
        return self._kept[tile]

    def drop(self) -> None:
        """Forget tiles that are not kept for good."""
        if not self.keep:
            self._kept.clear()

    def __getstate__(self) -> dict:
        return {**self.__dict__, '_kept': {}}  # large, and quickly made

    def add_product(self, tile: Tile, block: Tensor, x: Tensor, out: Tensor) -> None:
        """Adds the part that a tile has in the product with a matrix."""
        rows, cols = self.scores.slices(tile)
        out[rows].addmm_(block, x[cols])
        if self.halved:
            below = slice(cols.stop, rows.stop)
            out[cols].addmm_(block[block.size(1) :].t(), x[below])

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """The inner product of two tiles, with what they stand for."""
        total = left.reshape(-1).dot(right.reshape(-1))
        if self.halved:
            square = slice(0, left.size(1))
            same = left[square].reshape(-1).dot(right[square].reshape(-1))
            total = 2.0 * total - same
        return total

    def matmul(self, x: Tensor, transposed: bool) -> Tensor:
        """The product with a matrix, without gradient."""
        width, x = x.size(1), widen(x)
        if transposed and not self.halved:
            out = x.new_zeros(self.scores.cols.num_rows, x.size(1))
            for tile in self.tiles:
                rows, cols = self.scores.slices(tile)
                out[cols].addmm_(self.tile(tile).t(), x[rows])
        else:
            out = x.new_zeros(self.scores.rows.num_rows, x.size(1))
            for tile in self.tiles:
                self.add_product(tile, self.tile(tile), x, out)
        return out[:, :width]


class _Walk(torch.autograd.Function):
    """One walk over the tiles, and the one backward of the whole graph."""

    @staticmethod
    def forward(ctx, entries, features, previous, slot_sizes, x, y, *leaves):
        ctx.entries, ctx.features = entries, features
        ctx.set_materialize_grads(False)  # Slots that nobody took are large.
        ctx.save_for_backward(x, y, *leaves)
        rows, cols = entries.scores.rows, entries.scores.cols
        widths = x.size(1), y.size(1)
        x, y = widen(x), widen(y)
        out = x.new_zeros(rows.num_rows, x.size(1))
        t_out = x.new_zeros(cols.num_rows, y.size(1))
        nothing = x.new_zeros(())
        parts = []  # of norm, Gram inner product and distance
        for tile in entries.tiles:
            block = entries.tile(tile)
            if x.size(1):
                entries.add_product(tile, block, x, out)
            if y.size(1):
                mine, others = entries.scores.slices(tile)
                t_out[others].addmm_(block.t(), y[mine])
            norm, inner, distance = entries.inner(block, block), nothing, nothing
            if features is not None:
                inner = entries.inner(block, features.gram_tile(tile))
            if previous is not None:
                gap = block - previous.tile(tile)
                distance = entries.inner(gap, gap)
            parts.append(torch.stack([norm, inner, distance]))
        if previous is not None:
            previous.drop()
        sums = x.new_zeros(3, rows.num_graphs)
        if parts:
            graph = torch.tensor([t.graph for t in entries.tiles], device=x.device)
            sums.index_add_(1, graph, torch.stack(parts, dim=1))
        norm, inner, distance = sums.unbind(0)
        ctx.mark_non_differentiable(distance)
        slots = [x.new_zeros(()).expand(size) for size in slot_sizes]
        out, t_out = out[:, : widths[0]], t_out[:, : widths[1]]
        return out, t_out, norm.clone(), inner.clone(), distance, *slots

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_t_out, grad_norm, grad_inner, _, *factors):
        entries, features = ctx.entries, ctx.features
        scores = entries.scores
        x, y, *leaves = ctx.saved_tensors
        sizes = [scores.rows.num_rows, scores.cols.num_rows]
        graphs = scores.rows.num_graphs
        grad_out = x.new_zeros(sizes[0], x.size(1)) if grad_out is None else grad_out
        if grad_t_out is None:
            grad_t_out = y.new_zeros(sizes[1], y.size(1))
        grad_norm = x.new_zeros(graphs) if grad_norm is None else grad_norm
        grad_inner = x.new_zeros(graphs) if grad_inner is None else grad_inner
        lefts, rights, whole = [grad_out, y], [x, grad_t_out], None
        for both in factors:  # of products that were made with a slot
            if both is None:
                continue
            if both.size(0) == sum(sizes):
                left, right = both.split(sizes)
                lefts.append(left)
                rights.append(right)
            else:  # of the anchor graph: no small factors
                whole = both
        left, right = torch.cat(lefts, dim=1), torch.cat(rights, dim=1)
        if entries.halved:  # The gradients of an entry and of its mirror image.
            left, right = torch.cat([left, right], 1), torch.cat([right, left], 1)
            grad_norm, grad_inner = 2.0 * grad_norm, 2.0 * grad_inner
        leaves = [
            leaf.detach().requires_grad_(need)
            for leaf, need in zip(leaves, ctx.needs_input_grad[6:], strict=True)
        ]
        known = isinstance(scores, InnerScores)  # the gradient of inner products is
        grads = [torch.zeros_like(leaf) for leaf in leaves]
        if known:
            grads = scores.start_gradient()
        widths = x.size(1), y.size(1)
        grad_out, grad_t_out = widen(grad_out), widen(grad_t_out)
        grad_x = x.new_zeros(x.size(0), grad_out.size(1))
        grad_y = y.new_zeros(y.size(0), grad_t_out.size(1))
        for tile in entries.tiles:
            mine, others = scores.slices(tile)
            if known:
                block = entries.tile(tile)
            else:
                with torch.enable_grad():
                    value = scores.block(tile, leaves)
                block = value.detach()
            if x.size(1) and ctx.needs_input_grad[4]:
                if entries.halved:
                    entries.add_product(tile, block, grad_out, grad_x)
                else:
                    grad_x[others].addmm_(block.t(), grad_out[mine])
            if y.size(1) and ctx.needs_input_grad[5]:
                torch.mm(block, grad_t_out[others], out=grad_y[mine])
            grad = left[mine] @ right[others].t()
            if whole is not None:
                grad += whole[mine, others]
            grad.addcmul_(block, 2.0 * grad_norm[tile.graph])
            if features is not None:
                grad.addcmul_(features.gram_tile(tile), grad_inner[tile.graph])
            if known:
                grad = torch.ops.aten.threshold_backward(grad, block, 0.0)
                scores.add_to_rows(grads, mine, others, grad)
                if entries.halved:  # The square is its own mirror image.
                    grad, mine = grad[block.size(1) :], slice(others.stop, mine.stop)
                scores.add_to_cols(grads, mine, others, grad)
            else:
                if entries.halved:  # The square is its own mirror image.
                    grad[: block.size(1)] *= 0.5
                add_gradients(value, grad, leaves, grads)
        entries.drop()
        grads = scores.end_gradient(grads) if known else grads
        grad_x, grad_y = grad_x[:, : widths[0]], grad_y[:, : widths[1]]
        return None, None, None, None, grad_x, grad_y, *grads


class _LaterProduct(torch.autograd.Function):
    """A product after the walk; the factors of its gradient are that of its slot."""

    @staticmethod
    def forward(ctx, entries, slot, x, transposed):
        ctx.entries, ctx.transposed = entries, transposed
        ctx.spare = slot.size(1) - x.size(1)
        ctx.save_for_backward(x)
        return entries.matmul(x, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[2]:
            grad_x = ctx.entries.matmul(grad.contiguous(), not ctx.transposed)
        factors = torch.cat((x, grad) if ctx.transposed else (grad, x))
        return None, F.pad(factors, (0, ctx.spare)), grad_x, None


class _AnchorGraph(torch.autograd.Function):
    r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}`; the gradient of
    :math:`\mathbf{R}` is that of a slot of the same size.
    """

    @staticmethod
    def forward(ctx, entries, slot, scale):
        ctx.entries = entries
        ctx.save_for_backward(scale)
        size = entries.scores.cols.num_rows
        out = scale.new_zeros(1, size, size)
        for tile in entries.tiles:
            rows, _ = entries.scores.slices(tile)
            block = entries.tile(tile).unsqueeze(0)
            out += symmetric_product(block * scale[rows], block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        both = grad[0] + grad[0].t()
        whole = grad.new_empty(scale.size(0), both.size(0))
        grad_scale = torch.empty_like(scale)
        for tile in ctx.entries.tiles:
            rows, _ = ctx.entries.scores.slices(tile)
            block = ctx.entries.tile(tile)
            part = torch.mm(block, both, out=whole[rows])
            grad_scale[rows] = 0.5 * torch.einsum('ij,ij->i', part, block).unsqueeze(1)
            part *= scale[rows]
        return None, whole, grad_scale


# Loops over tiles and caches are nothing to compile.


@torch.compiler.disable
def _walk(entries, *args):
    return _Walk.apply(entries, *args, *entries.scores.leaves)


@torch.compiler.disable
def _later_product(entries, slot, x, transposed):
    return _LaterProduct.apply(entries, slot, x, transposed)
