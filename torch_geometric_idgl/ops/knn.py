"""Cosine nearest neighbours in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch_geometric.utils import cumsum, is_torch_sparse_tensor

__all__ = ['knn_graph']


@torch.no_grad()
def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    *,
    include_self: bool = True,
    block_size: int = 1024,
) -> Tensor:
    r"""Connects every node to its :obj:`k` nearest neighbours by cosine similarity.

    This is the initial graph of the paper for data without one. Edges lead from a
    node :math:`i` to its neighbours :math:`j`, *i.e.* :obj:`edge_index[0]` holds each
    centre :math:`k` times, as in the authors' code; with weights :math:`1/k`, message
    passing over it multiplies by :math:`\mathbf{A}^{\top} / k`.

    Nodes are compared in blocks of rows, so that :obj:`block_size` times the size of
    the largest graph numbers are held at a time. Neighbours of a node come in
    descending similarity, equally similar ones by ascending index. The cosine of an
    all-zero row to anything is zero.

    Args:
        x (torch.Tensor): The node features of shape :obj:`[num_nodes, in_channels]`,
            dense or sparse (COO, CSR, ...).
        k (int): The number of neighbours of a node, itself included if
            :obj:`include_self` is set. Graphs with fewer nodes than that are
            connected completely.
        batch (torch.Tensor, optional): The sorted vector that assigns each node to
            its graph. Nodes of different graphs are never connected.
            (default: :obj:`None`)
        include_self (bool, optional): If set to :obj:`False`, a node is not its own
            (first) neighbour. (default: :obj:`True`)
        block_size (int, optional): The number of rows to compare at a time.
            (default: :obj:`1024`)

    Returns:
        torch.Tensor: The edges of shape :obj:`[2, num_edges]`.
    """
    if x.dim() != 2:
        raise ValueError(
            f"Expected 'x' to be two-dimensional (got {x.dim()} dimensions)"
        )
    for name, value in [('k', k), ('block_size', block_size)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Expected '{name}' to be a positive int (got {value!r})")

    ptr = graph_bounds(batch, x.size(0))
    x = _unit_rows(x)

    edges = []
    for begin, end in itertools.pairwise(ptr):
        graph = _rows(x, begin, end)
        for start in range(0, end - begin, block_size):
            neighbours = _neighbours(graph, start, block_size, k, include_self)
            rows, num_neighbours = neighbours.size()
            centre = torch.arange(begin + start, begin + start + rows, device=x.device)
            centre = centre.repeat_interleave(num_neighbours)
            edges.append(torch.stack([centre, neighbours.flatten() + begin]))

    if len(edges) == 0:
        return torch.empty((2, 0), dtype=torch.long, device=x.device)
    return torch.cat(edges, dim=1)


def _neighbours(x: Tensor, start: int, size: int, k: int, include_self: bool) -> Tensor:
    # The indices of the `k` most similar rows of `x` to rows `start:start + size`.
    n = x.size(0)
    queries = _rows(x, start, min(start + size, n))
    if is_torch_sparse_tensor(x):  # A CSR matrix can only be the left factor.
        sim = (x @ queries.to_dense().t()).t().contiguous()
    else:
        sim = queries @ x.t()

    # A node comes first also if it is all zero or has duplicates.
    own = torch.arange(queries.size(0), device=x.device)
    sim[own, own + start] = float('inf' if include_self else '-inf')
    k = min(k, n if include_self else n - 1)
    if k == 0:
        return sim.new_empty((sim.size(0), 0), dtype=torch.long)

    # `topk` leaves open which of the nodes that tie for the last place it returns, and
    # in which order equals come: the first by index are meant.
    value, index = sim.topk(min(k + 1, n), dim=1)
    index = index[:, :k].sort(dim=1).values
    order = sim.gather(1, index).sort(dim=1, descending=True, stable=True).indices
    index = index.gather(1, order)
    if value.size(1) > k:
        tied = value[:, k - 1] == value[:, k]
        full = sim[tied].sort(dim=1, descending=True, stable=True).indices
        index[tied] = full[:, :k]
    return index


def graph_bounds(batch: Tensor | None, num_nodes: int) -> list[int]:
    """Returns where the graphs of a sorted :obj:`batch` vector begin, and the end."""
    if batch is None:
        return [0, num_nodes]
    if batch.dim() != 1 or batch.numel() != num_nodes:
        raise ValueError(
            f"Expected 'batch' to be of shape [{num_nodes}] (got {list(batch.size())})"
        )
    if batch.numel() == 0:
        return [0]
    if bool((batch[1:] < batch[:-1]).any()) or int(batch[0]) < 0:
        raise ValueError(
            "Expected 'batch' to be sorted in ascending order without negative entries"
        )
    return cumsum(batch.bincount()).tolist()


def _unit_rows(x: Tensor) -> Tensor:
    # Rows of unit length, dense or CSR; zero rows stay zero.
    if not x.is_floating_point() or x.dtype in {torch.half, torch.bfloat16}:
        x = x.to(torch.float)
    if not is_torch_sparse_tensor(x):
        _check_finite(x)
        return torch.nn.functional.normalize(x, dim=1, eps=1e-12)

    x = x.to_sparse_csr()
    crow, value = x.crow_indices(), x.values()
    _check_finite(value)
    row = torch.arange(x.size(0), device=x.device).repeat_interleave(crow.diff())
    norm = value.new_zeros(x.size(0)).index_add_(0, row, value * value).sqrt_()
    value = value / norm.clamp_(min=1e-12)[row]
    return _csr(crow, x.col_indices(), value, x.size(0), x.size(1))


def _rows(x: Tensor, begin: int, end: int) -> Tensor:
    # `x[begin:end]`, which PyTorch does not offer for CSR.
    if not is_torch_sparse_tensor(x):
        return x[begin:end]
    crow = x.crow_indices()[begin : end + 1]
    first, last = int(crow[0]), int(crow[-1])
    col, value = x.col_indices()[first:last], x.values()[first:last]
    return _csr(crow - first, col, value, end - begin, x.size(1))


def _csr(crow: Tensor, col: Tensor, value: Tensor, rows: int, cols: int) -> Tensor:
    return torch.sparse_csr_tensor(
        crow, col, value, size=(rows, cols), check_invariants=False
    )


def _check_finite(value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise ValueError("Expected 'x' to be finite (got infinite or NaN values)")
