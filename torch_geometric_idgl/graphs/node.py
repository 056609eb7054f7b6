r"""A learned graph of all pairs of nodes, with what one look at it has found out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.features import Features
from ..ops.numeric import safe_reciprocal
from .base import Affinity, GraphOperator

__all__ = ['NodeGraph']


class NodeGraph(GraphOperator):
    r"""A learned graph :math:`\mathbf{A}` over which messages are passed as
    :math:`\mathrm{f}(\mathbf{A})_{ij} = A_{ij} / \sum_j A_{ij}` (empty rows stay
    empty), and which is regularised as it is.

    :class:`~torch_geometric_idgl.graphs.AnchorGraph` has the same constructor and
    attributes, so one loop serves both.

    Args:
        affinity (Affinity): :math:`\mathbf{A}`.
        message (torch.Tensor, optional): What the first layer multiplies it with (if
            known), and a column of ones, whose product is the degrees.
        features (Features, optional): The features whose smoothness is asked for.
        previous (NodeGraph, optional): The graph before, whose distance is asked for.
        norm (bool): Whether the squared norm is asked for.
        later (Tuple[int]): The numbers of columns of products that will follow.

    Attributes:
        affinity: The learned matrix, not normalised.
        product: :math:`\mathrm{f}(\mathbf{A}) \mathbf{F}` with the message, or nothing.
        degree: The degrees :math:`\mathbf{A} \mathbf{1}`.
        energy: :math:`\frac{1}{2} \sum_{i,j} A_{ij} \|\mathbf{x}_i - \mathbf{x}_j\|^2`
            of each graph (Eq. 10), or nothing.
        sq_norm: :math:`\|\mathbf{A}\|_F^2` of each graph, or nothing.
        sq_dist: The squared distance to the previous graph, or nothing.
        lacks_norm: Whether the norm of the previous graph is still to be added to it.
    """

    affinity: Affinity
    energy: Any
    sq_norm: Any
    sq_dist: Any
    own_norm: Any = None  # its change is compared with the norm of the first graph

    def __init__(
        self,
        affinity: Affinity,
        message: Tensor | None = None,
        features: Features | None = None,
        previous: NodeGraph | None = None,
        norm: bool = False,
        later: tuple[int, ...] = (),
    ) -> None:
        self.rows, self.cols, self.dtype = affinity.rows, affinity.cols, affinity.dtype
        message = self.ones() if message is None else message
        found = affinity.measure(
            message,
            None if affinity.symmetric or features is None else message[:, -1:],
            features=features,
            previous=None if previous is None else previous.affinity,
            norm=norm,
            later=later,
        )
        width = message.size(1) - 1
        product, degree = found.product.split((width, 1), dim=1)  # type: ignore
        self.affinity = found.graph
        self.degree = degree.squeeze(1)
        self.scale = safe_reciprocal(degree)
        if width > 0:
            self.product = self.scale * product
        self.sq_norm = found.sq_norm
        self.sq_dist = found.sq_dist
        self.lacks_norm = found.lacks_norm
        self.energy = None
        if features is not None:
            both = self.degree  # row sums, or their mean with column sums
            if not affinity.symmetric:
                both = 0.5 * (both + found.t_product[:, 0])  # type: ignore[index]
            self.energy = self.rows.sum(both * features.sq_norms) - found.gram_inner  # type: ignore

    def matmul(self, x: Tensor) -> Tensor:
        return self.weighted_matmul(x, 1.0)

    def weighted_matmul(self, x: Tensor, weight: float) -> Tensor:
        scale = self.scale if weight == 1.0 else weight * self.scale
        return scale * self.affinity.matmul(x)
