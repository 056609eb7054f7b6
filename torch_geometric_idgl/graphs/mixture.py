r"""A weighted sum of graphs (Eq. 3 and 9)."""

from __future__ import annotations

from torch import Tensor

from .base import GraphOperator

__all__ = ['Mixture', 'weighted_sum']


class Mixture(GraphOperator):
    r""":math:`\sum_i w_i \mathbf{A}_i`; sums within the sum are taken apart.

    Args:
        *terms (Tuple[float, GraphOperator]): Weights and graphs.
    """

    def __init__(self, *terms: tuple[float, GraphOperator]) -> None:
        super().__init__(terms[0][1].rows, terms[0][1].cols, terms[0][1].dtype)
        self.terms: list[tuple[float, GraphOperator]]
        merged: dict[int, tuple[float, GraphOperator]] = {}
        for weight, graph in terms:
            parts = graph.terms if isinstance(graph, Mixture) else [(1.0, graph)]
            for own, part in parts:  # A graph that comes twice is multiplied once.
                before, _ = merged.get(id(part), (0.0, part))
                merged[id(part)] = (before + weight * own, part)
        self.terms = list(merged.values())
        if all(graph.product is not None for _, graph in terms):
            self.product = weighted_sum([(w, graph.product) for w, graph in terms])  # type: ignore[misc]

    def matmul(self, x: Tensor) -> Tensor:
        (weight, graph), *rest = self.terms
        total = graph.weighted_matmul(x, weight)
        for weight, graph in rest:
            total = total.add_(graph.weighted_matmul(x, weight))
        return total


def weighted_sum(terms: list[tuple[float, Tensor]]) -> Tensor:
    """The sum of matrices times numbers, which is nobody else's."""
    (weight, value), *rest = terms
    total = value if weight == 1.0 and rest else weight * value
    for weight, value in rest:
        total = total.add(value, alpha=weight)
    return total
