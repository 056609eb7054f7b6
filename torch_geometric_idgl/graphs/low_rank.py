r"""The graph that nothing of size :math:`n^2` is ever formed for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.caching import LastTensor, cached_tensor
from ..ops.norms import psd_sq_norm_bounds
from ..ops.numeric import widen
from ..ops.sparse import Pattern, sddmm
from .base import Affinity, Change, Message
from .dense import DenseGraph
from .factors import DenseFactor, Factor, SelectedFactor, WeightedFactor
from .signal import Signal

__all__ = ['LowRankGraph']

_SUBSPACES = (16, 64)  # dimensions, for bounds of the norm


class LowRankGraph(Affinity):
    r"""An affinity :math:`\mathbf{A} = \mathbf{U} \mathbf{V}^{\top}`, exact where
    sparsification removes nothing (:math:`\varepsilon = 0` and non-negative vectors):

    .. math::
        \mathbf{A} \mathbf{F} = \mathbf{U} (\mathbf{V}^{\top} \mathbf{F}), \quad
        \|\mathbf{A}\|_F^2 = \langle \mathbf{U}^{\top} \mathbf{U},
        \mathbf{V}^{\top} \mathbf{V} \rangle, \quad
        \langle \mathbf{A}, \mathbf{X} \mathbf{X}^{\top} \rangle =
        \|\mathbf{U}^{\top} \mathbf{X}\|_F^2

    Time and memory are linear in the number of nodes.

    Args:
        left (Factor): :math:`\mathbf{U}`.
        right (Factor, optional): :math:`\mathbf{V}`; :math:`\mathbf{U}` if not given.
            (default: :obj:`None`)
    """

    def __init__(self, left: Factor, right: Factor | None = None) -> None:
        self.left = left
        self.right: Factor = left if right is None else right
        self.symmetric = right is None
        self.factored = isinstance(left, DenseFactor)
        self.inner_rank = 0 if self.factored else 2
        self._observed = LastTensor()
        self._subspace_bounds: dict[int, tuple[Tensor, Tensor]] = {}
        self._known_middle = LastTensor()
        super().__init__(self.left.layout, self.right.layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def observe(
        self, message: Message, signal: Signal | None, previous: Affinity | None
    ) -> None:
        product = self.right.expand(self.left.project(message.with_ones))
        self._observed.set(message.x, product[:, :-1])
        if self.symmetric:
            self._row_sum = product[:, -1]
        else:
            self._col_sum = product[:, -1]

    def matmul(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return self.t_matmul(x)
        return self._multiply(self.left, self.right, x)

    def t_matmul(self, x: Tensor) -> Tensor:
        if self._observed.knows(x):
            return self._observed.value
        return self._multiply(self.right, self.left, x)

    def _multiply(self, left: Factor, right: Factor, x: Tensor) -> Tensor:
        if not self.factored:
            return left.expand(right.project(x))
        return left.expand(right.project(widen(x)))[:, : x.size(1)]

    def sq_norm(self) -> Tensor:
        return self._sq_norm

    @cached_tensor
    def _sq_norm(self) -> Tensor:
        if isinstance(self.left, WeightedFactor):
            return self.left.sq_norm() if self.symmetric else self._explicit.sq_norm()
        left, right = self._dense_factors()
        return (left.gram * right.gram).sum((1, 2))

    def sq_norm_bounds(self, effort: int = 0) -> tuple[Tensor, Tensor]:
        if self.factored:
            return super().sq_norm_bounds()
        if effort == 0:
            return self._sq_norm_bounds
        if effort > len(_SUBSPACES) or not self._worth_a_subspace:
            return super().sq_norm_bounds()
        if effort not in self._subspace_bounds:
            self._subspace_bounds[effort] = self._look_at(_SUBSPACES[effort - 1])
        return self._subspace_bounds[effort]

    @cached_tensor
    def _sq_norm_bounds(self) -> tuple[Tensor, Tensor]:
        # Weighted cosines are at most one, and s |R|^2 >= |R 1|^2 (Cauchy-Schwarz).
        degree = self.row_sum()
        lower = self.rows.sum(degree.square()) / self.cols.count
        return lower, self.rows.sum(degree)

    @property
    def _worth_a_subspace(self) -> bool:
        # The list of co-occurring features makes the norm cheap, as few nodes do.
        assert isinstance(self.left, WeightedFactor)
        large = self.symmetric and self.num_nodes >= 4 * max(_SUBSPACES)
        large &= self.dtype in (torch.float, torch.double)  # others have no QR
        return large and self.rows.num_graphs == 1 and self.left.signal.pairs is None

    def _look_at(self, dimension: int) -> tuple[Tensor, Tensor]:
        def multiply(x: Tensor) -> Tensor:  # in parts: products are heads times wider
            parts = x.split(_SUBSPACES[0], dim=1)
            return torch.cat([self.matmul(part) for part in parts], dim=1)

        generator = torch.Generator().manual_seed(0)  # the caller's is left alone
        size = (self.num_nodes, dimension)
        start = torch.randn(size, generator=generator, dtype=self.dtype)
        with torch.no_grad():
            lower, upper = psd_sq_norm_bounds(
                multiply, start.to(self.rows.device), float(self.num_nodes)
            )
            least, most = self._sq_norm_bounds
            return torch.maximum(least, lower), torch.minimum(most, upper)

    def _dense_factors(self) -> tuple[DenseFactor, DenseFactor]:
        assert isinstance(self.left, DenseFactor)
        assert isinstance(self.right, DenseFactor)
        return self.left, self.right

    @cached_tensor
    def _explicit(self) -> DenseGraph:
        """The entries, for what a factor that is never formed cannot answer."""
        assert isinstance(self.left, WeightedFactor)
        index = self.right.index if isinstance(self.right, SelectedFactor) else None
        value = self.left.affinity(index, self.cols)
        return DenseGraph(value, self.rows, self.cols, self.symmetric)

    def values_at(self, pattern: Pattern) -> Tensor:
        if not self.factored:
            return super().values_at(pattern)
        left, right = self._dense_factors()
        return sddmm(pattern, left.value, right.value)

    def inner(self, other: Affinity) -> Tensor:
        if not self.factored or other.inner_rank < self.inner_rank:
            return super().inner(other)
        left, right = self._dense_factors()
        # <A', U V^T> = tr(U^T A' V), for any A'.
        return self.rows.sum((other.matmul(right.value) * left.value).sum(1))

    def sq_dist(self, other: Affinity) -> Tensor:
        if not (isinstance(other, LowRankGraph) and self._same_shape(other)):
            return super().sq_dist(other)
        # With D = U - U' and E = V - V', A - A' = D V^T + U' E^T: every term is of the
        # size of the difference, so nothing cancels near convergence.
        u, v = self._dense_factors()
        u_old, v_old = other._dense_factors()
        d = DenseFactor(u.value - u_old.value, u.layout)
        if self.symmetric and other.symmetric:
            # U'^T D and D^T D give all the rest, the next U^T U included.
            cross = u_old.project(d.value)
            e, t_cross = d, cross.transpose(1, 2) + d.gram
            u.gram = u_old.gram + cross + t_cross
        else:
            e = DenseFactor(v.value - v_old.value, v.layout)
            cross, t_cross = u_old.project(d.value), e.project(v.value)
        total = (d.gram * v.gram).addcmul_(e.gram, u_old.gram)
        total = total.addcmul_(cross, t_cross, value=2.0)
        return total.sum((1, 2)).clamp(min=0.0)

    def change_from(self, previous: Affinity) -> Change:
        implicit = isinstance(previous, LowRankGraph) and not previous.factored
        if not (self.factored and implicit):
            return super().change_from(previous)
        return Change(self.sq_norm() - 2.0 * self.inner(previous), previous)

    def _same_shape(self, other: LowRankGraph) -> bool:
        if not (self.factored and other.factored):
            return False
        mine, others = self._dense_factors(), other._dense_factors()
        return mine[0].value.shape == others[0].value.shape

    def gram_inner(self, signal: Signal) -> Tensor:
        if isinstance(self.left, WeightedFactor):
            if self.symmetric and self.left.signal is signal:
                return self.left.gram_inner()
            return super().gram_inner(signal)
        left, right = self._dense_factors()
        projected = signal.t_matmul(left.value)  # [B, d, K]
        if self.symmetric:
            return projected.square().sum((1, 2))
        return (projected * signal.t_matmul(right.value)).sum((1, 2))

    def _middle(self, weight: Tensor) -> Tensor:
        r""":math:`\mathbf{U}^{\top} \mathrm{diag}(\mathbf{c}) \mathbf{U}`."""
        return self._known_middle.get(weight, self._make_middle)

    def _make_middle(self, weight: Tensor) -> Tensor:
        left, _ = self._dense_factors()
        return left.project(weight.unsqueeze(1) * left.value)

    def normal_matrix(self, weight: Tensor) -> Tensor:
        if not self.factored:
            return self._explicit.normal_matrix(weight)
        _, right = self._dense_factors()
        return right.padded @ self._middle(weight) @ right.padded.transpose(1, 2)

    def normal_sq_norm(self, weight: Tensor) -> Tensor:
        if not self.factored:
            return self._explicit.normal_sq_norm(weight)
        product = self._middle(weight) @ self._dense_factors()[1].gram
        return (product * product.transpose(1, 2)).sum((1, 2))

    def normal_gram_inner(self, weight: Tensor, signal: Signal) -> Tensor:
        if not self.factored:
            return self._explicit.normal_gram_inner(weight, signal)
        _, right = self._dense_factors()
        projected = signal.t_matmul(right.value)  # X_U^T V: [B, d, K]
        return ((projected @ self._middle(weight)) * projected).sum((1, 2))
