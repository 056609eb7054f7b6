r"""IDGL for documents as it is straightforward to write: padded, with dense matrices.

All documents of a batch get the shape of the longest, heads are stacked in one tensor,
graphs are dense, and autograd gives all gradients. What padding holds enters nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['PaddedRun', 'knn_adjacency', 'padded_idgl']

TINY = 1e-12  # sums are clamped here before dividing and inside the log


@dataclass
class PaddedRun:
    """What happened: position 0 is the first graph, position t the t-th refinement."""

    outs: list[Tensor] = field(default_factory=list)  # [B, N, out]
    regs: list[Tensor] = field(default_factory=list)  # [B]

    def loss(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """The joint loss, as every document has been refined equally often."""
        losses = [
            fn(out) + reg.mean() for out, reg in zip(self.outs, self.regs, strict=True)
        ]
        return losses[0] + sum(losses[1:]) / max(len(losses) - 1, 1)


def knn_adjacency(x: Tensor, mask: Tensor, k: int) -> Tensor:
    """The normalised cosine kNN graph of each document, itself included: a token of a
    shorter document has all its tokens as neighbours.
    """
    x = F.normalize(x, dim=-1, eps=TINY)
    cosine = x @ x.transpose(1, 2)
    adjacency = torch.zeros_like(cosine)
    for own, scores, size in zip(adjacency, cosine, mask.sum(1).tolist(), strict=True):
        count = min(k, size)
        nearest = scores[:size, :size].topk(count).indices
        own[:size, :size].scatter_(1, nearest, 1.0 / max(count, 1))
    return adjacency.transpose(1, 2)


def padded_idgl(
    x: Tensor,
    graph_x: Tensor,
    mask: Tensor,
    weights: list[Tensor],
    w_raw: Tensor,
    w_hidden: Tensor,
    *,
    k: int,
    epsilon: float,
    initial_weight: float,
    update_weight: float,
    smoothness: float,
    connectivity: float,
    sparsity: float,
    max_iters: int,
) -> PaddedRun:
    r"""Algorithm 1 with a fixed number of refinements, without dropout.

    Args:
        x: What enters the GCN, of shape B x N x d.
        graph_x: What graphs are learned from at first, of shape B x N x g.
        mask: Which tokens are not padding, of shape B x N.
        weights: One matrix (in x out) for each GCN layer (two or more).
        w_raw: Head weights of the learner on :obj:`graph_x`, of shape m x g.
        w_hidden: Head weights of the learner on embeddings, of shape m x h.
        k: The number of neighbours in the initial graph.
        epsilon: The threshold of learned graphs.
        initial_weight: That of the initial graph.
        update_weight: That of the refined graph against the first learned one.
        smoothness: The weight of the Dirichlet energy.
        connectivity: The weight of the log barrier on degrees.
        sparsity: The weight of the squared norm.
        max_iters: The number of refinements, of all documents.
    """
    run = PaddedRun()
    size = mask.sum(1).clamp(min=1)
    pairs = mask.unsqueeze(1) & mask.unsqueeze(2)

    def learn(v: Tensor, w: Tensor) -> Tensor:
        heads = F.normalize(w[:, None, None] * v, dim=-1, eps=TINY)  # [m, B, N, d]
        s = (heads @ heads.transpose(2, 3)).mean(0)
        return torch.where(pairs & (s > epsilon), s, 0.0)

    def normalize(a: Tensor) -> Tensor:
        return a / a.sum(2, keepdim=True).clamp(min=TINY)

    def regularizer(a: Tensor) -> Tensor:
        degree = a.sum(2)
        laplacian = torch.diag_embed(degree) - a
        smooth = (graph_x * (laplacian @ graph_x)).sum((1, 2)) / size**2
        logs = torch.where(mask, degree.clamp(min=TINY).log(), 0.0)
        connected = -logs.sum(1) / size
        norm = a.square().sum((1, 2)) / size**2
        return smoothness * smooth + connectivity * connected + sparsity * norm

    def step(a: Tensor, first: Tensor) -> Tensor:
        """Mix a learned graph, predict, and return the embeddings."""
        mixture = update_weight * normalize(a) + (1.0 - update_weight) * first
        mixed = initial_weight * initial + (1.0 - initial_weight) * mixture
        z = x
        for weight in weights[:-1]:
            z = torch.relu(mixed @ (z @ weight))
        run.outs.append(mixed @ (z @ weights[-1]))
        run.regs.append(regularizer(a))
        return z

    initial = knn_adjacency(graph_x.detach(), mask, k)
    a = learn(graph_x, w_raw)
    first = normalize(a)
    z = step(a, first)
    for _ in range(max_iters):
        z = step(learn(z, w_hidden), first)
    return run
