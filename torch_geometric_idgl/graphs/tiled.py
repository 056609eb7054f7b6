r"""The graph that makes its entries when asked, and forgets or keeps them.

A :class:`Scores` object knows how to compute any rectangle of the similarity matrix
from a few tensors (its leaves), and what sparsification leaves of it. The tiled graph
asks it for one block after another, forwards and again backwards; the dense graph for
all at once; the sparse graph to find the survivors.

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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import (
    are_largest,
    block_entries,
    gram,
    refuse_second_derivatives,
    safe_rsqrt,
    symmetric_product,
    widen,
)
from ..ops.sparse import Pattern, SparseMatrix, sddmm
from .base import Affinity, Measures
from .dense import DenseGraph

__all__ = [
    'BlockScores',
    'InnerScores',
    'PairScores',
    'RepeatedScores',
    'Scores',
    'Tile',
    'TiledGraph',
    'WeightedScores',
    'half_tiles',
    'sparsify',
    'tiles',
]

_DECIMALS = 6  # by which entries are ranked
_STRIPS = 4  # at least, of half a matrix: the fewer, the more is on the other side

# Similarities, block by block ---------------------------------------------------------


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
            equal ones (to six decimals) the first. (default: :obj:`None`)
    """
    kept = F.threshold(scores, epsilon, 0.0)
    if top_k is None or top_k >= scores.size(-1):
        return kept
    # Rounded, so that the order of equal entries does not hang on their last bit.
    rank = kept.detach().float().round(decimals=_DECIMALS)
    return kept * are_largest(rank, top_k)


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
        step -= step % 64 if step > 64 else 0  # such sizes are multiplied faster
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
        return _EntriesAt.apply(self, pattern, value, *self.leaves)


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
        # Copies: an optimizer may change the parameters before tiles are made again.
        leaves = embeddings + tuple(p.clone() for p in self.pair.parameters())
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
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
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


class _EntriesAt(torch.autograd.Function):
    """Known entries of a score matrix; backward recomputes the tiles they are in."""

    @staticmethod
    def forward(ctx, scores, pattern, value, *leaves):
        ctx.scores, ctx.pattern = scores, pattern
        ctx.save_for_backward(*leaves)
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
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


# The graph ----------------------------------------------------------------------------


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
        norm: bool = False,  # is known after every walk
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

    @property
    def slots(self) -> list[list[Tensor]]:
        return [self._slots]

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
        return _TiledAnchorGraph.apply(self.entries, self._matrix_slot, scale)

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
    def backward(ctx, grad_out, grad_t_out, grad_norm, grad_inner, _, *factors):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
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
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        (x,) = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[2]:
            grad_x = ctx.entries.matmul(grad.contiguous(), not ctx.transposed)
        factors = torch.cat((x, grad) if ctx.transposed else (grad, x))
        return None, F.pad(factors, (0, ctx.spare)), grad_x, None


class _TiledAnchorGraph(torch.autograd.Function):
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
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
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
