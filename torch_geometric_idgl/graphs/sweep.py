r"""Products with a thresholded score matrix, with one backward for all of them.

Autograd would answer every product :math:`\mathbf{Y} = \mathbf{A} \mathbf{F}` with a
gradient :math:`\mathbf{G} \mathbf{F}^{\top}` of the size of :math:`\mathbf{A}`. Here
products only leave :math:`\mathbf{G}` and :math:`\mathbf{F}` behind; the gradient

.. math::
    \mathrm{d}\mathbf{A} = [\mathbf{G}_1, \mathbf{G}_2, \ldots]
    [\mathbf{F}_1, \mathbf{F}_2, \ldots]^{\top} + \ldots

is formed once, tile by tile, when all of them are known, and goes straight on to the
tensors that the scores are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.autograd import first_order
from ..ops.numeric import widen
from .scores import InnerScores, Scores, Tile, tiles
from .signal import Signal
from .sparsify import sparsify

__all__ = ['Entries', 'product', 'survey']

_KEPT_TILE = 1 << 20
_PASSING_TILE = 1 << 19


class Entries:
    """The entries of a thresholded score matrix, tile by tile.

    Args:
        scores (Scores): What makes the tiles.
        epsilon (float): The threshold.
        top_k (int, optional): Largest entries to keep of each row.
        keep (bool): Whether tiles are kept once made, or made again when needed.
    """

    def __init__(
        self, scores: Scores, epsilon: float, top_k: int | None, keep: bool
    ) -> None:
        self.scores = scores
        self.epsilon = epsilon
        self.top_k = top_k
        size = _KEPT_TILE if keep else _PASSING_TILE
        self.tiles: list[Tile] = list(tiles(scores.rows, scores.cols, size))
        self._kept: dict[Tile, Tensor] | None = {} if keep else None
        # What the products of one backward pass leave behind, and which pass that is.
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._task = -1

    def tile(self, tile: Tile) -> Tensor:
        """The entries of a tile, without gradient."""
        if self._kept is not None and tile in self._kept:
            return self._kept[tile]
        with torch.no_grad():
            block = self.scores.block(tile, self.scores.leaves)
            if self.top_k is None and self.scores.makes_new_blocks:
                entries = torch.threshold_(block, self.epsilon, 0.0)
            else:
                entries = sparsify(block, self.epsilon, self.top_k)
        if self._kept is not None:
            self._kept[tile] = entries
        return entries

    def slices(self, tile: Tile) -> tuple[slice, slice]:
        """The rows and columns of a tile in flat matrices."""
        graph, start, stop = tile
        first, ptr = self.scores.rows.ptr[graph], self.scores.cols.ptr
        return slice(first + start, first + stop), slice(ptr[graph], ptr[graph + 1])

    def matmul(self, x: Tensor) -> Tensor:
        """The product with a matrix, without gradient."""
        width, x = x.size(1), widen(x)
        out = x.new_zeros(self.scores.rows.num_rows, x.size(1))
        for tile in self.tiles:
            rows, cols = self.slices(tile)
            torch.mm(self.tile(tile), x[cols], out=out[rows])
        return out[:, :width]

    def t_matmul(self, x: Tensor) -> Tensor:
        """The transposed product with a matrix, without gradient."""
        width, x = x.size(1), widen(x)
        out = x.new_zeros(self.scores.cols.num_rows, x.size(1))
        for tile in self.tiles:
            rows, cols = self.slices(tile)
            out[cols].addmm_(self.tile(tile).t(), x[rows])
        return out[:, :width]

    def leave_gradient(self, left: Tensor, right: Tensor) -> None:
        """Keep the factors of a product's gradient for the end of the backward pass.

        What a pass that never reached its end has left behind is dropped.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._left, self._right, self._task = [], [], task
        self._left.append(left)
        self._right.append(right)

    def take_gradient(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the products of this backward pass have left behind."""
        taken = (
            ([], [])
            if self._task != torch._C._current_graph_task_id()
            else (self._left, self._right)
        )
        self._left, self._right, self._task = [], [], -1
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
        out = x.new_zeros(rows.num_rows, x.size(1))
        t_out = x.new_zeros(cols.num_rows, y.size(1))
        sums = x.new_zeros(3, rows.num_graphs)  # norm, Gram inner product, distance
        for tile in entries.tiles:
            mine, others = entries.slices(tile)
            block = entries.tile(tile)
            if x.size(1):
                torch.mm(block, x[others], out=out[mine])
            if y.size(1):
                t_out[others].addmm_(block.t(), y[mine])
            flat = block.reshape(-1)
            sums[0, tile[0]] += flat.dot(flat)
            if signal is not None:
                sums[1, tile[0]] += flat.dot(signal.gram_rows(*tile).reshape(-1))
            if previous is not None:
                gap = (block - previous.tile(tile)).reshape(-1)
                sums[2, tile[0]] += gap.dot(gap)
        norm, inner, distance = sums.unbind(0)
        ctx.mark_non_differentiable(distance)
        return out, t_out, norm.clone(), inner.clone(), distance, x.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx, grad_out, grad_t_out, grad_norm, grad_inner, _, __):
        entries, signal = ctx.entries, ctx.signal
        x, y, *leaves = ctx.saved_tensors
        left, right = entries.take_gradient()
        left = torch.cat([grad_out, y, *left], dim=1)
        right = torch.cat([x, grad_t_out, *right], dim=1)
        leaves = [
            leaf.detach().requires_grad_(need)
            for leaf, need in zip(leaves, ctx.needs_input_grad[5:], strict=True)
        ]
        grads = [torch.zeros_like(leaf) for leaf in leaves]
        grad_x, grad_y = torch.zeros_like(x), torch.zeros_like(y)
        for tile in entries.tiles:
            mine, others = entries.slices(tile)
            block = entries.tile(tile)
            if x.size(1):
                grad_x[others].addmm_(block.t(), grad_out[mine])
            if y.size(1):
                torch.mm(block, grad_t_out[others], out=grad_y[mine])
            grad = left[mine] @ right[others].t()
            grad.addcmul_(block, 2.0 * grad_norm[tile[0]])
            if signal is not None:
                grad.addcmul_(signal.gram_rows(*tile), grad_inner[tile[0]])
            _backward_tile(entries, tile, block, grad, leaves, grads)
        return None, None, None, grad_x, grad_y, *grads


def _backward_tile(
    entries: Entries,
    tile: Tile,
    block: Tensor,
    grad: Tensor,
    leaves: list[Tensor],
    grads: list[Tensor],
) -> None:
    """Send the gradient of a tile's entries on to the leaves of the scores."""
    mine, others = entries.slices(tile)
    if isinstance(entries.scores, InnerScores):
        grad = torch.ops.aten.threshold_backward(grad, block, 0.0)
        u, v = leaves[0], leaves[-1]
        grads[0][mine].addmm_(grad, v[others])
        grads[-1][others].addmm_(grad.t(), u[mine])
        return
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.enable_grad():
        scores = entries.scores.block(tile, tuple(leaves))
        value = sparsify(scores, entries.epsilon, entries.top_k)
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
