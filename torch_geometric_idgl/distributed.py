r"""Full-graph training of :class:`~torch_geometric_idgl.nn.IDGLAnch` on several ranks.

Every process (rank) owns some of the nodes. All that IDGL-Anch asks of the nodes
together are sums with few rows, such as :math:`\mathbf{R}^{\top} \mathbf{F}`: these are
added up over ranks. Of the initial graph a rank holds the rows of its own nodes, and
fetches what their neighbours on other ranks send.

Gradients are those of one process, after :class:`~torch.nn.parallel.\
DistributedDataParallel` has averaged them: every rank computes the same loss, so what a
rank computes serves as many losses as there are ranks. The gradient of a sum over ranks
is therefore added up over ranks too, and the average takes off what is too much.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, LayerNorm
from torch_geometric.utils import add_remaining_self_loops, coalesce

from .checks import check_at_least
from .graphs import GraphOperator
from .nn import IDGLAnch
from .nn.backbone import Backbone, EdgeLayer
from .nn.inputs import edges_from_adjacency
from .ops.batch import Nodes
from .ops.numeric import dropout, refuse_second_derivatives, safe_rsqrt
from .ops.sparse import Pattern, SparseMatrix
from .training.checkpoint import read_checkpoint, replacing, rng_state, set_rng_state

__all__ = [
    'NodeShard',
    'all_sum',
    'distribute',
    'load_checkpoint',
    'partition',
    'process_group',
    'same_anchors',
    'save_checkpoint',
]


# Collectives -------------------------------------------------------------------------


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


def all_sum(x: Tensor) -> Tensor:
    r"""The sum of a tensor over all ranks, on each of them. Gradients are added up over
    ranks as well.

    Args:
        x (torch.Tensor): The part of this rank, of the same shape on all ranks.
    """
    return _AllSum.apply(x)


class _Exchange(torch.autograd.Function):
    """Rows that other ranks have asked for against those that this one has asked for;
    backwards, their gradients go the other way.
    """

    @staticmethod
    def forward(ctx, x, halo):
        ctx.halo, ctx.num_rows = halo, x.size(0)
        sent = x[halo.wanted]
        return _swap(sent, halo.wanted_sizes, halo.sizes)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        halo = ctx.halo
        grad = _swap(grad.contiguous(), halo.sizes, halo.wanted_sizes)
        rows = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return rows.index_add_(0, halo.wanted, grad), None


def _swap(rows: Tensor, sizes: list[int], other_sizes: list[int]) -> Tensor:
    out = rows.new_empty(sum(other_sizes), *rows.shape[1:])
    dist.all_to_all_single(out, rows, other_sizes, sizes)
    return out


class _Halo:
    """The nodes of other ranks that send messages to nodes of this one.

    Args:
        nodes (ShardNodes): The nodes of this rank.
        index (torch.Tensor): The others, rank by rank.
        sizes (List[int]): How many of each rank.
    """

    def __init__(self, nodes: ShardNodes, index: Tensor, sizes: list[int]) -> None:
        self.sizes = sizes
        counts = _swap(
            torch.tensor(sizes, device=nodes.device), [1] * len(sizes), [1] * len(sizes)
        )
        self.wanted_sizes: list[int] = counts.tolist()
        asked = _swap(index.to(nodes.device), sizes, self.wanted_sizes)
        self.wanted, _ = nodes.find(asked)

    def __call__(self, x: Tensor) -> Tensor:
        return _Exchange.apply(x, self)


# Nodes and their initial graph -------------------------------------------------------


class ShardNodes(Nodes):
    r"""The nodes of one graph that a rank owns.

    Args:
        index (torch.Tensor): Which nodes of the whole graph these are, sorted.
        num_total (int): The number of nodes of the whole graph.
    """

    spread = True

    def __init__(self, index: Tensor, num_total: int) -> None:
        super().__init__((index.numel(),), index.device)
        self.index = index
        self.num_total = num_total
        self._whole = Nodes((num_total,), index.device)

    @property
    def whole(self) -> Nodes:
        return self._whole

    def find(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The places of nodes among those of this rank, and which of them are here."""
        place = torch.searchsorted(self.index, index).clamp(max=self.num_rows - 1)
        return place, self.index[place] == index

    def total(self, part: Tensor) -> Tensor:
        return all_sum(part)

    def take(self, rows: Tensor, index: Tensor) -> Tensor:
        place, here = self.find(index)
        return all_sum(torch.where(here.unsqueeze(1), rows[place], 0.0))

    def same(self, drawn: Tensor) -> Tensor:
        drawn = drawn.contiguous()
        dist.broadcast(drawn, 0)
        return drawn

    def agreed(self, choice: int) -> int:
        least = torch.tensor(int(choice), device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


class ShardGraph(GraphOperator):
    r"""The rows of :math:`\mathbf{L}^{(0)}` that belong to the nodes of a rank. Columns
    are these nodes, and after them those of the halo.
    """

    def __init__(
        self, pattern: Pattern, value: Tensor, nodes: ShardNodes, halo: _Halo
    ) -> None:
        self.rows = self.cols = nodes
        self.dtype = value.dtype
        self.pattern = pattern
        self.value = value
        self.halo = halo
        self.matrix = SparseMatrix(pattern, value)

    def with_value(self, value: Tensor) -> ShardGraph:
        """The same edges with other weights."""
        assert isinstance(self.rows, ShardNodes)
        return ShardGraph(self.pattern, value, self.rows, self.halo)

    def dropout(self, p: float, message: Tensor | None) -> ShardGraph:
        """The same graph with some of its entries dropped."""
        return self.with_value(dropout(self.value, p)).multiplied(message)

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(torch.cat([x, self.halo(x)]))

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        return self.with_value(weight * self.value).matmul(x)


class ShardAdjacency:
    r"""The edges that lead to the nodes of a rank, as a transposed adjacency. Its
    normalised form is made when a model asks for it, and kept.

    Args:
        row (torch.Tensor): The target of each edge, a place among the rank's nodes.
        col (torch.Tensor): Its source, a place among these nodes and those of the halo.
        weight (torch.Tensor, optional): Its weight.
        index (torch.Tensor): The nodes of this rank, sorted.
        halo_index (torch.Tensor): The nodes of other ranks that are sources, rank by
            rank.
        halo_sizes (List[int]): How many of them each rank has.
        num_total (int): The number of nodes of the whole graph.
    """

    def __init__(
        self,
        row: Tensor,
        col: Tensor,
        weight: Tensor | None,
        index: Tensor,
        halo_index: Tensor,
        halo_sizes: list[int],
        num_total: int,
    ) -> None:
        self.row = row
        self.col = col
        self.weight = weight
        self.index = index
        self.halo_index = halo_index
        self.halo_sizes = halo_sizes
        self.num_total = num_total
        self._kept: dict[Any, ShardGraph] = {}

    def check(self, model: Module) -> None:
        """Raises unless a model can do with the nodes of one rank."""
        if not isinstance(model, IDGLAnch):
            raise TypeError(
                f"Expected an 'IDGLAnch' for a graph whose nodes are spread over ranks "
                f"(got '{type(model).__name__}', which compares all pairs of nodes)"
            )
        for norm in getattr(model.backbone, 'norms', ()):
            _check_norm(norm)
        alone = [
            norm
            for norm in model.modules()
            if isinstance(norm, _NormBase) and not isinstance(norm, ShardBatchNorm)
        ]
        if model.training and alone:
            raise RuntimeError(
                f"Expected a model that 'distribute' has prepared (got one whose "
                f'{alone[0]} would see the nodes of one rank alone)'
            )

    def initial_graph(
        self, x: Tensor, normalize: bool, add_self_loops: bool
    ) -> ShardGraph:
        r"""The rows of :math:`\mathbf{L}^{(0)}`, for features of a type and device."""
        if x.size(0) != self.index.numel():
            raise ValueError(
                f'Expected features of the {self.index.numel()} nodes of this rank '
                f'(got {x.size(0)} rows)'
            )
        key = (x.dtype, x.device, normalize, add_self_loops)
        if key not in self._kept:
            with torch.no_grad():
                self._kept[key] = self._initial_graph(*key)
        return self._kept[key]

    def _initial_graph(
        self,
        dtype: torch.dtype,
        device: torch.device,
        normalize: bool,
        add_self_loops: bool,
    ) -> ShardGraph:
        nodes = ShardNodes(self.index.to(device), self.num_total)
        halo = _Halo(nodes, self.halo_index, self.halo_sizes)
        own, all_cols = nodes.num_rows, nodes.num_rows + self.halo_index.numel()
        index = torch.stack([self.row, self.col]).to(device)
        if self.weight is None:
            weight = torch.ones(index.size(1), dtype=dtype, device=device)
        else:
            weight = self.weight.to(device, dtype)
        if normalize:
            if add_self_loops:
                index, weight = add_remaining_self_loops(index, weight, 1.0, all_cols)
                mine = index[0] < own  # the loops of others are not ours
                index, weight = index[:, mine], weight[mine]
            scale = safe_rsqrt(weight.new_zeros(own).index_add(0, index[0], weight))
            scale = torch.cat([scale, halo(scale)])
            weight = scale[index[0]] * weight * scale[index[1]]
        (row, col), weight = coalesce(index, weight, all_cols)
        pattern = Pattern.from_sorted(row, col, (own, all_cols))
        return ShardGraph(pattern, weight, nodes, halo)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_kept': {}}  # of no use to other processes

    def __repr__(self) -> str:
        size = [self.index.numel(), self.num_total]
        return f'{self.__class__.__name__}({size}, nnz={self.row.numel()})'


class NodeShard(Data):
    r"""The part of a graph that a rank owns, made by :meth:`partition`: its rows of
    features, labels, masks and all else that nodes have, their numbers in the whole
    graph (:obj:`node_index`), and the edges that lead to them (:obj:`adj_t`). It is
    what a model that :meth:`distribute` has prepared is called with.
    """

    @property
    def num_total(self) -> int:
        """The number of nodes of the whole graph."""
        return self.adj_t.num_total

    def mean(self, values: Tensor) -> Tensor:
        r"""The mean of values of nodes (losses, or whether predictions are right) over
        all ranks, the same on each of them, with gradient:

        .. code-block:: python

            mask = shard.train_mask
            loss = trace.loss(lambda out: shard.mean(
                F.cross_entropy(out[mask], shard.y[mask], reduction='none')))

        Args:
            values (torch.Tensor): The values of nodes of this rank, maybe none.
        """
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        count = values.new_tensor(values.numel())
        total, number = all_sum(torch.stack([values.sum(), count]))
        return total / number.detach().clamp(min=1)

    @torch.no_grad()
    def gather(self, rows: Tensor) -> Tensor:
        r"""The rows of all nodes in the order of the whole graph, on every rank and
        without gradient, for looking at predictions.

        Args:
            rows (torch.Tensor): The rows of the nodes of this rank.
        """
        count = self.node_index.numel()
        shape = list(rows.shape) if isinstance(rows, Tensor) else None
        if not shape or shape[0] != count:
            raise ValueError(
                f"Expected 'rows' to be a tensor with a row for each of the {count} "
                f'nodes of this rank (got shape {shape})'
            )
        whole = rows.new_zeros(self.num_total, *rows.shape[1:])
        whole[self.node_index.to(rows.device)] = rows
        dist.all_reduce(whole)
        return whole


def partition(
    data: Data, rank: int, world_size: int, part: Tensor | None = None
) -> NodeShard:
    r"""The part of a graph that a rank owns. It can be saved with :meth:`torch.save`,
    so that a large graph is partitioned once, and each rank loads its own part.

    Args:
        data (Data): The graph, with :obj:`x` and :obj:`edge_index` (or :obj:`adj_t`).
        rank (int): The rank.
        world_size (int): The number of ranks.
        part (torch.Tensor, optional): The rank of each node. The fewer edges lead from
            one part to another, the less is sent; parts of the same size take the same
            time. :obj:`PartitionLoader(data, world_size).part` grows such parts, with
            the same random numbers on all ranks. If not given, ranks own equal ranges
            of nodes. (default: :obj:`None`)
    """
    check_at_least('world_size', world_size, 1, integer=True)
    check_at_least('rank', rank, 0, integer=True)
    if rank >= world_size:
        raise ValueError(
            f"Expected 'rank' to be below {world_size} (got {rank}), the 'world_size'"
        )
    if data.x is None:
        raise ValueError("Expected 'data' to hold node features 'x' (got none)")
    num_nodes = data.x.size(0)
    adjacency = data.get('edge_index')
    adjacency = data.get('adj_t') if adjacency is None else adjacency
    if adjacency is None:
        raise ValueError(
            "Expected 'data' to hold a graph to partition it (got none); make one "
            "first, for example with 'transforms.CosineKNNGraph'"
        )
    weight = data.get('edge_weight')
    (source, target), weight = edges_from_adjacency(adjacency, weight, num_nodes)
    part = _checked_part(part, num_nodes, world_size).to(source.device)

    own = (part == rank).nonzero().squeeze(1)
    mine = part[target] == rank
    source, target = source[mine], target[mine]
    weight = None if weight is None else weight[mine].detach()
    halo = source[part[source] != rank].unique()
    halo = halo[torch.argsort(part[halo], stable=True)]
    place = torch.empty(num_nodes, dtype=torch.long, device=source.device)
    place[own] = torch.arange(own.numel(), device=own.device)
    place[halo] = torch.arange(halo.numel(), device=own.device) + own.numel()

    shard = NodeShard()
    for key, value in data.to_dict().items():
        if key in ('edge_index', 'adj_t', 'edge_weight') or data.is_edge_attr(key):
            continue
        if isinstance(value, Tensor) and data.is_node_attr(key):
            if value.layout != torch.strided:
                rows = value.to_sparse_coo().index_select(0, own.to(value.device))
                value = rows.to_dense()
            else:
                value = value[own.to(value.device)]
        if key != 'num_nodes':
            shard[key] = value
    shard.node_index = own
    sizes = torch.bincount(part[halo], minlength=world_size).tolist()
    shard.adj_t = ShardAdjacency(
        place[target], place[source], weight, own, halo, sizes, num_nodes
    )
    return shard


def _checked_part(part: Tensor | None, num_nodes: int, world_size: int) -> Tensor:
    if part is None:
        part = torch.arange(num_nodes) * world_size // max(num_nodes, 1)
    if not isinstance(part, Tensor):
        raise TypeError(
            f"Expected 'part' to be a 'torch.Tensor' (got '{type(part).__name__}')"
        )
    whole = not (part.is_floating_point() or part.dtype == torch.bool)
    if part.shape != (num_nodes,) or not whole:
        raise ValueError(
            f"Expected 'part' to hold the rank of each of the {num_nodes} nodes "
            f'(got shape {list(part.shape)}, {part.dtype})'
        )
    if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < world_size:
        raise ValueError(
            f"Expected 'part' to hold ranks from 0 to {world_size - 1} "
            f'(got {int(part.min())} to {int(part.max())})'
        )
    sizes = torch.bincount(part, minlength=world_size)
    if int(sizes.min()) == 0:
        raise ValueError(
            f'Expected every rank to own at least one node (got {sizes.tolist()})'
        )
    return part


# The model ---------------------------------------------------------------------------


class ShardBatchNorm(BatchNorm1d):
    """Batch normalisation over the nodes of all ranks, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        number = x.new_full((1,), x.size(0))
        sums = all_sum(torch.cat([x.sum(0), number]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean
        var = all_sum(centred.square().sum(0)) / count
        if self.training and self.running_mean is not None:
            self._update(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        out = centred * (var + self.eps).rsqrt()
        return out if self.weight is None else out * self.weight + self.bias

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor) -> None:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        share: Any = self.momentum
        if share is None:
            share = 1.0 / self.num_batches_tracked.to(mean.dtype)  # type: ignore
        self.running_mean.add_(share * (mean - self.running_mean))  # type: ignore
        self.running_var.add_(share * (var - self.running_var))  # type: ignore


def distribute(model: IDGLAnch) -> IDGLAnch:
    r"""Prepares a model for shards of nodes, in place: batch normalisation is over the
    nodes of all ranks from now on. Raises if a part of the model cannot do with the
    nodes of one rank. The names of parameters stay the same.

    .. code-block:: python

        with process_group() as (rank, world_size):
            shard = partition(data, rank, world_size)
            model = DistributedDataParallel(distribute(IDGLAnch(...)))
            out, trace = model(shard, return_trace=True)
            loss = trace.loss(lambda out: shard.mean(losses(out)))
            loss.backward()

    Args:
        model (IDGLAnch): The model.
    """
    if not isinstance(model, IDGLAnch):
        raise TypeError(
            f"Expected 'model' to be an 'IDGLAnch', whose sums over nodes are small "
            f"(got '{type(model).__name__}')"
        )
    backbone = model.backbone
    if type(backbone) is not Backbone:
        raise TypeError(
            f"Expected a model with one of the package's backbones "
            f"(got '{type(backbone).__name__}')"
        )
    if any(isinstance(conv, EdgeLayer) for conv in backbone.convs):
        raise ValueError(
            "Expected layers that run on a graph operator, as those of 'gcn', 'sage', "
            "'gin' and 'appnp' (got a convolution that needs all edges in one process)"
        )
    for norm in backbone.norms:
        _check_norm(norm)
    for layer in model.modules():  # layers and metrics of one's own may have some, too
        if type(layer) is BatchNorm1d:
            layer.__class__ = ShardBatchNorm  # with the same parameters and buffers
        elif isinstance(layer, _NormBase) and not isinstance(layer, ShardBatchNorm):
            raise ValueError(
                f"Expected norms over nodes to be 'torch.nn.BatchNorm1d' (got {layer})"
            )
    return model


def _check_norm(norm: Module) -> None:
    rowwise = isinstance(norm, torch.nn.LayerNorm | torch.nn.Identity)
    rowwise = rowwise or (isinstance(norm, LayerNorm) and norm.mode == 'node')
    if not (rowwise or isinstance(norm, BatchNorm1d | BatchNorm)):
        raise ValueError(
            f'Expected batch normalisation, layer normalisation of single nodes '
            f"(norm='layer_norm', norm_kwargs={{'mode': 'node'}}) or none (got {norm})"
        )


def same_anchors(draw: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    r"""Anchors that are the same on all ranks, those that rank 0 draws, for
    mini-batches in several processes.

    .. code-block:: python

        draw = same_anchors(model.draw_anchors)
        loader = AnchorLoader(PartitionLoader(data, 20, sampler=sampler), data, draw)

    Args:
        draw (callable): A function from the number of nodes to anchors, such as
            :obj:`model.draw_anchors`. All ranks have to call what is returned equally
            often, as they do with one pass over a loader per epoch.
    """

    def drawn(num_nodes: int) -> Tensor:
        found = [draw(num_nodes)]
        dist.broadcast_object_list(found)
        return found[0]

    return drawn


# Runs that go on after a failure -----------------------------------------------------


def save_checkpoint(
    path: str | Path,
    model: Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    run: dict[str, Any] | None = None,
) -> None:
    r"""Saves the state of a run, that of the random number generators of all ranks
    included. All ranks have to call it; rank 0 writes the file, at once or not at all.

    Args:
        path (str or Path): The file.
        model (torch.nn.Module): The model, or what
            :class:`~torch.nn.parallel.DistributedDataParallel` has made of it.
        optimizer (torch.optim.Optimizer): The optimiser.
        progress (Dict[str, Any]): What else the run has to know: numbers, strings,
            tensors, and lists and dictionaries of them.
        run (Dict[str, Any], optional): The settings of the run, of the same types. A
            run with other settings does not go on from this file.
            (default: :obj:`None`)
    """
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, rng_state())
    if dist.get_rank() == 0:
        content = {
            'run': {**(run or {}), 'world_size': len(states)},
            'model': _bare(model).state_dict(),
            'optimizer': optimizer.state_dict(),
            'progress': progress,
            'rng': states,
        }
        with replacing(Path(path)) as temp:
            torch.save(content, temp)


def load_checkpoint(
    path: str | Path,
    model: Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    r"""Restores what :meth:`save_checkpoint` has saved, such that the run goes on as if
    it had not been stopped. All ranks have to call it; only rank 0 reads the file.

    Args:
        path (str or Path): The file.
        model (torch.nn.Module): The model.
        optimizer (torch.optim.Optimizer): The optimiser.
        run (Dict[str, Any], optional): The settings of this run, which have to be those
            that were saved. (default: :obj:`None`)

    Returns:
        The progress that was saved, or :obj:`None` if there is no file.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0 and Path(path).exists():
        content = read_checkpoint(Path(path), 'save_checkpoint')
        saved = content['run'].pop('world_size', None)
        if saved != dist.get_world_size():
            raise ValueError(
                f"Expected '{path}' to be a checkpoint of {dist.get_world_size()} "
                f'ranks (got one of {saved}). Start as many, or remove it'
            )
        if (saved := content['run']) != (run or {}):
            raise ValueError(
                f"Expected '{path}' to be a checkpoint of a run with the settings "
                f'{run or {}} (got one with {saved}). Name another file, or remove it'
            )
        found = [content]
    dist.broadcast_object_list(found)
    content = found[0]
    if content is None:
        return None
    _bare(model).load_state_dict(content['model'])
    optimizer.load_state_dict(content['optimizer'])
    set_rng_state(content['rng'][dist.get_rank()])
    return content['progress']


def _bare(model: Module) -> Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class _Stopped(BaseException):
    """Somebody asks the process to end."""


_TOLD = 'was told to stop (SIGTERM)'


@contextlib.contextmanager
def process_group(
    backend: str | None = None,
    timeout: float = 30.0,
    checkpoint: str | Path | None = None,
) -> Iterator[tuple[int, int]]:
    r"""Within, this process is one of those that :obj:`torchrun` has started (without
    :obj:`torchrun`, the only one). Gives its rank and the number of ranks.

    Where a rank has died, the others stop too and say which one it was: at once if its
    connections are closed, after :obj:`timeout` if it no longer answers.

    Args:
        backend (str, optional): See :meth:`torch.distributed.init_process_group`; gloo
            for tensors of CPUs and NCCL for those of GPUs if not given.
            (default: :obj:`None`)
        timeout (float, optional): How many seconds to wait for other ranks. It has to
            be longer than any work that only some of them do. (default: :obj:`30.`)
        checkpoint (str or Path, optional): The file of :meth:`save_checkpoint`, for the
            message. (default: :obj:`None`)
    """
    limit = timedelta(seconds=timeout)
    store: Any
    if 'RANK' in os.environ:
        store, rank, world_size = next(dist.rendezvous('env://', timeout=limit))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(
        backend,
        store=dist.PrefixStore('group', store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    previous = _on_sigterm(_stop)
    try:
        yield rank, world_size
    except BaseException as error:
        _on_sigterm(signal.SIG_IGN)  # there is something to say first
        note = f'has raised {type(error).__name__}: {error}'
        if isinstance(error, _Stopped):
            note = _TOLD
        elif _is_lost_connection(error):
            note = ''
        with contextlib.suppress(RuntimeError):  # It may be gone with its machine.
            store.set(f'ended/{rank}', note)
        if note not in ('', _TOLD):
            if world_size == 1:  # no one is waited for: it may be entered again
                _leave()
            raise
        what = _what_happened(store, rank, world_size, error)
        then = '' if checkpoint is None else f", which goes on from '{checkpoint}'"
        raise RuntimeError(
            f'Rank {rank} of {world_size} has stopped: {what}. Start the same command '
            f'again{then}'
        ) from (error if isinstance(error, Exception) else None)
    else:
        _leave()
    finally:
        _on_sigterm(previous)


def _leave() -> None:
    # Threads of gloo let go of the last tensors as soon as they get hold of Python,
    # which is left to them for a moment. Otherwise the process may hang or abort at its
    # end: it did in a third of all runs.
    time.sleep(0.2)
    dist.destroy_process_group()


def _on_sigterm(handler: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _stop(*_: Any) -> None:
    raise _Stopped


def _is_lost_connection(error: BaseException) -> bool:
    words = ('gloo', 'nccl', 'connection', 'timed out', 'socket')
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in said for word in words)
    )


def _what_happened(store: Any, rank: int, world_size: int, error: BaseException) -> str:
    """Which rank has ended, and why. Those that live leave a note."""
    others = set(range(world_size)) - {rank}
    notes, end = {}, time.monotonic() + 3.0
    with contextlib.suppress(RuntimeError):
        while others and time.monotonic() < end:
            for other in sorted(others):
                if store.check([f'ended/{other}']):
                    notes[other] = store.get(f'ended/{other}').decode()
                    others.remove(other)
            time.sleep(0.05)
    raised = [f'rank {other} {note}' for other, note in notes.items() if note]
    failed = [text for text in raised if not text.endswith(_TOLD)]
    if isinstance(error, _Stopped):  # those that are well leave no note
        return ', '.join([f'it {_TOLD}', *failed])
    gone = [f'rank {other} no longer answers' for other in sorted(others)]
    # Where one rank has failed, those that are told to stop are told for that reason.
    if found := failed or gone or raised:
        return ', '.join(found)
    said = str(error).partition('\n')[0]
    return (
        f'all ranks live, but one has waited for the others in vain. Perhaps they do '
        f'not make the same calls, or one takes longer than the timeout ({said})'
    )
