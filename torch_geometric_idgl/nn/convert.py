r"""The graph convolutions of a module, made to run on learned graphs.

A learned graph is an operator without a list of edges. The module gets an object in
place of :obj:`edge_index` that only graph convolutions can do something with: those of
:obj:`_ON_OPERATORS` multiply with the operator, others get exported edges.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import (
    APPNP,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
)
from torch_geometric.nn.dense import Linear

from ..graphs import GraphOperator
from ..ops.numeric import dropout
from ..ops.sparse import SparseMatrix
from .backbone import edge_refusal

__all__ = ['LearnedEdges', 'SparseInput', 'convert', 'first_of', 'version_of']


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
    if conv.aggr not in ('add', 'sum', 'mean'):
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
