r"""The initial graph :math:`\mathbf{L}^{(0)}`, given or built from the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import (
    add_remaining_self_loops,
    coalesce,
    is_torch_sparse_tensor,
)

from ..checks import check_nodes
from ..graphs import Signal, SparseGraph
from ..ops.knn import knn_graph
from ..ops.layout import Layout
from ..ops.numeric import safe_rsqrt
from ..ops.sparse import Pattern, SparseMatrix

__all__ = ['edges_from_adjacency', 'given_graph', 'knn_initial_graph']


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
    layout: Layout,
    dtype: torch.dtype,
    normalize: bool,
    add_self_loops: bool,
) -> SparseGraph:
    r"""A given graph, normalised as :math:`\mathbf{D}^{-1/2} (\mathbf{A} + \mathbf{I})
    \mathbf{D}^{-1/2}` like PyG's :func:`gcn_norm`, whose gradient is NaN where a degree
    is zero.
    """
    num_nodes = layout.num_rows
    if layout.num_graphs > 1 and edge_index.numel():
        crossing = layout.batch[edge_index[0]] != layout.batch[edge_index[1]]
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
    return SparseGraph(pattern, weight, layout, layout)


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


def knn_initial_graph(signal: Signal, k: int) -> SparseGraph:
    r"""The cosine kNN graph of the raw features, where no graph is given.

    As in the paper's experiments every node is among its own neighbours, the graph is
    directed, and :math:`\mathbf{L}^{(0)} = \mathbf{A}^{\top} / k`.
    """
    layout = signal.layout
    x = signal.x
    if isinstance(x, SparseMatrix):
        pattern = x.pattern
        parts = (pattern.rowptr, pattern.col, x.value)
        x = torch.sparse_csr_tensor(*parts, x.shape, check_invariants=False)
    batch = None if layout.num_graphs == 1 else layout.batch
    centre, neighbour = knn_graph(x.detach(), k, batch)
    sizes = torch.tensor(layout.sizes, device=layout.device).clamp(min=1, max=k)
    weight = sizes.to(signal.x.dtype).reciprocal()[layout.batch[centre]]
    shape = (layout.num_rows, layout.num_rows)
    pattern, perm = Pattern.from_coo(neighbour, centre, shape)
    return SparseGraph(pattern, weight[perm], layout, layout)
