r"""IDGL: the one loop of Algorithm 1, which IDGL-Anch shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from ..checks import (
    check_at_least,
    check_features,
    check_probability,
    check_unit_interval,
)
from ..graphs import (
    Affinity,
    AnchorGraph,
    ColumnScaled,
    GraphOperator,
    Memoized,
    Message,
    Mixture,
    RowNormalized,
    SparseGraph,
    column_mask,
)
from ..ops.layout import Layout
from ..ops.numeric import dropout
from .anchors import Anchors
from .backbone import Backbone
from .conv import ConvLike, conv_resolver
from .graph_learner import GraphLearner
from .inputs import InputCache, Inputs, cacheable, prepare_inputs
from .regularization import graph_regularization
from .similarity import MetricLike, metric_resolver
from .stopping import still_changing, where_active
from .trace import Trace

__all__ = ['IDGL']


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
        cached (bool, optional): Whether to keep the normalised graph after the first
            call and ignore :obj:`edge_index`, :obj:`edge_weight` and :obj:`batch` in
            later ones, as :class:`~torch_geometric.nn.GCNConv` does; and what is
            computed from :obj:`x` alone (sparse form, validation, kNN graph) for as
            long as it is the same, unchanged tensor. Only for a single fixed graph. It
            is not saved with the model. (default: :obj:`False`)
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
        check_at_least('in_channels', in_channels, 1, integer=True)
        check_at_least('hidden_channels', hidden_channels, 1, integer=True)
        check_at_least('num_layers', num_layers, 1, integer=True)
        check_at_least('heads', heads, 1, integer=True)
        check_at_least('k', k, 1, integer=True)
        check_at_least('max_iters', max_iters, 0, integer=True)
        if out_channels is not None:
            check_at_least('out_channels', out_channels, 1, integer=True)
        if tol is not None:
            check_at_least('tol', tol, 0)
        check_unit_interval('initial_weight', initial_weight)
        check_unit_interval('update_weight', update_weight)
        check_at_least('smoothness', smoothness, 0)
        check_at_least('connectivity', connectivity, 0)
        check_at_least('sparsity', sparsity, 0)
        if jk not in (None, 'last', 'cat', 'max', 'lstm'):
            raise ValueError(
                f"Expected 'jk' to be None or one of ['last', 'cat', 'max', 'lstm'] "
                f"(got '{jk}')"
            )
        check_probability('dropout', dropout)
        check_probability('iter_dropout', iter_dropout)
        check_probability('feature_dropout', feature_dropout)
        check_probability('graph_dropout', graph_dropout)

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
        self._cache: InputCache | None = None

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
            given = (edge_index, edge_weight, batch, batch_size)
            if any(argument is not None for argument in given):
                raise ValueError(
                    "Expected a data object to hold 'edge_index', 'edge_weight' and "
                    "'batch' (got them as arguments besides)"
                )
            return self._forward_data(x, max_iters, anchor_index, return_trace)
        if max_iters is None:
            max_iters = self.max_iters
        check_at_least('max_iters', max_iters, 0, integer=True)
        with cacheable(self.cached):
            inputs = self._inputs(x, edge_index, edge_weight, batch, batch_size)
            # Graphs are compared by small differences: mixed precision would lose them.
            with torch.autocast(inputs.signal.x.device.type, enabled=False):
                trace = self._iterate(inputs, max_iters, anchor_index)
        return (trace.out, trace) if return_trace else trace.out

    def _forward_data(self, data: Data, *options: Any) -> Any:
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
        self, inputs: Inputs, max_iters: int, anchor_index: Tensor | None
    ) -> Trace:
        """Algorithm 1."""
        signal = inputs.signal.dropout(self.feature_dropout, self.training)
        layout = signal.layout
        anchors = self._draw_anchors(layout, anchor_index)
        projected = self.backbone.project(signal.x)
        message = self.backbone.message(projected)
        announced = None if message is None else Message.of(message)
        targets = signal
        if anchors is not None:
            targets = signal.rows(anchors.index, anchors.layout)

        def learn(learner: GraphLearner, vectors, previous=None, **options):
            affinity = learner(vectors, layout, anchors, **options)
            graph = self._regularized(affinity)
            if announced is not None:
                observed = signal if self.smoothness > 0 and not anchors else None
                affinity.observe(announced, observed, previous)
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

        constant = self._constant_part(initial, first_mix)
        vectors, backend = z, None
        for _ in range(max_iters):
            vectors = where_active(active, z, vectors, layout)
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
            trace.mixed = mixed = self._mix(constant, graph)
            z = self.backbone.embed(projected, mixed, layout, self.iter_dropout)
            predictions.append(self.backbone.start_prediction(z, projected, mixed))

            trace.regs.append(where_active(active, reg, trace.regs[-1], layout))
            trace.num_iters = trace.num_iters + active
            trace.refined.append(active)
            if self.tol is None:
                continue
            scale = self._stopping_scale(trace.learned, first)
            with torch.no_grad():
                change = trace.learned.change_from(previous)
                exact = layout.device.type != 'cpu'
                active, going_on = still_changing(
                    active, change, scale, self.tol, exact
                )
            trace.changes.append(change)
            # Not the graph, which may be large, unless it stays anyway.
            trace.scales.append(first if scale is first else scale.sq_norm().detach())
            if not going_on:
                break

        first_out, *outs = self.backbone.finish_predictions(predictions)
        trace.outs.append(first_out)
        for active, out in zip(trace.refined, outs, strict=True):
            trace.outs.append(where_active(active, out, trace.outs[-1], layout))
        return trace

    # The mixture (Eq. 3) ------------------------------------------------------------

    def _mix_first(
        self, initial: Memoized, first: Affinity, graph: GraphOperator
    ) -> Mixture:
        lam, p = self.initial_weight, self.graph_dropout
        kept: GraphOperator = initial
        if self.training and p > 0:
            given = initial.graph
            assert isinstance(given, SparseGraph)
            kept = Memoized(given.with_value(dropout(given.value, p)))
            graph = ColumnScaled(first, column_mask(first, p))
            graph = RowNormalized(graph)
            graph = ColumnScaled(graph, column_mask(graph, p))
        return Mixture([(lam, kept), (1.0 - lam, Memoized(graph))])

    def _constant_part(self, initial: Memoized, first: Mixture) -> Memoized:
        eta = self.update_weight
        terms = [(eta * self.initial_weight, initial), *first.scaled(1.0 - eta)]
        return Memoized(Mixture(terms))

    def _mix(self, constant: Memoized, graph: GraphOperator) -> Mixture:
        weight = self.update_weight * (1.0 - self.initial_weight)
        return Mixture([(1.0, constant), (weight, graph)])

    # What IDGL-Anch does differently ------------------------------------------------

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

    # Inputs -------------------------------------------------------------------------

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
    ) -> Inputs:
        dtype = next(self.parameters()).dtype
        cache = self._cache if self.cached else None
        if cache is not None and (found := cache.find(x, dtype)) is not None:
            return found
        features = check_features(x, self.in_channels, dtype)
        inputs = None if cache is None else cache.renew(features, adjacency)
        if inputs is not None:
            given = True
        else:
            given = adjacency is not None
            inputs = prepare_inputs(
                features,
                adjacency,
                weight,
                batch,
                batch_size,
                k=self.k,
                normalize=self.normalize,
                add_self_loops=self.add_self_loops,
            )
        if self.cached:
            self._cache = InputCache.of(inputs, x, given) or cache
        return inputs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_cache': None}  # it is large, and quickly made

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.in_channels}, {self.out_channels}, '
            f'num_layers={self.num_layers})'
        )
