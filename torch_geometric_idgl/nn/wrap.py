r"""IDGL around a GNN of one's own.

A learned graph is an operator without a list of edges. The module gets an object in
place of :obj:`edge_index` that only graph convolutions can do something with: those of
:obj:`_ON_OPERATORS` multiply with the operator, others get exported edges.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    Sequential,
    SGConv,
    TAGConv,
)
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.inits import reset

from ..checks import check_at_least, floating_dtype
from ..graphs import DenseGraph, GraphOperator
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout
from ..ops.sparse import SparseMatrix
from .backbone import Backbone, edge_refusal
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
        with torch.inference_mode(False):  # a copy is to be trained
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
        # What depends on the graph is seen by gradients, wherever the model is made.
        with torch.inference_mode(False), torch.enable_grad():
            self._find_embedding(in_channels, watched, embedding, convs)

    def _find_embedding(
        self,
        in_channels: int,
        watched: list[str],
        embedding: str | None,
        convs: list[str],
    ) -> None:
        """Runs the module once to see where graphs can be refined from."""
        parts = dict(self.module.named_modules(remove_duplicate=False))
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


# PyG's convolutions, made to run on learned graphs ------------------------------------


def version_of(x: Tensor) -> int:
    """The number of changes in place, which inference mode does not count."""
    if isinstance(x, SparseInput):
        return 0 if not x.is_made else version_of(x.dense) - x.made
    return 0 if x.is_inference() else x._version


class SparseInput(Tensor):
    r"""Sparse features, as a matrix that modules can take for a dense one.

    Many modules begin with dropout and a linear map, which take most of the time if the
    zeros of bags of words take part in them. Here they do not; for anything else, a
    dense matrix is made.
    """

    matrix: SparseMatrix
    made: int  # the version of the dense matrix when it was made

    @classmethod
    def of(cls, matrix: SparseMatrix) -> SparseInput:
        """Features of a sparse form."""
        x = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, matrix.shape, dtype=matrix.dtype, device=matrix.device
        )
        x.matrix = matrix
        return x

    @property
    def is_made(self) -> bool:
        """Whether there is a dense matrix already."""
        return 'dense' in self.__dict__

    @cached_property
    def dense(self) -> Tensor:
        """The dense matrix."""
        dense = self.matrix.to_dense()
        self.made = version_of(dense)
        return dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and type(args[0]) is cls and version_of(args[0]) == 0:
            if func is F.linear:
                return _linear(*args, **kwargs)
            if func is F.dropout and not kwargs.get('inplace', False):
                return _dropout(*args, **kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


_SHAPES = {
    Tensor.size,
    Tensor.dim,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
}


def _linear(x: SparseInput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.matrix.matmul(weight.t())
    return out if bias is None else out + bias


def _dropout(x: SparseInput, p: float, training: bool, inplace: bool) -> Tensor:
    if not training or p == 0.0:
        return x
    return SparseInput.of(x.matrix.with_value(dropout(x.matrix.value, p)))


class LearnedEdges:
    r"""What a module gets in place of :obj:`edge_index`: nothing but graph convolutions
    can use it.

    Args:
        graph (GraphOperator): The graph.
    """

    def __init__(self, graph: GraphOperator) -> None:
        self.graph = graph
        self.entered: list[Module] = []  # the convolutions, in their order
        self.widths: list[int] = []  # the numbers of columns of products

    def matmul(self, x: Tensor) -> Tensor:
        r""":math:`\widetilde{\mathbf{A}} \mathbf{X}`."""
        self.widths.append(x.size(1))
        return self.graph.matmul(x.dense if isinstance(x, SparseInput) else x)

    @cached_property
    def exported(self) -> tuple[Tensor, Tensor]:
        """Edges and their weights, once for all convolutions that need them."""
        return self.graph.to_edges()

    def enter(self, conv: Module, x: Any, weight: Any = None, size: Any = None) -> None:
        """Raises unless a convolution gets what it can take."""
        name = type(conv).__name__
        if not isinstance(x, Tensor):
            raise TypeError(
                f"Expected '{name}' to get one matrix of node features, because the "
                f"same nodes send and receive (got '{type(x).__name__}')"
            )
        if x.size(0) != self.graph.num_nodes:
            raise ValueError(
                f"Expected '{name}' to get a row of features for each of "
                f'{self.graph.num_nodes} nodes (got shape {list(x.shape)})'
            )
        if weight is not None or size is not None:
            raise ValueError(
                f"Expected '{name}' to get no 'edge_weight' and no 'size' besides the "
                f'learned graph (got one)'
            )
        self.entered.append(conv)

    def influences(self, value: Tensor) -> bool:
        """Whether a value depends on the entries of a dense graph."""
        if not value.requires_grad:
            return False
        entries = self.graph.value  # type: ignore[attr-defined]
        return (
            torch.autograd.grad(
                value.sum(), entries, retain_graph=True, allow_unused=True
            )[0]
            is not None
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_misuse(f"of '.{name}'"))

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(_misuse('of an index'))

    def __iter__(self) -> NoReturn:
        raise TypeError(_misuse('as a sequence'))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(_misuse(f"in '{getattr(func, '__name__', func)}'"))


def _misuse(how: str) -> str:
    return (
        f"Expected the module to give 'edge_index' to graph convolutions only, because "
        f'a learned graph has no list of edges (got a use {how})'
    )


# Convolutions on operators --------------------------------------------------------


class _OnOperator:
    """A convolution whose products are with a graph operator. Instances are made of
    those of PyG by changing their class: names, weights and attributes stay.
    """

    def forward(
        self, x: Tensor, edge_index: Any, edge_weight: Any = None, size: Any = None
    ) -> Tensor:
        if not isinstance(edge_index, LearnedEdges):
            raise TypeError(
                f"Expected '{type(self).__name__}' to get the 'edge_index' that the "
                f"module was called with (got '{type(edge_index).__name__}')"
            )
        edge_index.enter(self, x, edge_weight, size)  # type: ignore[arg-type]
        return self._on(edge_index, x)

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        raise NotImplementedError


class OperatorGCNConv(_OnOperator, GCNConv):
    """:class:`~torch_geometric.nn.GCNConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        out = _mapped(self.lin, graph, x)
        return out if self.bias is None else out + self.bias


class OperatorSAGEConv(_OnOperator, SAGEConv):
    """:class:`~torch_geometric.nn.SAGEConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        out = _mapped(self.lin_l, graph, self.lin(x).relu() if self.project else x)
        if self.root_weight:
            out = out + self.lin_r(x)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


class OperatorGraphConv(_OnOperator, GraphConv):
    """:class:`~torch_geometric.nn.GraphConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        return _mapped(self.lin_rel, graph, x) + self.lin_root(x)


class OperatorGINConv(_OnOperator, GINConv):
    """:class:`~torch_geometric.nn.GINConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        parts = [*self.nn] if type(self.nn) is torch.nn.Sequential else []
        if not parts or not _narrows(parts[0]):
            return self.nn(graph.matmul(x) + (1.0 + self.eps) * x)
        out = F.linear(x, parts[0].weight)
        out = graph.matmul(out) + (1.0 + self.eps) * out
        out = out if parts[0].bias is None else out + parts[0].bias
        for part in parts[1:]:
            out = part(out)
        return out


class OperatorTAGConv(_OnOperator, TAGConv):
    """:class:`~torch_geometric.nn.TAGConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        if all(map(_narrows, self.lins)):  # Horner's scheme: products are narrow.
            out = self.lins[-1](x)
            for lin in reversed(self.lins[:-1]):
                out = graph.matmul(out) + lin(x)
        else:
            out = self.lins[0](x)
            for lin in self.lins[1:]:
                x = graph.matmul(x)
                out = out + lin(x)
        return out if self.bias is None else out + self.bias


class OperatorSGConv(_OnOperator, SGConv):
    """:class:`~torch_geometric.nn.SGConv` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        return _mapped(self.lin, graph, x, times=self.K)


class OperatorAPPNP(_OnOperator, APPNP):
    """:class:`~torch_geometric.nn.APPNP` on an operator."""

    def _on(self, graph: LearnedEdges, x: Tensor) -> Tensor:
        out = x
        for _ in range(self.K):
            out = (1.0 - self.alpha) * graph.matmul(out) + self.alpha * x
        return out


_ON_OPERATORS: dict[type, type] = {
    GCNConv: OperatorGCNConv,
    SAGEConv: OperatorSAGEConv,
    GraphConv: OperatorGraphConv,
    GINConv: OperatorGINConv,
    TAGConv: OperatorTAGConv,
    SGConv: OperatorSGConv,
    APPNP: OperatorAPPNP,
}


def _narrows(lin: Any) -> bool:
    """Whether a linear map is known to be cheaper before products than after them."""
    if type(lin) not in (torch.nn.Linear, Linear) or is_lazy(lin.weight):
        return False
    watched = lin._forward_pre_hooks or lin._forward_hooks
    return not watched and lin.weight.size(0) < lin.weight.size(1)


def _mapped(lin: Any, graph: LearnedEdges, x: Tensor, times: int = 1) -> Tensor:
    """Products with the graph and a linear map, in the order that is cheaper."""
    first = _narrows(lin)
    x = F.linear(x, lin.weight) if first else x
    for _ in range(times):
        x = graph.matmul(x)
    if not first:
        return lin(x)
    return x if lin.bias is None else x + lin.bias


def _refusal(conv: Module) -> str | None:
    """Why a convolution cannot run on a learned graph, if it cannot."""
    if type(conv) not in _ON_OPERATORS:
        return edge_refusal(conv)
    if conv.aggr not in ('add', 'sum', 'mean'):  # a mean is a sum: rows are normalised
        return f'whose aggr={conv.aggr!r} is no weighted sum'
    if conv.flow != 'source_to_target':
        return f'whose flow={conv.flow!r} is against the direction of learned edges'
    if isinstance(conv, APPNP) and conv.dropout > 0:
        return "which drops out edges; use 'graph_dropout' instead"
    return None


def convert(module: Module) -> list[str]:
    """Makes all graph convolutions of a module run on :class:`LearnedEdges`, and gives
    their names.
    """
    convs: dict[str, Module] = {}
    for name, part in module.named_modules():
        inner = any(name.startswith(f'{outer}.' if outer else '') for outer in convs)
        if isinstance(part, MessagePassing) and not inner:
            convs[name] = part
    if not convs:
        raise ValueError(
            f"Expected 'module' to have graph convolutions, which are PyG "
            f"'MessagePassing' layers (got none in {module})"
        )
    refused = [
        f"{type(conv).__name__} at '{name}', {reason}"
        for name, conv in convs.items()
        if (reason := _refusal(conv))
    ]
    if refused:
        raise ValueError(
            f'Expected graph convolutions that take a normalised graph by '
            f"'edge_weight' (got {'; '.join(refused)})"
        )
    for conv in convs.values():
        for key in vars(conv):
            if key.startswith('_cached'):  # of another graph
                setattr(conv, key, None)
        if type(conv) in _ON_OPERATORS:
            conv.__class__ = _ON_OPERATORS[type(conv)]
            continue
        if getattr(conv, 'normalize', False) is True:
            conv.normalize = False  # type: ignore[assignment]
        conv.register_forward_pre_hook(_export_edges, with_kwargs=True)
    return list(convs)


def _export_edges(
    conv: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives a convolution edges and weights in place of the learned graph."""
    bound = inspect.signature(conv.forward).bind_partial(*args, **kwargs)
    given = bound.arguments
    for name, edges in given.items():
        if isinstance(edges, LearnedEdges):
            edges.enter(conv, first_of(args, kwargs), given.get('edge_weight'))
            given[name], given['edge_weight'] = edges.exported
            return bound.args, bound.kwargs
    raise TypeError(
        f"Expected '{type(conv).__name__}' to get the 'edge_index' that the module was "
        f'called with (got {", ".join(given)})'
    )


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module is called with first, or as `x`."""
    return kwargs.get('x', next(iter(kwargs.values()), None)) if not args else args[0]
