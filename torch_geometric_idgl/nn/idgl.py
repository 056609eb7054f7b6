r"""IDGL and IDGL-Anch: Algorithm 1, written once for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from ..checks import (
    check_at_least,
    check_choice,
    check_features,
    check_graph_features,
    check_probability,
    check_unit_interval,
    floating_dtype,
)
from ..graphs import AnchorGraph, Mixture, NodeGraph
from ..ops.batch import Nodes
from ..ops.features import Features, RowBlocks
from .backbone import Backbone, LayerLike, resolve_layer
from .graph_learner import GraphLearner
from .inputs import (
    Anchors,
    InputCache,
    Inputs,
    Part,
    arrange,
    given_anchors,
    initial_graph,
    knn_initial_graph,
    prepare,
    sample_anchors,
)
from .loss import Stopping, graph_loss
from .similarity import MetricLike
from .trace import Trace

__all__ = ['IDGL', 'IDGLAnch']


class _Asked(NamedTuple):
    """What is asked of every learned graph of a pass."""

    nodes: Nodes  # between all pairs of these nodes,
    anchors: Anchors | None  # or between nodes and anchors
    message: Tensor  # its products with what enters the first layer, and with ones
    features: Features | None  # the smoothness of these features on it
    norm: bool  # its squared norm
    # How many columns later products will have: with the first graph, with others.
    later_first: tuple[int, ...]
    later: tuple[int, ...]
    block_size: int | None  # for so many nodes at a time, in inference
    weights: Any  # its regulariser with these weights; without, only the last outputs


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
    :meth:`forward`:

    .. code-block:: python

        model = IDGL(dataset.num_features, 16, num_layers=2, dropout=0.5,
                     out_channels=dataset.num_classes)
        out, trace = model(data.x, data.edge_index, return_trace=True)
        loss = trace.loss(lambda out: F.cross_entropy(out[mask], data.y[mask]))

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
            convolution that takes :obj:`edge_weight` (one that normalises the graph is
            told not to: the mixed graph is normalised). (default: :obj:`"gcn"`)
        metric (str or torch.nn.Module or Callable, optional): The similarity metric:
            :obj:`"weighted_cosine"`, :obj:`"cosine"`, :obj:`"rbf"`,
            :obj:`"attention"`, or a module (or a function from input channels to one)
            that compares two sets of vectors. A module is used as it is, not copied, by
            both learners. (default: :obj:`"weighted_cosine"`)
        heads (int, optional): Number of heads :math:`m` of the metric.
            (default: :obj:`4`)
        epsilon (float, optional): The threshold :math:`\varepsilon`: similarities of at
            most this are set to zero. (default: :obj:`0.`)
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
        graph_dropout (float, optional): Dropout on the mixed first graph, after
            normalising: on every entry of the initial graph, and on the sending nodes
            (columns) of the first learned graph; of an initial kNN graph that is
            complete, on the sending nodes too. In a row, entries of each of the two are
            dropped independently; that rows share the mask of the learned graph makes
            it possible without an :math:`n \times n` matrix. (The paper's code has one
            mask for all entries of the mixture.) The regulariser and the stopping
            criterion see the graph without dropout. (default: :obj:`0.`)
        add_self_loops (bool, optional): Whether to add self-loops to the initial graph.
            (default: :obj:`True`)
        normalize (bool, optional): Whether to normalise the initial graph
            symmetrically. (default: :obj:`True`)
        graph_channels (int, optional): Size of the features :obj:`graph_x` that graphs
            are learned from, where these are others than those that enter the GNN: the
            first learned graph, the kNN graph and the smoothness are then of them. With
            word vectors, for example, while the GNN starts from what a language model
            makes of them. (default: :obj:`None`)
        cached (bool, optional): Whether to keep the normalised graph after the first
            call and ignore :obj:`edge_index`, :obj:`edge_weight` and :obj:`batch` in
            later ones, as :class:`~torch_geometric.nn.GCNConv` does; and what is
            computed from :obj:`x` alone (sparse form, validation, kNN graph) for as
            long as its values stay the same. Only for a single fixed graph. It is not
            saved with the model. (default: :obj:`False`)
        backend (str, optional): How learned graphs are computed: :obj:`"auto"`,
            :obj:`"dense"`, :obj:`"low_rank"`, :obj:`"tiled"` or :obj:`"sparse"`. All
            give the same results; see
            :class:`~torch_geometric_idgl.nn.GraphLearner`. (default: :obj:`"auto"`)
        checkpoint_iters (bool, optional): Whether refinements are computed once more
            in backward instead of being kept: less memory for more time, with the same
            results. (default: :obj:`False`)
    """

    # What learned graphs are: all pairs of nodes (Eq. 1, 3), regularised as they are.
    _graph_type: type[NodeGraph] | type[AnchorGraph] = NodeGraph
    scale_regularizer = False

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
        backbone: LayerLike | Backbone = 'gcn',
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
        graph_channels: int | None = None,
        cached: bool = False,
        backend: str = 'auto',
        checkpoint_iters: bool = False,
    ) -> None:
        super().__init__()
        for name, number in [
            ('in_channels', in_channels),
            ('hidden_channels', hidden_channels),
            ('num_layers', num_layers),
            ('out_channels', hidden_channels if out_channels is None else out_channels),
            ('k', k),
            ('graph_channels', 1 if graph_channels is None else graph_channels),
        ]:
            check_at_least(name, number, 1, integer=True)
        check_at_least('max_iters', max_iters, 0, integer=True)
        check_at_least('tol', 0 if tol is None else tol, 0)
        check_at_least('smoothness', smoothness, 0)
        check_at_least('connectivity', connectivity, 0)
        check_at_least('sparsity', sparsity, 0)
        check_unit_interval('initial_weight', initial_weight)
        check_unit_interval('update_weight', update_weight)
        iter_dropout = dropout if iter_dropout is None else iter_dropout
        check_probability('dropout', dropout)
        check_probability('iter_dropout', iter_dropout)
        check_probability('feature_dropout', feature_dropout)
        check_probability('graph_dropout', graph_dropout)
        for name, value in [('act', act), ('norm', norm)]:
            if not (value is None or isinstance(value, str) or callable(value)):
                raise TypeError(
                    f"Expected '{name}' to be a name, a callable or None "
                    f'(got {value!r})'
                )
        check_choice('jk', jk, (None, 'last', 'cat', 'max', 'lstm'))

        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.dropout = dropout
        self.k = k
        self.initial_weight = initial_weight
        self.update_weight = update_weight
        self.tol = tol
        self.max_iters = max_iters
        self.smoothness = smoothness
        self.connectivity = connectivity
        self.sparsity = sparsity
        self.iter_dropout = iter_dropout
        self.feature_dropout = feature_dropout
        self.graph_dropout = graph_dropout
        self.add_self_loops = add_self_loops
        self.normalize = normalize
        self.graph_channels = graph_channels
        self.cached = cached
        self.checkpoint_iters = checkpoint_iters

        if not isinstance(backbone, Backbone):
            backbone = Backbone(
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
                resolve_layer(backbone, bias),
            )
        self.backbone = backbone
        self.out_channels = backbone.out_channels
        options = (metric, heads, epsilon, top_k, backend)
        self.feature_learner = GraphLearner(graph_channels or in_channels, *options)
        self.embedding_learner = GraphLearner(backbone.embedding_channels, *options)
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
        graph_x: Tensor | None = None,
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
                and each stops by itself. Graphs of more than 128 nodes are refined one
                after another; smaller ones in two groups, up to 16 nodes and up to 128,
                each until the last of them has stopped. (default: :obj:`None`)
            batch_size (int, optional): The number of graphs. (default: :obj:`None`)
            graph_x (torch.Tensor, optional): The features that graphs are learned from,
                for a model with :obj:`graph_channels`. (default: :obj:`None`)
            max_iters (int, optional): Overrides the model's for this call; with
                :obj:`0`, a phase of training without iteration.
                (default: :obj:`None`)
            anchor_index (torch.Tensor, optional): The anchors to use, for
                :class:`IDGLAnch`; those of the data object if it holds some.
                (default: :obj:`None`)
            return_trace (bool, optional): Whether to return a
                :class:`~torch_geometric_idgl.nn.Trace` as well, which gives the joint
                loss. (default: :obj:`False`)

        Returns:
            The outputs (logits) of the last iteration and, if asked for, the trace.
        """
        if isinstance(x, Data):
            given = (edge_index, edge_weight, batch, batch_size, graph_x)
            arguments = self._of_data(x, *given, anchor_index=anchor_index)
            x, edge_index, edge_weight, batch, batch_size, graph_x, anchor_index = (
                arguments
            )
        if max_iters is None:
            max_iters = self.max_iters
        else:
            check_at_least('max_iters', max_iters, 0, integer=True)
        with _cacheable(self.cached):
            inputs = self._inputs(
                x, graph_x, edge_index, edge_weight, batch, batch_size
            )
            nodes = inputs.x.nodes
            anchors = self._anchors(nodes, anchor_index)
            # Graphs are compared by small differences: mixed precision would lose them.
            with torch.autocast(nodes.device.type, enabled=False):
                traces = []
                for part in inputs.parts:
                    own = None if anchors is None else inputs.anchors_of(part, anchors)
                    traces.append(self._iterate(part, own, max_iters, return_trace))
        trace = traces[0]
        if trace.nodes is not nodes:
            graphs = [part.graphs for part in inputs.parts]
            trace = Trace.joined(traces, graphs, nodes)
        return (trace.out, trace) if return_trace else trace.out

    def _iterate(
        self, part: Part, anchors: Anchors | None, max_iters: int, full: bool
    ) -> Trace:
        """Algorithm 1. Without a full trace, only what the last outputs need."""
        lam, eta = self.initial_weight, self.update_weight
        drop = self.graph_dropout if self.training else 0.0
        x, features = part.dropout(self.feature_dropout if self.training else 0.0)
        nodes = x.nodes
        projected, message = self.backbone.project(x)  # X W: the same for all graphs
        initial = part.initial.multiplied(message)
        asked = self._asked(features, message, anchors, max_iters, full)

        graph = self._learn(self.feature_learner, features, asked, drop=drop)  # Eq. 1
        kept = initial.dropout(drop, message) if drop > 0 else initial
        mixed = Mixture((lam, kept), (1.0 - lam, graph))  # Eq. 3
        # Eq. 3 is η λ L + (1 − η) Ã(1) + η (1 − λ) f(A(t)), where only f(A(t)) changes.
        constant = Mixture((eta * lam, initial), (1.0 - eta, mixed))
        z, last = self.backbone.embed(projected, mixed, nodes, self.dropout)  # Eq. 4
        trace = Trace(nodes, part.initial, graph.affinity, graph.affinity, mixed)
        drafts = []  # outputs on refined graphs, still without the part of `constant`
        if full:
            trace.regs.append(graph_loss(graph, *asked.weights))  # Eq. 10, 11
            trace.outs.append(self.backbone.predict(last, mixed))
        if full and not self.training:  # to look at
            trace.graphs.append(graph.affinity.light())
        stopping = None if self.tol is None else Stopping(graph, self.tol)
        active = torch.ones_like(trace.num_iters, dtype=torch.bool)
        vectors, backend = z, None
        refine = self._recomputed if self.checkpoint_iters else self._refine

        for t in range(1, max_iters + 1):
            vectors = nodes.where(active, z, vectors)  # stopped graphs keep theirs
            backend = backend or self._embedding_backend(vectors, asked)
            previous = graph if stopping and (full or t < max_iters) else None
            weight = eta * (1.0 - lam)
            graph, mixed, z, last, reg, draft = refine(
                vectors, asked, previous, backend, constant, weight, projected
            )
            trace.add(graph.affinity, mixed, active, reg)
            drafts.append(draft)
            if full and not self.training:
                trace.graphs.append(graph.affinity.light())
            if stopping and previous is not None:
                trace.changes.append((graph.sq_dist, graph.lacks_norm, graph.own_norm))
                active, going_on = stopping.still_changing(graph, active)
                if not going_on:
                    break

        if full:
            trace.add_outs(self.backbone.finish(drafts, constant))
        else:
            trace.outs.append(self.backbone.predict(last, mixed))
        return trace

    def _refine(
        self,
        vectors: Tensor,
        asked: _Asked,
        previous: Any,
        backend: str,
        constant: Mixture,
        weight: float,
        projected: Any,
    ) -> tuple[Any, ...]:
        """One refinement: the graph of the embeddings, and the embeddings on it."""
        graph = self._learn(self.embedding_learner, vectors, asked, previous, backend)
        mixed = Mixture((1.0, constant), (weight, graph))  # Eq. 3
        z, last = self.backbone.embed(projected, mixed, asked.nodes, self.iter_dropout)
        if asked.weights is None:
            return graph, mixed, z, last, None, None
        reg = graph_loss(graph, *asked.weights)  # Eq. 10, 11
        draft = self.backbone.draft(last, mixed, graph, weight)
        return graph, mixed, z, last, reg, draft

    def _recomputed(self, *arguments: Any) -> tuple[Any, ...]:
        """A refinement that is not kept for backward, but computed once more."""
        constant = arguments[4]
        before = [(slots, [*slots]) for slots in constant.slots]

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), _once_more(self.backbone, before)

        return checkpoint(
            self._refine, *arguments, use_reentrant=False, context_fn=contexts
        )

    def _asked(
        self,
        x: Features,
        message: Tensor | None,
        anchors: Anchors | None,
        max_iters: int,
        full: bool,
    ) -> _Asked:
        nodes = x.nodes
        ones = torch.ones(nodes.num_rows, 1, dtype=x.dtype, device=x.device)
        both = ones if message is None else torch.cat([message, ones], dim=1)
        weights = (self.smoothness, self.connectivity, self.sparsity)
        smooth = full and self.smoothness > 0
        if smooth and anchors is not None:
            x = x.rows(anchors.index, anchors.nodes)
        return _Asked(
            nodes,
            anchors,
            both,
            x if smooth else None,
            full and self.sparsity > 0,
            self.backbone.later_channels(1 + max_iters),
            self.backbone.later_channels(),
            x.block_size,
            (*weights, self.scale_regularizer) if full else None,
        )

    def _learn(
        self,
        learner: GraphLearner,
        vectors: Tensor | Features,
        asked: _Asked,
        previous: Any = None,
        backend: str | None = None,
        drop: float = 0.0,
    ) -> Any:
        """A graph of the given vectors, and what is asked of it."""
        nodes, anchors, message, features, norm, later_first, later, size, _ = asked
        nonnegative = self.backbone.nonnegative  # Raw features know it themselves.
        affinity = learner(vectors, nodes, anchors, nonnegative, backend, size)
        later = later_first if learner is self.feature_learner else later
        asking = (message, features, previous, norm, later, drop)
        return self._graph_type(affinity, *asking)

    def _embedding_backend(self, z: Tensor, asked: _Asked) -> str:
        learner = self.embedding_learner
        known = learner.backend != 'auto' or asked.block_size is not None
        if known or self.backbone.nonnegative is None:
            return learner.backend  # Where signs are not known, each graph chooses.
        return learner.choose_backend(
            z, asked.nodes, asked.anchors, self.backbone.nonnegative
        )

    def _anchors(self, nodes: Nodes, index: Tensor | None) -> Anchors | None:
        if index is not None:
            raise ValueError(
                f"Expected no 'anchor_index' for {self.__class__.__name__}, which has "
                f"no anchors (got one); use 'IDGLAnch'"
            )
        return None

    def _of_data(self, data: Data, *given: Any, anchor_index: Any) -> tuple[Any, ...]:
        """What a data object holds, in place of the arguments that are not given."""
        if any(argument is not None for argument in given):
            raise ValueError(
                "Expected a data object to hold 'edge_index', 'edge_weight', "
                "'batch' and 'graph_x' (got them as arguments besides)"
            )
        graph_x = None if self.graph_channels is None else data.get('graph_x')
        if anchor_index is None and self._graph_type is AnchorGraph:
            anchor_index = data.get('anchor_index')
        return (*_unpacked(data), graph_x, anchor_index)

    def _inputs(
        self,
        x: Tensor,
        graph_x: Tensor | None,
        adjacency: Any,
        weight: Tensor | None,
        batch: Tensor | None,
        batch_size: int | None,
    ) -> Inputs:
        if hasattr(adjacency, 'check'):  # rows that are spread over processes
            adjacency.check(self)
        dtype = floating_dtype(self)
        cache = self._cache if self.cached else None
        if cache is not None and (found := cache.find(x, graph_x, dtype)) is not None:
            return found
        x = check_features(x, self.in_channels, dtype)
        if graph_x is not None or self.graph_channels is not None:
            graph_x = check_graph_features(graph_x, self.graph_channels, x)
        given = None if cache is None else cache.graph_for(x, adjacency)
        together = self.backbone.mixes_graphs
        if given is not None:
            inputs = arrange(x, graph_x, given.rows, given, self.k, together)
        else:
            inputs = prepare(
                x,
                graph_x,
                adjacency,
                weight,
                batch,
                batch_size,
                k=self.k,
                normalize=self.normalize,
                add_self_loops=self.add_self_loops,
                together=together,
            )
        if self.cached:
            self._cache = InputCache.of(inputs, x, graph_x) or cache
        return inputs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_cache': None}  # it is large, and quickly made

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

    The regulariser is of a graph of the :math:`s` anchors,
    :math:`\widehat{\mathbf{B}} = \mathbf{R}^{\top} \mathbf{\Delta}^{-1} \mathbf{R}`
    with :math:`\Delta_{ii} = \sum_k R_{ik}`. The paper takes it as it is. Its entries
    grow like :math:`n / s`: with few anchors the regulariser outweighs the prediction
    loss, weights shrink to nothing, and outputs collapse. So here it is
    :math:`\frac{s}{n} \widehat{\mathbf{B}}` unless asked otherwise
    (:obj:`scale_regularizer`). Its size does not depend on :math:`s`: the columns of
    :math:`\mathbf{R}` are :math:`s` of the :math:`n` columns of :math:`\mathbf{A}`, the
    similarities of all pairs. With the row sums :math:`\mathbf{D}` of these,
    :math:`\Delta_{ii} \approx \frac{s}{n} D_{ii}`, and

    .. math::
        \frac{s}{n} \widehat{B}_{kl} = \frac{s}{n} \sum_i \frac{R_{ik} R_{il}}
        {\Delta_{ii}} \approx \sum_i \frac{A_{ik} A_{il}}{D_{ii}} =
        (\mathbf{A} \mathbf{D}^{-1} \mathbf{A})_{kl}

    These are two steps on :math:`\mathbf{A}`, with the same row sums. Smoothness and
    squared norm are means over pairs, of anchors here and of nodes in :class:`IDGL`, so
    their size is about the same in both. Degrees are :math:`\frac{s}{n}` times those of
    :math:`\mathbf{A}`, which adds the constant :math:`\beta \log \frac{n}{s}` to the
    loss, and nothing to its gradient.

    Arguments that are not listed are those of :class:`IDGL`.

    Args:
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        num_layers (int): Number of message passing layers.
        num_anchors (int, optional): The number :math:`s` of anchors of each graph (at
            most all its nodes). The paper has 1,000 for Cora, where many fewer do with
            the scaled regulariser, and 300 for its largest graph.
            (default: :obj:`300`)
        anchor_ratio (float, optional): The share of nodes that are anchors, instead of
            a number. (default: :obj:`None`)
        anchor_sampling (str, optional): :obj:`"seeded"` draws anchors anew at each
            forward in training, and takes the same ones whenever it evaluates;
            :obj:`"resample"` draws them anew in evaluation too, as the paper's code
            does; :obj:`"fixed"` always takes the same. (default: :obj:`"seeded"`)
        anchor_seed (int, optional): The seed of seeded and fixed anchors, saved with
            the model's state. (default: :obj:`0`)
        scale_regularizer (bool, optional): Whether to regularise :math:`\frac{s}{n}
            \widehat{\mathbf{B}}`, or :math:`\widehat{\mathbf{B}}` as in the paper.
            (default: :obj:`True`)
        tol (float, optional): The share :math:`\delta` by which :math:`\mathbf{R}`
            changes, relative to its own norm. (default: :obj:`8.5e-5`)
        sparsity (float, optional): See :class:`IDGL`. (default: :obj:`0.1`)
        graph_dropout (float, optional): Dropout on the mixed first graph: on every
            entry of the initial graph, and on the anchors of the first learned graph.
            (default: :obj:`0.`)
    """

    # Nodes and anchors (Eq. 2, 9), regularised as the graph of the anchors.
    _graph_type = AnchorGraph

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
        num_anchors: int = 300,
        anchor_ratio: float | None = None,
        anchor_sampling: str = 'seeded',
        anchor_seed: int = 0,
        scale_regularizer: bool = True,
        bias: bool = False,
        backbone: LayerLike | Backbone = 'gcn',
        metric: MetricLike = 'weighted_cosine',
        heads: int = 4,
        epsilon: float = 0.0,
        top_k: int | None = None,
        k: int = 20,
        initial_weight: float = 0.8,
        update_weight: float = 0.1,
        tol: float | None = 8.5e-5,
        max_iters: int = 10,
        smoothness: float = 0.2,
        connectivity: float = 0.0,
        sparsity: float = 0.1,
        iter_dropout: float | None = None,
        feature_dropout: float = 0.0,
        graph_dropout: float = 0.0,
        add_self_loops: bool = True,
        normalize: bool = True,
        graph_channels: int | None = None,
        cached: bool = False,
        backend: str = 'auto',
        checkpoint_iters: bool = False,
    ) -> None:
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            out_channels,
            dropout,
            act,
            act_first,
            act_kwargs,
            norm,
            norm_kwargs,
            jk,
            bias=bias,
            backbone=backbone,
            metric=metric,
            heads=heads,
            epsilon=epsilon,
            top_k=top_k,
            k=k,
            initial_weight=initial_weight,
            update_weight=update_weight,
            tol=tol,
            max_iters=max_iters,
            smoothness=smoothness,
            connectivity=connectivity,
            sparsity=sparsity,
            iter_dropout=iter_dropout,
            feature_dropout=feature_dropout,
            graph_dropout=graph_dropout,
            add_self_loops=add_self_loops,
            normalize=normalize,
            graph_channels=graph_channels,
            cached=cached,
            backend=backend,
            checkpoint_iters=checkpoint_iters,
        )
        check_at_least('num_anchors', num_anchors, 1, integer=True)
        if anchor_ratio is not None:
            check_unit_interval('anchor_ratio', anchor_ratio, open_left=True)
        check_choice(
            'anchor_sampling', anchor_sampling, ('seeded', 'resample', 'fixed')
        )
        check_at_least('anchor_seed', anchor_seed, 0, integer=True)
        if anchor_seed >= 2**63:
            raise ValueError(
                f"Expected 'anchor_seed' to be below 2**63 (got {anchor_seed})"
            )
        self.num_anchors = num_anchors
        self.anchor_ratio = anchor_ratio
        self.anchor_sampling = anchor_sampling
        self.scale_regularizer = scale_regularizer
        # A buffer: a model that is loaded evaluates with the anchors of the saved one.
        self.register_buffer('anchor_seed', torch.tensor(anchor_seed))

    def draw_anchors(self, num_nodes: int) -> Tensor:
        r"""The anchors of a graph, as :obj:`anchor_sampling` says: in training mode or
        in evaluation mode, whichever the model is in.

        Args:
            num_nodes (int): The number of nodes.
        """
        check_at_least('num_nodes', num_nodes, 1, integer=True)
        return self._anchors(Nodes((num_nodes,), torch.device('cpu')), None).index

    @torch.no_grad()
    def inference(
        self,
        x: Any,
        edge_index: Any = None,
        edge_weight: Tensor | None = None,
        *,
        graph_x: Tensor | None = None,
        max_iters: int | None = None,
        anchor_index: Tensor | None = None,
        batch_size: int = 4096,
    ) -> Tensor:
        r"""The outputs for all nodes of a large graph, in little memory.

        They are those of :meth:`forward` in evaluation mode. Layers run on all nodes
        one after another, so beside the graph a few matrices of the size of their
        outputs are held. Affinities to anchors are made for :obj:`batch_size` nodes at
        a time, used and dropped, and made again for the next product, which takes
        longer. Features may stay on the CPU while the model is on a GPU.

        GNNs of one's own (:func:`~torch_geometric_idgl.nn.to_idgl`) still get all
        features at once, and layers that need a list of edges that of the whole learned
        graph.

        Args:
            x (torch.Tensor or Data): The node features, on any device; or a data object
                that holds all the inputs.
            edge_index (torch.Tensor or EdgeIndex or SparseTensor, optional): The
                initial graph. If not given, a cosine kNN graph, for which all features
                are moved to the device. (default: :obj:`None`)
            edge_weight (torch.Tensor, optional): The weights of its edges.
                (default: :obj:`None`)
            graph_x (torch.Tensor, optional): See :meth:`forward`.
                (default: :obj:`None`)
            max_iters (int, optional): See :meth:`forward`. (default: :obj:`None`)
            anchor_index (torch.Tensor, optional): The anchors to use.
                (default: :obj:`None`)
            batch_size (int, optional): The number of nodes whose features and
                affinities are on the device at a time. (default: :obj:`4096`)
        """
        if self.training:
            raise RuntimeError(
                'Expected the model to be in evaluation mode (got one in training); '
                "call 'model.eval()' first"
            )
        check_at_least('batch_size', batch_size, 1, integer=True)
        if isinstance(x, Data):
            arguments = self._of_data(
                x, edge_index, edge_weight, graph_x, anchor_index=anchor_index
            )
            x, edge_index, edge_weight, batch, _, graph_x, anchor_index = arguments
            if batch is not None or hasattr(edge_index, 'check'):
                what = 'a batch of graphs' if batch is not None else 'nodes of one rank'
                raise ValueError(
                    f"Expected one whole graph (got {what}); call 'model(data)'"
                )
        max_iters = self.max_iters if max_iters is None else max_iters
        check_at_least('max_iters', max_iters, 0, integer=True)
        x = check_features(x, self.in_channels, floating_dtype(self))
        if graph_x is not None or self.graph_channels is not None:
            graph_x = check_graph_features(graph_x, self.graph_channels, x)
        device: Any = self.anchor_seed.device
        nodes = Nodes((x.size(0),), device)
        if hasattr(edge_index, 'to'):
            edge_index = edge_index.to(device)
        if isinstance(edge_weight, Tensor):
            edge_weight = edge_weight.to(device)
        options = (self.normalize, self.add_self_loops)
        given = initial_graph(edge_index, edge_weight, nodes, x.dtype, *options)
        features = own = Features(RowBlocks(x, device, batch_size), nodes)
        if graph_x is not None:
            features = Features(RowBlocks(graph_x, device, batch_size), nodes)
        part = Part(own, features, given or knn_initial_graph(features, self.k), [0])
        with torch.autocast(device.type, enabled=False):
            anchors = self._anchors(nodes, anchor_index)
            return self._iterate(part, anchors, max_iters, full=False).out

    def _anchors(self, nodes: Nodes, index: Tensor | None) -> Anchors:
        if index is not None:
            return given_anchors(nodes.whole, index)
        seeded = self.anchor_sampling == 'seeded' and not self.training
        seeded = seeded or self.anchor_sampling == 'fixed'
        seed = int(self.anchor_seed) if seeded else None  # type: ignore[arg-type]
        whole = nodes.whole
        anchors = sample_anchors(whole, self.num_anchors, self.anchor_ratio, seed)
        return anchors._replace(index=nodes.same(anchors.index))


def _unpacked(data: Data) -> tuple[Any, Any, Any, Any, Any]:
    """Features, graph, weights, and the graphs of the nodes."""
    if data.x is None:
        raise ValueError("Expected 'data' to hold node features 'x' (got none)")
    graph = data.get('edge_index')
    graph = data.get('adj_t') if graph is None else graph
    batch = data.get('batch')
    batch_size = None if batch is None else getattr(data, 'num_graphs', None)
    return data.x, graph, data.get('edge_weight'), batch, batch_size


@contextmanager
def _once_more(
    module: Module, slots: list[tuple[list[Tensor], list[Tensor]]]
) -> Iterator[None]:
    """Batch norms see what they have seen before: their statistics stay. Products with
    graphs take the slots that they took before.
    """
    left = [[*now] for now, _ in slots]
    for now, then in slots:
        now[:] = then
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
        for (now, _), rest in zip(slots, left, strict=True):
            now[:] = rest


def _cacheable(cached: bool) -> Any:
    """Inference mode makes tensors that no later step can use: what is kept for later
    ones is made without it, and without gradients.
    """
    if not (cached and torch.is_inference_mode_enabled()):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack
