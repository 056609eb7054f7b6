r"""From node vectors to a learned graph: a metric, and a sparsification."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import Module

from ..checks import check_at_least
from ..graphs import (
    Affinity,
    DenseFactor,
    DenseGraph,
    InnerScores,
    LowRankGraph,
    PairScores,
    Scores,
    SelectedFactor,
    Signal,
    SparseGraph,
    Tile,
    TiledGraph,
    WeightedFactor,
    WeightedScores,
    sparsify,
)
from ..ops.layout import Layout
from .anchors import Anchors
from .similarity import Metric, WeightedCosine

__all__ = ['BACKENDS', 'GraphLearner']

BACKENDS = ('auto', 'dense', 'low_rank', 'tiled', 'sparse')

_DENSE_NODE_ENTRIES = 1 << 22  # node-node graphs of up to 2,048 nodes
_DENSE_ANCHOR_ENTRIES = 1 << 26
_SPARSE_DENSITY = 0.05
_SAMPLED_ROWS = 64
_LARGE_GRAPH = 10_000


class GraphLearner(Module):
    r"""Learns the graph of a set of nodes: :math:`\mathbf{A} = \mathrm{GL}(\mathbf{V})`
    or, with anchors, :math:`\mathbf{R} = \mathrm{GL}(\mathbf{V}, \mathbf{V}_U)`.

    The result is an operator. Which one computes it is chosen from the metric, the
    threshold, the sign of the vectors, the size and the measured density:

    - :obj:`"low_rank"`, if sparsification removes nothing: :math:`\varepsilon = 0`, no
      :obj:`top_k`, and an inner-product metric on vectors that are not negative.
      Linear in the number of nodes.
    - :obj:`"dense"`, up to about 2,000 nodes, or 67 million node-anchor pairs.
    - :obj:`"sparse"`, if fewer than 5 % of the entries survive.
    - :obj:`"tiled"`, otherwise: memory stays linear, time is quadratic.

    All give the same values and gradients.

    Args:
        metric (Metric): The similarity metric.
        epsilon (float, optional): The threshold :math:`\varepsilon`.
            (default: :obj:`0.`)
        top_k (int, optional): Keep only so many of the largest entries of each row.
            (default: :obj:`None`)
        backend (str, optional): :obj:`"auto"`, or the operator to use.
            (default: :obj:`"auto"`)
    """

    def __init__(
        self,
        metric: Metric,
        epsilon: float = 0.0,
        top_k: int | None = None,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        check_at_least('epsilon', epsilon, 0)
        if top_k is not None:
            check_at_least('top_k', top_k, 1, integer=True)
        if not isinstance(metric, Metric):
            raise TypeError(
                f"Expected 'metric' to be a 'Metric' (got {metric!r}); "
                f"'metric_resolver' makes one of a name or a module"
            )
        self.metric = metric
        self.epsilon = epsilon
        self.top_k = top_k
        self.backend = _checked_backend(backend)
        if backend == 'low_rank':
            self._check_low_rank(nonnegative=True)

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.metric.reset_parameters()

    def forward(
        self,
        x: Tensor | Signal,
        layout: Layout | None = None,
        anchors: Anchors | None = None,
        nonnegative: bool | None = None,
        backend: str | None = None,
    ) -> Affinity:
        """Learn a graph.

        Args:
            x (torch.Tensor or Signal): Node vectors, of shape :obj:`[n, d]`.
            layout (Layout, optional): The graphs of a batch. (default: one graph)
            anchors (Anchors, optional): The anchors, for a node-anchor affinity.
                (default: :obj:`None`)
            nonnegative (bool, optional): Whether :obj:`x` is known to have no negative
                entry; measured if not given, and of a :class:`Signal` always.
                (default: :obj:`None`)
            backend (str, optional): Overrides the learner's. (default: :obj:`None`)
        """
        if isinstance(x, Tensor):
            layout = layout or Layout((x.size(0),), x.device)
            if nonnegative is None:
                nonnegative = x.numel() == 0 or bool(x.detach().min() >= 0)
        else:
            layout, nonnegative = x.layout, x.nonnegative
        backend = _checked_backend(backend or self.backend)
        raw = self._weighted_factor(x)
        if backend == 'auto':
            backend = self.choose_backend(x, layout, anchors, nonnegative)
        if backend == 'low_rank':
            self._check_low_rank(nonnegative)
            if raw is not None:
                if anchors is None:
                    return LowRankGraph(raw)
                return LowRankGraph(
                    raw, SelectedFactor(raw, anchors.index, anchors.layout)
                )
            u, v = self._embed(x, anchors)
            left = DenseFactor(u, layout)
            right = None if v is None else DenseFactor(v, anchors.layout)  # type: ignore
            return LowRankGraph(left, right)
        scores = self.scores(x, layout, anchors)
        if backend == 'dense' and layout.num_graphs == 1:
            return TiledGraph(scores, self.epsilon, self.top_k, keep=True)
        if backend == 'dense':
            value = sparsify(scores.dense(), self.epsilon, self.top_k)
            symmetric = scores.symmetric and self.top_k is None
            return DenseGraph(value, scores.rows, scores.cols, symmetric)
        if backend == 'sparse':
            return SparseGraph.from_scores(scores, self.epsilon, self.top_k)
        return TiledGraph(scores, self.epsilon, self.top_k)

    def scores(
        self, x: Tensor | Signal, layout: Layout, anchors: Anchors | None
    ) -> Scores:
        """The similarities before sparsification, as an object that makes blocks."""
        cols = layout if anchors is None else anchors.layout
        if isinstance(x, Signal) and x.is_sparse:
            raw = self._weighted_factor(x)
            if raw is not None:
                index = None if anchors is None else anchors.index
                return WeightedScores(raw, index, cols)
        u, v = self._embed(x, anchors)
        if self.metric.inner_product:
            return InnerScores(u, v, layout, cols)
        return PairScores(self.metric, u, v, layout, cols, self.metric.symmetric)

    def choose_backend(
        self,
        x: Tensor | Signal,
        layout: Layout,
        anchors: Anchors | None,
        nonnegative: bool,
    ) -> str:
        """The operator that :obj:`"auto"` stands for."""
        exact = self.epsilon == 0.0 and self.top_k is None
        factored = self.metric.inner_product and self.metric.nonnegative(nonnegative)
        if exact and factored:
            return 'low_rank'
        cols = layout if anchors is None else anchors.layout
        entries = layout.num_padded * cols.max_size
        if anchors is None and entries <= _DENSE_NODE_ENTRIES:
            return 'dense'
        if anchors is None and layout.max_size >= _LARGE_GRAPH:
            _warn_quadratic(layout.max_size)
        if self._density(x, layout, anchors) < _SPARSE_DENSITY:
            return 'sparse'
        if anchors is not None and entries <= _DENSE_ANCHOR_ENTRIES:
            return 'dense'
        return 'tiled'

    @torch.no_grad()
    def _density(
        self, x: Tensor | Signal, layout: Layout, anchors: Anchors | None
    ) -> float:
        if self.epsilon == 0.0 and self.top_k is None:
            return 1.0
        scores = self.scores(x, layout, anchors)
        graph = max(range(layout.num_graphs), key=layout.sizes.__getitem__)
        size = layout.sizes[graph]
        step = max(1, size // _SAMPLED_ROWS)
        kept = total = 0
        for start in range(0, size, step * 8):  # eight runs of neighbouring rows
            width = scores.cols.sizes[graph]
            tile = Tile(graph, start, min(start + 8, size), 0, width)
            block = sparsify(
                scores.block(tile, scores.leaves), self.epsilon, self.top_k
            )
            kept += int(torch.count_nonzero(block))
            total += block.numel()
        return kept / max(total, 1)

    def _weighted_factor(self, x: Tensor | Signal) -> WeightedFactor | None:
        if isinstance(x, Signal) and isinstance(self.metric, WeightedCosine):
            return WeightedFactor(x, self.metric.weight)
        return None

    def _embed(
        self, x: Tensor | Signal, anchors: Anchors | None
    ) -> tuple[Tensor, Tensor | None]:
        u = self.metric.embed(x.x if isinstance(x, Signal) else x)
        return u, None if anchors is None else u[anchors.index]

    def _check_low_rank(self, nonnegative: bool) -> None:
        if not self.metric.inner_product:
            raise ValueError(
                f"Expected a metric that is an inner product for backend='low_rank' "
                f'(got {self.metric})'
            )
        if self.epsilon > 0 or self.top_k is not None:
            raise ValueError(
                f"Expected epsilon=0 and top_k=None for backend='low_rank' "
                f'(got epsilon={self.epsilon}, top_k={self.top_k})'
            )
        if not self.metric.nonnegative(nonnegative):
            raise ValueError(
                'Expected features and embeddings without negative entries for '
                "backend='low_rank' (got some, or an activation other than ReLU); use "
                "backend='auto'"
            )

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.metric}, epsilon={self.epsilon}, '
            f'top_k={self.top_k})'
        )


def _checked_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(
            f"Expected 'backend' to be one of {list(BACKENDS)} (got {backend!r})"
        )
    return backend


def _warn_quadratic(num_nodes: int) -> None:
    warnings.warn(
        f'Learning a graph of all pairs of {num_nodes:,} nodes takes '
        f'{num_nodes**2:,} similarities in every iteration (in linear memory). '
        f"'IDGLAnch' takes time linear in the number of nodes; so does 'IDGL' with "
        f'epsilon=0, top_k=None and features that are not negative.',
        stacklevel=4,
    )
