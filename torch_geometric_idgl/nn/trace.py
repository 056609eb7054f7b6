"""What happened during one forward pass."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checks import check_at_least, check_unit_interval
from ..graphs import Affinity, BlockGraph, GraphOperator
from ..ops.batch import Nodes

__all__ = ['Trace']


@dataclass
class Trace:
    r"""The iterations of one forward pass, for losses and for looking at them.

    Position 0 is the first graph :math:`\mathbf{A}^{(1)}`, position :math:`t` the
    :math:`t`-th refinement. In a batch a graph that has stopped keeps the outputs of
    its own last iteration.

    .. code-block:: python

        out, trace = model(data.x, data.edge_index, return_trace=True)
        loss = trace.loss(lambda out: F.cross_entropy(out[mask], data.y[mask]))
        edge_index, edge_weight = trace.learned.to_edges(min_weight=0.1)

    Attributes:
        outs: The outputs of each iteration, of shape :obj:`[n, out_channels]`.
        regs: The graph regulariser of each iteration, of shape :obj:`[B]`.
        refined: Which graphs of the batch each iteration has refined.
        num_iters: The number of refinements of each graph, of shape :obj:`[B]`.
        initial: The initial graph :math:`\mathbf{L}^{(0)}`.
        first: The first learned graph, :math:`\mathbf{A}^{(1)}` or
            :math:`\mathbf{R}^{(1)}`.
        learned: The last learned graph, before normalisation.
        graphs: The learned graph of each iteration, before normalisation (in
            evaluation mode only).
        mixed: The last mixed graph :math:`\widetilde{\mathbf{A}}`, which the outputs
            come from.
        nodes: The nodes of each graph of the batch.
    """

    nodes: Nodes
    initial: GraphOperator
    first: Affinity
    learned: Affinity
    mixed: GraphOperator
    num_iters: Tensor = field(init=False)
    outs: list[Tensor] = field(default_factory=list)
    regs: list[Tensor] = field(default_factory=list)
    refined: list[Tensor] = field(default_factory=list)
    graphs: list[Affinity] = field(default_factory=list)
    # The squared distance of each refined graph to the one before, whether it lacks the
    # norm of the first graph, and the norm it is compared with (nothing: the first's).
    changes: list[tuple[Tensor, bool, Tensor | None]] = field(default_factory=list)
    # The traces of graphs of a batch that were refined one after another.
    parts: list[tuple[Trace, list[int]]] = field(default_factory=list)
    of_graphs: bool = False  # whether outputs are those of graphs, not of nodes

    def __post_init__(self) -> None:
        self.num_iters = torch.zeros(
            self.nodes.num_graphs, dtype=torch.long, device=self.nodes.device
        )

    @property
    def out(self) -> Tensor:
        """The final outputs."""
        return self.outs[-1]

    @property
    @torch.no_grad()
    def deltas(self) -> list[Tensor]:
        r"""The stopping value of each refinement, of shape :obj:`[B]`: the change
        relative to :math:`\|\mathbf{A}^{(1)}\|_F^2` for IDGL, to
        :math:`\|\mathbf{R}^{(t)}\|_F^2` for IDGL-Anch. NaN for graphs that had
        stopped before. Without a tolerance (:obj:`tol=None`) nothing is compared, and
        there are none.
        """
        if self.parts:
            return self._deltas_of_parts()
        deltas = []
        first: Any = None
        for (change, lacks_norm, scale), refined in zip(
            self.changes, self.refined, strict=False
        ):
            if first is None and (lacks_norm or scale is None):
                first = self.first.sq_norm()
            norm = first if scale is None else scale
            change = (change + first).clamp(min=0.0) if lacks_norm else change
            delta = change / norm.clamp(min=1e-12)
            deltas.append(torch.where(refined, delta, torch.nan))
        return deltas

    def _deltas_of_parts(self) -> list[Tensor]:
        deltas: list[Tensor] = []
        for part, graphs in self.parts:
            place = torch.tensor(graphs, device=self.nodes.device)
            for t, delta in enumerate(part.deltas):
                if t == len(deltas):
                    size = (self.nodes.num_graphs,)
                    deltas.append(delta.new_full(size, torch.nan))
                deltas[t][place] = delta
        return deltas

    @property
    def reg(self) -> Tensor:
        r"""The regulariser of the joint loss, averaged over graphs (empty ones count as
        zero): that of the first graph plus the mean over each graph's own refinements.
        """
        total = self.regs[0]
        if len(self.regs) > 1:
            later = torch.stack(self.regs[1:])  # [T, B]
            step = torch.arange(1, len(self.regs), device=later.device).unsqueeze(1)
            count = self.num_iters.clamp(min=1)
            total = total + torch.where(step <= count, later, 0.0).sum(0) / count
        return total.mean()

    def loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        r"""The joint loss of Algorithm 1,

        .. math::
            \mathcal{L} = \mathcal{L}^{(1)} + \frac{1}{T} \sum_{t=1}^{T}
            \mathcal{L}^{(1 + t)}, \qquad \mathcal{L}^{(t)} =
            \mathcal{L}_{\mathrm{pred}}^{(t)} + \mathcal{L}_{\mathcal{G}}^{(t)}

        with each graph's own number :math:`T` of refinements.

        Args:
            fn (Callable): The prediction loss, from outputs to a scalar. For batches
                whose graphs stop at different iterations, it must be a sum or mean of
                terms that depend on one graph each (as cross entropy is).
        """
        return self.prediction_loss(fn) + self.reg

    def readout(self, fn: Callable[[Tensor], Tensor]) -> Trace:
        r"""The trace of a graph-level task, with a row of outputs for each graph.

        .. code-block:: python

            out, trace = model(batch, return_trace=True)
            trace = trace.readout(lambda h: head(global_max_pool(h, batch.batch)))
            loss = trace.loss(lambda out: F.cross_entropy(out, batch.y))

        Args:
            fn (Callable): From the outputs of nodes to those of graphs, each of which
                depends on its own nodes.
        """
        trace = copy.copy(self)
        trace.outs = [fn(out) for out in self.outs]
        trace.of_graphs = True
        shape = list(trace.out.shape)
        if shape[:1] != [self.nodes.num_graphs]:
            raise ValueError(
                f"Expected 'fn' to return a row for each of the "
                f'{self.nodes.num_graphs} graphs (got shape {shape})'
            )
        return trace

    @torch.no_grad()
    def smooth(
        self, alpha: float = 0.8, steps: int = 5, probs: Tensor | None = None
    ) -> Tensor:
        r"""Smooths predictions over the mixed graph, for use after training:

        .. math::
            \mathbf{P} \leftarrow \alpha \widetilde{\mathbf{A}} \mathbf{P} +
            (1 - \alpha) \mathbf{P}_0

        The graph is :obj:`mixed`, the last one that messages were passed on. Its
        learned part has rows that sum to one. Its initial part is normalised
        symmetrically, so the rows of the result need not sum to one: compare them by
        their largest entry. The paper has no such step; it is the one of
        :class:`~torch_geometric.nn.models.LabelPropagation`, on the learned graph.

        .. code-block:: python

            fit(model, data)
            model.eval()
            out, trace = model(data, return_trace=True)
            pred = trace.smooth(alpha=0.8, steps=5).argmax(dim=-1)

        Choose :obj:`alpha` and :obj:`steps` on validation nodes.

        Args:
            alpha (float, optional): The share that neighbours have.
                (default: :obj:`0.8`)
            steps (int, optional): How often to smooth. (default: :obj:`5`)
            probs (torch.Tensor, optional): What to smooth, with a row for each node;
                by default the softmax of the final outputs. (default: :obj:`None`)
        """
        check_unit_interval('alpha', alpha)
        check_at_least('steps', steps, 0, integer=True)
        if self.of_graphs:
            raise ValueError(
                'Expected the trace of a task on nodes, whose predictions a graph '
                "connects (got that of 'readout')"
            )
        if probs is None:
            if self.out.size(-1) == 1:
                raise ValueError(
                    "Expected 'probs' for a model with one output, whose softmax is "
                    'one everywhere (got none); its sigmoid may be meant'
                )
            probs = self.out.softmax(dim=-1)
        if not isinstance(probs, Tensor):
            raise TypeError(
                f"Expected 'probs' to be a 'torch.Tensor' (got "
                f"'{type(probs).__name__}')"
            )
        probs = probs.detach().to(self.mixed.dtype)
        if probs.dim() != 2 or probs.size(0) != self.nodes.num_rows:
            raise ValueError(
                f"Expected 'probs' to be of shape [{self.nodes.num_rows}, num_classes] "
                f'(got {list(probs.shape)})'
            )
        smoothed = probs
        for _ in range(steps):
            smoothed = alpha * self.mixed.matmul(smoothed) + (1.0 - alpha) * probs
        return smoothed

    def prediction_loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """The joint loss without regularisers."""
        first_out = self.outs[0]
        first = fn(first_out)
        if len(self.outs) == 1:
            return first
        counts = self.num_iters.unique().tolist() if self.nodes.num_graphs > 1 else []
        if len(counts) <= 1:
            later = sum(map(fn, self.outs[1:])) / (len(self.outs) - 1)
            return first + later
        # Rows are independent: graphs with T refinements are averaged over T steps by
        # letting the others stand at the first graph's outputs, then taking these off.
        total = first + first
        for count in counts:
            rows = self.num_iters == count
            rows = rows if self.of_graphs else rows[self.nodes.batch]
            for out in self.outs[1 : count + 1]:
                mixed = torch.where(_like(rows, out), out, first_out)
                total = total + (fn(mixed) - first) / count
        return total

    def view(self, data: Any, path: str | os.PathLike, **kwargs: Any) -> None:
        r"""Writes a page on which the learned graphs can be looked at: the strongest
        edges of every iteration, which of them are new, and how much of the weight is
        within classes. It is one file that needs no network.

        .. code-block:: python

            model.eval()
            with torch.no_grad():
                _, trace = model(data, return_trace=True)
            trace.view(data, 'graph.html')

        Args:
            data (Data or Batch): What the model was called with. Nodes are coloured by
                :obj:`data.y`, if it has a class for each node.
            path (str or PathLike): The page to write.
            **kwargs (optional): Arguments of
                :meth:`GraphView.from_trace
                <torch_geometric_idgl.view.GraphView.from_trace>`: which :obj:`graph` of
                a batch, how many edges :obj:`k` of each node, :obj:`title`,
                :obj:`class_names` and :obj:`node_names`.
        """
        from ..view import GraphView

        GraphView.from_trace(self, data, **kwargs).write(path)

    def save(self, data: Any, path: str | os.PathLike, **kwargs: Any) -> None:
        r"""Saves what :meth:`view` shows as plain tensors, to write the page later with
        ``python -m torch_geometric_idgl.view run.pt``. Takes the arguments of
        :meth:`view`.
        """
        from ..view import GraphView

        GraphView.from_trace(self, data, **kwargs).save(path)

    # How the loop fills it ----------------------------------------------------------

    def add(
        self,
        learned: Affinity,
        mixed: GraphOperator,
        active: Tensor,
        reg: Tensor | None = None,
    ) -> None:
        """One more refinement, of the graphs that are active; graphs that have stopped
        keep their regulariser.
        """
        self.learned = learned
        self.mixed = mixed
        self.num_iters = self.num_iters + active
        self.refined.append(active)
        if reg is not None:
            alone = self.nodes.num_graphs == 1
            self.regs.append(reg if alone else torch.where(active, reg, self.regs[-1]))

    def add_outs(self, outs: list[Tensor]) -> None:
        """The outputs of all refinements; graphs that have stopped keep theirs."""
        for active, out in zip(self.refined, outs, strict=True):
            self.outs.append(self.nodes.where(active, out, self.outs[-1]))

    @classmethod
    def joined(cls, parts: list[Trace], graphs: list[list[int]], nodes: Nodes) -> Trace:
        """The trace of a batch whose graphs were refined one after another. Graphs that
        are in no part are empty, and get zeros.

        Args:
            parts (List[Trace]): The traces of the parts.
            graphs (List[List[int]]): The graphs of each part.
            nodes (Nodes): The nodes of all graphs.
        """
        order = [graph for own in graphs for graph in own]
        place = torch.tensor(order, device=nodes.device)
        rows = torch.cat([nodes.rows_of(own) for own in graphs])

        def last(values: list[Any], t: int) -> Any:
            return values[min(t, len(values) - 1)]

        def spread(values: list[Tensor]) -> Tensor:
            zeros = values[0].new_zeros(nodes.num_graphs)
            return zeros.index_copy(0, place, torch.cat(values))

        def side_by_side(blocks: list[Any]) -> BlockGraph:
            sizes = [0] * nodes.num_graphs
            for block, own in zip(blocks, graphs, strict=True):
                for graph, size in zip(own, block.cols.sizes, strict=True):
                    sizes[graph] = size
            cols = nodes if tuple(sizes) == nodes.sizes else Nodes(sizes, nodes.device)
            return BlockGraph(blocks, graphs, nodes, cols)

        trace = cls(
            nodes,
            side_by_side([part.initial for part in parts]),
            side_by_side([part.first for part in parts]),
            side_by_side([part.learned for part in parts]),
            side_by_side([part.mixed for part in parts]),
        )
        trace.parts = list(zip(parts, graphs, strict=True))
        trace.num_iters = spread([part.num_iters for part in parts])
        for t in range(max(len(part.outs) for part in parts)):
            out = torch.cat([last(part.outs, t) for part in parts])
            if order != sorted(order):
                out = torch.empty_like(out).index_copy(0, rows, out)
            trace.outs.append(out)
        for t in range(max(len(part.regs) for part in parts)):
            trace.regs.append(spread([last(part.regs, t) for part in parts]))
        for t in range(max(len(part.refined) for part in parts)):
            trace.refined.append(trace.num_iters > t)
        for t in range(max(len(part.graphs) for part in parts)):
            trace.graphs.append(side_by_side([last(part.graphs, t) for part in parts]))
        return trace


def _like(rows: Tensor, out: Tensor) -> Tensor:
    """A choice of rows, with as many dimensions as outputs."""
    return rows.view(-1, *[1] * (out.dim() - 1))
