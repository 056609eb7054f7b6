r"""IDGL and IDGL-Anch: one loop, Algorithm 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from ..graphs import (
    Affinity,
    AnchorGraph,
    Change,
    ColumnScaled,
    GraphOperator,
    Memoized,
    Mixture,
    RowNormalized,
    Signal,
    SparseGraph,
)
from ..ops.features import to_features
from ..ops.layout import Layout
from .anchors import Anchors, given_anchors, sample_anchors
from .backbone import Backbone, ConvLike, conv_resolver
from .checks import (
    check_at_least,
    check_batch,
    check_features,
    check_probability,
    check_unit_interval,
)
from .graph_learner import BACKENDS, GraphLearner
from .initial_graph import edges_from_adjacency, given_graph, knn_initial_graph
from .regularization import graph_regularization
from .similarity import MetricLike, metric_resolver
from .trace import Trace

__all__ = ['IDGL', 'IDGLAnch']


class _Inputs(NamedTuple):
    """Features and initial graph, brought into the form the loop works on."""

    signal: Signal
    initial: SparseGraph


class IDGL(Module):
    r"""The IDGL model from the `"Iterative Deep Graph Learning for Graph Neural
    Networks: Better and Robust Node Embeddings" <https://arxiv.org/abs/2006.13009>`_
    paper.

    Learns a graph from the raw features, then refines it from the node embeddings that
    the GNN computes on it, until it no longer changes. The GNN runs on the mixture

    .. math::
        \widetilde{\mathbf{A}}^{(t)} = \lambda \mathbf{L}^{(0)} + (1 - \lambda)
        \left\{ \eta \, \mathrm{f}(\mathbf{A}^{(t)}) + (1 - \eta) \,
        \mathrm{f}(\mathbf{A}^{(1)}) \right\}

    of the normalised initial graph, the refined graph and the first learned graph.
    The constructor begins as that of :class:`torch_geometric.nn.GCN`, and so does
    :meth:`forward`.

    Args:
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        num_layers (int): Number of message passing layers.
        out_channels (int, optional): Size of the outputs; :obj:`hidden_channels` if
            not given. (default: :obj:`None`)
        dropout (float, optional): Dropout after layers on the first graph.
            (default: :obj:`0.`)
        act (str or Callable, optional): The activation. (default: :obj:`"relu"`)
        act_first (bool, optional): Whether to activate before normalising.
            (default: :obj:`False`)
        act_kwargs (Dict[str, Any], optional): Arguments of the activation.
            (default: :obj:`None`)
        norm (str or Callable, optional): The normalisation between layers.
            (default: :obj:`None`)
        norm_kwargs (Dict[str, Any], optional): Arguments of the normalisation.
            (default: :obj:`None`)
        jk (str, optional): The Jumping Knowledge mode. (default: :obj:`None`)
        bias (bool, optional): Whether layers learn a bias. (default: :obj:`False`)
        backbone (str or Callable, optional): :obj:`"gcn"`, :obj:`"sage"`,
            :obj:`"gin"`, :obj:`"appnp"`, or a function from input and output channels
            to a layer: an :class:`~torch_geometric_idgl.nn.OperatorConv`, or any PyG
            convolution that takes :obj:`edge_weight`. (default: :obj:`"gcn"`)
        metric (str or torch.nn.Module or Callable, optional): The similarity metric:
            :obj:`"weighted_cosine"`, :obj:`"cosine"`, :obj:`"rbf"`,
            :obj:`"attention"`, or a module (or a function from input channels to one)
            that compares two sets of vectors. (default: :obj:`"weighted_cosine"`)
        heads (int, optional): Number of heads :math:`m` of the metric.
            (default: :obj:`4`)
        epsilon (float, optional): The threshold :math:`\varepsilon` below which
            similarities are set to zero. (default: :obj:`0.`)
        top_k (int, optional): Keep only so many of the largest similarities of each
            node. (default: :obj:`None`)
        k (int, optional): The number :math:`k` of neighbours of the cosine kNN graph
            that is built when no graph is given. (default: :obj:`20`)
        initial_weight (float, optional): The weight :math:`\lambda` of the initial
            graph. (default: :obj:`0.8`)
        update_weight (float, optional): The weight :math:`\eta` of the refined graph
            against the first learned one. (default: :obj:`0.1`)
        tol (float, optional): Refine until the graph changes by less than this share
            :math:`\delta`; with :obj:`None` always :obj:`max_iters` times.
            (default: :obj:`4e-5`)
        max_iters (int, optional): The maximal number :math:`T` of refinements; without
            any, the model learns one graph from the raw features.
            (default: :obj:`10`)
        smoothness (float, optional): The weight :math:`\alpha` of the Dirichlet energy
            of the features on the learned graph. (default: :obj:`0.2`)
        connectivity (float, optional): The weight :math:`\beta` of the log barrier on
            degrees. (default: :obj:`0.`)
        sparsity (float, optional): The weight :math:`\gamma` of the squared norm.
            (default: :obj:`0.`)
        iter_dropout (float, optional): Dropout after layers on refined graphs;
            :obj:`dropout` if not given. (default: :obj:`None`)
        feature_dropout (float, optional): Dropout on the input features.
            (default: :obj:`0.`)
        graph_dropout (float, optional): Dropout on the first graph: on every entry of
            the initial graph, and on the columns of the first learned graph, before
            and after its normalisation. Each row of the learned graph is dropped
            exactly as if its entries were dropped one by one (as the paper's code
            does); only that rows share the mask makes it possible without an
            :math:`n \times n` matrix. (default: :obj:`0.`)
        add_self_loops (bool, optional): Whether to add self-loops to the initial graph.
            (default: :obj:`True`)
        normalize (bool, optional): Whether to normalise the initial graph
            symmetrically. (default: :obj:`True`)
        cached (bool, optional): Whether to keep what is computed from :obj:`x` and
            :obj:`edge_index` alone (normalisation, sparse form, validation) after the
            first call, and ignore these arguments in later ones, as
            :class:`~torch_geometric.nn.GCNConv` does. Only for a single fixed graph.
            (default: :obj:`False`)
        backend (str, optional): How learned graphs are computed: :obj:`"auto"`,
            :obj:`"dense"`, :obj:`"low_rank"`, :obj:`"tiled"` or :obj:`"sparse"`. All
            give the same results; see
            :class:`~torch_geometric_idgl.nn.GraphLearner`. (default: :obj:`"auto"`)
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        act: str | Callable | None = 'relu',
        act_first: bool = False,
        act_kwargs: dict[str, Any] | None = None,
        norm: str | Callable | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        jk: str | None = None,
        *,
        bias: bool = False,
        backbone: ConvLike = 'gcn',
        metric: MetricLike = 'weighted_cosine',
        heads: int = 4,
        epsilon: float = 0.0,
        top_k: int | None = None,
        k: int = 20,
        initial_weight: float = 0.8,
        update_weight: float = 0.1,
        tol: float | None = 4e-5,
        max_iters: int = 10,
        smoothness: float = 0.2,
        connectivity: float = 0.0,
        sparsity: float = 0.0,
        iter_dropout: float | None = None,
        feature_dropout: float = 0.0,
        graph_dropout: float = 0.0,
        add_self_loops: bool = True,
        normalize: bool = True,
        cached: bool = False,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        iter_dropout = dropout if iter_dropout is None else iter_dropout
        for name, value in [
            ('in_channels', in_channels),
            ('hidden_channels', hidden_channels),
            ('num_layers', num_layers),
            ('heads', heads),
            ('k', k),
        ]:
            check_at_least(name, value, 1, integer=True)
        if out_channels is not None:
            check_at_least('out_channels', out_channels, 1, integer=True)
        if top_k is not None:
            check_at_least('top_k', top_k, 1, integer=True)
        check_at_least('max_iters', max_iters, 0, integer=True)
        check_unit_interval('initial_weight', initial_weight)
        check_unit_interval('update_weight', update_weight)
        for name, weight in [
            ('epsilon', epsilon),
            ('tol', 0.0 if tol is None else tol),
            ('smoothness', smoothness),
            ('connectivity', connectivity),
            ('sparsity', sparsity),
        ]:
            check_at_least(name, weight, 0)
        for name, rate in [
            ('dropout', dropout),
            ('iter_dropout', iter_dropout),
            ('feature_dropout', feature_dropout),
            ('graph_dropout', graph_dropout),
        ]:
            check_probability(name, rate)
        if backend not in BACKENDS:
            raise ValueError(
                f"Expected 'backend' to be one of {list(BACKENDS)} (got '{backend}')"
            )
        if backend == 'low_rank' and (epsilon > 0 or top_k is not None):
            raise ValueError(
                f"Expected epsilon=0 and top_k=None for backend='low_rank' "
                f'(got epsilon={epsilon}, top_k={top_k})'
            )

        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.k = k
        self.initial_weight = initial_weight
        self.update_weight = update_weight
        self.tol = tol
        self.max_iters = max_iters
        self.smoothness = smoothness
        self.connectivity = connectivity
        self.sparsity = sparsity
        self.dropout = dropout
        self.iter_dropout = iter_dropout
        self.feature_dropout = feature_dropout
        self.graph_dropout = graph_dropout
        self.add_self_loops = add_self_loops
        self.normalize = normalize
        self.cached = cached

        self.backbone = Backbone(
            in_channels,
            hidden_channels,
            num_layers,
            out_channels,
            act,
            act_first,
            act_kwargs,
            norm,
            norm_kwargs,
            jk,
            conv_resolver(backbone, bias),
        )
        self.out_channels = self.backbone.out_channels
        self.feature_learner, self.embedding_learner = (
            GraphLearner(
                metric_resolver(metric, channels, heads), epsilon, top_k, backend
            )
            for channels in (in_channels, self.backbone.embedding_channels)
        )
        self._cache: _Inputs | None = None

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.backbone.reset_parameters()
        self.feature_learner.reset_parameters()
        self.embedding_learner.reset_parameters()
        self._cache = None

    def forward(
        self,
        x: Tensor | Data,
        edge_index: Any = None,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        *,
        max_iters: int | None = None,
        anchor_index: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        r"""Forward pass.

        Args:
            x (torch.Tensor or Data or Batch): The node features, dense or torch
                sparse; or a data object that holds all the inputs.
            edge_index (torch.Tensor or EdgeIndex or SparseTensor, optional): The
                initial graph: indices, or a (transposed) sparse adjacency. If not
                given, a cosine kNN graph of the features. (default: :obj:`None`)
            edge_weight (torch.Tensor, optional): The weights of its edges.
                (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): Ignored, as by
                :class:`torch_geometric.nn.GCN`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. Graphs never mix,
                and each stops by itself. (default: :obj:`None`)
            batch_size (int, optional): The number of graphs. (default: :obj:`None`)
            max_iters (int, optional): Overrides the model's for this call; with
                :obj:`0`, a phase of training without iteration.
                (default: :obj:`None`)
            anchor_index (torch.Tensor, optional): The anchors to use, for
                :class:`IDGLAnch`. (default: :obj:`None`)
            return_trace (bool, optional): Whether to return a
                :class:`~torch_geometric_idgl.nn.Trace` as well, which gives the joint
                loss. (default: :obj:`False`)

        Returns:
            The outputs (logits) of the last iteration and, if asked for, the trace.
        """
        if isinstance(x, Data):
            return self._forward_data(
                x, edge_index, max_iters, anchor_index, return_trace
            )
        if max_iters is None:
            max_iters = self.max_iters
        check_at_least('max_iters', max_iters, 0, integer=True)
        inputs = self._inputs(x, edge_index, edge_weight, batch, batch_size)
        trace = self._iterate(inputs, max_iters, anchor_index)
        return (trace.out, trace) if return_trace else trace.out

    def _forward_data(self, data: Data, edge_index: Any, *options: Any) -> Any:
        if edge_index is not None:
            raise ValueError("Expected no 'edge_index' besides a data object (got both)")
        if data.x is None:
            raise ValueError("Expected 'data' to hold node features 'x' (got none)")
        max_iters, anchor_index, return_trace = options
        graph = data.get('edge_index')
        graph = data.get('adj_t') if graph is None else graph
        return self.forward(
            data.x,
            graph,
            data.get('edge_weight'),
            batch=data.get('batch'),
            batch_size=getattr(data, 'num_graphs', None) if 'batch' in data else None,
            max_iters=max_iters,
            anchor_index=anchor_index,
            return_trace=return_trace,
        )

    def _iterate(
        self, inputs: _Inputs, max_iters: int, anchor_index: Tensor | None
    ) -> Trace:
        """Algorithm 1."""
        signal = inputs.signal.dropout(self.feature_dropout, self.training)
        layout = signal.layout
        anchors = self._draw_anchors(layout, anchor_index)
        projected = self.backbone.project(signal.x)
        message = self.backbone.message(projected)
        targets = signal if anchors is None else signal.rows(*anchors)

        def learn(learner: GraphLearner, vectors, previous=None, **options):
            affinity = learner(vectors, layout, anchors, **options)
            graph = self._regularized(affinity)
            if message is not None:
                observed = signal if self.smoothness > 0 and not anchors else None
                affinity.observe(message, observed, previous)
            reg = graph_regularization(
                graph, targets, self.smoothness, self.connectivity, self.sparsity
            )
            return affinity, self._message_graph(graph), reg

        # t = 1: the graph of the raw features.
        initial = Memoized(inputs.initial)
        first, first_graph, reg = learn(self.feature_learner, signal)
        first_mix = self._mix_first(initial, first, first_graph)
        z = self.backbone.embed(projected, first_mix, layout, self.dropout)
        predictions = [self.backbone.start_prediction(z, projected, first_mix)]

        active = torch.ones(layout.num_graphs, dtype=torch.bool, device=layout.device)
        num_iters = torch.zeros_like(active, dtype=torch.long)
        trace = Trace(layout, inputs.initial, first, first, first_mix, num_iters, [reg])

        vectors, backend = z, None
        for _ in range(max_iters):
            vectors = _where_active(active, z, vectors, layout)
            if backend is None:
                backend = self._embedding_backend(vectors, layout, anchors)
            previous = trace.learned
            trace.learned, graph, reg = learn(
                self.embedding_learner,
                vectors,
                previous,
                nonnegative=self.backbone.nonnegative,
                backend=backend,
            )
            trace.mixed = mixed = self._mix(initial, first_mix, graph)
            z = self.backbone.embed(projected, mixed, layout, self.iter_dropout)
            predictions.append(self.backbone.start_prediction(z, projected, mixed))

            trace.regs.append(_where_active(active, reg, trace.regs[-1], layout))
            trace.num_iters = trace.num_iters + active
            trace.refined.append(active)
            if self.tol is None:
                continue
            scale = self._stopping_scale(trace.learned, first)
            with torch.no_grad():
                change = trace.learned.change_from(previous)
                active, going_on = _still_changing(active, change, scale, self.tol)
            trace.changes.append(change)
            trace.scales.append(scale)
            if not going_on:
                break

        first_out, *outs = self.backbone.finish_predictions(predictions)
        trace.outs.append(first_out)
        for active, out in zip(trace.refined, outs, strict=True):
            trace.outs.append(_where_active(active, out, trace.outs[-1], layout))
        return trace

    # The mixture (Eq. 3) -------------------------------------------------------------

    def _mix_first(
        self, initial: Memoized, first: Affinity, graph: GraphOperator
    ) -> Mixture:
        lam, p = self.initial_weight, self.graph_dropout
        kept: GraphOperator = initial
        if self.training and p > 0:
            given = initial.graph
            assert isinstance(given, SparseGraph)
            kept = Memoized(given.with_value(F.dropout(given.value, p)))
            graph = ColumnScaled(first, _column_mask(first, p))
            graph = RowNormalized(graph)
            graph = ColumnScaled(graph, _column_mask(graph, p))
        return Mixture([(lam, kept), (1.0 - lam, Memoized(graph))])

    def _mix(self, initial: Memoized, first: Mixture, graph: GraphOperator) -> Mixture:
        lam, eta = self.initial_weight, self.update_weight
        terms = [(eta * lam, initial), (eta * (1.0 - lam), graph)]
        return Mixture([*terms, *first.scaled(1.0 - eta)])

    # What differs between IDGL and IDGL-Anch ------------------------------------------

    def _draw_anchors(self, layout: Layout, index: Tensor | None) -> Anchors | None:
        if index is not None:
            raise ValueError(
                f"Expected no 'anchor_index' for {self.__class__.__name__}, which has "
                f"no anchors (got one); use 'IDGLAnch'"
            )
        return None

    def _regularized(self, affinity: Affinity) -> Affinity | AnchorGraph:
        return affinity

    def _message_graph(self, graph: Affinity | AnchorGraph) -> GraphOperator:
        return RowNormalized(graph)

    def _stopping_scale(self, learned: Affinity, first: Affinity) -> Affinity:
        return first

    # Inputs -----------------------------------------------------------------------------

    def _embedding_backend(
        self, z: Tensor, layout: Layout, anchors: Anchors | None
    ) -> str:
        learner = self.embedding_learner
        if learner.backend != 'auto':
            return learner.backend
        return learner.choose_backend(z, layout, anchors, self.backbone.nonnegative)

    def _inputs(
        self,
        x: Tensor,
        adjacency: Any,
        weight: Tensor | None,
        batch: Tensor | None,
        batch_size: int | None,
    ) -> _Inputs:
        if self.cached and self._cache is not None:
            known = self._cache.signal
            if tuple(x.shape) != tuple(known.x.shape):
                raise ValueError(
                    f'Expected the cached graph with features of shape '
                    f'{list(known.x.shape)} (got {list(x.shape)}); use cached=False'
                )
            if x.device == known.x.device:
                return self._cache
        check_features(x, self.in_channels)
        if adjacency is None and weight is not None:
            raise ValueError("Expected 'edge_index' beside 'edge_weight' (got none)")
        if batch is not None:
            check_batch(batch, batch_size, x.size(0))
        layout = Layout.from_batch(batch, x.size(0), batch_size, x.device)
        signal = Signal(to_features(x), layout)
        if adjacency is None:
            initial = knn_initial_graph(signal, self.k)
        else:
            edge_index, weight = edges_from_adjacency(adjacency, weight, x.size(0))
            initial = given_graph(
                edge_index, weight, layout, x.dtype, self.normalize, self.add_self_loops
            )
        inputs = _Inputs(signal, initial)
        if self.cached:
            self._cache = inputs
        return inputs

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.in_channels}, {self.out_channels}, '
            f'num_layers={self.num_layers})'
        )


class IDGLAnch(IDGL):
    r"""The anchor-based scalable IDGL-Anch model from the `"Iterative Deep Graph
    Learning for Graph Neural Networks: Better and Robust Node Embeddings"
    <https://arxiv.org/abs/2006.13009>`_ paper.

    Learns an affinity :math:`\mathbf{R}` of nodes and anchors instead of a graph of
    all pairs, and passes messages through the anchors:

    .. math::
        \mathrm{MP}_a(\mathbf{F}) = \lambda \mathbf{L}^{(0)} \mathbf{F} + (1 - \lambda)
        \left\{ \eta \, \mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}^{(t)}) + (1 - \eta) \,
        \mathrm{MP}_{12}(\mathbf{F}, \mathbf{R}^{(1)}) \right\}

    With :obj:`graph_dropout`, anchors of the first affinity are dropped.

    Args:
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        num_layers (int): Number of message passing layers.
        *args: Further arguments of :class:`IDGL`.
        num_anchors (int, optional): The number :math:`s` of anchors of each graph (at
            most all its nodes). (default: :obj:`1000`)
        anchor_ratio (float, optional): The share of nodes that are anchors, instead of
            a number. (default: :obj:`None`)
        anchor_sampling (str, optional): :obj:`"resample"` draws anchors anew at each
            forward (as the paper does), :obj:`"seeded"` does so in training and takes
            the same ones whenever it evaluates, :obj:`"fixed"` always takes the same.
            (default: :obj:`"resample"`)
        anchor_seed (int, optional): The seed of seeded and fixed anchors.
            (default: :obj:`0`)
        tol (float, optional): See :class:`IDGL`. (default: :obj:`8.5e-5`)
        sparsity (float, optional): See :class:`IDGL`. (default: :obj:`0.1`)
        **kwargs: Further keyword arguments of :class:`IDGL`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        *args: Any,
        num_anchors: int = 1000,
        anchor_ratio: float | None = None,
        anchor_sampling: str = 'resample',
        anchor_seed: int = 0,
        tol: float | None = 8.5e-5,
        sparsity: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            *args,
            tol=tol,
            sparsity=sparsity,
            **kwargs,
        )
        check_at_least('num_anchors', num_anchors, 1, integer=True)
        if anchor_ratio is not None:
            check_unit_interval('anchor_ratio', anchor_ratio, open_left=True)
        choices = ('resample', 'seeded', 'fixed')
        if anchor_sampling not in choices:
            raise ValueError(
                f"Expected 'anchor_sampling' to be one of {list(choices)} "
                f"(got '{anchor_sampling}')"
            )
        self.num_anchors = num_anchors
        self.anchor_ratio = anchor_ratio
        self.anchor_sampling = anchor_sampling
        self.anchor_seed = anchor_seed

    def _draw_anchors(self, layout: Layout, index: Tensor | None) -> Anchors:
        if index is not None:
            return given_anchors(layout, index)
        generator = None
        seeded = self.anchor_sampling == 'seeded' and not self.training
        if seeded or self.anchor_sampling == 'fixed':
            generator = torch.Generator().manual_seed(self.anchor_seed)
        return sample_anchors(layout, self.num_anchors, self.anchor_ratio, generator)

    def _mix_first(
        self, initial: Memoized, first: Affinity, graph: GraphOperator
    ) -> Mixture:
        if self.training and self.graph_dropout > 0:
            mask = _column_mask(first, self.graph_dropout)
            graph = AnchorGraph(ColumnScaled(first, mask))
        lam = self.initial_weight
        return Mixture([(lam, initial), (1.0 - lam, Memoized(graph))])

    def _regularized(self, affinity: Affinity) -> AnchorGraph:
        return AnchorGraph(affinity)

    def _message_graph(self, graph: Affinity | AnchorGraph) -> GraphOperator:
        return graph

    def _stopping_scale(self, learned: Affinity, first: Affinity) -> Affinity:
        return learned


def _still_changing(
    active: Tensor, change: Change, scale: Affinity, tol: float
) -> tuple[Tensor, bool]:
    """Which graphs go on, and whether any does, in one host synchronisation.

    Bounds of the norm usually decide; it is computed only where they do not.
    """
    least, most = scale.sq_norm_bounds()
    low, high = change.bounds()
    surely = active & (low > tol * most)
    if least is not most or low is not high:
        perhaps = active & (high > tol * least) & ~surely
        undecided, going_on = torch.stack([perhaps.any(), surely.any()]).tolist()
        if not undecided:
            return surely, going_on
        surely = active & (change.exact() > tol * scale.sq_norm())
    return surely, bool(surely.any())


def _where_active(active: Tensor, new: Tensor, old: Tensor, layout: Layout) -> Tensor:
    """New values for graphs that still iterate; those that have stopped keep theirs."""
    if layout.num_graphs == 1:
        return new
    rows = active[layout.batch] if new.size(0) == layout.num_rows else active
    return torch.where(rows if new.dim() == 1 else rows.unsqueeze(1), new, old)


def _column_mask(graph: GraphOperator, p: float) -> Tensor:
    ones = torch.ones(
        graph.cols.num_rows, dtype=graph.dtype, device=graph.cols.device
    )
    return F.dropout(ones, p)
