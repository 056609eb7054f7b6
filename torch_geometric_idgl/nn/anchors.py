"""Anchors: the few nodes that stand for all in IDGL-Anch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.layout import Layout

__all__ = ['Anchors', 'given_anchors', 'sample_anchors']


@dataclass(frozen=True)
class Anchors:
    """The anchors of one graph or a batch."""

    index: Tensor  # nodes of the whole batch, graph by graph
    layout: Layout


def sample_anchors(
    nodes: Layout,
    num_anchors: int | None,
    ratio: float | None,
    generator: torch.Generator | None = None,
) -> Anchors:
    """Draw anchors without replacement, in every graph by itself.

    Args:
        nodes (Layout): The graphs of the nodes.
        num_anchors (int, optional): How many of each graph, at most all its nodes.
        ratio (float, optional): Or which share of the nodes of each graph, rounded up.
        generator (torch.Generator, optional): For reproducible draws, on the CPU.
            (default: :obj:`None`)
    """
    chosen, sizes = [], []
    for first, size in zip(nodes.ptr, nodes.sizes, strict=False):
        wanted = num_anchors if ratio is None else math.ceil(round(ratio * size, 9))
        wanted = min(wanted or 0, size)
        order = torch.randperm(size, generator=generator)[:wanted]
        chosen.append(order + first)
        sizes.append(wanted)
    index = torch.cat(chosen).to(nodes.device)
    return Anchors(index, Layout(tuple(sizes), nodes.device))


def given_anchors(nodes: Layout, index: Tensor) -> Anchors:
    """Anchors the user has chosen, as node indices of the whole batch."""
    if not isinstance(index, Tensor):
        raise TypeError(
            f"Expected 'anchor_index' to be a tensor (got '{type(index).__name__}')"
        )
    if index.dim() != 1 or index.dtype not in (torch.long, torch.int):
        raise ValueError(
            f"Expected 'anchor_index' to be a one-dimensional index tensor "
            f'(got shape {list(index.shape)}, {index.dtype})'
        )
    index = index.to(nodes.device, torch.long)
    total = nodes.num_rows
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= total):
        raise ValueError(
            f"Expected 'anchor_index' to hold nodes from 0 to {total - 1} "
            f'(got {int(index.min())} to {int(index.max())})'
        )
    graph = nodes.batch[index]
    order = torch.argsort(graph, stable=True)
    sizes = torch.bincount(graph, minlength=nodes.num_graphs).tolist()
    for number, (size, anchors) in enumerate(zip(nodes.sizes, sizes, strict=True)):
        if size > 0 and anchors == 0:
            raise ValueError(
                f"Expected 'anchor_index' to hold at least one node of every graph "
                f'(got none of graph {number})'
            )
    return Anchors(index[order], Layout(tuple(sizes), nodes.device))
