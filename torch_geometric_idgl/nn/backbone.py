r"""The graph neural network that runs on graph operators: layers, and a stack of them.

A layer is two steps: :meth:`OperatorConv.project` (what does not depend on the graph,
so that all iterations share it) and :meth:`OperatorConv.propagate`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter
from torch_geometric.nn import JumpingKnowledge, MessagePassing
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver

from ..graphs import GraphOperator
from ..ops.batch import Nodes
from ..ops.features import Features
from ..ops.numeric import dropout, relu_dropout
from ..ops.sparse import SparseMatrix

__all__ = ['Backbone', 'OperatorConv', 'resolve_layer']

_NONNEGATIVE = (
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.Sigmoid,
    torch.nn.Hardsigmoid,
    torch.nn.Softplus,
    torch.nn.Softmax,
)


class OperatorConv(Module):
    r"""A layer that runs on a graph operator, for :obj:`IDGL(..., backbone=...)`.

    Most layers multiply the graph with one matrix, and write :meth:`project`,
    :meth:`message` and :meth:`finish`; others write :meth:`project` and
    :meth:`propagate`. For example :math:`\widetilde{\mathbf{A}} \mathbf{X} \mathbf{W} +
    \mathbf{b}`:

    .. code-block:: python

        class Layer(OperatorConv):
            def __init__(self, in_channels, out_channels):
                super().__init__()
                self.weight = Parameter(torch.randn(in_channels, out_channels))
                self.bias = Parameter(torch.zeros(out_channels))

            def project(self, x):
                return x.matmul(self.weight)

            def finish(self, aggregated, projected):
                return aggregated + self.bias

        model = IDGL(64, 16, num_layers=2, out_channels=7, backbone=Layer)
    """

    def project(self, x: Tensor | SparseMatrix) -> Any:
        """The part that does not depend on the graph.

        Args:
            x (torch.Tensor or SparseMatrix): What enters the layer. Raw features may be
                sparse; both kinds have :obj:`x.matmul(weight)` and :obj:`x.to_dense()`.
        """
        raise NotImplementedError

    def message(self, projected: Any) -> Tensor:
        """What the graph is multiplied with."""
        return projected

    def finish(self, aggregated: Tensor, projected: Any) -> Tensor:
        """The part after the product of the graph with the message."""
        raise NotImplementedError

    def propagate(self, projected: Any, graph: GraphOperator) -> Tensor:
        """The part that depends on the graph."""
        return self.finish(graph.matmul(self.message(projected)), projected)

    def forward(self, x: Tensor | SparseMatrix, graph: GraphOperator) -> Tensor:
        """Both parts, one after the other."""
        return self.propagate(self.project(x), graph)


def _linear(in_channels: int, out_channels: int, bias: bool = False) -> Linear:
    return Linear(in_channels, out_channels, bias=bias, weight_initializer='glorot')


def _apply(linear: Linear, x: Tensor | SparseMatrix) -> Tensor:
    out = x.matmul(linear.weight.t())
    return out if linear.bias is None else out + linear.bias


class GCNLayer(OperatorConv):
    r"""The paper's GCN layer, :math:`\widetilde{\mathbf{A}} \mathbf{X} \mathbf{W}`."""

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False) -> None:
        super().__init__()
        self.message_channels = out_channels
        self.lin = _linear(in_channels, out_channels)
        self.bias = Parameter(torch.zeros(out_channels)) if bias else None

    def reset_parameters(self) -> None:
        self.lin.reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def project(self, x: Tensor | SparseMatrix) -> Tensor:
        return x.matmul(self.lin.weight.t())

    def finish(self, aggregated: Tensor, projected: Tensor) -> Tensor:
        return aggregated if self.bias is None else aggregated + self.bias


class SAGELayer(OperatorConv):
    r"""GraphSAGE, :math:`\mathbf{X} \mathbf{W}_1 + \widetilde{\mathbf{A}} \mathbf{X}
    \mathbf{W}_2`; the graph's rows are averages already.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False) -> None:
        super().__init__()
        self.message_channels = out_channels
        self.lin_l = _linear(in_channels, out_channels, bias)
        self.lin_r = _linear(in_channels, out_channels)

    def reset_parameters(self) -> None:
        self.lin_l.reset_parameters()
        self.lin_r.reset_parameters()

    def project(self, x: Tensor | SparseMatrix) -> tuple[Tensor, Tensor]:
        return x.matmul(self.lin_l.weight.t()), _apply(self.lin_r, x)

    def message(self, projected: tuple[Tensor, Tensor]) -> Tensor:
        return projected[0]

    def finish(self, aggregated: Tensor, projected: tuple[Tensor, Tensor]) -> Tensor:
        out = aggregated + projected[1]
        return out if self.lin_l.bias is None else out + self.lin_l.bias


class GINLayer(OperatorConv):
    r"""GIN, :math:`\mathrm{MLP}((1 + \epsilon) \mathbf{X} + \widetilde{\mathbf{A}}
    \mathbf{X})`, with the first linear map moved before the graph.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        super().__init__()
        self.message_channels = out_channels
        self.eps = Parameter(torch.zeros(()))
        self.lin_1 = _linear(in_channels, out_channels, bias)
        self.lin_2 = _linear(out_channels, out_channels, bias)

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.eps)
        self.lin_1.reset_parameters()
        self.lin_2.reset_parameters()

    def project(self, x: Tensor | SparseMatrix) -> Tensor:
        return x.matmul(self.lin_1.weight.t())

    def finish(self, aggregated: Tensor, projected: Tensor) -> Tensor:
        out = aggregated + (1.0 + self.eps) * projected
        if self.lin_1.bias is not None:
            out = out + self.lin_1.bias
        return self.lin_2(out.relu())


class APPNPLayer(OperatorConv):
    r"""Predict, then propagate: :math:`\mathbf{Z} \leftarrow (1 - a)
    \widetilde{\mathbf{A}} \mathbf{Z} + a \mathbf{X} \mathbf{W}`, some steps.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bias: bool = False,
        steps: int = 10,
        teleport: float = 0.1,
    ) -> None:
        super().__init__()
        self.lin = _linear(in_channels, out_channels, bias)
        self.steps = steps
        self.teleport = teleport

    def reset_parameters(self) -> None:
        self.lin.reset_parameters()

    def project(self, x: Tensor | SparseMatrix) -> Tensor:
        return _apply(self.lin, x)

    def propagate(self, projected: Tensor, graph: GraphOperator) -> Tensor:
        out = projected
        for _ in range(self.steps):
            out = (1.0 - self.teleport) * graph.matmul(out) + self.teleport * projected
        return out


# What normalises in any case, and so would normalise the mixed graph once more.
_ALWAYS_NORMALIZE = (
    'SGConv',
    'SSGConv',
    'ARMAConv',
    'ChebConv',
    'MixHopConv',
    'WLConvContinuous',
)


def edge_refusal(conv: Module) -> str | None:
    """Why a convolution cannot run on weighted, normalised edges, if it cannot."""
    if 'edge_weight' not in inspect.signature(conv.forward).parameters:
        return "whose 'forward' takes no 'edge_weight'"
    names = {cls.__name__ for cls in type(conv).__mro__}
    if names.intersection(_ALWAYS_NORMALIZE):
        return 'which always normalises the graph itself'
    aggr = getattr(conv, 'aggr', 'add')
    if isinstance(aggr, str) and aggr not in ('add', 'sum'):
        return (
            f"whose aggr={aggr!r} is no weighted sum; use 'add': graphs are normalised"
        )
    if getattr(conv, 'flow', 'source_to_target') != 'source_to_target':
        return 'whose flow is against the direction of learned edges'
    return None


class EdgeLayer(OperatorConv):
    """Any PyG convolution with edge weights, on the exported edges of the graph."""

    def __init__(self, conv: Module) -> None:
        super().__init__()
        if reason := edge_refusal(conv):
            raise ValueError(
                f'Expected a convolution that takes a normalised graph by '
                f"'edge_weight' (got {conv}, {reason})"
            )
        if getattr(conv, 'normalize', False) is True:
            conv.normalize = False  # type: ignore[assignment]
        self.conv = conv

    def reset_parameters(self) -> None:
        if hasattr(self.conv, 'reset_parameters'):
            self.conv.reset_parameters()  # type: ignore[operator]

    def project(self, x: Tensor | SparseMatrix) -> Tensor:
        return x.to_dense()

    def propagate(self, projected: Tensor, graph: GraphOperator) -> Tensor:
        edge_index, edge_weight = graph.to_edges()
        return self.conv(projected, edge_index, edge_weight=edge_weight)


LayerLike = str | Callable[[int, int], Module]

_LAYERS: dict[str, type[Module]] = {
    'gcn': GCNLayer,
    'sage': SAGELayer,
    'gin': GINLayer,
    'appnp': APPNPLayer,
}


def resolve_layer(
    backbone: LayerLike, bias: bool
) -> Callable[[int, int], OperatorConv]:
    """A function from channels to a layer.

    Args:
        backbone (str or Callable): A name, or a function (or class) from numbers of
            input and output channels to an :class:`OperatorConv` or to a PyG
            convolution that takes :obj:`edge_weight`.
        bias (bool): Whether named layers learn a bias.
    """
    if isinstance(backbone, str):
        if backbone not in _LAYERS:
            raise ValueError(
                f"Expected 'backbone' to be one of {sorted(_LAYERS)} (got '{backbone}')"
            )
        layer = _LAYERS[backbone]
        return lambda i, o: layer(i, o, bias=bias)  # type: ignore[return-value]
    if not callable(backbone) or isinstance(backbone, Module):
        raise TypeError(
            f"Expected 'backbone' to be a name or a function of input and output "
            f"channels (got '{type(backbone).__name__}')"
        )

    def make(in_channels: int, out_channels: int) -> OperatorConv:
        conv = backbone(in_channels, out_channels)
        if isinstance(conv, OperatorConv):
            return conv
        if isinstance(conv, MessagePassing):
            return EdgeLayer(conv)
        raise TypeError(
            f"Expected 'backbone' to give an 'OperatorConv' or a PyG 'MessagePassing' "
            f"layer (got '{type(conv).__name__}')"
        )

    return make


class Draft(NamedTuple):
    """Outputs on a refined graph that still lack the product with what all refined
    mixtures share.
    """

    projected: Any  # the part of the last layer that does not depend on the graph
    message: Tensor
    product: Tensor  # of the refined graph with the message, weighted


class Backbone(Module):
    r"""Layers, activations, norms and dropout in the order of PyG's
    :class:`~torch_geometric.nn.models.basic_gnn.BasicGNN`.

    Graphs are refined from the embeddings :math:`\mathbf{Z}`: the input of the last map
    (with a single layer, its activated output). Outputs do not influence later graphs,
    so they are finished after the last iteration, all together.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None,
        act: str | Callable | None,
        act_first: bool,
        act_kwargs: dict[str, Any] | None,
        norm: str | Callable | None,
        norm_kwargs: dict[str, Any] | None,
        jk: str | None,
        make_layer: Callable[[int, int], OperatorConv],
    ) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.act = activation_resolver(act, **(act_kwargs or {}))
        self.act_first = act_first
        self.jk_mode = jk
        self.out_channels = hidden_channels if out_channels is None else out_channels
        direct = jk is None  # the last layer is the last map

        widths = [in_channels] + [hidden_channels] * num_layers
        if direct:
            widths[-1] = self.out_channels
        self.convs = ModuleList(make_layer(i, o) for i, o in pairwise(widths))
        # Whether layers are one product with their message, which can be given to them.
        self.multiplies_once = all(
            getattr(type(conv), 'propagate', None) is OperatorConv.propagate
            for conv in self.convs
        )

        layer = normalization_resolver(norm, hidden_channels, **(norm_kwargs or {}))
        layer = torch.nn.Identity() if layer is None else layer
        parameters = inspect.signature(layer.forward).parameters
        self.norm_takes_batch = 'batch' in parameters
        self.has_norm = not isinstance(layer, torch.nn.Identity)
        num_norms = num_layers - 1 if direct else num_layers
        self.norms = ModuleList(copy.deepcopy(layer) for _ in range(num_norms))

        # Whether outputs of a graph may depend on other graphs of the batch.
        self.mixes_graphs = self.has_norm and not (
            self.norm_takes_batch or isinstance(layer, torch.nn.LayerNorm)
        )

        self.jk = None
        self.lin = None
        self.embedding_channels = hidden_channels
        if not direct:
            if jk != 'last':
                self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
            if jk == 'cat':
                self.embedding_channels = num_layers * hidden_channels
            self.lin = Linear(self.embedding_channels, self.out_channels)
        elif num_layers == 1:
            self.embedding_channels = self.out_channels
        # Whether embeddings are known to have no negative entry; with `None`, measured.
        channels = [getattr(conv, 'message_channels', None) for conv in self.convs[1:]]
        self.later_widths: list[Any] = [c for c in channels if c is not None]
        normed_last = act_first and self.has_norm and num_norms > 0
        self.nonnegative: bool | None = (
            isinstance(self.act, _NONNEGATIVE) and not normed_last and jk != 'lstm'
        )

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        for module in [*self.convs, *self.norms, self.jk, self.lin]:
            if hasattr(module, 'reset_parameters'):
                module.reset_parameters()  # type: ignore[union-attr]

    def project(self, x: Features) -> tuple[Any, Tensor | None]:
        """The part of the first layer that all graphs share, and what every graph is
        multiplied with first, if the layer is one product.
        """
        layer: Any = self.convs[0]
        projected = layer.project(x.value)
        return projected, layer.message(projected) if self.multiplies_once else None

    def later_channels(self, num_graphs: int = 1) -> tuple[int, ...]:
        """The numbers of columns of later products with a graph, where known: one for
        each layer after the first; of a graph that is part of several mixtures, one for
        each mixture, and one for the last layers of all but the first.
        """
        if not self.later_widths:
            return ()
        *middle, last = self.later_widths
        together = ((num_graphs - 1) * last,) if num_graphs > 1 else ()
        return (*(middle * num_graphs), last, *together)

    def embed(
        self, projected: Any, graph: GraphOperator, nodes: Nodes, p: float
    ) -> tuple[Tensor, Any]:
        r"""The embeddings :math:`\mathbf{Z}` on a graph, and what enters the last map
        (with a single layer, what :meth:`project` gave).

        Args:
            projected: What :meth:`project` gave.
            graph (GraphOperator): The graph, with its product with the first message.
            nodes (Nodes): The nodes of each graph of the batch.
            p (float): The dropout after each layer.
        """
        first, *later = self.convs[: max(len(self.norms), 1)]
        if graph.product is None:
            z = first.propagate(projected, graph)  # type: ignore[operator]
        else:
            z = first.finish(graph.product, projected)  # type: ignore[operator]
        if not self.norms:  # a single layer
            return z if self.act is None else self.act(z), projected
        z = self._activate(z, 0, nodes, p)
        embeddings = [z]
        for i, conv in enumerate(later, start=1):
            z = conv.propagate(conv.project(z), graph)  # type: ignore[operator]
            z = self._activate(z, i, nodes, p)
            embeddings.append(z)
        z = z if self.jk is None else self.jk(embeddings)
        return z, z

    def _activate(self, x: Tensor, i: int, nodes: Nodes, p: float) -> Tensor:
        if self.act is not None and self.act_first:
            x = self.act(x)
        if self.norm_takes_batch:
            x = self.norms[i](x, nodes.batch, nodes.num_graphs)
        elif self.has_norm:
            x = self.norms[i](x)
        if self.act is not None and not self.act_first:
            if type(self.act) is torch.nn.ReLU:
                return relu_dropout(x, p, self.training)
            x = self.act(x)
        return dropout(x, p, self.training)

    def predict(self, last: Any, graph: GraphOperator) -> Tensor:
        """The outputs on a graph, from what enters the last map."""
        if self.lin is not None:
            return self.lin(last)
        conv: Any = self.convs[-1]
        return conv.propagate(conv.project(last) if self.norms else last, graph)

    def draft(
        self, last: Any, mixed: GraphOperator, graph: GraphOperator, weight: float
    ) -> Draft | Tensor:
        """The part that a refined graph has in the outputs on a mixture; or the outputs
        themselves, if the last map is not one product.
        """
        conv: Any = self.convs[-1]
        if self.lin is not None or not self.multiplies_once:
            return self.predict(last, mixed)
        projected = conv.project(last) if self.norms else last
        message = conv.message(projected)
        return Draft(projected, message, graph.weighted_matmul(message, weight))

    def finish(
        self, drafts: list[Draft | Tensor], constant: GraphOperator
    ) -> list[Tensor]:
        """The outputs of all drafts. What their mixtures share is multiplied once, with
        all messages side by side: an epoch on Cora takes 1.1 times as long without.
        """
        outs, messages = [], []
        for draft in drafts:
            if isinstance(draft, Draft):
                messages.append(draft.message)
        if not messages:
            return drafts  # type: ignore[return-value]
        conv: Any = self.convs[-1]
        shared = constant.matmul(torch.cat(messages, dim=1))
        parts = shared.split(messages[0].size(1), dim=1)
        for (projected, _, product), part in zip(drafts, parts, strict=True):
            outs.append(conv.finish(product + part, projected))
        return outs
