r"""Graph neural networks that run on graph operators.

A layer is two steps, :meth:`OperatorConv.project` (what does not depend on the graph,
so that all iterations share it) and :meth:`OperatorConv.propagate`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter
from torch_geometric.nn import JumpingKnowledge, MessagePassing
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver

from ..graphs import GraphOperator, Mixture, shared_products
from ..ops.features import Features, matmul
from ..ops.layout import Layout
from ..ops.sparse import SparseMatrix

__all__ = [
    'APPNPLayer',
    'Backbone',
    'EdgeLayer',
    'GCNLayer',
    'GINLayer',
    'OperatorConv',
    'SAGELayer',
    'conv_resolver',
]

_NONNEGATIVE = (
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.Sigmoid,
    torch.nn.Hardsigmoid,
    torch.nn.Softplus,
    torch.nn.Softmax,
)


def _linear(in_channels: int, out_channels: int, bias: bool = False) -> Linear:
    return Linear(in_channels, out_channels, bias=bias, weight_initializer='glorot')


def _apply(linear: Linear, x: Features) -> Tensor:
    out = matmul(x, linear.weight.t())
    return out if linear.bias is None else out + linear.bias


class OperatorConv(Module):
    """A layer on graph operators.

    Most layers multiply the graph with one matrix and need only :meth:`project`,
    :meth:`message` and :meth:`finish`; others set :attr:`single_product` to false and
    write :meth:`propagate`.
    """

    single_product: bool = True

    def project(self, x: Features) -> Any:
        """The part that does not depend on the graph."""
        raise NotImplementedError

    def message(self, projected: Any) -> Tensor | None:
        """What the graph will be multiplied with first, if known beforehand."""
        return projected

    def finish(self, aggregated: Tensor, projected: Any) -> Tensor:
        """The part after the product of the graph with the message."""
        raise NotImplementedError

    def propagate(self, projected: Any, graph: GraphOperator) -> Tensor:
        """The part that depends on the graph."""
        message = self.message(projected)
        assert message is not None
        return self.finish(graph.matmul(message), projected)

    def forward(self, x: Features, graph: GraphOperator) -> Tensor:
        """Both parts, one after the other."""
        return self.propagate(self.project(x), graph)


class GCNLayer(OperatorConv):
    r"""The paper's GCN layer, :math:`\widetilde{\mathbf{A}} \mathbf{X} \mathbf{W}`."""

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False) -> None:
        super().__init__()
        self.lin = _linear(in_channels, out_channels)
        self.bias = Parameter(torch.zeros(out_channels)) if bias else None

    def reset_parameters(self) -> None:
        self.lin.reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def project(self, x: Features) -> Tensor:
        return _apply(self.lin, x)

    def finish(self, aggregated: Tensor, projected: Tensor) -> Tensor:
        return aggregated if self.bias is None else aggregated + self.bias


class SAGELayer(OperatorConv):
    r"""GraphSAGE, :math:`\mathbf{X} \mathbf{W}_1 + \widetilde{\mathbf{A}} \mathbf{X}
    \mathbf{W}_2`; the graph's rows are averages already.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = False) -> None:
        super().__init__()
        self.lin_l = _linear(in_channels, out_channels, bias)
        self.lin_r = _linear(in_channels, out_channels)

    def reset_parameters(self) -> None:
        self.lin_l.reset_parameters()
        self.lin_r.reset_parameters()

    def project(self, x: Features) -> tuple[Tensor, Tensor]:
        return matmul(x, self.lin_l.weight.t()), _apply(self.lin_r, x)

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
        self.eps = Parameter(torch.zeros(()))
        self.lin_1 = _linear(in_channels, out_channels, bias)
        self.lin_2 = _linear(out_channels, out_channels, bias)

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.eps)
        self.lin_1.reset_parameters()
        self.lin_2.reset_parameters()

    def project(self, x: Features) -> Tensor:
        return matmul(x, self.lin_1.weight.t())

    def finish(self, aggregated: Tensor, projected: Tensor) -> Tensor:
        out = aggregated + (1.0 + self.eps) * projected
        if self.lin_1.bias is not None:
            out = out + self.lin_1.bias
        return self.lin_2(out.relu())


class APPNPLayer(OperatorConv):
    r"""Predict, then propagate: :math:`\mathbf{Z} \leftarrow (1 - a)
    \widetilde{\mathbf{A}} \mathbf{Z} + a \mathbf{X} \mathbf{W}`, some steps.
    """

    single_product = False

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

    def project(self, x: Features) -> Tensor:
        return _apply(self.lin, x)

    def propagate(self, projected: Tensor, graph: GraphOperator) -> Tensor:
        out = projected
        for _ in range(self.steps):
            out = (1.0 - self.teleport) * graph.matmul(out) + self.teleport * projected
        return out


class EdgeLayer(OperatorConv):
    """Any PyG convolution with edge weights, on the exported edges of the graph."""

    single_product = False

    def __init__(self, conv: Module) -> None:
        super().__init__()
        if 'edge_weight' not in inspect.signature(conv.forward).parameters:
            raise ValueError(
                f"Expected a convolution whose 'forward' takes 'edge_weight' "
                f'(got {conv})'
            )
        self.conv = conv

    def reset_parameters(self) -> None:
        if hasattr(self.conv, 'reset_parameters'):
            self.conv.reset_parameters()  # type: ignore[operator]

    def project(self, x: Features) -> Tensor:
        return x.to_dense() if isinstance(x, SparseMatrix) else x

    def message(self, projected: Tensor) -> None:
        return None

    def propagate(self, projected: Tensor, graph: GraphOperator) -> Tensor:
        edge_index, edge_weight = graph.to_edges()
        return self.conv(projected, edge_index, edge_weight=edge_weight)


ConvLike = str | Callable[[int, int], Module]

_CONVS: dict[str, type[Module]] = {
    'gcn': GCNLayer,
    'sage': SAGELayer,
    'gin': GINLayer,
    'appnp': APPNPLayer,
}


def conv_resolver(backbone: ConvLike, bias: bool) -> Callable[[int, int], OperatorConv]:
    """A function from channels to a layer.

    Args:
        backbone (str or Callable): A name, or a function (or class) from numbers of
            input and output channels to an :class:`OperatorConv` or to a PyG
            convolution that takes :obj:`edge_weight`.
        bias (bool): Whether named layers learn a bias.
    """
    if isinstance(backbone, str):
        if backbone not in _CONVS:
            raise ValueError(
                f"Expected 'backbone' to be one of {sorted(_CONVS)} (got '{backbone}')"
            )
        layer = _CONVS[backbone]
        return lambda i, o: layer(i, o, bias=bias)  # type: ignore[return-value]
    if not callable(backbone):
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


class Prediction(NamedTuple):
    """Outputs on one graph, finished or waiting for the terms all graphs share."""

    graph: Mixture
    projected: Any = None
    message: Tensor | None = None
    own: Tensor | None = None
    out: Tensor | None = None


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
        make_conv: Callable[[int, int], OperatorConv],
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
        self.convs = ModuleList(
            make_conv(i, o) for i, o in zip(widths[:-1], widths[1:], strict=True)
        )

        layer = normalization_resolver(norm, hidden_channels, **(norm_kwargs or {}))
        layer = torch.nn.Identity() if layer is None else layer
        parameters = inspect.signature(layer.forward).parameters
        self.norm_takes_batch = 'batch' in parameters
        self.has_norm = not isinstance(layer, torch.nn.Identity)
        num_norms = num_layers - 1 if direct else num_layers
        self.norms = ModuleList(copy.deepcopy(layer) for _ in range(num_norms))

        self.jk = None
        self.lin = None
        self.embedding_channels = hidden_channels
        if not direct:
            if jk != 'last':
                self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
            if jk == 'cat':
                self.embedding_channels = num_layers * hidden_channels
            self.lin = _linear(self.embedding_channels, self.out_channels, True)
        elif num_layers == 1:
            self.embedding_channels = self.out_channels

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        for module in [*self.convs, *self.norms, self.jk, self.lin]:
            if hasattr(module, 'reset_parameters'):
                module.reset_parameters()  # type: ignore[union-attr]

    @property
    def nonnegative(self) -> bool:
        """Whether embeddings are known to have no negative entry."""
        last = isinstance(self.act, _NONNEGATIVE)
        if self.act_first and self.has_norm and self.num_layers > 1:
            return False
        return last and self.jk_mode != 'lstm'

    def project(self, x: Features) -> Any:
        """The part of the first layer that all graphs share."""
        return self.convs[0].project(x)  # type: ignore[operator]

    def message(self, projected: Any) -> Tensor | None:
        """What every graph is multiplied with first."""
        return self.convs[0].message(projected)  # type: ignore[operator]

    def embed(
        self, projected: Any, graph: GraphOperator, layout: Layout, dropout: float
    ) -> Tensor:
        r"""The embeddings :math:`\mathbf{Z}` on a graph."""
        if not self.norms:  # a single layer
            out = self.convs[0].propagate(projected, graph)  # type: ignore[operator]
            return out if self.act is None else self.act(out)
        embeddings: list[Tensor] = []
        for i in range(len(self.norms)):
            conv = self.convs[i]
            if i > 0:
                projected = conv.project(embeddings[-1])  # type: ignore[operator]
            out = conv.propagate(projected, graph)  # type: ignore[operator]
            out = self._activate(out, i, layout)
            embeddings.append(F.dropout(out, dropout, self.training))
        return embeddings[-1] if self.jk is None else self.jk(embeddings)

    def start_prediction(self, z: Tensor, first: Any, graph: Mixture) -> Prediction:
        """The outputs of one graph, but for what all graphs share."""
        if self.lin is not None:
            return Prediction(graph, out=self.lin(z))
        conv = self.convs[-1]
        projected = first if not self.norms else conv.project(z)  # type: ignore
        if not conv.single_product:
            return Prediction(graph, out=conv.propagate(projected, graph))  # type: ignore
        message = conv.message(projected)  # type: ignore[operator]
        return Prediction(graph, projected, message, graph.own_matmul(message))

    def finish_predictions(self, started: list[Prediction]) -> list[Tensor]:
        """The outputs of all graphs; shared terms are multiplied once for all."""
        if started[0].out is not None:
            return [prediction.out for prediction in started]  # type: ignore[misc]
        finish = self.convs[-1].finish
        shared = shared_products(
            [prediction.graph for prediction in started],
            [prediction.message for prediction in started],  # type: ignore[misc]
        )
        outs = []
        for prediction, product in zip(started, shared, strict=True):
            if prediction.own is not None:
                product = product + prediction.own
            outs.append(finish(product, prediction.projected))  # type: ignore[operator]
        return outs

    def _activate(self, x: Tensor, i: int, layout: Layout) -> Tensor:
        if self.act is not None and self.act_first:
            x = self.act(x)
        if self.norm_takes_batch:
            x = self.norms[i](x, layout.batch, layout.num_graphs)
        elif self.has_norm:
            x = self.norms[i](x)
        if self.act is not None and not self.act_first:
            x = self.act(x)
        return x
