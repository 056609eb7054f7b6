r"""From the arguments of a forward pass to what Algorithm 1 works on: checked features,
the initial graph :math:`\mathbf{L}^{(0)}`, anchors, and what is kept of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import (
    add_remaining_self_loops,
    coalesce,
    is_torch_sparse_tensor,
)

from ..checks import check_batch, check_nodes
from ..graphs import SparseGraph
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.knn import knn_graph
from ..ops.numeric import safe_rsqrt
from ..ops.sparse import Pattern, SparseMatrix, csr_without_warning

__all__ = [
    'Anchors',
    'InputCache',
    'Inputs',
    'given_anchors',
    'prepare',
    'sample_anchors',
]


class Inputs(NamedTuple):
    """What depends on the arguments of a forward pass alone, and can be kept."""

    features: Features
    initial: SparseGraph
    graphs: Tensor | None = None  # the graphs of the batch that have nodes, if not all
    num_graphs: int = 1


def prepare(
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
    nodes, graphs, num_graphs = _nodes(batch, batch_size, x)
    features = Features.from_tensor(x, nodes)
    if adjacency is None:
        initial = knn_initial_graph(features, k)
    else:
        edge_index, weight = edges_from_adjacency(adjacency, weight, x.size(0))
        initial = given_graph(
            edge_index, weight, nodes, x.dtype, normalize, add_self_loops
        )
    return Inputs(features, initial, graphs, num_graphs)


def _nodes(
    batch: Tensor | None, batch_size: int | None, x: Tensor
) -> tuple[Nodes, Tensor | None, int]:
    """The nodes of the graphs that have any, which graphs these are (nothing: all), and
    the number of all graphs. Empty graphs take no part in anything.
    """
    if batch is None:
        return Nodes((x.size(0),), x.device), None, 1
    check_batch(batch, batch_size, x.size(0))
    graphs, sizes = batch.unique_consecutive(return_counts=True)
    ends = torch.cat([sizes, graphs[-1:] + 1]).tolist()  # one look at the device
    num_graphs = max(ends.pop() if x.size(0) else 0, batch_size or 0, 1)
    nodes = Nodes(ends or [0], x.device)
    return nodes, None if len(ends) == num_graphs else graphs, num_graphs


class InputCache(NamedTuple):
    """What a call with :obj:`cached=True` leaves for later ones: its graph, and what it
    has made of its features, for as long as they are equal.
    """

    inputs: Inputs
    given: bool  # whether there was a graph: a kNN graph is one of the features
    same: bool  # whether the features can serve again: no gradients go through them

    @classmethod
    def of(cls, inputs: Inputs, x: Tensor, given: bool) -> InputCache | None:
        """Nothing is kept that gradients go through, or that never can have any."""
        value = inputs.initial.value
        if value.requires_grad or value.is_inference():
            return None
        same = not (x.requires_grad or x.is_inference())
        if same:
            inputs.features.remember(x)
        return cls(inputs, given, same) if same or given else None

    def find(self, x: Any, dtype: torch.dtype) -> Inputs | None:
        """The inputs of equal features."""
        if not self.same or not isinstance(x, Tensor) or x.requires_grad:
            return None
        if x.dtype != dtype or not self.inputs.features.holds(x):
            return None
        return self.inputs

    def renew(self, x: Tensor, adjacency: Any) -> Inputs | None:
        """Other features on the same graph, if that does not depend on them."""
        features, initial = self.inputs.features, self.inputs.initial
        shape = (initial.num_nodes, features.num_features)
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
        return self.inputs._replace(features=Features.from_tensor(x, initial.rows))


# Anchors -----------------------------------------------------------------------------


class Anchors(NamedTuple):
    """The anchors of one graph or a batch: the few nodes that stand for all."""

    index: Tensor  # type: ignore[assignment]  # nodes of the whole batch
    nodes: Nodes  # which of them belong to which graph


def sample_anchors(
    nodes: Nodes,
    num_anchors: int | None,
    ratio: float | None,
    generator: torch.Generator | None = None,
) -> Anchors:
    """Draw anchors without replacement, in every graph by itself.

    Args:
        nodes (Nodes): The nodes of each graph.
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
    return Anchors(index, Nodes(sizes, nodes.device))


def given_anchors(nodes: Nodes, index: Tensor) -> Anchors:
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
    return Anchors(index[order], Nodes(sizes, nodes.device))


# The initial graph -------------------------------------------------------------------


def edges_from_adjacency(
    adjacency: Any, weight: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    """Any form of adjacency as a checked :obj:`edge_index` and weights.

    Sparse matrices are transposed adjacencies, as everywhere in PyG: a row is a
    target node.

    Args:
        adjacency (torch.Tensor or EdgeIndex or SparseTensor): COO indices of shape
            :obj:`[2, E]`, or a sparse matrix.
        weight (torch.Tensor, optional): Edge weights, of shape :obj:`[E]`.
        num_nodes (int): The number of nodes.
    """
    if hasattr(adjacency, 'sparse_sizes') and hasattr(adjacency, 'coo'):
        if not isinstance(adjacency, EdgeIndex):  # torch_sparse.SparseTensor
            _check_square(tuple(adjacency.sizes()), num_nodes, weight)
            row, col, value = adjacency.coo()
            value = None if value is None else _as_weight(value)
            return _checked(torch.stack([col, row]), value, num_nodes)
    if not isinstance(adjacency, Tensor):
        raise TypeError(
            f"Expected 'edge_index' to be a tensor of shape [2, num_edges], a torch "
            f"sparse tensor or a 'SparseTensor' (got '{type(adjacency).__name__}')"
        )
    if is_torch_sparse_tensor(adjacency):
        _check_square(tuple(adjacency.shape), num_nodes, weight)
        with csr_without_warning():
            coo = adjacency.to_sparse_coo().coalesce()
        return _checked(coo.indices().flip(0), _as_weight(coo.values()), num_nodes)
    if isinstance(adjacency, EdgeIndex):
        adjacency = adjacency.as_tensor()
    return _checked(adjacency, weight, num_nodes)


def _check_square(
    shape: tuple[int, ...], num_nodes: int, weight: Tensor | None
) -> None:
    if shape != (num_nodes, num_nodes):
        raise ValueError(
            f'Expected a sparse adjacency of shape {[num_nodes, num_nodes]}, as '
            f"'x' has {num_nodes} rows (got {list(shape)})"
        )
    if weight is not None:
        raise ValueError(
            'Expected the weights of a sparse adjacency to be its values '
            "(got 'edge_weight' besides)"
        )


def _as_weight(value: Tensor) -> Tensor:
    """The entries of a sparse adjacency, which may well be whole numbers."""
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _checked(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int
) -> tuple[Tensor, Tensor | None]:
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to be of shape [2, num_edges] "
            f'(got {list(edge_index.shape)})'
        )
    if edge_index.dtype not in (torch.long, torch.int):
        raise TypeError(
            f"Expected 'edge_index' to be of type torch.long (got {edge_index.dtype})"
        )
    edge_index = edge_index.long()
    check_nodes(edge_index, num_nodes)
    if weight is None:
        return edge_index, None
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"Expected 'edge_weight' to be floating-point (got {got})")
    if weight.dim() == 2 and weight.size(1) == 1:
        weight = weight.squeeze(1)
    if weight.dim() != 1 or weight.numel() != edge_index.size(1):
        raise ValueError(
            f"Expected 'edge_weight' to be of shape [{edge_index.size(1)}], one for "
            f'each edge (got {list(weight.shape)})'
        )
    value = weight.detach()
    if not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(
            f"Expected 'edge_weight' to be finite and not negative "
            f'(got values from {float(value.min())} to {float(value.max())})'
        )
    return edge_index, weight


def given_graph(
    edge_index: Tensor,
    weight: Tensor | None,
    nodes: Nodes,
    dtype: torch.dtype,
    normalize: bool,
    add_self_loops: bool,
) -> SparseGraph:
    r"""A given graph, normalised as :math:`\mathbf{D}^{-1/2} (\mathbf{A} + \mathbf{I})
    \mathbf{D}^{-1/2}` like PyG's :func:`gcn_norm`, whose gradient is NaN where a degree
    is zero.
    """
    num_nodes = nodes.num_rows
    if nodes.num_graphs > 1 and edge_index.numel():
        crossing = nodes.batch[edge_index[0]] != nodes.batch[edge_index[1]]
        if bool(crossing.any()):
            raise ValueError(
                f"Expected edges within the graphs of 'batch' "
                f'(got {int(crossing.sum())} between different graphs)'
            )
    if weight is not None:
        weight = weight.to(dtype)
    else:
        weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    if normalize:
        edge_index, weight = _normalized(edge_index, weight, num_nodes, add_self_loops)
    # Parallel edges become one (as products would treat them anyway).
    (row, col), weight = coalesce(edge_index.flip(0), weight, num_nodes)
    pattern = Pattern.from_sorted(row, col, (num_nodes, num_nodes))
    return SparseGraph(pattern, weight, nodes, nodes)


def _normalized(
    edge_index: Tensor, weight: Tensor, num_nodes: int, add_self_loops: bool
) -> tuple[Tensor, Tensor]:
    if add_self_loops:
        edge_index, weight = add_remaining_self_loops(
            edge_index, weight, 1.0, num_nodes
        )
    source, target = edge_index
    scale = safe_rsqrt(weight.new_zeros(num_nodes).index_add(0, target, weight))
    return edge_index, scale[source] * weight * scale[target]


def knn_initial_graph(features: Features, k: int) -> SparseGraph:
    r"""The cosine kNN graph of the raw features, where no graph is given.

    As in the paper's experiments every node is among its own neighbours, the graph is
    directed, and :math:`\mathbf{L}^{(0)} = \mathbf{A}^{\top} / k`.
    """
    nodes, x = features.nodes, features.value
    if isinstance(x, SparseMatrix):
        index = torch.stack([x.pattern.row, x.pattern.col])
        x = torch.sparse_coo_tensor(
            index, x.value, x.shape, is_coalesced=True, check_invariants=False
        )
    batch = None if nodes.num_graphs == 1 else nodes.batch
    centre, neighbour = knn_graph(x.detach(), k, batch)
    sizes = torch.tensor(nodes.sizes, device=nodes.device).clamp(min=1, max=k)
    weight = sizes.to(features.dtype).reciprocal()[nodes.batch[centre]]
    shape = (nodes.num_rows, nodes.num_rows)
    pattern, perm = Pattern.from_coo(neighbour, centre, shape)
    return SparseGraph(pattern, weight[perm], nodes, nodes)
