"""Where nodes are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ['layout']

_NEGATIVES = 5  # nodes that each node is pushed away from, in every step
_GRAVITY = 0.05  # keeps parts that hardly hang together near each other


@torch.no_grad()
def layout(
    edge_index: Tensor, num_nodes: int, num_steps: int = 200, seed: int = 0
) -> Tensor:
    r"""Positions in the plane, of shape :obj:`[n, 2]`, such that neighbours are near.

    Neighbours attract each other, and nodes drawn at random push each other away, with
    the forces of UMAP and ever smaller steps. Linear in nodes and edges, and always the
    same for the same seed.

    Args:
        edge_index (torch.Tensor): The edges, in any direction.
        num_nodes (int): The number of nodes.
        num_steps (int, optional): The number of steps. (default: :obj:`200`)
        seed (int, optional): Of the random numbers. (default: :obj:`0`)
    """
    generator = torch.Generator().manual_seed(seed)
    source = torch.cat([edge_index[0], edge_index[1]])
    target = torch.cat([edge_index[1], edge_index[0]])
    pos = _start(source, target, num_nodes, generator)
    for step in range(num_steps):
        diff = pos[source] - pos[target]
        pull = 2.0 * diff / (1.0 + diff.square().sum(1, keepdim=True))
        move = torch.zeros_like(pos).index_add_(0, target, pull)
        shape = (num_nodes, _NEGATIVES)
        other = torch.randint(max(num_nodes, 1), shape, generator=generator)
        diff = pos.unsqueeze(1) - pos[other]
        dist = diff.square().sum(2, keepdim=True)
        push = 2.0 * diff / ((0.01 + dist) * (1.0 + dist))
        move += push.clamp(-4.0, 4.0).sum(1) - _GRAVITY * pos
        # Nodes with many neighbours would jump to and fro.
        pos = pos + (1.0 - step / num_steps) * 0.2 * move.clamp(-4.0, 4.0)
    return pos - pos.mean(0) if num_nodes > 0 else pos


def _start(
    source: Tensor, target: Tensor, num_nodes: int, generator: torch.Generator
) -> Tensor:
    """Two slow vectors of a random walk, so that far parts of the graph start apart."""
    noise = torch.randn(num_nodes, 2, generator=generator)
    degree = target.bincount(minlength=num_nodes).clamp(min=1).unsqueeze(1)
    pos = noise
    for _ in range(50 if num_nodes > 2 else 0):
        mean = torch.zeros_like(pos).index_add_(0, target, pos[source]) / degree
        pos = pos + mean
        pos, _ = torch.linalg.qr(pos - pos.mean(0))
    # Parts that hardly hang together with the rest would start far away.
    scale = pos.square().mean().sqrt().clamp(min=1e-12) if num_nodes > 0 else 1.0
    return 2.0 * (pos / scale).clamp(-2.0, 2.0) + 0.1 * noise
