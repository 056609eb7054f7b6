r"""The graph that makes its entries when asked, and forgets or keeps them."""

from __future__ import annotations

import weakref
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..ops.caching import cached_tensor
from ..ops.sparse import Pattern
from .base import Affinity, Message
from .dense import DenseGraph
from .scores import Scores, tiles
from .signal import Signal
from .sparsify import sparsify
from .sweep import Entries, normal_matrix, product, survey

__all__ = ['TiledGraph']


class _Answers(NamedTuple):
    """What one walk over the tiles has found out."""

    message: Message  # F
    product: Tensor  # A [F, 1], or A 1 for node-anchor affinities
    t_product: Tensor  # nothing, or R^T [F, 1]
    sq_norm: Tensor
    gram_inner: Tensor
    sq_dist: Tensor
    token: Tensor
    signal: Signal | None
    previous: weakref.ref | None  # weak, or every graph would keep all before it


class TiledGraph(Affinity):
    r"""A thresholded affinity in row tiles: always exact.

    Tiles are made, thresholded, used and dropped, and made again in backward, so that
    memory is :math:`\mathcal{O}(n \cdot \mathrm{tile})`. With :obj:`keep`, they are
    kept instead: the fastest form of a matrix that fits. (The whole matrix is made for
    distances with gradient, single entries with gradient, and the smoothness of sparse
    features on an anchor graph.)

    Args:
        scores (Scores): What makes the tiles.
        epsilon (float, optional): The threshold :math:`\varepsilon`.
            (default: :obj:`0.`)
        top_k (int, optional): Largest entries to keep of each row.
            (default: :obj:`None`)
        keep (bool, optional): Whether to keep tiles. (default: :obj:`False`)
    """

    def __init__(
        self,
        scores: Scores,
        epsilon: float = 0.0,
        top_k: int | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__(scores.rows, scores.cols)
        self.scores = scores
        self.symmetric = scores.symmetric and top_k is None
        self.entries = Entries(scores, epsilon, top_k, keep)
        self._answers: _Answers | None = None
        self._with_grad = False

    @property
    def dtype(self) -> torch.dtype:
        return self.scores.dtype

    def observe(
        self, message: Message, signal: Signal | None, previous: Affinity | None
    ) -> None:
        self._survey(message, signal, previous)

    def _survey(
        self,
        message: Message,
        signal: Signal | None = None,
        previous: Affinity | None = None,
    ) -> _Answers:
        square = self.rows is self.cols
        if signal is not None and (signal.requires_grad or not square):
            signal = None
        before = previous if self._has_same_tiles(previous) else None
        ones = self._ones(self.cols)
        with_ones = message.with_ones
        answers = survey(
            self.entries,
            with_ones if square else ones,
            with_ones[:, :0] if square else with_ones,
            signal,
            None if before is None else before.entries,
        )
        self._with_grad = torch.is_grad_enabled()
        known = None if before is None else weakref.ref(before)
        self._answers = _Answers(message, *answers, signal, known)  # type: ignore[call-arg]
        return self._answers

    @property
    def _known(self) -> _Answers:
        answers = self._answers
        if answers is None or (torch.is_grad_enabled() and not self._with_grad):
            nothing = self._ones(self.rows)[:, :0]
            return self._survey(
                Message.of(nothing if answers is None else answers.message.x)
            )
        return answers

    def _has_same_tiles(self, other: Affinity | None) -> TypeGuard[TiledGraph]:
        if not isinstance(other, TiledGraph):
            return False
        return self.entries.tiles == other.entries.tiles

    def matmul(self, x: Tensor) -> Tensor:
        known = self._known
        if x is known.message.x and self.rows is self.cols:
            return known.product[:, : x.size(1)]
        return product(self.entries, known.token, x, transposed=False)

    def t_matmul(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return self.matmul(x)
        known = self._known
        if x is known.message.x and self.rows is not self.cols:
            return known.t_product[:, : x.size(1)]
        return product(self.entries, known.token, x, transposed=True)

    def row_sum(self) -> Tensor:
        known = self._known
        place = known.message.x.size(1) if self.rows is self.cols else 0
        return known.product[:, place]

    def col_sum(self) -> Tensor:
        if self.rows is self.cols:
            return super().col_sum()
        known = self._known
        return known.t_product[:, known.message.x.size(1)]

    def sq_norm(self) -> Tensor:
        return self._known.sq_norm

    def gram_inner(self, signal: Signal) -> Tensor:
        if signal.requires_grad:
            return super().gram_inner(signal)
        known = self._known
        if signal is not known.signal:
            known = self._survey(known.message, signal)
        return known.gram_inner

    def values_at(self, pattern: Pattern) -> Tensor:
        if torch.is_grad_enabled():
            return self._explicit.values_at(pattern)
        found = [torch.empty(0, dtype=self.dtype, device=self.rows.device)]
        for tile in tiles(self.rows, self.cols):
            rows, cols = self.scores.slices(tile)
            places = slice(
                int(pattern.rowptr[rows.start]), int(pattern.rowptr[rows.stop])
            )
            row = pattern.row[places] - rows.start
            col = pattern.col[places] - cols.start
            found.append(self.entries.make(tile)[row, col])
        return torch.cat(found)

    def sq_dist(self, other: Affinity) -> Tensor:
        if not isinstance(other, TiledGraph):
            return super().sq_dist(other)
        if torch.is_grad_enabled() or not self._has_same_tiles(other):
            return self.to_affinity().sq_dist(other.to_affinity())
        known = self._known
        if known.previous is None or other is not known.previous():
            known = self._survey(known.message, None, other)
        return known.sq_dist

    @cached_tensor
    def _explicit(self) -> DenseGraph:
        return self.to_affinity()

    def to_affinity(self) -> DenseGraph:
        """The same graph with its whole matrix in autograd's hands."""
        value = sparsify(self.scores.dense(), self.entries.epsilon, self.entries.top_k)
        return DenseGraph(value, self.rows, self.cols, self.symmetric)

    def _make_normal_matrix(self, weight: Tensor) -> Tensor:
        if self.entries.halved or self.rows.num_graphs > 1:
            return self._explicit.normal_matrix(weight)
        return normal_matrix(self.entries, self._known.token, weight).unsqueeze(0)

    def _make_normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        if signal.requires_grad or not signal.is_sparse:
            return super()._make_normal_gram_inner(weight, signal)
        return self._explicit.normal_gram_inner(weight, signal)
