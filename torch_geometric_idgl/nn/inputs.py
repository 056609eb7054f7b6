"""Features and initial graph, brought into the form the loop works on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_batch
from ..graphs import Signal, SparseGraph
from ..ops.features import to_features
from ..ops.layout import Layout
from .initial_graph import edges_from_adjacency, given_graph, knn_initial_graph

__all__ = ['InputCache', 'Inputs', 'cacheable', 'prepare_inputs']


class Inputs(NamedTuple):
    """What depends on the arguments of a forward pass alone, and can be cached."""

    signal: Signal
    initial: SparseGraph


@dataclass(frozen=True)
class InputCache:
    """What a call leaves for later ones: its graph, and what it has made of its
    features, for as long as they are the same tensor and unchanged.
    """

    initial: SparseGraph
    given: bool  # whether there was a graph: a kNN graph is one of the features
    num_features: int
    x: Tensor | None = None
    version: int = 0
    signal: Signal | None = None

    @classmethod
    def of(cls, inputs: Inputs, x: Tensor, given: bool) -> InputCache | None:
        """Nothing is kept that gradients go through, or that never can have any."""
        signal, initial = inputs
        if initial.value.requires_grad or initial.value.is_inference():
            return None
        if x.requires_grad or x.is_inference():
            return cls(initial, given, signal.num_features) if given else None
        return cls(initial, given, signal.num_features, x, x._version, signal)

    def find(self, x: Any, dtype: torch.dtype) -> Inputs | None:
        """The inputs of the same features."""
        if self.x is None or x is not self.x or self.x._version != self.version:
            return None
        if x.requires_grad:  # by now
            return None
        if self.signal is None or self.initial.dtype != dtype:
            return None
        return Inputs(self.signal, self.initial)

    def renew(self, x: Tensor, adjacency: Any) -> Inputs | None:
        """Other features on the same graph, if that does not depend on them."""
        initial = self.initial
        shape = (initial.rows.num_rows, self.num_features)
        if tuple(x.shape) != shape:
            raise ValueError(
                f'Expected the cached graph with features of shape {list(shape)} '
                f'(got {list(x.shape)}); use cached=False'
            )
        if not self.given:
            return None
        if initial.dtype != x.dtype or initial.value.device != x.device:
            if adjacency is None:
                raise ValueError(
                    f"Expected 'edge_index' once more, as the cached graph is of "
                    f'{initial.dtype} on {initial.value.device} (got none beside '
                    f'features of {x.dtype} on {x.device})'
                )
            return None
        return Inputs(Signal(to_features(x), initial.rows), initial)


@contextlib.contextmanager
def cacheable(cached: bool) -> Iterator[None]:
    """Inference mode makes tensors that no later step can use: what is kept for later
    ones is made without it, and without gradients.
    """
    if cached and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def prepare_inputs(
    x: Tensor,
    adjacency: Any,
    weight: Tensor | None,
    batch: Tensor | None,
    batch_size: int | None,
    *,
    k: int,
    normalize: bool,
    add_self_loops: bool,
) -> Inputs:
    """Normalise or build the graph of checked features."""
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
