r"""Similarities of all pairs, made block by block when they are needed.

A :class:`Scores` object knows how to compute any rectangle of the similarity matrix
from a few tensors (its leaves), and what sparsification leaves of it. The dense graph
asks for all at once; the tiled graph for one block after another, forwards and again
backwards; the sparse graph to find the survivors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import Module

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import are_largest, block_entries, gram, safe_rsqrt
from ..ops.sparse import Pattern, SparseMatrix, sddmm

__all__ = [
    'BlockScores',
    'InnerScores',
    'PairScores',
    'RepeatedScores',
    'Scores',
    'Tile',
    'WeightedScores',
    'half_tiles',
    'sparsify',
    'tiles',
]

_STRIPS = 4  # at least, of half a matrix: the fewer, the more is on the other side


def sparsify(scores: Tensor, epsilon: float = 0.0, top_k: int | None = None) -> Tensor:
    r"""Keep the :math:`\varepsilon`-neighbourhood, the largest entries, or both.

    .. math::
        A_{ij} = \begin{cases} s_{ij} & s_{ij} > \varepsilon \\ 0 &
        \text{otherwise} \end{cases}

    The result is non-negative, and symmetric if :obj:`scores` is and :obj:`top_k` is
    not given.

    Args:
        scores (torch.Tensor): Similarities, of shape :obj:`[n, s]`.
        epsilon (float, optional): The threshold :math:`\varepsilon \geq 0`.
            (default: :obj:`0.`)
        top_k (int, optional): Keep only so many of the largest entries of each row, of
            equal ones the first. (default: :obj:`None`)
    """
    kept = F.threshold(scores, epsilon, 0.0)
    if top_k is None or top_k >= scores.size(-1):
        return kept
    return kept * are_largest(kept.detach(), top_k)


class Tile(NamedTuple):
    """A rectangle of the matrix of a graph; rows and columns are counted within it."""

    graph: int
    top: int
    bottom: int
    left: int
    right: int


def tiles(rows: Nodes, cols: Nodes, entries: int | None = None) -> Iterator[Tile]:
    """Strips of rows of every graph with about so many entries each."""
    entries = block_entries(rows.device) if entries is None else entries
    for graph, (height, width) in enumerate(zip(rows.sizes, cols.sizes, strict=True)):
        step = max(1, entries // max(1, width))
        for top in range(0, height, step):
            yield Tile(graph, top, min(top + step, height), 0, width)


def half_tiles(nodes: Nodes, entries: int | None = None) -> Iterator[Tile]:
    r"""Strips of columns of a symmetric matrix, from the diagonal down: each begins
    with a square, and what is below the square stands for what is right of it as well.
    (CPU libraries make tall blocks faster than wide ones.)
    """
    entries = block_entries(nodes.device) if entries is None else entries
    for graph, size in enumerate(nodes.sizes):
        left = 0
        while left < size:
            step = min(entries // (size - left), -(-size // _STRIPS))
            right = min(left + max(1, step), size)
            yield Tile(graph, left, size, left, right)
            left = right


class Scores(ABC):
    """Similarities of rows (nodes) and columns (nodes or anchors) of each graph, and
    what sparsification leaves of them.

    Args:
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
        leaves (Tuple[torch.Tensor]): What similarities are made of.
        symmetric (bool): Whether the similarities are symmetric.
        epsilon (float): The threshold.
        top_k (int, optional): Largest entries to keep of each row.
    """

    makes_new: bool = True  # similarities, so that they may be changed in place
    tile_rows: int | None = None  # the number of rows of a tile, if it is given

    def __init__(
        self,
        rows: Nodes,
        cols: Nodes,
        leaves: tuple[Tensor, ...],
        symmetric: bool,
        epsilon: float = 0.0,
        top_k: int | None = None,
    ) -> None:
        self.rows = rows
        self.cols = cols
        self.leaves = leaves
        self.epsilon = epsilon
        self.top_k = top_k
        self.symmetric = symmetric and top_k is None
        self.dtype = leaves[0].dtype

    @abstractmethod
    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
        """The similarities of a tile, computed from the given leaves."""

    def block(self, tile: Tile, leaves: Sequence[Tensor] | None = None) -> Tensor:
        """What is left of a tile; rows of tiles must be whole if :obj:`top_k` is
        given.
        """
        scores = self.similarities(tile, self.leaves if leaves is None else leaves)
        if self.top_k is None and self.makes_new and not torch.is_grad_enabled():
            return F.threshold(scores, self.epsilon, 0.0, inplace=True)
        return sparsify(scores, self.epsilon, self.top_k)

    def slices(self, tile: Tile) -> tuple[slice, slice]:
        """The rows and columns of a tile in matrices of all graphs."""
        first, start = self.rows.ptr[tile.graph], self.cols.ptr[tile.graph]
        return (
            slice(first + tile.top, first + tile.bottom),
            slice(start + tile.left, start + tile.right),
        )

    def dense(self) -> Tensor:
        """All entries, padded with zeros: :obj:`[B, N, M]`."""
        full: list[Tensor] = []
        for graph, (n, m) in enumerate(
            zip(self.rows.sizes, self.cols.sizes, strict=True)
        ):
            whole = Tile(graph, 0, n, 0, m)
            if self.top_k is None or n == 0:
                full.append(self.block(whole))
                continue
            # In the strips that all forms of a graph are made of: rounding must not
            # decide differently which of equal entries are kept.
            own = tiles(self.rows.of([graph]), self.cols.of([graph]))
            strips = [self.block(tile._replace(graph=graph)) for tile in own]
            full.append(torch.cat(strips))
        if self.rows.num_graphs == 1:
            return full[0].unsqueeze(0)
        height, width = self.rows.max_size, self.cols.max_size
        padded = [
            F.pad(block, (0, width - block.size(1), 0, height - block.size(0)))
            for block in full
        ]
        return torch.stack(padded)

    def at(self, pattern: Pattern, value: Tensor) -> Tensor:
        """The similarities at some places, whose values are known already: attaches
        the gradient to the leaves.
        """
        return _Entries.apply(self, pattern, value, *self.leaves)


class InnerScores(Scores):
    r"""Inner products :math:`\mathbf{U} \mathbf{V}^{\top}`."""

    def __init__(
        self, u: Tensor, v: Tensor | None, rows: Nodes, cols: Nodes, *options
    ) -> None:
        leaves = (u,) if v is None else (u, v)
        super().__init__(rows, cols, leaves, v is None, *options)

    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
        mine, others = self.slices(tile)
        if self.symmetric and mine == others:
            return gram(leaves[0][mine])
        return leaves[0][mine] @ leaves[-1][others].t()

    def dense(self) -> Tensor:
        if self.top_k is not None or self.rows.num_graphs == 1:
            return super().dense()
        u = self.rows.pad(self.leaves[0])
        if self.symmetric:
            return sparsify(gram(u), self.epsilon)
        v = self.cols.pad(self.leaves[-1])
        return sparsify(u @ v.transpose(1, 2), self.epsilon)

    def at(self, pattern: Pattern, value: Tensor) -> Tensor:
        return sddmm(pattern, self.leaves[0], self.leaves[-1], value)

    # The gradient of tiles in closed form -------------------------------------------

    def start_gradient(self) -> list[Tensor]:
        """What gradients of tiles are summed in."""
        return [torch.zeros_like(leaf) for leaf in self.leaves]

    def add_to_rows(
        self, totals: list[Tensor], mine: slice, others: slice, grad: Tensor
    ) -> None:
        """Sends the gradient of a tile on to the vectors of its rows."""
        totals[0][mine].addmm_(grad, self.leaves[-1][others])

    def add_to_cols(
        self, totals: list[Tensor], mine: slice, others: slice, grad: Tensor
    ) -> None:
        """Sends the gradient of a tile on to the vectors of its columns."""
        totals[-1][others].addmm_(grad.t(), self.leaves[0][mine])

    def end_gradient(self, totals: list[Tensor]) -> list[Tensor]:
        """The gradients of the leaves."""
        return totals


class RepeatedScores(InnerScores):
    r"""Inner products of vectors many of which are equal, as those of the words of a
    document are: different ones are multiplied once. A step on documents takes 1.15
    times as long without.

    Args:
        u (torch.Tensor): The different vectors.
        row_kind (torch.Tensor): Which of them the vector of each row is.
        col_kind (torch.Tensor, optional): The same of columns; that of rows if not
            given.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
        options: Threshold and largest entries, as of :class:`Scores`.
    """

    def __init__(
        self,
        u: Tensor,
        row_kind: Tensor,
        col_kind: Tensor | None,
        rows: Nodes,
        cols: Nodes,
        *options,
    ) -> None:
        Scores.__init__(self, rows, cols, (u,), col_kind is None, *options)
        self.row_kind = row_kind
        self.col_kind = row_kind if col_kind is None else col_kind

    @cached_property
    def _products(self) -> Tensor:
        u = self.leaves[0].detach()
        return u @ u.t()

    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
        mine, others = self.slices(tile)
        products = self._products
        if torch.is_grad_enabled():
            products = gram(leaves[0])
        products = products.index_select(0, self.row_kind[mine])
        return products.index_select(1, self.col_kind[others])

    def dense(self) -> Tensor:
        return Scores.dense(self)

    def at(self, pattern: Pattern, value: Tensor) -> Tensor:
        u = self.leaves[0]
        return sddmm(pattern, u[self.row_kind], u[self.col_kind], value)

    def start_gradient(self) -> list[Tensor]:
        return [torch.zeros_like(self._products)]  # of the products, not the vectors

    def add_to_rows(
        self, totals: list[Tensor], mine: slice, others: slice, grad: Tensor
    ) -> None:
        by_row = totals[0].new_zeros(len(totals[0]), grad.size(1))
        by_row.index_add_(0, self.row_kind[mine], grad)
        totals[0].index_add_(1, self.col_kind[others], by_row)

    def add_to_cols(
        self, totals: list[Tensor], mine: slice, others: slice, grad: Tensor
    ) -> None:
        by_col = totals[0].new_zeros(len(totals[0]), grad.size(0))
        by_col.index_add_(0, self.col_kind[others], grad.t())
        totals[0].index_add_(1, self.row_kind[mine], by_col)

    def end_gradient(self, totals: list[Tensor]) -> list[Tensor]:
        return [totals[0] @ self.leaves[0]]


class PairScores(Scores):
    """Any function of two sets of embeddings, such as a user's own metric.

    Args:
        metric (torch.nn.Module): Its method :obj:`pair` takes :obj:`[n, K]` and
            :obj:`[s, K]` to :obj:`[n, s]`. Its parameters are leaves, so that
            recomputation sends gradients to them.
        u (torch.Tensor): Embeddings of the rows.
        v (torch.Tensor, optional): Embeddings of the columns; those of the rows if not
            given.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The nodes of the columns.
        symmetric (bool): Whether swapping the arguments transposes the result.
        options: Threshold and largest entries, as of :class:`Scores`.
    """

    makes_new = False  # a user's module may hold on to what it returns

    def __init__(
        self,
        metric: Module,
        u: Tensor,
        v: Tensor | None,
        rows: Nodes,
        cols: Nodes,
        symmetric: bool,
        *options,
    ) -> None:
        embeddings = (u,) if v is None else (u, v)
        self.pair = _Pair(metric)
        self.names = [name for name, _ in self.pair.named_parameters()]
        self.num_embeddings = len(embeddings)
        leaves = embeddings + tuple(self.pair.parameters())
        super().__init__(rows, cols, leaves, symmetric and v is None, *options)

    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
        mine, others = self.slices(tile)
        u, v = leaves[0], leaves[self.num_embeddings - 1]
        parameters = dict(zip(self.names, leaves[self.num_embeddings :], strict=True))
        with _no_random_numbers('metric', u.device):
            return functional_call(self.pair, parameters, (u[mine], v[others]))


class BlockScores(Scores):
    """Similarities of nodes and anchors, without gradient. Nodes are embedded tile by
    tile, so that nothing is as large as all their embeddings.

    Args:
        metric (torch.nn.Module): The metric.
        x (torch.Tensor or RowBlocks): What it compares.
        index (torch.Tensor): The anchors.
        rows (Nodes): The nodes of the rows.
        cols (Nodes): The anchors of each graph.
        tile_rows (int): The number of nodes of a tile.
        options: Threshold and largest entries, as of :class:`Scores`.
    """

    makes_new = False

    def __init__(
        self,
        metric: Any,
        x: Any,
        index: Tensor,
        rows: Nodes,
        cols: Nodes,
        tile_rows: int,
        *options,
    ) -> None:
        super().__init__(rows, cols, (metric.embed(x[index]),), False, *options)
        self.metric = metric
        self.x = x
        self.tile_rows = tile_rows

    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
        mine, others = self.slices(tile)
        u, v = self.metric.embed(self.x[mine]), leaves[0][others]
        with _no_random_numbers('metric', u.device):
            return self.metric.pair(u, v)


class _Pair(Module):
    def __init__(self, metric: Module) -> None:
        super().__init__()
        self.metric = metric

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.metric.pair(u, v)  # type: ignore[operator]


@contextmanager
def _no_random_numbers(name: str, device: torch.device) -> Iterator[None]:
    """Refuse a function that draws random numbers: what is computed block by block, and
    again in the backward pass, would be another function each time.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = _rng_states(device)
    yield
    if not all(map(torch.equal, before, _rng_states(device))):
        raise RuntimeError(
            f"Expected the '{name}' to be a function of its arguments (got one that "
            f'draws random numbers; take its dropout out, or leave it in evaluation '
            f'mode)'
        )


def _rng_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == 'cuda':
        states.append(torch.cuda.get_rng_state(device))
    return states


class WeightedScores(Scores):
    r"""Multi-head weighted cosines of *sparse* raw features,
    :math:`\frac{1}{m} \sum_p \mathbf{r}_p \odot \mathbf{X} (\mathbf{w}_p^2 \odot
    \mathbf{X}_J^{\top}) \odot \mathbf{r}_{pJ}`, by products with sparse
    :math:`\mathbf{X}`.

    Args:
        features (Features): The features, sparse.
        weight (torch.Tensor): The head weights, of shape :obj:`[m, d]`.
        index (torch.Tensor, optional): The anchors. (default: :obj:`None`)
        cols (Nodes): The nodes of the columns.
        options: Threshold and largest entries, as of :class:`Scores`.
    """

    def __init__(
        self,
        features: Features,
        weight: Tensor,
        index: Tensor | None,
        cols: Nodes,
        *options,
    ) -> None:
        assert isinstance(features.value, SparseMatrix)
        self.x = features.value
        self.index = index
        sq_weight = weight.square()
        scale = safe_rsqrt(features.squared.matmul(sq_weight.t()))
        leaves = (scale, sq_weight / weight.size(0))
        super().__init__(features.nodes, cols, leaves, index is None, *options)

    def similarities(self, tile: Tile, leaves: Sequence[Tensor]) -> Tensor:
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
        if len(mine[1]) <= len(others[1]):
            return _WeightedProduct.apply(*others, *mine, sq_weight).t()
        return _WeightedProduct.apply(*mine, *others, sq_weight)


class _WeightedProduct(torch.autograd.Function):
    """Weighted cosines of many and few sparse rows; the few become a dense table.

    Gradients are taken at the table's non-zero entries only.
    """

    @staticmethod
    def forward(ctx, many, scale_many, few, scale_few, sq_weight):
        row, col = few.pattern.row, few.pattern.col
        out = scale_many.new_zeros(len(scale_many), len(scale_few))
        # Other values for each head, in the same places.
        table = out.new_zeros(few.pattern.num_cols, len(scale_few))
        products = []
        for head, weight in enumerate(sq_weight):
            table[col, row] = few.value * weight[col] * scale_few[row, head]
            products.append(many.matmul(table))
            out.addcmul_(products[-1], scale_many[:, head : head + 1])
        ctx.many, ctx.few = many, few
        ctx.save_for_backward(scale_many, scale_few, sq_weight, *products)
        return out

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx, grad):
        scores, pattern = ctx.scores, ctx.pattern
        leaves = [
            leaf.detach().requires_grad_(needed)
            for leaf, needed in zip(
                ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True
            )
        ]
        totals = [torch.zeros_like(leaf) for leaf in leaves]
        for tile in tiles(scores.rows, scores.cols):
            mine, others = scores.slices(tile)
            places = pattern.places(mine.start, mine.stop)
            row = pattern.row[places] - mine.start
            col = pattern.col[places] - others.start
            if row.numel() == 0:
                continue
            with torch.enable_grad():
                value = scores.similarities(tile, leaves)[row, col]
            add_gradients(value, grad[places], leaves, totals)
        wanted = zip(totals, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(total if need else None for total, need in wanted)


def add_gradients(
    value: Tensor, grad: Tensor, leaves: list[Tensor], totals: list[Tensor]
) -> None:
    """Send a gradient on to the leaves that autograd has followed."""
    wanted = [
        (leaf, total)
        for leaf, total in zip(leaves, totals, strict=True)
        if leaf.requires_grad
    ]
    if not wanted or not value.requires_grad:
        return
    inputs = [leaf for leaf, _ in wanted]
    parts = torch.autograd.grad(value, inputs, grad, allow_unused=True)
    for (_, total), part in zip(wanted, parts, strict=True):
        if part is not None:
            total += part
