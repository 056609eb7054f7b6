"""What happened during one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..graphs import Affinity, Change, GraphOperator
from ..ops.layout import Layout

__all__ = ['Trace']


@dataclass
class Trace:
    r"""The iterations of one forward pass, for losses and for looking at them.

    Position 0 is the first graph :math:`\mathbf{A}^{(1)}`, position :math:`t` the
    :math:`t`-th refinement. In a batch a graph that has stopped keeps the outputs of
    its own last iteration.

    Attributes:
        outs: The outputs of each iteration, of shape :obj:`[n, out_channels]`.
        regs: The graph regulariser of each iteration, of shape :obj:`[B]`.
        changes: The squared distance of each refined graph to the one before, which
            :obj:`exact()` gives (it may not be needed, and is expensive).
        refined: Which graphs of the batch each iteration has refined.
        num_iters: The number of refinements of each graph, of shape :obj:`[B]`.
        initial: The initial graph :math:`\mathbf{L}^{(0)}`.
        first: The first learned graph, :math:`\mathbf{A}^{(1)}` or
            :math:`\mathbf{R}^{(1)}`.
        learned: The last learned graph, before normalisation.
        mixed: The last mixed graph :math:`\widetilde{\mathbf{A}}`, which the outputs
            come from.
        scales: The squared norm each change is compared with, or the graph it is of.
        layout: The graphs of the batch.
    """

    layout: Layout
    initial: GraphOperator
    first: Affinity
    learned: Affinity
    mixed: GraphOperator
    num_iters: Tensor
    regs: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    refined: list[Tensor] = field(default_factory=list)
    scales: list[Affinity | Tensor] = field(default_factory=list)

    @property
    def out(self) -> Tensor:
        """The final outputs."""
        return self.outs[-1]

    @cached_property
    @torch.no_grad()
    def deltas(self) -> list[Tensor]:
        r"""The stopping value of each refinement, of shape :obj:`[B]`: the change
        relative to :math:`\|\mathbf{A}^{(1)}\|_F^2` for IDGL, to
        :math:`\|\mathbf{R}^{(t)}\|_F^2` for IDGL-Anch. NaN for graphs that had
        stopped before. Without a tolerance (:obj:`tol=None`) nothing is compared, and
        there are none.
        """
        deltas = []
        for change, scale, refined in zip(
            self.changes, self.scales, self.refined, strict=False
        ):
            norm = scale if isinstance(scale, Tensor) else scale.sq_norm()
            delta = change.exact() / norm.clamp(min=1e-12)
            deltas.append(torch.where(refined, delta, torch.nan))
        return deltas

    @property
    def reg(self) -> Tensor:
        r"""The regulariser of the joint loss, averaged over graphs (empty ones count as
        zero): that of the first graph plus the mean over each graph's own refinements.
        """
        total = self.regs[0]
        if len(self.regs) > 1:
            later = torch.stack(self.regs[1:])  # [T, B]
            step = torch.arange(1, len(self.regs), device=later.device).unsqueeze(1)
            count = self.num_iters.clamp(min=1)
            total = total + torch.where(step <= count, later, 0.0).sum(0) / count
        return total.mean()

    def loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        r"""The joint loss of Algorithm 1,

        .. math::
            \mathcal{L} = \mathcal{L}^{(1)} + \frac{1}{T} \sum_{t=1}^{T}
            \mathcal{L}^{(1 + t)}, \qquad \mathcal{L}^{(t)} =
            \mathcal{L}_{\mathrm{pred}}^{(t)} + \mathcal{L}_{\mathcal{G}}^{(t)}

        with each graph's own number :math:`T` of refinements.

        Args:
            fn (Callable): The prediction loss, from outputs to a scalar. For batches
                whose graphs stop at different iterations, it must be a sum or mean of
                terms that depend on one row each (as cross entropy is).
        """
        return self.prediction_loss(fn) + self.reg

    def prediction_loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """The joint loss without regularisers."""
        first_out = self.outs[0]
        first = fn(first_out)
        if len(self.outs) == 1:
            return first
        counts = self.num_iters.unique().tolist() if self.layout.num_graphs > 1 else []
        if len(counts) <= 1:
            return first + sum(fn(out) for out in self.outs[1:]) / (len(self.outs) - 1)
        # Rows are independent: graphs with T refinements are averaged over T steps by
        # letting the others stand at the first graph's outputs, then taking these off.
        total = first + first
        for count in counts:
            rows = (self.num_iters == count)[self.layout.batch]
            for out in self.outs[1 : count + 1]:
                mixed = torch.where(rows.unsqueeze(-1), out, first_out)
                total = total + (fn(mixed) - first) / count
        return total
