r"""The graph that makes its entries when asked, and forgets them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import Affinity
from .scores import Scores, Tile, tiles
from .signal import Signal
from .sparsify import sparsify

__all__ = ['TiledGraph']


class _Answers(NamedTuple):
    product: Tensor  # A [F, 1]
    t_product: Tensor  # A^T F
    sq_norm: Tensor
    gram_inner: Tensor


class _Request(NamedTuple):
    """What a sweep over the tiles computes (the rest stays empty)."""

    scores: Scores
    epsilon: float
    top_k: int | None
    signal: Signal | None = None
    transposed: bool = False
    sq_norm: bool = False


class _Sweep(torch.autograd.Function):
    """One walk over the row tiles that answers everything asked together.

    Backward walks again and makes every tile anew, so that memory stays at a few tiles.
    """

    @staticmethod
    def forward(ctx, request, x, *leaves):  # noqa: D102
        ctx.request = request
        ctx.save_for_backward(x, *leaves)
        rows, cols = request.scores.rows, request.scores.cols
        graphs = rows.num_graphs
        out = _Answers(
            x.new_zeros(0 if request.transposed else rows.num_rows, x.size(1)),
            x.new_zeros(cols.num_rows if request.transposed else 0, x.size(1)),
            x.new_zeros(graphs),
            x.new_zeros(graphs),
        )
        for tile in tiles(rows, cols):
            _add_tile(out, request, tile, x, leaves)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):  # noqa: D102
        request = ctx.request
        needed = ctx.needs_input_grad[1:]
        inputs = tuple(
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        )
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        totals = [torch.zeros_like(tensor) for tensor in wanted]
        rows, cols = request.scores.rows, request.scores.cols
        for tile in tiles(rows, cols):
            with torch.enable_grad():
                loss = _tile_loss(request, tile, inputs[0], inputs[1:], grads)
                parts = torch.autograd.grad(loss, wanted, allow_unused=True)
            for total, part in zip(totals, parts, strict=True):
                if part is not None:
                    total += part
        found = iter(totals)
        return None, *(next(found) if need else None for need in needed)


def _tile_entries(request: _Request, tile: Tile, leaves) -> Tensor:
    block = request.scores.block(tile, leaves)
    return sparsify(block, request.epsilon, request.top_k)


def _slices(request: _Request, tile: Tile) -> tuple[slice, slice]:
    graph, start, stop = tile
    first = request.scores.rows.ptr[graph]
    ptr = request.scores.cols.ptr
    return slice(first + start, first + stop), slice(ptr[graph], ptr[graph + 1])


def _add_tile(out: _Answers, request: _Request, tile: Tile, x: Tensor, leaves) -> None:
    entries = _tile_entries(request, tile, leaves)
    mine, others = _slices(request, tile)
    graph = tile[0]
    if request.transposed:
        out.t_product[others].addmm_(entries.t(), x[mine])
    else:
        out.product[mine] = entries @ x[others]
    if request.sq_norm:
        out.sq_norm[graph] += entries.flatten().dot(entries.flatten())
    if request.signal is not None:
        gram = request.signal.gram_rows(*tile)
        out.gram_inner[graph] += (entries * gram).sum()


def _tile_loss(request: _Request, tile: Tile, x: Tensor, leaves, grads) -> Tensor:
    """The tile's part of the inner product of the answers with their gradients."""
    entries = _tile_entries(request, tile, leaves)
    mine, others = _slices(request, tile)
    graph = tile[0]
    if request.transposed:
        loss = (entries.t() @ x[mine] * grads[1][others]).sum()
    else:
        loss = (entries @ x[others] * grads[0][mine]).sum()
    if request.sq_norm:
        loss = loss + grads[2][graph] * entries.square().sum()
    if request.signal is not None:
        gram = request.signal.gram_rows(*tile)
        loss = loss + grads[3][graph] * (entries * gram).sum()
    return loss


class TiledGraph(Affinity):
    r"""A thresholded affinity in row tiles: always exact, memory
    :math:`\mathcal{O}(n \cdot \mathrm{tile})`.

    Tiles are made, thresholded, used and dropped, and made again in backward.

    Args:
        scores (Scores): What makes the tiles.
        epsilon (float): The threshold :math:`\varepsilon`.
        top_k (int, optional): Largest entries to keep of each row.
    """

    def __init__(self, scores: Scores, epsilon: float, top_k: int | None) -> None:
        super().__init__(scores.rows, scores.cols)
        self.scores = scores
        self.epsilon = epsilon
        self.top_k = top_k
        self.symmetric = scores.symmetric and top_k is None
        self._observed: Tensor | None = None
        self._observed_signal: Signal | None = None
        self._answers: _Answers | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.scores.dtype

    def _sweep(self, x: Tensor, **asked) -> _Answers:
        request = _Request(self.scores, self.epsilon, self.top_k, **asked)
        return _Answers(*_Sweep.apply(request, x, *self.scores.leaves))

    def observe(self, x: Tensor, signal: Signal | None, previous: Affinity | None):
        self._observed, self._observed_signal = x, signal
        with_ones = torch.cat([x, self._ones(self.cols)], dim=1)
        self._answers = self._sweep(with_ones, sq_norm=True, signal=signal)
        self.__dict__['_row_sum'] = self._answers.product[:, -1]

    def matmul(self, x: Tensor) -> Tensor:
        if x is self._observed and self._answers is not None:
            return self._answers.product[:, :-1]
        return self._sweep(x).product

    def t_matmul(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return self.matmul(x)
        return self._sweep(x, transposed=True).t_product

    def sq_norm(self) -> Tensor:
        if self._answers is None:
            return self._sweep(self._ones(self.cols)[:, :0], sq_norm=True).sq_norm
        return self._answers.sq_norm

    def gram_inner(self, signal: Signal) -> Tensor:
        if self._answers is not None and signal is self._observed_signal:
            return self._answers.gram_inner
        return self._sweep(self._ones(self.cols)[:, :0], signal=signal).gram_inner

    def sq_dist(self, other: Affinity) -> Tensor:
        if not isinstance(other, TiledGraph):
            return super().sq_dist(other)
        total = torch.zeros(self.rows.num_graphs, dtype=self.dtype, device=self.rows.device)
        for tile in tiles(self.rows, self.cols):
            gap = self._tile(tile) - other._tile(tile)
            total[tile[0]] += gap.flatten().dot(gap.flatten())
        return total

    def _tile(self, tile: Tile) -> Tensor:
        block = self.scores.block(tile, self.scores.leaves)
        return sparsify(block, self.epsilon, self.top_k)
