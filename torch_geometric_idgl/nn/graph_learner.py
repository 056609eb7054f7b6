r"""From node vectors to a learned graph: a metric, and a sparsification."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..checks import (
    check_at_least,
    check_choice,
    check_features,
    floating_dtype,
    is_replica,
)
from ..graphs import (
    Affinity,
    DenseGraph,
    FeatureGraph,
    InnerScores,
    LowRankGraph,
    PairScores,
    RepeatedScores,
    Scores,
    SparseGraph,
    TiledGraph,
    WeightedScores,
)
from ..graphs.tiled import BlockScores, Tile
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import different_rows, reads_are_free
from .inputs import Anchors, given_anchors
from .similarity import ROWWISE, MetricLike, WeightedCosine, resolve_metric

__all__ = ['BACKENDS', 'GraphLearner']

BACKENDS = ('auto', 'dense', 'low_rank', 'tiled', 'sparse')

_SMALL = 256  # nodes below which a matrix is quicker than its factors
_DENSE_NODE_ENTRIES = 1 << 22  # node-node graphs of up to 2,048 nodes
_DENSE_ANCHOR_ENTRIES = 1 << 26
_SPARSE_DENSITY = 0.05
_SAMPLED_RUNS = 8  # of neighbouring rows, as many each, to measure the density
_LARGE_GRAPH = 10_000
_FEW = 64  # nodes for which it does not matter whether some are equal
_LARGE_FEATURE = 1e6  # beyond it, what is implicit may overflow in backward


class GraphLearner(Module):
    r"""Learns the graph of a set of nodes: :math:`\mathbf{A} = \mathrm{GL}(\mathbf{V})`
    or, with anchors, :math:`\mathbf{R} = \mathrm{GL}(\mathbf{V}, \mathbf{V}_U)`
    (Eq. 1 and 2), where similarities of at most :math:`\varepsilon` are set to zero.

    The result is an operator. Which one computes it is chosen from the metric, the
    threshold, the sign of the vectors, the size and the measured density:

    - :obj:`"low_rank"`, from 257 nodes on (or with anchors), if sparsification removes
      nothing: :math:`\varepsilon = 0`, no :obj:`top_k`, and an inner-product metric on
      vectors that are not negative. Linear in the number of nodes.
    - :obj:`"dense"`, up to 2,048 nodes, or 67 million node-anchor pairs.
    - :obj:`"sparse"`, if fewer than 5 % of the entries survive.
    - :obj:`"tiled"`, otherwise: memory stays linear, time is quadratic.

    All give the same values and gradients.

    .. code-block:: python

        learner = GraphLearner(64, heads=4, epsilon=0.1)
        graph = learner(x)
        edge_index, edge_weight = graph.to_edges()

    Args:
        in_channels (int): Size of each input sample.
        metric (str or torch.nn.Module or Callable, optional): The similarity metric:
            :obj:`"weighted_cosine"`, :obj:`"cosine"`, :obj:`"rbf"`,
            :obj:`"attention"`, or a module (or a function from input channels to one)
            that compares two sets of vectors. (default: :obj:`"weighted_cosine"`)
        heads (int, optional): Number of heads :math:`m` of the metric.
            (default: :obj:`4`)
        epsilon (float, optional): The threshold :math:`\varepsilon`.
            (default: :obj:`0.`)
        top_k (int, optional): Keep only so many of the largest entries of each row.
            (default: :obj:`None`)
        backend (str, optional): :obj:`"auto"`, or the operator to use.
            (default: :obj:`"auto"`)
    """

    def __init__(
        self,
        in_channels: int,
        metric: MetricLike = 'weighted_cosine',
        heads: int = 4,
        epsilon: float = 0.0,
        top_k: int | None = None,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        check_at_least('in_channels', in_channels, 1, integer=True)
        check_at_least('heads', heads, 1, integer=True)
        check_at_least('epsilon', epsilon, 0)
        if top_k is not None:
            check_at_least('top_k', top_k, 1, integer=True)
        if backend not in BACKENDS:
            raise ValueError(
                f"Expected 'backend' to be one of {list(BACKENDS)} (got {backend!r})"
            )
        self.in_channels = in_channels
        self.metric = resolve_metric(metric, in_channels, heads)
        self.epsilon = epsilon
        self.top_k = top_k
        self.backend = backend
        if backend == 'low_rank':
            self._check_low_rank(nonnegative=True)

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.metric.reset_parameters()

    def forward(
        self,
        x: Tensor | Features,
        nodes: Nodes | None = None,
        anchors: Tensor | Anchors | None = None,
        nonnegative: bool | None = None,
        backend: str | None = None,
        block_size: int | None = None,
    ) -> Affinity:
        """Learn a graph.

        Args:
            x (torch.Tensor or Features): Node vectors, of shape :obj:`[n, d]`.
            nodes (Nodes, optional): The nodes of each graph of a batch.
                (default: one graph)
            anchors (torch.Tensor, optional): The anchors, for a node-anchor affinity.
                (default: :obj:`None`)
            nonnegative (bool, optional): Whether :obj:`x` is known to have no negative
                entry; measured if not given. (default: :obj:`None`)
            backend (str, optional): Overrides the learner's. (default: :obj:`None`)
            block_size (int, optional): Embed so many nodes at a time, in every product
                anew, and compare them with the anchors: without gradient, in the least
                memory. (default: :obj:`None`)
        """
        chosen = self.backend
        if isinstance(x, Features):
            nodes = x.nodes
        elif nodes is None:  # a user's call
            x, nodes = self._checked(x, anchors, backend)
            chosen = backend or chosen
        if block_size is not None:
            return self._in_blocks(x, nodes, anchors, block_size)
        if isinstance(x, Features):
            nonnegative = bool(nodes.agreed(x.range[0] >= 0))
        elif nonnegative is None:
            measured = x.numel() == 0 or bool(x.detach().min() >= 0)
            nonnegative = bool(nodes.agreed(measured))
        if isinstance(anchors, Tensor):
            anchors = given_anchors(nodes, anchors)
        # Graphs are compared by small differences: mixed precision would lose them.
        with torch.autocast(nodes.device.type, enabled=False):
            backend = backend or self.backend
            scores = None
            if backend == 'auto':
                if self.epsilon > 0 or self.top_k is not None:  # needed in any case
                    scores = self.scores(x, nodes, anchors)
                given = (x, nodes, anchors, nonnegative)
                backend = self.choose_backend(*given, scores)
            if chosen == 'low_rank':
                self._check_low_rank(nonnegative)
            if backend == 'low_rank':
                return self._low_rank(x, nodes, anchors)
            scores = scores or self.scores(x, nodes, anchors)
            small = nodes.num_total * scores.cols.num_rows <= _SMALL**2
            dense = backend == 'dense' and (small or nodes.num_graphs > 1)
            # Replicas of `DataParallel` hold plain tensors, which cannot be found as
            # leaves of tiles: autograd gets the whole matrix.
            if dense or (isinstance(scores, PairScores) and is_replica(self.metric)):
                value = scores.dense()
                return DenseGraph(value, nodes, scores.cols, scores.symmetric)
            if backend == 'sparse':
                return SparseGraph.from_scores(scores)
            return TiledGraph(scores, keep=backend == 'dense')

    def _checked(self, x: Any, anchors: Any, backend: Any) -> tuple[Any, Nodes]:
        """Raises for what cannot be right; gives the vectors of one graph."""
        dtype = floating_dtype(self, getattr(x, 'dtype', None))
        x = check_features(x, self.in_channels, dtype)
        if backend is not None:
            check_choice('backend', backend, BACKENDS)
        if not isinstance(anchors, Tensor | tuple | None):
            raise TypeError(
                f"Expected 'anchors' to be a 'torch.Tensor' of node indices (got "
                f"'{type(anchors).__name__}')"
            )
        nodes = Nodes((x.size(0),), x.device)
        return x if x.layout == torch.strided else Features.from_tensor(x, nodes), nodes

    def _in_blocks(self, x: Any, nodes: Any, anchors: Any, size: int) -> TiledGraph:
        x = x.value if isinstance(x, Features) else x
        options = (self.epsilon, self.top_k)
        scores = BlockScores(
            self.metric, x, anchors.index, nodes, anchors.nodes, size, *options
        )
        return TiledGraph(scores)

    def _low_rank(
        self, x: Tensor | Features, nodes: Nodes, anchors: Anchors | None
    ) -> Affinity:
        if isinstance(x, Features):
            # A subclass may compare in another way, which its weights do not tell.
            implicit = type(self.metric) is WeightedCosine and (
                anchors is None or x.is_sparse  # else the factor is small enough
            )
            if implicit and x.range[1] < _LARGE_FEATURE:
                weight: Any = self.metric.weight
                return FeatureGraph(x, weight, *(anchors or ()))
            x = x.value  # type: ignore[assignment]
        u = self.metric.embed(x)  # type: ignore[arg-type]
        if anchors is None:
            return LowRankGraph(u, None, nodes, nodes)
        v = nodes.take(u, anchors.index)
        return LowRankGraph(u, v, nodes, anchors.nodes)

    def scores(
        self, x: Tensor | Features, nodes: Nodes, anchors: Anchors | None
    ) -> Scores:
        """What is left of similarities, as an object that makes blocks."""
        cols = nodes if anchors is None else anchors.nodes
        index = None if anchors is None else anchors.index
        options = (self.epsilon, self.top_k)
        if isinstance(x, Features):
            if (
                x.is_sparse
                and type(self.metric) is WeightedCosine
                and x.range[1] < _LARGE_FEATURE
            ):
                weight: Any = self.metric.weight
                return WeightedScores(x, weight, index, cols, *options)
            if self._may_repeat(x):
                first, kind = different_rows(x.to_dense())
                if 2 * first.numel() ** 2 <= nodes.num_rows * cols.num_rows:
                    u = self.metric.embed(x.to_dense()[first])
                    col_kind = None if index is None else kind[index]
                    return RepeatedScores(u, kind, col_kind, nodes, cols, *options)
            x = x.value  # type: ignore[assignment]
        given: Any = x
        u, v = self.metric.embed(given), None
        if index is not None:
            alone = type(self.metric) in ROWWISE and not nodes.spread
            if alone and not getattr(x, 'requires_grad', True):
                v = self.metric.embed(given[index])  # no gradient as large as u
            else:
                v = nodes.take(u, index)
        if self.metric.inner_product:
            return InnerScores(u, v, nodes, cols, *options)
        symmetric = self.metric.symmetric
        return PairScores(self.metric, u, v, nodes, cols, symmetric, *options)

    def _may_repeat(self, x: Features) -> bool:
        """Whether to look for equal rows: where that is quick, and may be of use."""
        return (
            self.metric.inner_product
            and not (x.is_sparse or x.requires_grad)
            and x.nodes.num_graphs == 1
            and not x.nodes.spread
            and _FEW < x.nodes.num_rows < _LARGE_GRAPH
            and reads_are_free(x.device)
        )

    def choose_backend(
        self,
        x: Tensor | Features,
        nodes: Nodes,
        anchors: Anchors | None,
        nonnegative: bool,
        scores: Scores | None = None,
    ) -> str:
        """The operator that :obj:`"auto"` stands for."""
        choice = self._best_backend(x, nodes, anchors, nonnegative, scores)
        return BACKENDS[nodes.agreed(BACKENDS.index(choice))]

    def _best_backend(
        self,
        x: Tensor | Features,
        nodes: Nodes,
        anchors: Anchors | None,
        nonnegative: bool,
        scores: Scores | None,
    ) -> str:
        exact = self.epsilon == 0.0 and self.top_k is None
        factored = self.metric.inner_product and self.metric.nonnegative(nonnegative)
        cols = nodes if anchors is None else anchors.nodes
        entries = nodes.num_graphs * nodes.max_size * cols.max_size
        if anchors is None and entries <= _DENSE_NODE_ENTRIES:
            if nodes.max_size <= _SMALL or not (exact and factored):
                return 'dense'
        if exact and factored:
            return 'low_rank'
        if anchors is None and nodes.max_size >= _LARGE_GRAPH:
            _warn_quadratic(nodes.max_size)
        # Finding survivors takes looks at numbers, which are free on CPUs only.
        if not exact and reads_are_free(nodes.device):
            if _density(scores or self.scores(x, nodes, anchors)) < _SPARSE_DENSITY:
                return 'sparse'
        if anchors is not None and entries <= _DENSE_ANCHOR_ENTRIES:
            return 'dense'
        return 'tiled'

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


@torch.no_grad()
def _density(scores: Scores) -> float:
    """The share of entries that survive, in some rows of the largest graph."""
    nodes = scores.rows
    graph = max(range(nodes.num_graphs), key=nodes.sizes.__getitem__)
    size, width = nodes.sizes[graph], scores.cols.sizes[graph]
    step = max(_SAMPLED_RUNS, size // _SAMPLED_RUNS)
    kept = total = 0
    for start in range(0, size, step):
        tile = Tile(graph, start, min(start + _SAMPLED_RUNS, size), 0, width)
        block = scores.block(tile)
        kept += int(torch.count_nonzero(block))
        total += block.numel()
    return kept / max(total, 1)


def _warn_quadratic(num_nodes: int) -> None:
    warnings.warn(
        f'Learning a graph of all pairs of {num_nodes:,} nodes takes '
        f'{num_nodes**2:,} similarities in every iteration (in linear memory). '
        f"'IDGLAnch' takes time linear in the number of nodes; so does 'IDGL' with "
        f'epsilon=0, top_k=None and features that are not negative.',
        stacklevel=4,
    )
