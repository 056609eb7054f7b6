r"""IDGL around a GNN of one's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import Sequential
from torch_geometric.nn.inits import reset

from ..checks import check_at_least, floating_dtype
from ..graphs import DenseGraph, GraphOperator
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.sparse import SparseMatrix
from .backbone import Backbone
from .convert import LearnedEdges, SparseInput, convert, first_of, version_of
from .idgl import IDGL, IDGLAnch

__all__ = ['WrappedGNN', 'to_idgl']

# Arguments of IDGL that say what its GNN is, which the module has decided already.
_OF_THE_GNN = (
    'hidden_channels',
    'num_layers',
    'out_channels',
    'dropout',
    'act',
    'act_first',
    'act_kwargs',
    'norm',
    'norm_kwargs',
    'jk',
    'bias',
    'backbone',
    'iter_dropout',
)
_GRAPH_NAMES = ('edge_index', 'adj_t', 'adj')


def to_idgl(
    module: Module,
    in_channels: int,
    *,
    num_anchors: int | None = None,
    embedding: str | None = None,
    **kwargs: Any,
) -> IDGL:
    r"""Converts a GNN into an :class:`IDGL` model that learns the graph it runs on, or
    into an :class:`IDGLAnch` model if it is given anchors.

    The model holds a copy of :obj:`module`, with its weights; :obj:`module` itself is
    not changed. In the copy, graph convolutions pass messages over the mixed graph
    :math:`\widetilde{\mathbf{A}}` as it is. It is weighted and normalised, and has
    self-loops, so their own options about that are without effect; those of
    :class:`IDGL` decide.

    .. list-table::
        :header-rows: 1

        * - Convolution
          - On the mixed graph
        * - :class:`~torch_geometric.nn.GCNConv`
          - :math:`\widetilde{\mathbf{A}} \mathbf{X} \mathbf{W} + \mathbf{b}`
        * - :class:`~torch_geometric.nn.SAGEConv`,
            :class:`~torch_geometric.nn.GraphConv`
          - :math:`\mathbf{X} \mathbf{W}_1 + \widetilde{\mathbf{A}} \mathbf{X}
            \mathbf{W}_2 + \mathbf{b}`; sums and means are the same
        * - :class:`~torch_geometric.nn.GINConv`
          - :math:`\mathrm{MLP}((1 + \epsilon) \mathbf{X} + \widetilde{\mathbf{A}}
            \mathbf{X})`
        * - :class:`~torch_geometric.nn.TAGConv`
          - :math:`\sum_{k=0}^{K} \widetilde{\mathbf{A}}^k \mathbf{X} \mathbf{W}_k +
            \mathbf{b}`
        * - :class:`~torch_geometric.nn.SGConv`
          - :math:`\widetilde{\mathbf{A}}^K \mathbf{X} \mathbf{W} + \mathbf{b}`
        * - :class:`~torch_geometric.nn.APPNP`
          - :math:`\mathbf{Z} \leftarrow (1 - \alpha) \widetilde{\mathbf{A}} \mathbf{Z}
            + \alpha \mathbf{X}`, :math:`K` times
        * - any other with :obj:`edge_weight` in its :meth:`forward`
          - its own computation on the edges of :math:`\widetilde{\mathbf{A}}`, which
            can be all pairs of nodes

    Those without :obj:`edge_weight`, such as :class:`~torch_geometric.nn.GATConv`, are
    refused, and so is a module that looks at :obj:`edge_index` itself.

    .. code-block:: python

        class Net(torch.nn.Module):
            def __init__(self, in_channels, hidden_channels, out_channels):
                super().__init__()
                self.conv1 = GCNConv(in_channels, hidden_channels)
                self.conv2 = GCNConv(hidden_channels, out_channels)

            def forward(self, x, edge_index, edge_weight=None):
                x = F.dropout(x, p=0.5, training=self.training)
                x = self.conv1(x, edge_index, edge_weight).relu()
                x = F.dropout(x, p=0.5, training=self.training)
                return self.conv2(x, edge_index, edge_weight)

        model = to_idgl(Net(1433, 16, 7), in_channels=1433)
        out, trace = model(data.x, data.edge_index, return_trace=True)
        loss = trace.loss(lambda out: F.cross_entropy(out[mask], data.y[mask]))

    Args:
        module (torch.nn.Module): The GNN, with a row of outputs for each node. Its
            :meth:`forward` takes features and graph (:obj:`x, edge_index`), and
            possibly :obj:`edge_weight`, :obj:`edge_attr` (both get :obj:`None`),
            :obj:`batch` and :obj:`batch_size`; or a data object with these. Parameters
            that are to be initialised lazily are initialised.
        in_channels (int): Size of each input sample.
        num_anchors (int, optional): The number of anchors of each graph; if given (or
            :obj:`anchor_ratio`), the model is an :class:`IDGLAnch`.
            (default: :obj:`None`)
        embedding (str, optional): The name of the submodule whose input are the
            embeddings :math:`\mathbf{Z}` that graphs are refined from. If not given,
            the last graph convolution that runs; where what enters that one does not
            depend on the graph (there may be only one), its output is taken.
            (default: :obj:`None`)
        **kwargs (optional): Arguments of :class:`IDGL` (or :class:`IDGLAnch`) that are
            about learning graphs, such as :obj:`heads`, :obj:`epsilon` or
            :obj:`initial_weight`; not those about its GNN, such as :obj:`dropout`.
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"Expected 'module' to be a 'torch.nn.Module' "
            f"(got '{type(module).__name__}')"
        )
    check_at_least('in_channels', in_channels, 1, integer=True)
    if decided := [repr(name) for name in _OF_THE_GNN if name in kwargs]:
        raise TypeError(
            f'Expected arguments about learning graphs only, because the module has '
            f'layers and dropout of its own (got {", ".join(decided)})'
        )
    if num_anchors is not None:
        kwargs['num_anchors'] = num_anchors
    anchored = num_anchors is not None or kwargs.get('anchor_ratio') is not None
    backbone = WrappedGNN(module, in_channels, embedding)
    model = (IDGLAnch if anchored else IDGL)(
        in_channels,
        backbone.embedding_channels,
        backbone.num_layers,
        backbone.out_channels,
        backbone=backbone,
        **kwargs,
    )
    model.training = module.training
    for learner in (model.feature_learner, model.embedding_learner):
        learner.to(_device(module), floating_dtype(backbone)).train(module.training)
    return model


class WrappedGNN(Backbone):
    r"""A copy of a GNN that runs on graph operators.

    Nothing is shared between graphs: the module may do anything with its inputs before
    the first convolution, such as drop out other entries each time.

    Args:
        module (torch.nn.Module): The GNN.
        in_channels (int): Size of each input sample.
        embedding (str, optional): The submodule whose input are the embeddings.
            (default: :obj:`None`)
    """

    def __init__(
        self, module: Module, in_channels: int, embedding: str | None = None
    ) -> None:
        Module.__init__(self)  # It has no layers but the module's.
        self.module = copy.deepcopy(module)
        self.training = module.training
        self.nonnegative = None  # Whatever comes before Z: it is measured.
        self.mixes_graphs = True  # The module may do anything with a batch.
        convs = convert(self.module)
        self.roles = _roles(self.module)
        parts = dict(self.module.named_modules(remove_duplicate=False))
        if embedding is not None and (not embedding or embedding not in parts):
            raise ValueError(
                f"Expected 'embedding' to name a submodule, one of {[*parts][1:]} "
                f'(got {embedding!r})'
            )
        watched = convs if embedding is None else [embedding]
        edges, out, inputs, outputs = self._try(in_channels, watched)
        self.num_layers = len(edges.entered)
        self.widths = tuple(edges.widths)
        self.out_channels = out.size(1)

        # Graphs are refined from what enters this submodule (or leaves it).
        last = edges.entered[-1]
        self.embedding: str = embedding or next(n for n in convs if parts[n] is last)
        self.after = False
        if self.embedding not in inputs:
            raise ValueError(
                f"Expected 'embedding' to name a submodule that runs (got "
                f'{embedding!r}, which does not)'
            )
        z = inputs[self.embedding]
        if isinstance(z, Tensor) and not edges.influences(z):
            if embedding is not None:
                raise ValueError(
                    f"Expected 'embedding' to name a submodule whose input depends on "
                    f'the graph (got {embedding!r}, which comes before any graph '
                    f'convolution)'
                )
            z, self.after = outputs[self.embedding], True
        if not isinstance(z, Tensor) or z.dim() != 2 or z.size(0) != out.size(0):
            got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f'Expected embeddings to be a matrix with a row for each node (got '
                f"{got} at '{self.embedding}'); name another submodule by 'embedding'"
            )
        self.embedding_channels = z.size(1)

    def reset_parameters(self) -> None:
        reset(self.module)

    def later_channels(self, num_graphs: int = 1) -> tuple[int, ...]:
        return self.widths * num_graphs

    def project(self, x: Features) -> tuple[Tensor, None]:
        value = x.value
        if isinstance(value, SparseMatrix):
            return SparseInput.of(value), None
        return value.to_dense(), None

    def embed(
        self, projected: Tensor, graph: GraphOperator, nodes: Nodes, p: float
    ) -> tuple[Tensor, Tensor]:
        found = []
        part = self.module.get_submodule(self.embedding)
        if self.after:
            handle = part.register_forward_hook(lambda _, args, out: found.append(out))
        else:
            handle = part.register_forward_pre_hook(
                lambda _, args, kwargs: found.append(first_of(args, kwargs)),
                with_kwargs=True,
            )
        with handle:
            out = self._run(projected, LearnedEdges(graph), nodes)
        if not found:
            raise RuntimeError(
                f"Expected the module to run '{self.embedding}' in every pass, because "
                f'graphs are refined from what enters it (got a pass without)'
            )
        return found[-1], out

    def predict(self, last: Tensor, graph: GraphOperator) -> Tensor:
        return last

    def draft(
        self, last: Tensor, mixed: GraphOperator, graph: GraphOperator, weight: float
    ) -> Tensor:
        return last

    def _run(self, x: Tensor, edges: LearnedEdges, nodes: Nodes) -> Tensor:
        values = {
            'x': x,
            'graph': edges,
            'batch': nodes.batch,
            'batch_size': nodes.num_graphs,
            'nothing': None,
        }
        if 'data' in self.roles.values():
            values['data'] = Data(
                x=x, edge_index=edges, edge_weight=None, batch=nodes.batch
            )
        version = version_of(x)
        out = self.module(**{name: values[role] for name, role in self.roles.items()})
        if version_of(x) != version:
            raise RuntimeError(
                "Expected the module to leave its input 'x' as it is, because every "
                'iteration starts from it (got one changed in place)'
            )
        return out

    def _try(
        self, in_channels: int, watched: list[str]
    ) -> tuple[LearnedEdges, Tensor, dict[str, Any], dict[str, Any]]:
        """Runs the module on two nodes. Gives the edges that have met its convolutions,
        the outputs, and what entered and left the watched submodules.
        """
        device, dtype = _device(self.module), floating_dtype(self.module)
        nodes = Nodes((2,), device)
        value = torch.full((1, 2, 2), 0.5, dtype=dtype, device=device)
        edges = LearnedEdges(DenseGraph(value.requires_grad_(), nodes, nodes))
        x = torch.ones(2, in_channels, dtype=dtype, device=device)
        watching = _watching(self.module, watched)
        with watching as (inputs, outputs), torch.enable_grad():
            try:
                out = self._run(x, edges, nodes)
            except Exception as error:
                raise ValueError(
                    f"Expected 'module' to run on features of shape [num_nodes, "
                    f'{in_channels}] and a learned graph (got {type(error).__name__}: '
                    f'{error})'
                ) from error
        if not isinstance(out, Tensor) or out.dim() != 2 or out.size(0) != 2:
            got = type(out).__name__
            if isinstance(out, Tensor):
                got = f'a tensor of shape {list(out.shape)} for 2 nodes'
            raise ValueError(
                f"Expected 'module' to give one tensor, with a row of outputs for each "
                f'node (got {got})'
            )
        if not edges.entered:
            raise ValueError(
                "Expected 'module' to run a graph convolution (got one that runs none)"
            )
        return edges, out, inputs, outputs


def _roles(module: Module) -> dict[str, str]:
    """What each argument of a module's forward is to be given."""
    if isinstance(module, Sequential):  # Its forward may take anything.
        names = required = list(module.signature.param_dict)
    else:
        parameters = [
            parameter
            for parameter in inspect.signature(module.forward).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        names = [p.name for p in parameters]
        required = [p.name for p in parameters if p.default is p.empty]
    graph = next((name for name in names if name in _GRAPH_NAMES), None)
    if graph is None and len(required) == 1:
        return {required[0]: 'data'}
    if len(names) < 2:
        raise ValueError(
            f"Expected the module's 'forward' to take node features and 'edge_index', "
            f'or a data object (got {names})'
        )
    graph = graph or names[1]
    x = 'x' if 'x' in names else next(name for name in names if name != graph)
    roles = {x: 'x', graph: 'graph'}
    for name in names:
        if name in ('batch', 'batch_size'):
            roles[name] = name
        elif name in ('edge_weight', 'edge_attr'):
            roles[name] = 'nothing'
    if missing := [name for name in required if name not in roles]:
        raise ValueError(
            f"Expected the module's 'forward' to need features, graph and batch only "
            f'(got {missing} besides)'
        )
    return roles


def _device(module: Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return next((tensor.device for tensor in tensors), torch.device('cpu'))


@contextmanager
def _watching(
    module: Module, names: list[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Evaluation in which is noted what enters and what leaves submodules; then, modes
    and random numbers go on as before.
    """
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    modes = [(part, part.training) for part in module.modules()]

    def watch(name: str) -> tuple[Any, Any]:
        part = module.get_submodule(name)
        return (
            part.register_forward_pre_hook(
                lambda _, args, kwargs: inputs.update({name: first_of(args, kwargs)}),
                with_kwargs=True,
            ),
            part.register_forward_hook(
                lambda _, args, out: outputs.update({name: out})
            ),
        )

    handles = [handle for name in names for handle in watch(name)]
    device = _device(module)
    try:
        with torch.random.fork_rng([device] if device.type == 'cuda' else []):
            module.eval()
            yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()
        for part, mode in modes:
            part.training = mode
