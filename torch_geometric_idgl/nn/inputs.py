r"""From the arguments of a forward pass to what Algorithm 1 works on: checked features,
the initial graph :math:`\mathbf{L}^{(0)}`, anchors, and what is kept of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import (
    add_remaining_self_loops,
    coalesce,
    is_torch_sparse_tensor,
)

from ..checks import check_batch, check_nodes
from ..graphs import CompleteGraph, DenseGraph, SparseGraph
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.knn import knn_graph, knn_matrix
from ..ops.numeric import safe_rsqrt
from ..ops.sparse import Pattern, SparseMatrix, csr_without_warning

__all__ = [
    'Anchors',
    'InputCache',
    'Inputs',
    'Part',
    'arrange',
    'given_anchors',
    'initial_graph',
    'knn_initial_graph',
    'prepare',
    'sample_anchors',
]

# Graphs of a batch with up to 16 nodes are refined together, and so are those with 17
# to 128: less padding.
_SMALL = (16, 128)
# An initial graph is a matrix if it is small and one in so many pairs are neighbours:
# a step on Cora with half of all pairs added as edges takes half the time.
_MANY = 8
_DENSE = 2048
_MATRIX = (1 << 16, 1 << 24)  # entries of a given graph that may be one

InitialGraph = SparseGraph | DenseGraph | CompleteGraph


class Part(NamedTuple):
    """What one run of Algorithm 1 works on: a graph, or small graphs of a batch."""

    x: Features  # what enters the GNN
    features: Features  # what graphs are learned from: the same, or others
    initial: InitialGraph
    graphs: list[int]  # of the batch

    def dropout(self, p: float) -> tuple[Features, Features]:
        """Both features with entries dropped, the same ones if they are the same."""
        x = self.x.dropout(p)
        return x, x if self.features is self.x else self.features.dropout(p)


class Inputs(NamedTuple):
    """What depends on the arguments of a forward pass alone, and can be kept."""

    x: Features
    features: Features
    given: SparseGraph | None  # nothing: a kNN graph of the features
    parts: list[Part]

    def anchors_of(self, part: Part, anchors: Anchors) -> Anchors:
        """The anchors of a part, as nodes of it."""
        if part.x.nodes is self.x.nodes:
            return anchors
        rows = self.x.nodes.rows_of(part.graphs)
        place = torch.empty(self.x.nodes.num_rows, dtype=torch.long, device=rows.device)
        place[rows] = torch.arange(rows.numel(), device=rows.device)
        index = anchors.index[anchors.nodes.rows_of(part.graphs)]
        return Anchors(place[index], anchors.nodes.of(part.graphs))


def prepare(
    x: Tensor,
    graph_x: Tensor | None,
    adjacency: Any,
    weight: Tensor | None,
    batch: Tensor | None,
    batch_size: int | None,
    *,
    k: int,
    normalize: bool,
    add_self_loops: bool,
    together: bool,
) -> Inputs:
    """Normalise or build the graph of checked features."""
    if hasattr(adjacency, 'initial_graph'):  # rows that are spread over processes
        given = adjacency.initial_graph(x, normalize, add_self_loops)
        return arrange(x, graph_x, given.rows, given, k, together)
    nodes = _nodes(batch, batch_size, x)
    given = initial_graph(adjacency, weight, nodes, x.dtype, normalize, add_self_loops)
    return arrange(x, graph_x, nodes, given, k, together)


def arrange(
    x: Tensor,
    graph_x: Tensor | None,
    nodes: Nodes,
    given: SparseGraph | None,
    k: int,
    together: bool,
) -> Inputs:
    """Puts a batch into parts. Large graphs are refined one after another: each stops
    by itself, and nothing is padded. Small ones are refined together, which saves time.

    Args:
        x (torch.Tensor): The features.
        graph_x (torch.Tensor, optional): Others, to learn graphs from.
        nodes (Nodes): The nodes of each graph of the batch.
        given (SparseGraph, optional): The initial graph.
        k (int): The number of neighbours, where there is no initial graph.
        together (bool): Whether all graphs have to be refined together, because the GNN
            mixes them (by batch normalisation, for example).
    """
    features = Features.from_tensor(x, nodes)
    others = features if graph_x is None else Features.from_tensor(graph_x, nodes)
    parts = []
    for graphs in _groups(nodes.sizes, together):
        own, own_others = features, others
        initial: InitialGraph | None = given
        if len(graphs) < nodes.num_graphs:
            rows, some = nodes.rows_of(graphs), nodes.of(graphs)
            own = features.rows(rows, some)
            own_others = own if others is features else others.rows(rows, some)
            initial = None if given is None else given.of_nodes(rows, some)
        if initial is None:
            initial = knn_initial_graph(own_others, k)
        elif _has_many_edges(initial):
            initial = initial.to_matrix()
        parts.append(Part(own, own_others, initial, graphs))
    return Inputs(features, others, given, parts)


def _has_many_edges(graph: Any) -> TypeGuard[SparseGraph]:
    if not isinstance(graph, SparseGraph) or graph.rows.num_graphs > 1:
        return False
    pairs = graph.rows.num_rows**2
    return _MATRIX[0] <= pairs <= _MATRIX[1] and pairs < _MANY * graph.value.numel()


def _groups(sizes: Sequence[int], together: bool) -> list[list[int]]:
    """Which graphs are refined together. Empty ones take part in nothing."""
    if len(sizes) == 1:
        return [[0]]
    present = [graph for graph, size in enumerate(sizes) if size > 0]
    if together:
        return [present or [0]]
    small = [
        [graph for graph in present if low < sizes[graph] <= high]
        for low, high in pairwise((0, *_SMALL))
    ]
    alone = [[graph] for graph in present if sizes[graph] > _SMALL[-1]]
    return [graphs for graphs in small + alone if graphs] or [[0]]


def _nodes(batch: Tensor | None, batch_size: int | None, x: Tensor) -> Nodes:
    """The nodes of each graph of the batch."""
    if batch is None:
        return Nodes((x.size(0),), x.device)
    check_batch(batch, batch_size, x.size(0))
    graphs, counts = batch.unique_consecutive(return_counts=True)
    found, numbers = torch.stack([graphs, counts]).tolist()  # one look at the device
    sizes = [0] * max(found[-1] + 1 if found else 0, batch_size or 0, 1)
    for graph, size in zip(found, numbers, strict=True):
        sizes[graph] = size
    return Nodes(sizes, x.device)


class InputCache(NamedTuple):
    """What a call with :obj:`cached=True` leaves for later ones: its graph, and what it
    has made of its features, for as long as they are equal.
    """

    inputs: Inputs
    same: bool  # whether the features can serve again: no gradients go through them

    @classmethod
    def of(cls, inputs: Inputs, x: Tensor, graph_x: Tensor | None) -> InputCache | None:
        """Nothing is kept that gradients go through, or that never can have any."""
        given = inputs.given
        if given is not None and not _can_be_kept(given.value):
            return None
        same = _can_be_kept(x) and (graph_x is None or _can_be_kept(graph_x))
        if same:
            inputs.x.remember(x)
            if graph_x is not None:
                inputs.features.remember(graph_x)
        return cls(inputs, same) if same or given is not None else None

    def find(self, x: Any, graph_x: Any, dtype: torch.dtype) -> Inputs | None:
        """The inputs of equal features."""
        if not self.same or (graph_x is None) != (
            self.inputs.features is self.inputs.x
        ):
            return None
        for value, kept in ((x, self.inputs.x), (graph_x, self.inputs.features)):
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.requires_grad:
                return None
            if value.dtype != dtype or not kept.holds(value):
                return None
        return self.inputs

    def graph_for(self, x: Tensor, adjacency: Any) -> SparseGraph | None:
        """The graph for other features, if it does not depend on them."""
        given, features = self.inputs.given, self.inputs.x
        shape = (features.nodes.num_rows, features.num_features)
        if tuple(x.shape) != shape:
            raise ValueError(
                f'Expected the cached graph with features of shape {list(shape)} '
                f'(got {list(x.shape)}); use cached=False'
            )
        if given is None:
            return None
        if given.dtype != x.dtype or given.value.device != x.device:
            if adjacency is None:
                raise ValueError(
                    f"Expected 'edge_index' once more, as the cached graph is of "
                    f'{given.dtype} on {given.value.device} (got none beside '
                    f'features of {x.dtype} on {x.device})'
                )
            return None
        return given


def _can_be_kept(value: Tensor) -> bool:
    return not (value.requires_grad or value.is_inference())


# Anchors -----------------------------------------------------------------------------


class Anchors(NamedTuple):
    """The anchors of one graph or a batch: the few nodes that stand for all."""

    index: Tensor  # type: ignore[assignment]  # nodes of the whole batch
    nodes: Nodes  # which of them belong to which graph


def sample_anchors(
    nodes: Nodes, num_anchors: int | None, ratio: float | None, seed: int | None = None
) -> Anchors:
    """Draw anchors without replacement, in every graph by itself.

    Args:
        nodes (Nodes): The nodes of each graph.
        num_anchors (int, optional): How many of each graph, at most all its nodes.
        ratio (float, optional): Or which share of the nodes of each graph, rounded up.
        seed (int, optional): For the same anchors each time, whatever else is in the
            batch. (default: :obj:`None`)
    """
    generator = None if seed is None else torch.Generator()
    chosen, sizes = [torch.empty(0, dtype=torch.long)], []
    for first, size in zip(nodes.ptr, nodes.sizes, strict=False):
        wanted = num_anchors if ratio is None else math.ceil(round(ratio * size, 9))
        wanted = min(wanted or 0, size)
        sizes.append(wanted)
        if wanted == 0:
            continue
        if generator is not None and seed is not None:
            generator.manual_seed(seed)
        order = torch.randperm(size, generator=generator)[:wanted]
        chosen.append(order + first)
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


def initial_graph(
    adjacency: Any,
    weight: Tensor | None,
    nodes: Nodes,
    dtype: torch.dtype,
    normalize: bool,
    add_self_loops: bool,
) -> SparseGraph | None:
    """The graph that any form of adjacency stands for, if there is one."""
    if adjacency is None:
        if weight is not None:
            raise ValueError("Expected 'edge_index' beside 'edge_weight' (got none)")
        return None
    edge_index, weight = edges_from_adjacency(adjacency, weight, nodes.num_rows)
    return given_graph(edge_index, weight, nodes, dtype, normalize, add_self_loops)


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


def knn_initial_graph(features: Features, k: int) -> InitialGraph:
    r"""The cosine kNN graph of the raw features, where no graph is given.

    As in the paper's experiments every node is among its own neighbours, the graph is
    directed, and :math:`\mathbf{L}^{(0)} = \mathbf{A}^{\top} / k`. Graphs of at most
    :math:`k` nodes are complete, and have no list of edges.
    """
    nodes, x = features.nodes, features.value
    if nodes.max_size <= k:
        return CompleteGraph(nodes, features.dtype)
    if features.block_size is not None:
        x = x.to_dense()
    if isinstance(x, SparseMatrix):
        index = torch.stack([x.pattern.row, x.pattern.col])
        x = torch.sparse_coo_tensor(
            index, x.value, x.shape, is_coalesced=True, check_invariants=False
        )
    if nodes.num_graphs == 1 and nodes.max_size <= min(_MANY * k, _DENSE):
        value = knn_matrix(x.detach(), k).t().to(features.dtype) / k
        return DenseGraph(value.unsqueeze(0), nodes, nodes)
    batch = None if nodes.num_graphs == 1 else nodes.batch
    centre, neighbour = knn_graph(x.detach(), k, batch)
    sizes = torch.tensor(nodes.sizes, device=nodes.device).clamp(min=1, max=k)
    weight = sizes.to(features.dtype).reciprocal()[nodes.batch[centre]]
    shape = (nodes.num_rows, nodes.num_rows)
    pattern, perm = Pattern.from_coo(neighbour, centre, shape)
    return SparseGraph(pattern, weight[perm], nodes, nodes)
