"""What a page shows of the graphs of one forward pass, as plain tensors."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checks import check_at_least
from ..graphs import Affinity, AnchorGraph, GraphOperator
from .layout import layout
from .strongest import class_share_by_chance, strongest_edges

if TYPE_CHECKING:
    from ..nn.trace import Trace

__all__ = ['GraphView']

MAX_NODES = 30_000  # all pairs are looked at
_STATIC = Path(__file__).parent / 'static'
_FORMAT = 1


@dataclass
class GraphView:
    r"""The graphs of one forward pass, ready to be drawn: the initial one, the first
    learned one and every refinement, with the strongest edges of each.

    Weights are those of the learned graphs :math:`\mathbf{A}^{(t)}` before
    normalisation; with anchors, of the two-step walks :math:`\mathbf{\Delta}^{-1}
    \mathbf{R} \mathbf{\Lambda}^{-1} \mathbf{R}^{\top}`. Usually made and written by
    :meth:`Trace.view <torch_geometric_idgl.nn.Trace.view>`.

    Attributes:
        title: The title of the page.
        steps: The name of each graph.
        edges: The strongest edges of each graph, of shape :obj:`[2, m]`, strongest
            first.
        weights: Their weights.
        initial: Whether each of them is an edge of the initial graph as well.
        shares: The share of the weight of each graph that is within classes, of all
            pairs of different nodes and not only of those that are drawn, or nothing.
        chance: The share if all pairs had the same weight, or nothing.
        pos: Where nodes are drawn, of shape :obj:`[n, 2]`.
        k: How many edges of each node are kept.
        y: The class of each node, negative where unknown, or nothing.
        class_names: The names of classes, or nothing.
        node_names: The names of nodes, or nothing.
    """

    title: str
    steps: list[str]
    edges: list[Tensor]
    weights: list[Tensor]
    initial: list[Tensor]
    shares: list[float | None]
    chance: float | None
    pos: Tensor
    k: int
    y: Tensor | None = None
    class_names: list[str] | None = None
    node_names: list[str] | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.pos.size(0)

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        data: Any = None,
        graph: int = 0,
        k: int = 5,
        title: str = 'Learned graph',
        class_names: Sequence[str] | None = None,
        node_names: Sequence[str] | None = None,
    ) -> GraphView:
        r"""Collects what is shown of a trace.

        Args:
            trace (Trace): The trace.
            data (Data, optional): What the model was called with; :obj:`data.y` gives
                the classes, if it has a whole number for each node.
                (default: :obj:`None`)
            graph (int, optional): Which graph of a batch. (default: :obj:`0`)
            k (int, optional): How many edges of each node to keep: the strongest ones.
                (default: :obj:`5`)
            title (str, optional): The title of the page.
                (default: :obj:`"Learned graph"`)
            class_names (Sequence[str], optional): The names of classes.
                (default: :obj:`None`)
            node_names (Sequence[str], optional): The names of the nodes of the graph.
                (default: :obj:`None`)
        """
        check_at_least('k', k, 1, integer=True)
        check_at_least('graph', graph, 0, integer=True)
        if graph >= trace.nodes.num_graphs:
            raise ValueError(
                f"Expected 'graph' to be below the number of graphs "
                f'{trace.nodes.num_graphs} (got {graph})'
            )
        n = trace.nodes.sizes[graph]
        if not 1 <= n <= MAX_NODES:
            raise ValueError(
                f'Expected a graph with 1 to {MAX_NODES:,} nodes to view (got {n:,})'
            )
        y = _classes(trace, data, graph)
        node_names = _checked_names('node_names', node_names, n)
        num_classes = 0 if y is None else int(y.max()) + 1
        class_names = _checked_names('class_names', class_names, num_classes)

        trace, number = _alone(trace, graph)
        known = _initial_keys(trace, number)
        last = int(trace.num_iters[number])
        if len(trace.graphs) <= last:
            raise ValueError(
                f'Expected a trace of a model in evaluation mode, which keeps the '
                f'graphs of all {last} refinements (got one of training)'
            )
        steps = ['Initial graph', 'First learned graph']
        steps += [f'Refinement {t}' for t in range(1, last + 1)]
        graphs = [trace.initial, *map(_of_nodes(trace), trace.graphs[: last + 1])]
        edges, weights, initial, shares = [], [], [], []
        for each in graphs:
            pair, weight, share = strongest_edges(each, number, k, y)
            edges.append(pair)
            weights.append(weight)
            initial.append(torch.isin(pair[0] * n + pair[1], known))
            shares.append(share)
        return cls(
            title,
            steps,
            edges,
            weights,
            initial,
            shares,
            None if y is None else class_share_by_chance(y),
            layout(torch.cat([edges[0], edges[-1]], dim=1), n),
            k,
            y,
            class_names,
            node_names,
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes plain tensors, for ``python -m torch_geometric_idgl.view``."""
        torch.save({'view': _FORMAT, **asdict(self)}, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> GraphView:
        """Reads what :meth:`save` has written; no code of the file is run."""
        with open(path, 'rb') as file:
            try:
                content = torch.load(file, map_location='cpu', weights_only=True)
            except Exception as error:  # torch raises many kinds
                got = f'a file that cannot be read: {type(error).__name__}'
                raise _not_a_view(path, got) from error
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or content.keys() != {'view', *names}:
            got = f'a {type(content).__name__}'
            if isinstance(content, dict):
                got = f'a dictionary of {sorted(map(str, content))[:8]}'
            raise _not_a_view(path, got)
        if content.pop('view') != _FORMAT:
            raise _not_a_view(path, 'one of another version')
        return cls(**content)

    def write(self, path: str | os.PathLike) -> None:
        """Writes the page: one file that needs no network."""
        Path(path).write_text(self.to_html(), encoding='utf-8')

    def to_html(self) -> str:
        """The page."""
        page = (_STATIC / 'page.html').read_text(encoding='utf-8')
        # Nothing in it can end the script element that it stands in.
        content = json.dumps(self._payload()).replace('<', '\\u003c')
        page = page.replace('{{title}}', html.escape(self.title))
        for name in ('graphology.umd.min.js', 'sigma.min.js', 'page.css', 'page.js'):
            text = (_STATIC / name).read_text(encoding='utf-8')
            page = page.replace(f'{{{{{name}}}}}', text)
        return page.replace('{{data}}', content)  # last: names may look like a mark

    def _payload(self) -> dict[str, Any]:
        steps = zip(
            self.steps, self.edges, self.weights, self.initial, self.shares, strict=True
        )
        return {
            'numNodes': self.num_nodes,
            'k': self.k,
            'pos': _encoded(self.pos, np.float32),
            'y': None if self.y is None else _encoded(self.y, np.int32),
            'classNames': self.class_names,
            'nodeNames': self.node_names,
            'chance': self.chance,
            'steps': [
                {
                    'name': name,
                    'source': _encoded(pair[0], np.int32),
                    'target': _encoded(pair[1], np.int32),
                    'weight': _encoded(weight, np.float32),
                    'initial': _encoded(initial, np.uint8),
                    'share': share,
                }
                for name, pair, weight, initial, share in steps
            ],
        }


def _classes(trace: Trace, data: Any, graph: int) -> Tensor | None:
    """The classes of the nodes of a graph, if data has them."""
    y = None if data is None else data.get('y')
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex():
        return None
    total = trace.nodes.num_rows
    if data.num_nodes != total:
        raise ValueError(
            f"Expected 'data' to hold the {total} nodes of the trace (got "
            f'{data.num_nodes})'
        )
    if y.numel() != total or (trace.of_graphs and trace.nodes.num_graphs == total):
        return None  # of graphs, or several of each node
    start, stop = trace.nodes.ptr[graph], trace.nodes.ptr[graph + 1]
    y = y.flatten()[start:stop].long().cpu()
    return y if bool((y >= 0).any()) else None


def _checked_names(
    name: str, names: Sequence[str] | None, least: int
) -> list[str] | None:
    if names is None:
        return None
    if len(names) < least:
        raise ValueError(
            f"Expected '{name}' to hold at least {least} names (got {len(names)})"
        )
    return [str(each) for each in names]


def _alone(trace: Trace, graph: int) -> tuple[Trace, int]:
    """The trace in which a graph was refined, and its number there."""
    for part, graphs in trace.parts:
        if graph in graphs:
            return part, graphs.index(graph)
    return trace, graph


def _of_nodes(trace: Trace) -> Callable[[Affinity], GraphOperator]:
    """What makes a graph of nodes of what was learned."""
    mixed: Any = trace.mixed
    if any(isinstance(graph, AnchorGraph) for _, graph in mixed.terms):
        return AnchorGraph
    return lambda graph: graph


def _initial_keys(trace: Trace, number: int) -> Tensor:
    """The pairs of nodes that the initial graph joins, as numbers."""
    (source, target), _ = trace.initial.to_edges()
    start, stop = trace.nodes.ptr[number], trace.nodes.ptr[number + 1]
    own = (source >= start) & (source < stop)
    source, target = source[own] - start, target[own] - start
    low, high = torch.minimum(source, target), torch.maximum(source, target)
    return (low * (stop - start) + high).unique().cpu()


def _encoded(values: Tensor, dtype: Any) -> str:
    array = values.cpu().numpy().astype(np.dtype(dtype).newbyteorder('<'))
    return base64.b64encode(array.tobytes()).decode('ascii')


def _not_a_view(path: str | os.PathLike, got: str) -> ValueError:
    return ValueError(
        f"Expected '{os.fspath(path)}' to be a file that 'trace.save(data, path)' has "
        f'written (got {got})'
    )
