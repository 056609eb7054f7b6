r"""The graph neural network that runs on graph operators."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric.nn import BatchNorm, JumpingKnowledge
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver

from ..graphs import GraphOperator, Mixture, shared_products, weighted_sum
from ..ops.features import Features
from ..ops.layout import Layout
from ..ops.numeric import dropout as drop
from ..ops.numeric import relu_dropout
from .conv import OperatorConv

__all__ = ['Backbone', 'Prediction']

_NONNEGATIVE = (
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.Sigmoid,
    torch.nn.Hardsigmoid,
    torch.nn.Softplus,
    torch.nn.Softmax,
)


class Prediction(NamedTuple):
    """Outputs on one graph, finished or waiting for the terms all graphs share."""

    shared: list[tuple[float, GraphOperator]]
    projected: Any = None
    message: Tensor | None = None
    own: list[tuple[float, Tensor]] | None = None
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
        self.convs = ModuleList(make_conv(i, o) for i, o in pairwise(widths))

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
            self.lin = Linear(self.embedding_channels, self.out_channels)
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
        if self.act_first and self.has_norm and len(self.norms) > 0:
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
            embeddings.append(self._activate(out, i, layout, dropout))
        return embeddings[-1] if self.jk is None else self.jk(embeddings)

    def start_prediction(self, z: Tensor, first: Any, graph: Mixture) -> Prediction:
        """The outputs of one graph, but for what all graphs share."""
        if self.lin is not None:
            return Prediction([], out=self.lin(z))
        conv = self.convs[-1]
        projected = first if not self.norms else conv.project(z)  # type: ignore
        if not conv.single_product:
            return Prediction([], out=conv.propagate(projected, graph))  # type: ignore
        message = conv.message(projected)  # type: ignore[operator]
        own = graph.own_products(message)
        return Prediction(graph.shared_terms(), projected, message, own)

    def finish_predictions(self, started: list[Prediction]) -> list[Tensor]:
        """The outputs of all graphs; shared terms are multiplied once for all."""
        if started[0].out is not None:
            return [prediction.out for prediction in started]  # type: ignore[misc]
        finish = self.convs[-1].finish
        shared = shared_products(
            [prediction.shared for prediction in started],
            [prediction.message for prediction in started],  # type: ignore[misc]
        )
        outs = []
        for prediction, product in zip(started, shared, strict=True):
            product = weighted_sum([(1.0, product), *(prediction.own or [])])
            outs.append(finish(product, prediction.projected))  # type: ignore[operator]
        return outs

    def _activate(self, x: Tensor, i: int, layout: Layout, dropout: float) -> Tensor:
        if self.act is not None and self.act_first:
            x = self.act(x)
        if self.norm_takes_batch:
            x = self.norms[i](x, layout.batch, layout.num_graphs)
        elif self.has_norm:
            x = self.norms[i](x)
        if self.act is not None and not self.act_first:
            if type(self.act) is torch.nn.ReLU:
                # Nobody but the next layer sees what batch normalisation has made.
                own = self.has_norm and _is_private(self.norms[i])
                return relu_dropout(x, dropout, self.training, inplace=own)
            x = self.act(x)
        return drop(x, dropout, self.training)


def _is_private(norm: torch.nn.Module) -> bool:
    """Whether the output of a norm may be changed: its backward does not need it, and
    there are no hooks that may hold on to it.
    """
    return type(norm) is BatchNorm and not any(
        module._forward_hooks for module in norm.modules()
    )
