"""Features and initial graph, brought into the form the loop works on."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..graphs import Signal, SparseGraph
from ..ops.features import to_features
from ..ops.layout import Layout
from .checks import check_batch, check_features
from .initial_graph import edges_from_adjacency, given_graph, knn_initial_graph

__all__ = ['Inputs', 'prepare_inputs']


class Inputs(NamedTuple):
    """What depends on the arguments of a forward pass alone, and can be cached."""

    signal: Signal
    initial: SparseGraph


def prepare_inputs(
    x: Tensor,
    adjacency: Any,
    weight: Tensor | None,
    batch: Tensor | None,
    batch_size: int | None,
    *,
    in_channels: int,
    k: int,
    normalize: bool,
    add_self_loops: bool,
) -> Inputs:
    """Check the arguments of a forward pass, and normalise or build the graph."""
    check_features(x, in_channels)
    if adjacency is None and weight is not None:
        raise ValueError("Expected 'edge_index' beside 'edge_weight' (got none)")
    if batch is not None:
        check_batch(batch, batch_size, x.size(0))
    layout = Layout.from_batch(batch, x.size(0), batch_size, x.device)
    signal = Signal(to_features(x), layout)
    if adjacency is None:
        return Inputs(signal, knn_initial_graph(signal, k))
    edge_index, weight = edges_from_adjacency(adjacency, weight, x.size(0))
    initial = given_graph(
        edge_index, weight, layout, x.dtype, normalize, add_self_loops
    )
    return Inputs(signal, initial)
