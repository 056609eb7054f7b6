"""The strongest edges of a learned graph, and how much of its weight is within
classes, in one walk over its entries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..graphs import DenseGraph, GraphOperator, SparseGraph, TiledGraph
from ..graphs.tiled import tiles

__all__ = ['class_share_by_chance', 'strongest_edges']

_STRIP = 1 << 22  # entries


@torch.no_grad()
def strongest_edges(
    graph: GraphOperator, number: int, k: int, y: Tensor | None = None
) -> tuple[Tensor, Tensor, float | None]:
    r"""The :obj:`k` strongest edges into each node of one graph, strongest first.

    The graph is taken as undirected, without self-loops: an edge that is among the
    strongest of both its ends has the larger of the two weights.

    Args:
        graph (GraphOperator): The graphs of a batch.
        number (int): Which of them.
        k (int): How many edges of each node to keep.
        y (torch.Tensor, optional): The classes of its nodes; negative where unknown.
            (default: :obj:`None`)

    Returns:
        Pairs of nodes, of shape :obj:`[2, m]`, their weights, and the share of the
        weight of all pairs of different nodes that is between nodes of one class:
        nothing without classes, or without weight.
    """
    n, device = graph.rows.sizes[number], graph.rows.device
    best = torch.zeros(n, k, dtype=graph.dtype, device=device)
    place = torch.zeros(n, k, dtype=torch.long, device=device)
    classes = None if y is None else _one_hot(y.to(device), graph.dtype)
    within = total = 0.0
    for top, left, block in _rectangles(graph, number):
        bottom, right = top + block.size(0), left + block.size(1)
        if classes is not None:
            sums = block @ classes[left:right]
            loop = torch.arange(max(top, left), min(bottom, right), device=device)
            loops = block[loop - top, loop - left] @ classes[loop]
            within += float((classes[top:bottom] * sums).sum() - loops.sum())
            total += float((classes[top:bottom].t() @ sums).sum() - loops.sum())
        # Most rows of most blocks hold nothing stronger: those are left out at once.
        row = (block.amax(1) > best[top:bottom, -1]).nonzero().squeeze(1)
        value, col = block[row].topk(min(k + 1, right - left), dim=1)
        row, col = row + top, col + left
        value = value.masked_fill(col == row.unsqueeze(1), 0.0)  # self-loops
        value = torch.cat([best[row], value], dim=1)
        col = torch.cat([place[row], col], dim=1)
        best[row], order = value.topk(k, dim=1)
        place[row] = col.gather(1, order)

    target, rank = (best > 0).nonzero(as_tuple=True)
    source, weight = place[target, rank], best[target, rank]
    pair = torch.stack([torch.minimum(source, target), torch.maximum(source, target)])
    order = weight.argsort(descending=True, stable=True)
    pair, weight = pair[:, order].cpu(), weight[order].float().cpu()
    first = _first_of_each(pair[0] * n + pair[1])
    # Self-loops were taken off: that may leave less than nothing by rounding.
    share = max(within / total, 0.0) if total > 0 else None
    return pair[:, first], weight[first], share


def _one_hot(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Classes in columns; rows of unknown ones are zero."""
    return (y.unsqueeze(1) == y[y >= 0].unique()).to(dtype)


def _first_of_each(key: Tensor) -> Tensor:
    """Where each key comes for the first time, in order."""
    _, group = key.unique(return_inverse=True)
    place = torch.arange(key.numel())
    first = torch.full_like(place, key.numel())
    first = first.scatter_reduce(0, group, place, 'amin')
    return first[first < key.numel()].sort().values


def _rectangles(graph: GraphOperator, number: int) -> Iterator[tuple[int, int, Tensor]]:
    """The entries of one graph in blocks, with their first row and first column. Only
    operators that do not hold or make entries are asked for products.
    """
    start, stop = graph.rows.ptr[number], graph.rows.ptr[number + 1]
    n = stop - start
    step = max(1, _STRIP // max(n, 1))
    if isinstance(graph, TiledGraph):
        for tile in tiles(graph.rows, graph.cols):
            if tile.graph == number:
                yield tile.top, tile.left, graph.scores.block(tile)
    elif isinstance(graph, DenseGraph):
        for top in range(0, n, step):
            yield top, 0, graph.value[number, top : min(top + step, n), :n]
    elif isinstance(graph, SparseGraph):
        for top in range(0, n, step):
            bottom = min(top + step, n)
            strip = graph.matrix.row_range(start + top, start + bottom).to_dense()
            yield top, 0, strip[:, start:stop]
    else:
        for left, block in graph.column_blocks():
            first, last = max(left, start), min(left + block.size(1), stop)
            if first < last:
                yield 0, first - start, block[start:stop, first - left : last - left]


def class_share_by_chance(y: Tensor) -> float | None:
    """The share of pairs of different nodes that are of one class."""
    y = y[y >= 0]
    count = y.bincount().double()
    pairs = y.numel() * (y.numel() - 1)
    return float((count * (count - 1)).sum()) / pairs if pairs > 0 else None
