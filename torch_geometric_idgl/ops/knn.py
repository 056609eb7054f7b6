"""Cosine nearest neighbours: exact in plain PyTorch, approximate with faiss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import is_torch_sparse_tensor

from ..checks import check_at_least, check_batch
from .numeric import are_largest
from .sparse import csr_without_warning

__all__ = ['knn_graph', 'knn_matrix']

# The approximate search.
_LARGE = 10_000  # nodes from which on it is used
_SAMPLE = 256  # nodes whose exact neighbours tell how many cells to visit
_RECALL = 0.95  # share of their neighbours that are found
_FEW = 8  # visiting more than one cell in so many, the exact search is quicker
_SEED = 0


@torch.no_grad()
def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    *,
    include_self: bool = True,
    block_size: int = 1024,
    approximate: bool = False,
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

    With :obj:`approximate=True`, one large graph (of 10,000 nodes or more, with dense
    :obj:`float32` features on the CPU) is searched by :obj:`faiss`: k-means divides
    the nodes into :math:`\sqrt{n}` cells, and a node is compared to those of a few
    cells near it. How many cells is measured: as many as hold 95% of the exact
    neighbours of 256 sampled nodes. If these are more than an eighth of all cells, as
    in data without any clusters, the exact search is quicker and takes over, as it
    does for all other input. Seeds are fixed: the same input gives the same graph,
    and no random numbers of PyTorch are used up.

    .. code-block:: python

        x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
        knn_graph(x, k=2)
        >>> tensor([[0, 0, 1, 1, 2, 2],
        ...         [0, 1, 1, 0, 2, 1]])

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
        approximate (bool, optional): If set to :obj:`True`, large graphs are searched
            faster, the more so the more their nodes cluster, and some neighbours
            (about one in twenty) are missed for the next ones in order. Needs
            :obj:`faiss`:
            :obj:`pip install torch_geometric_idgl[knn]`. (default: :obj:`False`)

    Returns:
        torch.Tensor: The edges of shape :obj:`[2, num_edges]`.
    """
    if x.dim() != 2:
        raise ValueError(
            f"Expected 'x' to be two-dimensional (got {x.dim()} dimensions)"
        )
    check_at_least('k', k, 1, integer=True)
    check_at_least('block_size', block_size, 1, integer=True)
    faiss = _import_faiss() if approximate else None

    # Graphs of the same size are put side by side and compared together: there may be
    # many small ones.
    sizes = graph_sizes(batch, x.size(0)).to(x.device)
    order = sizes.repeat_interleave(sizes).argsort(stable=True)
    x = unit_rows(x).index_select(0, order)
    if x.is_sparse:
        with csr_without_warning():
            x = x.to_sparse_csr()
    if faiss is not None and sizes.numel() == 1 and _is_large(x):
        index = _nearest_in_cells(faiss, x, k, include_self, block_size)
        if index is not None:
            return torch.stack([order.repeat_interleave(index.size(1)), index.view(-1)])

    edges, begin = [order.new_empty((2, 0))], 0
    buffer = torch.empty(0, dtype=x.dtype, device=x.device)
    for size, count in torch.stack(sizes.unique(return_counts=True), dim=1).tolist():
        end = begin + size * count
        step = size * max(block_size // size, 1)
        place = torch.arange(size, device=x.device)
        for start in range(begin, end, step):
            rows = _rows(x, start, min(start + step, end))
            first = torch.arange(start, start + rows.size(0), size, device=x.device)
            for own in place.split(block_size):
                sim = _similarities(rows, own, size, buffer)
                index = _nearest(sim, own, k, include_self)
                target = first.view(-1, 1, 1) + index
                source = (first.view(-1, 1) + own).unsqueeze(-1).expand_as(target)
                edges.append(torch.stack([source.flatten(), target.flatten()]))
        begin = end

    edge_index = order[torch.cat(edges, dim=1)]
    return edge_index[:, edge_index[0].argsort(stable=True)]


@torch.no_grad()
def knn_matrix(x: Tensor, k: int) -> Tensor:
    """The edges of :meth:`knn_graph` as a matrix: whether node j is one of the
    :obj:`k` nearest neighbours of node i, itself included. Quicker where they are many.
    """
    x = unit_rows(x).to_dense()
    sim = (x @ x.t()).fill_diagonal_(torch.inf)
    if k > x.size(0) // 2:  # There are fewer to find that are no neighbours.
        return ~are_largest(-sim.flip(1), x.size(0) - k).flip(1)
    return are_largest(sim, k)


def graph_sizes(batch: Tensor | None, num_nodes: int) -> Tensor:
    """Returns the number of nodes of each graph that has any."""
    if batch is None:
        batch = torch.zeros(num_nodes, dtype=torch.long)
    check_batch(batch, None, num_nodes)
    return batch.unique_consecutive(return_counts=True)[1]


def _similarities(rows: Tensor, own: Tensor, size: int, buffer: Tensor) -> Tensor:
    # Of the nodes `own` to all nodes, in each graph: [num_graphs, len(own), size].
    # Large ones are written to the same memory each time, as new memory is slow.
    if rows.size(0) > size:  # Several graphs, `own` are all of their nodes.
        rows = rows.to_dense().unflatten(0, (rows.size(0) // size, size))
        return rows @ rows.mT
    queries = _rows(rows, int(own[0]), int(own[-1]) + 1)
    if is_torch_sparse_tensor(rows):  # A CSR matrix can only be the left factor.
        sim = (rows @ queries.to_dense().t()).t().contiguous()
    else:
        out = buffer.resize_(len(own), size)
        sim = torch.mm(queries, rows.t(), out=out)
    return sim.unsqueeze(0)


def _nearest(sim: Tensor, own: Tensor, k: int, include_self: bool) -> Tensor:
    # The indices of the `k` largest similarities, in order.
    size = sim.size(-1)
    # A node comes first also if it is all zero or has duplicates.
    sim[:, torch.arange(len(own)), own] = float('inf' if include_self else '-inf')
    k = min(k, size if include_self else size - 1)
    if k == 0:
        return own.new_empty((*sim.size()[:-1], 0))

    # `topk` leaves open which of the nodes that tie for the last place it returns, and
    # in which order equals come: the first by index are meant.
    value, index = sim.topk(min(k + 1, size), dim=-1)
    index = index[..., :k].sort(dim=-1).values
    order = sim.gather(-1, index).sort(dim=-1, descending=True, stable=True).indices
    index = index.gather(-1, order)
    if size > k:
        tied = value[..., k - 1] == value[..., k]
        index[tied] = sim[tied].sort(descending=True, stable=True).indices[:, :k]
    return index


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as e:
        raise ImportError(
            "The approximate search for neighbours is done by 'faiss'. Install it with "
            "'pip install torch_geometric_idgl[knn]'"
        ) from e
    return faiss


def _is_large(x: Tensor) -> bool:
    # Whether the approximate search is worth it, and takes such features.
    if is_torch_sparse_tensor(x) or x.device.type != 'cpu' or x.dtype != torch.float:
        return False
    return x.size(0) >= _LARGE and x.size(1) > 0


def _nearest_in_cells(
    faiss: Any, x: Tensor, k: int, include_self: bool, block_size: int
) -> Tensor | None:
    # The nearest neighbours that are in cells near a node: [num_nodes, k]. Nothing if
    # too many cells would have to be visited.
    size, num_features = x.size()
    others = min(k, size) - 1 if include_self else min(k, size - 1)
    nodes = torch.arange(size)
    if others == 0:
        return nodes.unsqueeze(1)
    values = x.numpy()
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(num_features),
        num_features,
        round(math.sqrt(size)),
        faiss.METRIC_INNER_PRODUCT,
    )
    index.cp.seed = _SEED
    index.cp.max_points_per_centroid = 64  # enough to tell cells apart
    index.train(values)
    index.nprobe = _num_cells_to_visit(index.quantizer, x, others, index.nlist)
    if index.nprobe * _FEW > index.nlist:
        return None
    index.add(values)

    found = []
    for own in nodes.split(block_size):
        queries = x[own]
        near = torch.from_numpy(index.search(queries.numpy(), others + 1)[1])
        near = near.sort(dim=1).values  # Equally similar ones by ascending index.
        sim = (queries.unsqueeze(1) * x[near.clamp(min=0)]).sum(dim=2)
        # A node itself is not searched for, and -1 stands for none.
        sim[(near == own.unsqueeze(1)) | (near < 0)] = -torch.inf
        sim, order = sim.sort(dim=1, descending=True, stable=True)
        near = near.gather(1, order)[:, :others]
        few = sim[:, others - 1] == -torch.inf
        if bool(few.any()):
            every = (queries[few] @ x.t()).unsqueeze(0)
            near[few] = _nearest(every, own[few], others, include_self=False)[0]
        found.append(torch.cat([own.unsqueeze(1), near], 1) if include_self else near)
    return torch.cat(found)


def _num_cells_to_visit(quantizer: Any, x: Tensor, k: int, num_cells: int) -> int:
    # A neighbour is found if its cell is visited: cells are ranked by how near they are
    # to a node, and the ranks of the cells of exact neighbours are looked at.
    generator = torch.Generator().manual_seed(_SEED)
    own = torch.randperm(x.size(0), generator=generator)[:_SAMPLE]
    near = _nearest((x[own] @ x.t()).unsqueeze(0), own, k, include_self=False)[0]
    cells = torch.from_numpy(quantizer.search(x[own].numpy(), num_cells)[1])
    cell = torch.from_numpy(quantizer.search(x[near.view(-1)].numpy(), 1)[1])
    rank = cells.argsort(dim=1).gather(1, cell.view_as(near)).view(-1)
    return int(rank.kthvalue(math.ceil(_RECALL * rank.numel())).values) + 1


@csr_without_warning()
def _rows(x: Tensor, begin: int, end: int) -> Tensor:
    # `x[begin:end]`, which PyTorch does not offer for CSR.
    if not is_torch_sparse_tensor(x):
        return x[begin:end]
    crow = x.crow_indices()[begin : end + 1]
    first, last = int(crow[0]), int(crow[-1])
    return torch.sparse_csr_tensor(
        crow - first,
        x.col_indices()[first:last],
        x.values()[first:last],
        size=(end - begin, x.size(1)),
        check_invariants=False,
    )


def unit_rows(x: Tensor) -> Tensor:
    """Rows of unit length, dense or COO; zero rows stay zero."""
    if not x.is_floating_point() or x.dtype in {torch.half, torch.bfloat16}:
        x = x.to(torch.float)
    if not is_torch_sparse_tensor(x):
        _check_finite(x)
        if x.numel() > 0:
            x = x / _scale(x.abs().amax(dim=1, keepdim=True))
        return torch.nn.functional.normalize(x, dim=1)

    x = x.to_sparse_coo().coalesce()
    index, value = x.indices(), x.values()
    _check_finite(value)
    zeros = value.new_zeros(x.size(0))
    row = index[0]
    value = value / _scale(zeros.scatter_reduce(0, row, value.abs(), 'amax'))[row]
    norm = zeros.index_add(0, row, value * value).sqrt()
    value = value / norm.clamp(min=1e-12)[row]
    return torch.sparse_coo_tensor(
        index, value, x.size(), check_invariants=False, is_coalesced=True
    )


def _scale(largest: Tensor) -> Tensor:
    # Squares of entries may overflow or vanish if rows are not scaled before. A power
    # of two rounds nothing: the first one below the largest entry.
    return torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - 1)


def _check_finite(value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise ValueError("Expected 'x' to be finite (got infinite or NaN values)")
