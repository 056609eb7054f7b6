r"""Layers that run on graph operators.

A layer is two steps, :meth:`OperatorConv.project` (what does not depend on the graph,
so that all iterations share it) and :meth:`OperatorConv.propagate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense import Linear

from ..graphs import GraphOperator
from ..ops.features import Features, matmul
from ..ops.sparse import SparseMatrix

__all__ = [
    'APPNPLayer',
    'EdgeLayer',
    'GCNLayer',
    'GINLayer',
    'OperatorConv',
    'SAGELayer',
    'conv_resolver',
]


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
