"""Immediate, specific errors for input that cannot be right."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = [
    'check_at_least',
    'check_batch',
    'check_choice',
    'check_features',
    'check_graph_features',
    'check_nodes',
    'check_probability',
    'check_unit_interval',
    'floating_dtype',
    'is_replica',
]


_LARGEST = 1e17


def check_at_least(name: str, value: Any, bound: float, integer: bool = False) -> None:
    """Raise unless a finite number is at least a bound (and whole, if asked)."""
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        kind = 'an integer' if integer else 'a number'
        raise TypeError(f"Expected '{name}' to be {kind} (got {value!r})")
    if not bound <= float(value) < math.inf:
        finite = 'finite and ' if value == math.inf else ''
        raise ValueError(
            f"Expected '{name}' to be {finite}at least {bound} (got {value})"
        )


def check_unit_interval(name: str, value: Any, open_left: bool = False) -> None:
    """Raise unless a number is in [0, 1] (or in (0, 1])."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Expected '{name}' to be a number (got {value!r})")
    number = float(value)
    low = number > 0 if open_left else number >= 0
    if not (low and number <= 1):
        interval = '(0, 1]' if open_left else '[0, 1]'
        raise ValueError(f"Expected '{name}' to be in {interval} (got {value})")


def check_probability(name: str, value: Any) -> None:
    """Raise unless a number is a dropout probability, in [0, 1)."""
    check_unit_interval(name, value)
    if value == 1:
        raise ValueError(f"Expected '{name}' to be in [0, 1) (got {value})")


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Raise unless a value is one of a few."""
    if value not in choices:
        raise ValueError(
            f"Expected '{name}' to be one of {list(choices)} (got {value!r})"
        )


def floating_dtype(module: Module, default: torch.dtype | None = None) -> torch.dtype:
    """The number type of a module. Replicas, as :class:`torch.nn.DataParallel` makes
    them, hold their parameters as plain attributes.
    """
    for part in module.modules():
        for value in [*part.parameters(recurse=False), *vars(part).values()]:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.dtype
    return default or torch.get_default_dtype()


def is_replica(module: Module) -> bool:
    """Whether a module is a replica, as :class:`torch.nn.DataParallel` makes them."""
    values = [value for part in module.modules() for value in vars(part).values()]
    learned = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    return bool(learned) and next(module.parameters(), None) is None


def check_features(
    x: Any, in_channels: int, dtype: torch.dtype, name: str = 'x'
) -> Tensor:
    """Raise unless x is a finite matrix with the columns and the number type of the
    model; mixed precision may have given it another, which is undone.
    """
    if not isinstance(x, Tensor):
        or_data = ", 'Data' or 'Batch'" if name == 'x' else ''
        raise TypeError(
            f"Expected '{name}' to be a 'torch.Tensor'{or_data} "
            f"(got '{type(x).__name__}')"
        )
    if x.dim() != 2:
        raise ValueError(
            f"Expected '{name}' to be two-dimensional (got {x.dim()} dimensions)"
        )
    if not x.is_floating_point():
        raise TypeError(f"Expected '{name}' to be floating-point (got {x.dtype})")
    if x.layout == torch.sparse_coo and x.dense_dim() > 0:
        raise ValueError(
            f"Expected sparse '{name}' to have two sparse dimensions (got a hybrid "
            f'tensor with {x.sparse_dim()} sparse and {x.dense_dim()} dense ones)'
        )
    if x.size(1) != in_channels:
        channels = 'in_channels' if name == 'x' else 'graph_channels'
        raise ValueError(
            f"Expected '{name}' to have {in_channels} features, as '{channels}' says "
            f'(got {x.size(1)})'
        )
    if x.dtype != dtype:
        if not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"Expected '{name}' to be of type {dtype}, as the model's parameters "
                f'are (got {x.dtype})'
            )
        x = x.to(dtype)
    value = x
    if x.layout != torch.strided:
        value = (x.coalesce() if x.layout == torch.sparse_coo else x).values()
    value = value.detach()
    largest = 0.0  # NaN, if there is one
    if value.numel():
        largest = float(torch.stack(value.aminmax()).abs().max())
    if not math.isfinite(largest):
        bad = int((~torch.isfinite(value)).sum())
        raise ValueError(
            f"Expected '{name}' to be finite (got {bad} NaN or infinite entries)"
        )
    bound = min(_LARGEST, torch.finfo(dtype).max)
    if largest > bound:
        raise ValueError(
            f"Expected '{name}' to hold numbers of at most {bound:.0e}, whose squares "
            f'can be summed (got {largest:.1e}); scale the features'
        )
    return x


def check_graph_features(graph_x: Any, graph_channels: int | None, x: Tensor) -> Tensor:
    """Raise unless the model wants features to learn graphs from, and these are some
    with a row for each of x.
    """
    if graph_channels is None:
        raise ValueError(
            "Expected no 'graph_x', because the model learns graphs from 'x' (got "
            "one); give the model 'graph_channels'"
        )
    if graph_x is None:
        raise ValueError(
            f"Expected 'graph_x' beside 'x', with {graph_channels} features, as "
            f"'graph_channels' says (got none)"
        )
    graph_x = check_features(graph_x, graph_channels, x.dtype, 'graph_x')
    if graph_x.size(0) != x.size(0):
        raise ValueError(
            f"Expected 'graph_x' to have {x.size(0)} rows, as 'x' has "
            f'(got {graph_x.size(0)})'
        )
    return graph_x


def check_nodes(index: Tensor, num_nodes: int, name: str = 'edge_index') -> None:
    """Raise unless an index is of nodes that there are."""
    if index.numel():
        low, high = map(int, index.aminmax())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"Expected '{name}' to hold nodes from 0 to {num_nodes - 1}, as "
                f'there are {num_nodes} (got {low} to {high})'
            )


def check_batch(batch: Any, batch_size: int | None, num_nodes: int) -> None:
    """Raise unless batch is a sorted vector with a graph for every node."""
    if not isinstance(batch, Tensor) or batch.dtype != torch.long:
        got = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(
            f"Expected 'batch' to be a tensor of type torch.long (got {got})"
        )
    if batch.dim() != 1 or batch.numel() != num_nodes:
        raise ValueError(
            f"Expected 'batch' to be of shape [{num_nodes}], one graph for each row of "
            f"'x' (got {list(batch.shape)})"
        )
    if batch_size is not None:
        check_at_least('batch_size', batch_size, 0, integer=True)
    if num_nodes == 0:
        return
    if bool((batch.diff() < 0).any()):
        raise ValueError("Expected 'batch' to be sorted (got an unsorted vector)")
    if int(batch[0]) < 0:
        raise ValueError(
            f"Expected 'batch' to start at 0 or above (got {int(batch[0])})"
        )
    if batch_size is not None and int(batch[-1]) >= batch_size:
        raise ValueError(
            f"Expected 'batch' to hold graphs below batch_size={batch_size} "
            f'(got {int(batch[-1])})'
        )
