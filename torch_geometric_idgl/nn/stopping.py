"""When graphs stop, and what happens to those that have stopped."""

from __future__ import annotations

import torch
from torch import Tensor

from ..graphs import Affinity, Change
from ..ops.layout import Layout

__all__ = ['still_changing', 'where_active']


def still_changing(
    active: Tensor, change: Change, scale: Affinity, tol: float, exact: bool = False
) -> tuple[Tensor, bool]:
    """Which graphs go on, and whether any does.

    Bounds of the norm usually decide. Where they do not, closer ones are asked for, and
    at last the norm: that takes another look at numbers, which is free on CPUs only.

    Args:
        active (torch.Tensor): The graphs that have not stopped yet.
        change (Change): The squared distance to the graphs before.
        scale (Affinity): The graphs whose squared norm it is compared with.
        tol (float): The share of it below which a graph stops.
        exact (bool, optional): Decide without bounds, in one host synchronisation.
            (default: :obj:`False`)
    """
    if exact:
        active = active & (change.exact() > tol * scale.sq_norm())
        return active, bool(active.any())
    effort, undecided = 0, True
    while undecided:
        least, most = scale.sq_norm_bounds(effort)
        low, high = change.bounds(effort)
        if active.numel() == 1:  # numbers are compared faster than tensors
            bounds = torch.cat([low, high, least, most]).tolist()
            going_on = bounds[0] > tol * bounds[3]
            undecided = not going_on and bounds[1] > tol * bounds[2]
            surely = active if going_on else torch.zeros_like(active)
        else:
            surely = active & (low > tol * most)
            perhaps = active & (high > tol * least) & ~surely
            undecided, going_on = torch.stack([perhaps.any(), surely.any()]).tolist()
        effort += 1
    return surely, going_on


def where_active(active: Tensor, new: Tensor, old: Tensor, layout: Layout) -> Tensor:
    """New rows for the nodes of graphs that still iterate (or new values for these
    graphs); the others keep theirs.
    """
    if layout.num_graphs == 1:
        return new
    if new.dim() == 1:
        return torch.where(active, new, old)
    return torch.where(active[layout.batch].unsqueeze(1), new, old)
