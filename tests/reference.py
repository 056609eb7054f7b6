r"""Algorithm 1 with dense matrices, as the paper's equations read.

Slow and plain on purpose: the models are held to it, and timed against it. Evaluation
mode only (no dropout); one graph; autograd gives all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['ReferenceRun', 'idgl_reference', 'regularizer', 'similarity']

TINY = 1e-12  # sums are clamped here before dividing and inside the log


@dataclass
class ReferenceRun:
    """What happened: position 0 is the first graph, position t the t-th refinement."""

    outs: list[Tensor] = field(default_factory=list)
    regs: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)
    learned: list[Tensor] = field(default_factory=list)  # A or R, not normalised
    mixed: list[Tensor] = field(default_factory=list)

    @property
    def num_iters(self) -> int:
        return len(self.outs) - 1

    def loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        losses = [fn(out) + reg for out, reg in zip(self.outs, self.regs, strict=True)]
        if self.num_iters == 0:
            return losses[0]
        return losses[0] + sum(losses[1:]) / self.num_iters


def similarity(v: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Eq. 1 and 2: the mean over heads of weighted cosines (0 with a zero vector)."""
    scores = [
        F.normalize(w_p * v, dim=1, eps=TINY)
        @ F.normalize(w_p * u, dim=1, eps=TINY).t()
        for w_p in w
    ]
    return torch.stack(scores).mean(0)


def inverse(degree: Tensor) -> Tensor:
    return 1.0 / degree.clamp(min=TINY)


def regularizer(
    a: Tensor, x: Tensor, alpha: float, beta: float, gamma: float
) -> Tensor:
    """Eq. 10 (in the trace form) and 11."""
    n = max(a.size(0), 1)
    laplacian = torch.diag(a.sum(1)) - a
    smoothness = torch.trace(x.t() @ laplacian @ x) / n**2
    connectivity = -a.sum(1).clamp(min=TINY).log().sum() / n
    sparsity = a.square().sum() / n**2
    return alpha * smoothness + beta * connectivity + gamma * sparsity


def idgl_reference(
    x: Tensor,
    initial: Tensor,
    weights: list[Tensor],
    w_raw: Tensor,
    w_hidden: Tensor,
    *,
    lam: float,
    eta: float,
    eps: float = 0.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    delta: float = 4e-5,
    T: int = 10,
    anchors: Tensor | None = None,
    fixed_iters: bool = False,
    recover: bool = True,
    scaled: bool = False,
    graph_x: Tensor | None = None,
) -> ReferenceRun:
    r"""IDGL and, with anchors, IDGL-Anch.

    Args:
        x: Features, of shape n x d.
        initial: The normalised initial graph L(0), of shape n x n.
        weights: One matrix (in x out) for each GCN layer.
        w_raw: Head weights of the learner on features, of shape m x d (or as many
            columns as graph_x has).
        w_hidden: Head weights of the learner on embeddings, of shape m x h.
        lam, eta, eps, alpha, beta, gamma, delta, T: As in the paper; T does not count
            the first graph.
        anchors: The nodes that are anchors.
        fixed_iters: Refine T times whatever delta says.
        recover: With anchors, form the graph of Eq. 5; otherwise pass messages through
            the anchors (Eq. 9).
        scaled: With anchors, regularise the graph of the anchors times s / n.
        graph_x: What the first graph is learned from and smoothness is of, if not x.
    """
    run = ReferenceRun()
    features = x if graph_x is None else graph_x

    def learn(v: Tensor, w: Tensor) -> Tensor:
        s = similarity(v, v if anchors is None else v[anchors], w)
        return torch.where(s > eps, s, 0.0)

    def normalize(a: Tensor) -> Tensor:
        rows = inverse(a.sum(1)).unsqueeze(1) * a  # f(A)
        if anchors is None:
            return rows
        return rows @ (inverse(a.sum(0)).unsqueeze(1) * a.t())  # Eq. 5

    def message(r: Tensor, f: Tensor) -> Tensor:
        """MP12 (Eq. 7)."""
        f = inverse(r.sum(0)).unsqueeze(1) * (r.t() @ f)
        return inverse(r.sum(1)).unsqueeze(1) * (r @ f)

    def graph_loss(a: Tensor) -> Tensor:
        if anchors is None:
            return regularizer(a, features, alpha, beta, gamma)
        b_hat = a.t() @ (inverse(a.sum(1)).unsqueeze(1) * a)
        if scaled:
            b_hat = a.size(1) / max(a.size(0), 1) * b_hat
        return regularizer(b_hat, features[anchors], alpha, beta, gamma)

    def step(v: Tensor, w: Tensor) -> Tensor:
        """Learn a graph, mix it (Eq. 3 or 9), predict (Eq. 4 or 8); returns Z."""
        a = learn(v, w)
        first = run.learned[0] if run.learned else a

        if anchors is None or recover:
            mixture = eta * normalize(a) + (1.0 - eta) * normalize(first)
            mixed = lam * initial + (1.0 - lam) * mixture
            run.mixed.append(mixed)

        def propagate(f: Tensor) -> Tensor:
            if anchors is None or recover:
                return mixed @ f
            both = eta * message(a, f) + (1.0 - eta) * message(first, f)
            return lam * (initial @ f) + (1.0 - lam) * both

        z = x
        for weight in weights[:-1]:
            z = torch.relu(propagate(z @ weight))
        out = propagate(z @ weights[-1])
        run.learned.append(a)
        run.outs.append(out)
        run.regs.append(graph_loss(a))
        return torch.relu(out) if len(weights) == 1 else z

    z = step(features, w_raw)
    for _ in range(T):
        z = step(z, w_hidden)
        first, before, now = run.learned[0], run.learned[-2], run.learned[-1]
        size = (first if anchors is None else now).square().sum().clamp(min=TINY)
        run.deltas.append((now - before).square().sum() / size)
        if not fixed_iters and run.deltas[-1] <= delta:
            break
    return run
