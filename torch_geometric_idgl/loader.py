"""Loading graphs in batches, and large graphs in batches of their nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, InMemoryDataset

from .checks import check_at_least, check_nodes

__all__ = ['AnchorLoader', 'BucketSampler', 'PartitionLoader']


class BucketSampler(Sampler[list[int]]):
    r"""Puts graphs of similar size into the same batch.

    The order is drawn anew for each epoch, from the random numbers of PyTorch: graphs
    are shuffled and cut into chunks, each chunk is sorted by size and cut into batches,
    and the batches of all chunks are shuffled. Every graph comes once per epoch.

    .. code-block:: python

        from torch_geometric.loader import DataLoader

        sampler = BucketSampler(dataset, batch_size=16)
        loader = DataLoader(dataset, batch_sampler=sampler)

    Args:
        sizes (sequence): The size of each graph, or a data set of graphs, whose numbers
            of nodes are taken.
        batch_size (int): The number of graphs in a batch. The last batch of the last
            chunk may have fewer.
        shuffle (bool, optional): If set to :obj:`False`, all graphs are sorted by size,
            the smallest first, in every epoch. (default: :obj:`True`)
        chunk_batches (int, optional): The number of batches in a chunk. With more of
            them sizes in a batch are closer, and its graphs are less of a random
            choice. (default: :obj:`50`)
    """

    def __init__(
        self,
        sizes: Sequence[int] | Tensor | Dataset,
        batch_size: int,
        shuffle: bool = True,
        chunk_batches: int = 50,
    ) -> None:
        super().__init__()
        check_at_least('batch_size', batch_size, 1, integer=True)
        check_at_least('chunk_batches', chunk_batches, 1, integer=True)
        self.sizes = _sizes(sizes)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.chunk_batches = chunk_batches

    def __len__(self) -> int:
        return -(-self.sizes.numel() // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            order = self.sizes.argsort(stable=True)
            yield from (batch.tolist() for batch in order.split(self.batch_size))
            return
        batches: list[Tensor] = []
        order = torch.randperm(self.sizes.numel())
        for chunk in order.split(self.chunk_batches * self.batch_size):
            # Graphs of the same size stay in their random order.
            chunk = chunk[self.sizes[chunk].argsort(stable=True)]
            batches += chunk.split(self.batch_size)
        for i in torch.randperm(len(batches)).tolist():
            yield batches[i].tolist()

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.sizes.numel()}, '
            f'batch_size={self.batch_size}, shuffle={self.shuffle})'
        )


def _sizes(value: Any) -> Tensor:
    found = value
    if isinstance(value, Dataset) or (
        isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Data)
    ):
        found = _numbers_of_nodes(value)
    try:
        sizes = torch.as_tensor(found).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_sizes(type(value).__name__) from error
    if sizes.dim() != 1 or sizes.numel() == 0:
        raise _not_sizes(f'shape {list(sizes.size())}')
    if sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool:
        raise _not_sizes(str(sizes.dtype))
    return sizes.to(torch.long)


def _numbers_of_nodes(dataset: Any) -> Any:
    # Without looking at each graph, where all are stored as one.
    if isinstance(dataset, InMemoryDataset) and dataset.transform is None:
        slices = dataset.slices or {}
        ends = slices.get('x')
        if isinstance(ends, Tensor) and ends.dim() == 1 and 'num_nodes' not in slices:
            return ends.diff()[torch.as_tensor(dataset.indices())]
    return [dataset[i].num_nodes for i in range(len(dataset))]


def _not_sizes(got: str) -> ValueError:
    return ValueError(
        f"Expected 'sizes' to be whole numbers, one for each graph, or a data set of "
        f'graphs (got {got})'
    )


# Batches of nodes --------------------------------------------------------------------


class PartitionLoader(DataLoader):
    r"""Loads a large graph in parts of its nodes, in plain PyTorch.

    A batch is the subgraph of the nodes of some parts: a
    :class:`~torch_geometric.data.Data` whose nodes are all seeds
    (:obj:`batch.batch_size` of them) and have the numbers :obj:`batch.n_id` in the
    graph, its edges :obj:`batch.e_id`. Parts are connected as far as possible: they
    grow along edges, all at the same time, from nodes drawn at random (from the random
    numbers of PyTorch), until they are full.

    .. code-block:: python

        loader = PartitionLoader(data, 50, batch_size=5, shuffle=True)
        loader = AnchorLoader(loader, data, model.draw_anchors)

    Args:
        data (torch_geometric.data.Data): The graph, with :obj:`edge_index`.
        parts (int or torch.Tensor): The number of parts, whose sizes differ by one at
            most; or the part of each node, of shape :obj:`[num_nodes]`.
        **kwargs (optional): Arguments of :class:`torch.utils.data.DataLoader`, such as
            the number :obj:`batch_size` of parts in a batch, and :obj:`shuffle`.
    """

    def __init__(self, data: Data, parts: int | Tensor, **kwargs: Any) -> None:
        edge_index, num_nodes = _edges(data), int(data.num_nodes or 0)
        check_nodes(edge_index, num_nodes)
        if isinstance(parts, Tensor):
            part = parts.to(edge_index.device)
            if part.dtype != torch.long or part.size() != (num_nodes,):
                raise ValueError(
                    f"Expected 'parts' to be a number, or a vector of {num_nodes} "
                    f'whole numbers (got {part.dtype} of shape {list(part.size())})'
                )
            # Parts that no node is in are left out.
            part = part.unique(return_inverse=True)[1]
        else:
            check_at_least('parts', parts, 1, integer=True)
            if parts > num_nodes:
                raise ValueError(
                    f"Expected 'parts' to be at most the number of nodes, {num_nodes} "
                    f'(got {parts})'
                )
            part = _grow_parts(edge_index, num_nodes, parts)
        self.data = data
        self.part = part
        self.num_parts = int(part.max()) + 1
        # The nodes of each part, and the edges that leave them.
        node, edge = (of.argsort(stable=True) for of in (part, part[edge_index[0]]))
        self._nodes = node.split(part.bincount().tolist())
        counts = part[edge_index[0]].bincount(minlength=self.num_parts)
        self._edges = edge.split(counts.tolist())
        self._place = torch.empty_like(part)  # of each node in its part
        for own in self._nodes:
            self._place[own] = torch.arange(own.numel(), device=own.device)
        kwargs.pop('dataset', None)
        kwargs.pop('collate_fn', None)
        super().__init__(
            range(self.num_parts),  # type: ignore[arg-type]
            collate_fn=self._batch,
            **kwargs,
        )

    def _batch(self, parts: list[int]) -> Data:
        edge_index = _edges(self.data)
        nodes = torch.cat([self._nodes[i] for i in parts])
        edges = torch.cat([self._edges[i] for i in parts])
        # Where the nodes of each part begin in the batch; nowhere for other parts.
        begin, end = self.part.new_full((self.num_parts,), -1), 0
        for i in parts:
            begin[i], end = end, end + self._nodes[i].numel()
        edges = edges[begin[self.part[edge_index[1, edges]]] >= 0]
        batch = copy.copy(self.data)
        for key, value in _chosen(self.data, nodes, edges):
            batch[key] = value
        ends = edge_index[:, edges]
        batch.edge_index = begin[self.part[ends]] + self._place[ends]
        if self.data.get('num_nodes') is not None:
            batch.num_nodes = nodes.numel()
        batch.n_id, batch.e_id = nodes, edges
        batch.batch_size = nodes.numel()
        return batch

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.num_parts}, batch_size={self.batch_size})'
        )


class AnchorLoader:
    r"""Adds the anchors of :class:`~torch_geometric_idgl.nn.IDGLAnch` to batches of
    nodes, such as those of :class:`PartitionLoader`, or of PyG's
    :class:`~torch_geometric.loader.NeighborLoader` and
    :class:`~torch_geometric.loader.ClusterLoader`.

    Anchors are nodes of the whole graph, the same in all batches of an epoch. Those
    that a batch lacks are appended to its nodes, with their features and all the edges
    that they have within the batch; :obj:`batch.anchor_index` says which nodes are
    anchors, and :obj:`model(batch)` takes them. Seeds stay the first
    :obj:`batch.batch_size` nodes, and only they are to be trained on and evaluated.

    A batch of all nodes gives exactly what the whole graph does. In other batches sums
    over nodes (the messages that anchors gather, and their degrees) run over the nodes
    of the batch, so outputs are estimates of those of the whole graph. So is the
    regulariser, whose size does not depend on the batch with
    :obj:`scale_regularizer=True`.

    .. code-block:: python

        loader = NeighborLoader(data, [10, 10], data.train_mask, batch_size=1024)
        for batch in AnchorLoader(loader, data, model.draw_anchors):
            seeds = slice(batch.batch_size)
            _, trace = model(batch, return_trace=True)
            loss = trace.loss(
                lambda out: F.cross_entropy(out[seeds], batch.y[seeds])
            )

    Args:
        loader (iterable): The loader of batches with :obj:`n_id`, the number of each
            node in the graph. Where they have no :obj:`batch_size`, all their nodes are
            seeds.
        data (torch_geometric.data.Data): The graph, as the loader got it.
        anchors (torch.Tensor or callable): The anchors, or a function from the number
            of nodes to them, which is asked once per epoch: with
            :obj:`model.draw_anchors`, they are drawn as :obj:`anchor_sampling` of the
            model says.
    """

    def __init__(
        self,
        loader: Iterable[Data],
        data: Data,
        anchors: Tensor | Callable[[int], Tensor],
    ) -> None:
        if not (isinstance(anchors, Tensor) or callable(anchors)):
            raise TypeError(
                f"Expected 'anchors' to be a tensor, or a function from a number of "
                f"nodes to one (got '{type(anchors).__name__}')"
            )
        clusters = getattr(loader, 'cluster_data', None)
        if clusters is not None and 'n_id' not in clusters.data:
            clusters.data.n_id = clusters.partition.node_perm
        self.edge_index = _edges(data)
        self.loader = loader
        self.data = data
        self.anchors = anchors

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Data]:
        anchors, num_nodes = self.anchors, int(self.data.num_nodes or 0)
        if not isinstance(anchors, Tensor):
            anchors = anchors(num_nodes)
        anchors = _checked_anchors(anchors, num_nodes).to(self.edge_index.device)
        is_anchor = torch.zeros(num_nodes, dtype=torch.bool, device=anchors.device)
        is_anchor[anchors] = True
        edges = is_anchor[self.edge_index].any(dim=0).nonzero().squeeze(1)
        for batch in self.loader:
            yield self._with_anchors(batch, anchors, edges)

    def _with_anchors(self, batch: Data, anchors: Tensor, edges: Tensor) -> Data:
        n_id = _numbers(batch)
        num_own = n_id.numel()
        check_nodes(n_id, int(self.data.num_nodes or 0), 'n_id')
        place = n_id.new_full((int(self.data.num_nodes or 0),), -1)
        place[n_id] = torch.arange(num_own, device=n_id.device)
        missing = anchors[place[anchors] < 0].unique()
        place[missing] = torch.arange(missing.numel(), device=n_id.device) + num_own
        # Edges among nodes of the batch are there already.
        ends = place[self.edge_index[:, edges]]
        new = (ends >= 0).all(dim=0) & (ends >= num_own).any(dim=0)
        ends, edges = ends[:, new], edges[new]
        out = copy.copy(batch)
        for key, value in _chosen(self.data, missing, edges):
            if batch.get(key) is None:
                continue
            dim = self.data.__cat_dim__(key, value)
            out[key] = torch.cat([batch[key], value], dim=dim)
        out.edge_index = torch.cat([_edges(batch), ends], dim=1)
        if batch.get('num_nodes') is not None:
            out.num_nodes = num_own + missing.numel()
        out.n_id = torch.cat([n_id, missing])
        if batch.get('e_id') is not None:
            out.e_id = torch.cat([batch.e_id, edges])
        for key in ('num_sampled_nodes', 'num_sampled_edges'):  # of hops, no more
            if key in out:
                del out[key]
        if batch.get('batch_size') is None:
            out.batch_size = num_own
        out.anchor_index = place[anchors]
        return out

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({self.loader})'


def _edges(data: Any) -> Tensor:
    edge_index = data.get('edge_index') if isinstance(data, Data) else None
    if not isinstance(edge_index, Tensor):
        advice = "a graph can be made by 'CosineKNNGraph'"
        if isinstance(data, Data) and 'adj_t' in data:
            advice = "leave out 'ToSparseTensor'"
        raise ValueError(
            f"Expected 'data' to be a graph with 'edge_index' (got {data}; {advice})"
        )
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def _chosen(data: Data, nodes: Tensor, edges: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What data holds of some of its nodes and edges, but for their numbers."""
    for key, value in data.items():
        if not isinstance(value, Tensor) or key in ('edge_index', 'n_id', 'e_id'):
            continue
        dim = data.__cat_dim__(key, value)
        if value.layout not in (torch.strided, torch.sparse_coo):
            value = value.to_sparse_coo()  # of which PyTorch can select rows
        if data.is_node_attr(key):
            yield key, value.index_select(dim, nodes)
        elif data.is_edge_attr(key):
            yield key, value.index_select(dim, edges)


def _numbers(batch: Any) -> Tensor:
    n_id = batch.get('n_id') if isinstance(batch, Data) else None
    if n_id is None:
        raise ValueError(
            f"Expected batches to hold 'n_id', the number of each node in the graph "
            f'(got {batch}); put data.n_id = torch.arange(data.num_nodes) into the '
            f'graph before it is taken apart'
        )
    if batch.get('batch') is not None:
        raise ValueError(
            'Expected the nodes of a batch to be of one graph, as anchors are shared '
            "(got 'batch'); use disjoint=False"
        )
    return n_id


def _checked_anchors(anchors: Any, num_nodes: int) -> Tensor:
    if not isinstance(anchors, Tensor) or anchors.dtype != torch.long:
        got = anchors.dtype if isinstance(anchors, Tensor) else type(anchors).__name__
        raise TypeError(f"Expected 'anchors' to be of type torch.long (got {got})")
    if anchors.dim() != 1 or anchors.numel() == 0:
        raise ValueError(
            f"Expected 'anchors' to be a vector of nodes (got shape "
            f'{list(anchors.size())})'
        )
    low, high = map(int, anchors.aminmax())
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"Expected 'anchors' to hold nodes from 0 to {num_nodes - 1} (got {low} to "
            f'{high})'
        )
    return anchors


def _grow_parts(edge_index: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """The part of each node. In each round, nodes beside a part join one of those they
    are beside of, drawn at random; whoever finds all of them full is put anywhere.
    """
    device = edge_index.device
    part = torch.full((num_nodes,), -1, device=device)
    room = torch.full((num_parts,), num_nodes // num_parts, device=device)
    room[: num_nodes % num_parts] += 1

    def join(nodes: Tensor, wanted: Tensor) -> Tensor:
        # The first ones, as many as there is room for.
        order = wanted.argsort(stable=True)
        nodes, wanted = nodes[order], wanted[order]
        count = wanted.bincount(minlength=num_parts)
        first = count.cumsum(0) - count
        rank = torch.arange(nodes.numel(), device=device) - first[wanted]
        fits = rank < room[wanted]
        part[nodes[fits]] = wanted[fits]
        room.sub_(torch.minimum(count, room))
        return nodes[fits]

    # Along edges in both directions.
    ends, neighbors = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    neighbors = neighbors[ends.argsort()]
    degree = ends.bincount(minlength=num_nodes)
    start = degree.cumsum(0) - degree
    fresh = torch.randperm(num_nodes)[:num_parts].to(device)
    fresh = join(fresh, torch.arange(num_parts, device=device))
    source = target = fresh[:0]
    best = torch.full((num_nodes,), ends.numel(), device=device)
    while True:
        count = degree[fresh]
        shift = (start[fresh] - count.cumsum(0) + count).repeat_interleave(count)
        place = torch.arange(shift.numel(), device=device) + shift
        source = torch.cat([source, fresh.repeat_interleave(count)])
        target = torch.cat([target, neighbors[place]])
        still = (part[target] < 0) & (room[part[source]] > 0)
        source, target = source[still], target[still]
        if target.numel() == 0:
            break
        # Of the edges to a node, a random one decides.
        rank = torch.randperm(target.numel()).to(device)
        best.scatter_reduce_(0, target, rank, 'amin')
        chosen = best[target] == rank
        best[target] = ends.numel()
        fresh = join(target[chosen], part[source[chosen]])
    left = (part < 0).nonzero().squeeze(1)
    left = left[torch.randperm(left.numel()).to(device)]
    part[left] = torch.arange(num_parts, device=device).repeat_interleave(room)
    return part
