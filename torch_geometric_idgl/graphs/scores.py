r"""Similarities of all pairs, made block by block when they are needed.

A :class:`Scores` object knows how to compute any rows of the similarity matrix from a
few tensors (its leaves). The dense graph asks for all rows at once; the tiled graph
for one block after another, forwards and again backwards; the sparse graph to find the
survivors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from ..ops.autograd import first_order, no_random_numbers
from ..ops.layout import Layout
from ..ops.sparse import Pattern, SparseMatrix, sddmm
from .factors import WeightedFactor

__all__ = [
    'InnerScores',
    'PairScores',
    'Scores',
    'Tile',
    'WeightedScores',
    'half_tiles',
    'tiles',
]

_TILE_ENTRIES = 1 << 20
_STRIPS = 4  # at least, of half a matrix: the fewer, the more is on the other side


class Tile(NamedTuple):
    """A rectangle of the matrix of a graph; rows and columns are counted within it."""

    graph: int
    top: int
    bottom: int
    left: int
    right: int


def tiles(rows: Layout, cols: Layout, entries: int = _TILE_ENTRIES) -> Iterator[Tile]:
    """Strips of rows of every graph with about so many entries each."""
    for graph, (height, width) in enumerate(zip(rows.sizes, cols.sizes, strict=True)):
        step = max(1, entries // max(1, width))
        for top in range(0, height, step):
            yield Tile(graph, top, min(top + step, height), 0, width)


def half_tiles(layout: Layout, entries: int = _TILE_ENTRIES) -> Iterator[Tile]:
    r"""Strips of columns of a symmetric matrix, from the diagonal down: each begins
    with a square, and what is below the square stands for what is right of it as well.
    (CPU libraries make tall blocks faster than wide ones.)
    """
    for graph, size in enumerate(layout.sizes):
        left = 0
        while left < size:
            step = min(entries // (size - left), -(-size // _STRIPS))
            right = min(left + max(1, step), size)
            yield Tile(graph, left, size, left, right)
            left = right


class Scores(ABC):
    """Similarities of rows (nodes) and columns (nodes or anchors) of each graph."""

    makes_new_blocks: bool = False  # so that they may be changed in place

    def __init__(
        self, rows: Layout, cols: Layout, leaves: tuple[Tensor, ...], symmetric: bool
    ) -> None:
        self.rows = rows
        self.cols = rows if symmetric else cols  # one object, as graphs compare them
        self.leaves = leaves
        self.symmetric = symmetric

    @abstractmethod
    def block(self, tile: Tile, leaves: tuple[Tensor, ...]) -> Tensor:
        """The similarities of a tile, computed from the given leaves."""

    def slices(self, tile: Tile) -> tuple[slice, slice]:
        """The rows and columns of a tile in matrices of all graphs."""
        first, start = self.rows.ptr[tile.graph], self.cols.ptr[tile.graph]
        return (
            slice(first + tile.top, first + tile.bottom),
            slice(start + tile.left, start + tile.right),
        )

    def dense(self) -> Tensor:
        """All similarities, padded with zeros: :obj:`[B, N, M]`."""
        rows, cols = self.rows, self.cols
        full = [
            self.block(Tile(graph, 0, size, 0, cols.sizes[graph]), self.leaves)
            for graph, size in enumerate(rows.sizes)
        ]
        if rows.num_graphs == 1:
            return full[0].unsqueeze(0)
        padded = [
            torch.nn.functional.pad(
                block,
                (0, cols.max_size - block.size(1), 0, rows.max_size - block.size(0)),
            )
            for block in full
        ]
        return torch.stack(padded)

    def at(self, pattern: Pattern, value: Tensor) -> Tensor:
        """The similarities at some places, whose values are known already: attaches
        the gradient to the leaves.
        """
        return _Entries.apply(self, pattern, value, *self.leaves)

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].dtype


class InnerScores(Scores):
    r"""Inner products :math:`\mathbf{U} \mathbf{V}^{\top}`."""

    makes_new_blocks = True

    def __init__(self, u: Tensor, v: Tensor | None, rows: Layout, cols: Layout) -> None:
        leaves = (u,) if v is None else (u, v)
        super().__init__(rows, cols, leaves, symmetric=v is None)

    def block(self, tile: Tile, leaves: tuple[Tensor, ...]) -> Tensor:
        mine, others = self.slices(tile)
        return leaves[0][mine] @ leaves[-1][others].t()

    def dense(self) -> Tensor:
        u, v = self.rows.pad(self.leaves[0]), self.cols.pad(self.leaves[-1])
        return u @ v.transpose(1, 2)

    def at(self, pattern: Pattern, value: Tensor) -> Tensor:
        return sddmm(pattern, self.leaves[0], self.leaves[-1], value)


class PairScores(Scores):
    """Any function of two sets of embeddings, such as a user's own metric.

    Args:
        metric (torch.nn.Module): Its method :obj:`pair` takes :obj:`[n, K]` and
            :obj:`[s, K]` to :obj:`[n, s]`. Its parameters are leaves, so that
            recomputation sends gradients to them.
        u (torch.Tensor): Embeddings of the rows.
        v (torch.Tensor, optional): Embeddings of the columns; those of the rows if not
            given.
        rows (Layout): The graphs of the rows.
        cols (Layout): The graphs of the columns.
        symmetric (bool): Whether swapping the arguments transposes the result.
    """

    makes_new_blocks = False  # a user's module may hold on to what it returns

    def __init__(
        self,
        metric: Module,
        u: Tensor,
        v: Tensor | None,
        rows: Layout,
        cols: Layout,
        symmetric: bool,
    ) -> None:
        embeddings = (u,) if v is None else (u, v)
        self.pair = _Pair(metric)
        self.names = [name for name, _ in self.pair.named_parameters()]
        self.num_embeddings = len(embeddings)
        leaves = embeddings + tuple(self.pair.parameters())
        super().__init__(rows, cols, leaves, symmetric=symmetric and v is None)

    def block(self, tile: Tile, leaves: tuple[Tensor, ...]) -> Tensor:
        mine, others = self.slices(tile)
        u, v = leaves[0], leaves[self.num_embeddings - 1]
        parameters = dict(zip(self.names, leaves[self.num_embeddings :], strict=True))
        with no_random_numbers('metric', u.device):
            return functional_call(self.pair, parameters, (u[mine], v[others]))


class _Pair(Module):
    def __init__(self, metric: Module) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.metric.pair(u, v)  # type: ignore[operator]


class WeightedScores(Scores):
    r"""Multi-head weighted cosines of *sparse* raw features,
    :math:`\frac{1}{m} \sum_p \mathbf{r}_p \odot \mathbf{X} (\mathbf{w}_p^2 \odot
    \mathbf{X}_J^{\top}) \odot \mathbf{r}_{pJ}`, by products with sparse
    :math:`\mathbf{X}`.

    Args:
        factor (WeightedFactor): The features with their weights.
        index (torch.Tensor, optional): The anchors. (default: :obj:`None`)
        cols (Layout, optional): The graphs of the anchors. (default: :obj:`None`)
    """

    makes_new_blocks = True

    def __init__(
        self,
        factor: WeightedFactor,
        index: Tensor | None = None,
        cols: Layout | None = None,
    ) -> None:
        assert isinstance(factor.signal.x, SparseMatrix)
        rows = factor.layout
        self.x = factor.signal.x
        self.index = index
        leaves = (factor.scale, factor.sq_weight)
        super().__init__(rows, cols or rows, leaves, symmetric=index is None)

    def block(self, tile: Tile, leaves: tuple[Tensor, ...]) -> Tensor:
        scale, sq_weight = leaves
        places, others_places = self.slices(tile)
        mine = (self.x.row_range(places.start, places.stop), scale[places])
        if self.index is None:
            places = others_places
            others = (self.x.row_range(places.start, places.stop), scale[places])
        else:
            index = self.index[others_places]
            others = (self.x.rows(index), scale[index])
        # The fewer rows become the dense table of the bag sums.
        if mine[0].size(0) <= others[0].size(0):
            return _WeightedProduct.apply(*others, *mine, sq_weight).t()
        return _WeightedProduct.apply(*mine, *others, sq_weight)


class _WeightedProduct(torch.autograd.Function):
    """Weighted cosines of many and few sparse rows; the few become a dense table.

    Gradients are taken at the table's non-zero entries only.
    """

    @staticmethod
    def forward(ctx, many, scale_many, few, scale_few, sq_weight):
        row, col = few.pattern.row, few.pattern.col
        out = scale_many.new_zeros(many.size(0), few.size(0))
        table = out.new_zeros(few.size(1), few.size(0))  # other values for each head
        products = []
        for head, weight in enumerate(sq_weight):
            table[col, row] = few.value * weight[col] * scale_few[row, head]
            products.append(many.matmul(table))
            out.addcmul_(products[-1], scale_many[:, head : head + 1])
        ctx.many, ctx.few = many, few
        ctx.save_for_backward(scale_many, scale_few, sq_weight, *products)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        scale_many, scale_few, sq_weight, *products = ctx.saved_tensors
        row, col = ctx.few.pattern.row, ctx.few.pattern.col
        grad_many = torch.empty_like(scale_many)
        grad_few = torch.zeros_like(scale_few)
        grad_weight = torch.zeros_like(sq_weight)
        for head, product in enumerate(products):
            grad_many[:, head] = torch.einsum('ij,ij->i', grad, product)
            product = ctx.many.scaled_t_matmul(scale_many[:, head], grad)
            entries = product[col, row] * ctx.few.value
            grad_weight[head].index_add_(0, col, entries * scale_few[row, head])
            grad_few[:, head].index_add_(0, row, entries * sq_weight[head, col])
        return None, grad_many, None, grad_few, grad_weight


class _Entries(torch.autograd.Function):
    """Known entries of a score matrix; backward recomputes the tiles they are in."""

    @staticmethod
    def forward(ctx, scores, pattern, value, *leaves):
        ctx.scores, ctx.pattern = scores, pattern
        ctx.save_for_backward(*leaves)
        return value.clone()

    @staticmethod
    @first_order
    def backward(ctx, grad):
        scores, pattern = ctx.scores, ctx.pattern
        leaves = tuple(
            leaf.detach().requires_grad_(needed)
            for leaf, needed in zip(
                ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True
            )
        )
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        totals = [torch.zeros_like(leaf) for leaf in wanted]
        for tile in tiles(scores.rows, scores.cols):
            mine, others = scores.slices(tile)
            places = slice(
                int(pattern.rowptr[mine.start]), int(pattern.rowptr[mine.stop])
            )
            row = pattern.row[places] - mine.start
            col = pattern.col[places] - others.start
            if row.numel() == 0:
                continue
            with torch.enable_grad():
                value = scores.block(tile, leaves)[row, col]
                if not value.requires_grad:
                    continue
                parts = torch.autograd.grad(
                    value, wanted, grad[places], allow_unused=True
                )
            for total, part in zip(totals, parts, strict=True):
                if part is not None:
                    total += part
        found = iter(totals)
        grads = (next(found) if leaf.requires_grad else None for leaf in leaves)
        return None, None, None, *grads
