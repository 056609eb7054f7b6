r"""Products with a thresholded score matrix, with one backward for all of them.

Autograd would answer every product :math:`\mathbf{Y} = \mathbf{A} \mathbf{F}` with a
gradient :math:`\mathbf{G} \mathbf{F}^{\top}` of the size of :math:`\mathbf{A}`. Here
products only leave :math:`\mathbf{G}` and :math:`\mathbf{F}` behind; the gradient

.. math::
    \mathrm{d}\mathbf{A} = [\mathbf{G}_1, \mathbf{G}_2, \ldots]
    [\mathbf{F}_1, \mathbf{F}_2, \ldots]^{\top} + \ldots

is formed once, tile by tile, when all of them are known, and goes straight on to the
tensors that the scores are made of.

Of a symmetric matrix only one half is made: a tile begins at the diagonal with a
square, and what is below the square stands for what is right of it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.autograd import first_order
from ..ops.numeric import symmetric_product, widen
from .scores import InnerScores, Scores, Tile, half_tiles, tiles
from .signal import Signal
from .sparsify import sparsify

__all__ = ['Entries', 'normal_matrix', 'product', 'survey']

_KEPT_TILE = 1 << 21
_PASSING_TILE = 1 << 19
_BRIEFLY_KEPT = 1 << 24  # entries of a whole matrix (64 MB of floats)


class Entries:
    """The entries of a thresholded score matrix, tile by tile.

    Args:
        scores (Scores): What makes the tiles.
        epsilon (float): The threshold.
        top_k (int, optional): Largest entries to keep of each row.
        keep (bool): Whether tiles are kept once made, or made again when needed:
            small matrices once forwards and once backwards, large ones every time.

    Attributes:
        halved (bool): Whether tiles make up one half of a symmetric matrix.
    """

    def __init__(
        self, scores: Scores, epsilon: float, top_k: int | None, keep: bool
    ) -> None:
        self.scores = scores
        self.epsilon = epsilon
        self.top_k = top_k
        self.halved = scores.symmetric and top_k is None
        sizes = zip(scores.rows.sizes, scores.cols.sizes, strict=True)
        entries = sum(n * s for n, s in sizes) // (2 if self.halved else 1)
        self.keep = keep
        self.keep_briefly = keep or entries <= _BRIEFLY_KEPT
        size = _KEPT_TILE if self.keep_briefly else _PASSING_TILE
        if self.halved:
            self.tiles = list(half_tiles(scores.rows, size))
        else:
            self.tiles = list(tiles(scores.rows, scores.cols, size))
        self._kept: dict[Tile, Tensor] = {}
        # What the products of one backward pass leave behind, and which pass that is.
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._task = -1

    def tile(self, tile: Tile) -> Tensor:
        """The entries of one of the tiles, without gradient."""
        if not self.keep_briefly:
            return self.make(tile)
        if tile not in self._kept:
            self._kept[tile] = self.make(tile)
        return self._kept[tile]

    def drop(self) -> None:
        """Forget tiles that are not kept for good."""
        if not self.keep:
            self._kept.clear()

    @torch.no_grad()
    def make(self, tile: Tile) -> Tensor:
        """The entries of any tile, made anew."""
        block = self.scores.block(tile, self.scores.leaves)
        if self.top_k is None and self.scores.makes_new_blocks:
            return torch.threshold_(block, self.epsilon, 0.0)
        return sparsify(block, self.epsilon, self.top_k)

    def tracked(self, tile: Tile, leaves: list[Tensor]) -> Tensor | None:
        """The entries of a tile as a function of the leaves, made anew; none for inner
        products, whose gradient is known without.
        """
        if isinstance(self.scores, InnerScores):
            return None
        with torch.enable_grad():
            scores = self.scores.block(tile, tuple(leaves))
            return sparsify(scores, self.epsilon, self.top_k)

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

    def matmul(self, x: Tensor) -> Tensor:
        """The product with a matrix, without gradient."""
        width, x = x.size(1), widen(x)
        out = x.new_zeros(self.scores.rows.num_rows, x.size(1))
        for tile in self.tiles:
            self.add_product(tile, self.tile(tile), x, out)
        return out[:, :width]

    def t_matmul(self, x: Tensor) -> Tensor:
        """The transposed product with a matrix, without gradient."""
        if self.halved:
            return self.matmul(x)
        width, x = x.size(1), widen(x)
        out = x.new_zeros(self.scores.cols.num_rows, x.size(1))
        for tile in self.tiles:
            rows, cols = self.scores.slices(tile)
            out[cols].addmm_(self.tile(tile).t(), x[rows])
        return out[:, :width]

    def leave_gradient(self, left: Tensor, right: Tensor) -> None:
        """Keep the factors of a product's gradient for the end of the backward pass.

        What a pass that never reached its end has left behind is dropped.
        """
        self._begin_pass()
        self._left.append(left)
        self._right.append(right)

    def leave_whole_gradient(self, grad: Tensor) -> None:
        """The same for a gradient that is no product of small factors."""
        self._begin_pass()
        self._whole.append(grad)

    def _begin_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._left, self._right, self._whole, self._task = [], [], [], task

    def take_gradient(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What the products of this backward pass have left behind."""
        self._begin_pass()
        taken = (self._left, self._right, self._whole)
        self._left, self._right, self._whole, self._task = [], [], [], -1
        return taken


class _Survey(torch.autograd.Function):
    """One walk over the tiles, and the one backward of the whole graph.

    The last output is a token: later products take it, so that autograd calls this
    backward after theirs.
    """

    @staticmethod
    def forward(ctx, entries, signal, previous, x, y, *leaves):
        ctx.entries, ctx.signal = entries, signal
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
            if signal is not None:
                inner = entries.inner(block, signal.gram_tile(*tile))
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
        out, t_out = out[:, : widths[0]], t_out[:, : widths[1]]
        return out, t_out, norm.clone(), inner.clone(), distance, x.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx, grad_out, grad_t_out, grad_norm, grad_inner, _, __):
        entries, signal = ctx.entries, ctx.signal
        x, y, *leaves = ctx.saved_tensors
        left, right, whole = entries.take_gradient()
        left = torch.cat([grad_out, y, *left], dim=1)
        right = torch.cat([x, grad_t_out, *right], dim=1)
        if entries.halved:  # The gradients of an entry and of its mirror image.
            left, right = torch.cat([left, right], 1), torch.cat([right, left], 1)
            grad_norm, grad_inner = 2.0 * grad_norm, 2.0 * grad_inner
        leaves = [
            leaf.detach().requires_grad_(need)
            for leaf, need in zip(leaves, ctx.needs_input_grad[5:], strict=True)
        ]
        grads = [torch.zeros_like(leaf) for leaf in leaves]
        widths = x.size(1), y.size(1)
        grad_out, grad_t_out = widen(grad_out), widen(grad_t_out)
        grad_x = x.new_zeros(x.size(0), grad_out.size(1))
        grad_y = y.new_zeros(y.size(0), grad_t_out.size(1))
        for tile in entries.tiles:
            mine, others = entries.scores.slices(tile)
            value = entries.tracked(tile, leaves)
            block = entries.tile(tile) if value is None else value.detach()
            if x.size(1) and ctx.needs_input_grad[3]:
                if entries.halved:
                    entries.add_product(tile, block, grad_out, grad_x)
                else:
                    grad_x[others].addmm_(block.t(), grad_out[mine])
            if y.size(1) and ctx.needs_input_grad[4]:
                torch.mm(block, grad_t_out[others], out=grad_y[mine])
            grad = left[mine] @ right[others].t()
            for part in whole:
                grad += part[mine, others]
            grad.addcmul_(block, 2.0 * grad_norm[tile.graph])
            if signal is not None:
                grad.addcmul_(signal.gram_tile(*tile), grad_inner[tile.graph])
            if value is None:
                _inner_backward(entries, tile, block, grad, leaves, grads)
            else:
                if entries.halved:  # The square is its own mirror image.
                    grad[: block.size(1)] *= 0.5
                _add_gradients(value, grad, leaves, grads)
        entries.drop()
        grad_x, grad_y = grad_x[:, : widths[0]], grad_y[:, : widths[1]]
        return None, None, None, grad_x, grad_y, *grads


def _inner_backward(
    entries: Entries,
    tile: Tile,
    block: Tensor,
    grad: Tensor,
    leaves: list[Tensor],
    grads: list[Tensor],
) -> None:
    """Send the gradient of a tile of inner products on to their vectors."""
    mine, others = entries.scores.slices(tile)
    grad = torch.ops.aten.threshold_backward(grad, block, 0.0)
    u, v = leaves[0], leaves[-1]
    grads[0][mine].addmm_(grad, v[others])
    if entries.halved:  # The square is its own mirror image.
        grad, mine = grad[block.size(1) :], slice(others.stop, mine.stop)
    grads[-1][others].addmm_(grad.t(), u[mine])


def _add_gradients(
    value: Tensor, grad: Tensor, leaves: list[Tensor], grads: list[Tensor]
) -> None:
    """Send a gradient on to the leaves that autograd has followed."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not value.requires_grad:
        return
    parts = iter(torch.autograd.grad(value, wanted, grad, allow_unused=True))
    for leaf, total in zip(leaves, grads, strict=True):
        part = next(parts) if leaf.requires_grad else None
        if part is not None:
            total += part


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, entries, token, x, transposed):
        ctx.entries, ctx.transposed = entries, transposed
        ctx.save_for_backward(x)
        return entries.t_matmul(x) if transposed else entries.matmul(x)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        entries = ctx.entries
        factors = (x, grad) if ctx.transposed else (grad, x)
        entries.leave_gradient(*factors)
        grad_x = None
        if ctx.needs_input_grad[2]:
            back = entries.matmul if ctx.transposed else entries.t_matmul
            grad_x = back(grad.contiguous())
        return None, grad.new_zeros(()), grad_x, None


class _NormalMatrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, entries, token, weight):
        ctx.entries = entries
        ctx.save_for_backward(weight)
        size = entries.scores.cols.num_rows
        normal = weight.new_zeros(1, size, size)
        for tile in entries.tiles:
            rows, _ = entries.scores.slices(tile)
            block = entries.tile(tile).unsqueeze(0)
            normal += symmetric_product(block * weight[rows].unsqueeze(1), block)
        return normal[0]

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        entries = ctx.entries
        both = grad + grad.t()
        whole = grad.new_empty(entries.scores.rows.num_rows, both.size(0))
        grad_weight = torch.empty_like(weight)
        for tile in entries.tiles:
            rows, _ = entries.scores.slices(tile)
            block = entries.tile(tile)
            part = torch.mm(block, both, out=whole[rows])
            grad_weight[rows] = 0.5 * torch.einsum('ij,ij->i', part, block)
            part *= weight[rows].unsqueeze(1)
        entries.leave_whole_gradient(whole)
        return None, grad.new_zeros(()), grad_weight


@torch.compiler.disable
def survey(
    entries: Entries,
    x: Tensor,
    y: Tensor,
    signal: Signal | None = None,
    previous: Entries | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""In one walk :math:`\mathbf{A} \mathbf{F}`, :math:`\mathbf{A}^{\top} \mathbf{H}`,
    :math:`\|\mathbf{A}\|_F^2`, :math:`\langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top}
    \rangle`, the squared distance to a previous graph, and the token that
    :func:`product` takes.
    """
    return _Survey.apply(entries, signal, previous, x, y, *entries.scores.leaves)


@torch.compiler.disable
def product(entries: Entries, token: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """A further product with the graph, after its :func:`survey`."""
    return _Product.apply(entries, token, x, transposed)


@torch.compiler.disable
def normal_matrix(entries: Entries, token: Tensor, weight: Tensor) -> Tensor:
    r""":math:`\mathbf{R}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{R}` of a single
    node-anchor affinity, after its :func:`survey`.
    """
    return _NormalMatrix.apply(entries, token, weight)
