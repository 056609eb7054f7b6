r"""Graphs made of other graphs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..ops.caching import LastTensor, cached_tensor
from ..ops.numeric import dropout, safe_reciprocal
from .base import Affinity, GraphOperator

__all__ = [
    'ColumnScaled',
    'Memoized',
    'Mixture',
    'RowNormalized',
    'column_mask',
    'shared_products',
    'weighted_sum',
]


class RowNormalized(GraphOperator):
    r""":math:`\mathrm{f}(\mathbf{A})_{ij} = A_{ij} / \sum_j A_{ij}`; empty rows stay
    empty.
    """

    def __init__(self, graph: GraphOperator) -> None:
        super().__init__(graph.rows, graph.cols)
        self.graph = graph

    @property
    def dtype(self) -> torch.dtype:
        return self.graph.dtype

    @cached_tensor
    def _scale(self) -> Tensor:
        return safe_reciprocal(self.graph.row_sum()).unsqueeze(1)

    def matmul(self, x: Tensor) -> Tensor:
        return self._scale * self.graph.matmul(x)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        return (weight * self._scale) * self.graph.matmul(x)


class ColumnScaled(Affinity):
    r""":math:`\mathbf{A} \, \mathrm{diag}(\mathbf{c})`: every column times a factor."""

    def __init__(self, graph: GraphOperator, scale: Tensor) -> None:
        super().__init__(graph.rows, graph.cols)
        self.graph = graph
        self.scale = scale.unsqueeze(1)

    @property
    def dtype(self) -> torch.dtype:
        return self.graph.dtype

    def matmul(self, x: Tensor) -> Tensor:
        return self.graph.matmul(self.scale * x)

    def t_matmul(self, x: Tensor) -> Tensor:
        if not isinstance(self.graph, Affinity):
            raise TypeError(
                f"Expected an 'Affinity' to transpose "
                f"(got '{type(self.graph).__name__}')"
            )
        return self.scale * self.graph.t_matmul(x)

    def sq_norm(self) -> Tensor:
        squares = [block.square().sum(1) for _, block in self._column_blocks()]
        return self.rows.sum(torch.stack(squares).sum(0))


def column_mask(graph: GraphOperator, p: float) -> Tensor:
    """A dropout mask for the columns of a graph."""
    ones = torch.ones(graph.cols.num_rows, dtype=graph.dtype, device=graph.cols.device)
    return dropout(ones, p)


class Memoized(GraphOperator):
    """Remembers its product with the first matrix it meets.

    All iterations start from the same projected features, so the products of the
    constant parts of the mixture with them are computed once.
    """

    def __init__(self, graph: GraphOperator) -> None:
        super().__init__(graph.rows, graph.cols)
        self.graph = graph
        self._first: Tensor | None = None
        self._known = LastTensor()

    @property
    def dtype(self) -> torch.dtype:
        return self.graph.dtype

    def known_product(self, x: Tensor) -> Tensor | None:
        """The remembered product, if it is the one with this matrix."""
        if self._first is None:
            self._first = x
        if x is not self._first:
            return None
        return self._known.get(x, self.graph.matmul)

    def matmul(self, x: Tensor) -> Tensor:
        product = self.known_product(x)
        return self.graph.matmul(x) if product is None else product

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        product = self.known_product(x)
        if product is None:
            return self.graph.weighted_matmul(x, weight)
        return weight * product


class Mixture(GraphOperator):
    r"""A weighted sum of graphs (Eq. 3 and 9).

    Args:
        terms (List[Tuple[float, GraphOperator]]): Weights and graphs; a graph that
            comes several times is multiplied once.
    """

    def __init__(self, terms: list[tuple[float, GraphOperator]]) -> None:
        first = terms[0][1]
        super().__init__(first.rows, first.cols)
        merged: dict[int, tuple[float, GraphOperator]] = {}
        for weight, graph in terms:
            before = merged.get(id(graph), (0.0, graph))[0]
            merged[id(graph)] = (before + weight, graph)
        self.terms = [term for term in merged.values() if term[0] != 0.0]
        if not self.terms:
            self.terms = [(0.0, first)]

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0][1].dtype

    def scaled(self, weight: float) -> list[tuple[float, GraphOperator]]:
        """The terms, times a weight."""
        return [(weight * own, graph) for own, graph in self.terms]

    def matmul(self, x: Tensor) -> Tensor:
        return self.weighted_matmul(x, 1.0)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        total, known = None, []
        for own, graph in self.terms:
            product = graph.known_product(x) if isinstance(graph, Memoized) else None
            if product is not None:
                known.append((weight * own, product))
                continue
            product = graph.weighted_matmul(x, weight * own)
            total = product if total is None else total.add_(product)
        if total is None:
            (own, product), *known = known
            total = own * product
        for own, product in known:
            total = total.add_(product, alpha=own)
        return total

    def own_products(self, x: Tensor) -> list[tuple[float, Tensor]]:
        """The products with the terms that no other mixture has, and their weights."""
        return [
            (1.0, graph.weighted_matmul(x, weight))
            for weight, graph in self.terms
            if not isinstance(graph, Memoized)
        ]

    def shared_terms(self) -> list[tuple[float, GraphOperator]]:
        """The terms that other mixtures have as well; sums are taken apart."""
        return [
            part
            for weight, graph in self.terms
            if isinstance(graph, Memoized)
            for part in _taken_apart(weight, graph)
        ]


def _taken_apart(
    weight: float, graph: GraphOperator
) -> list[tuple[float, GraphOperator]]:
    """The terms of a remembered sum, those of sums within it, or the graph itself."""
    if not (isinstance(graph, Memoized) and isinstance(graph.graph, Mixture)):
        return [(weight, graph)]
    terms = Mixture(graph.graph.scaled(weight)).terms
    return [part for term in terms for part in _taken_apart(*term)]


def shared_products(
    terms: list[list[tuple[float, GraphOperator]]], inputs: list[Tensor]
) -> list[Tensor]:
    """The products of several sums of shared graphs, each with an input of its own:
    every graph is multiplied once, with all the inputs side by side, and equal sums
    are taken together.
    """
    together = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
    graphs = {id(graph): graph for sums in terms for _, graph in sums}
    products = {key: graph.matmul(together) for key, graph in graphs.items()}
    width, stop = inputs[0].size(1), 0
    out: list[Tensor] = []
    for sums, group in itertools.groupby(terms):
        start, stop = stop, stop + width * len(list(group))
        parts = [(weight, products[id(g)][:, start:stop]) for weight, g in sums]
        if not parts:
            parts = [(0.0, together[:, start:stop])]
        total = weighted_sum(parts)
        # Slices, because what `split` returns cannot be changed in place.
        out += [total[:, i : i + width] for i in range(0, stop - start, width)]
    return out


def weighted_sum(terms: list[tuple[float, Tensor]]) -> Tensor:
    """The sum of matrices times numbers."""
    weight, value = terms[0]
    out = value if weight == 1.0 else weight * value
    for weight, value in terms[1:]:
        out = out.add(value, alpha=weight)
    return out
