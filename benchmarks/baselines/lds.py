"""LDS: learn a Bernoulli probability for each pair of nodes by bilevel programming.

Franceschi, Niepert, Pontil, He, `"Learning Discrete Structures for Graph Neural
Networks" <https://arxiv.org/abs/1903.11960>`_, ICML 2019.

The inner problem trains a GCN on graphs sampled anew at each step; the outer one moves
the edge probabilities along the gradient of the loss on half of the dev set, through
the last few inner steps. The other half of the dev set decides when to stop.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected
from tqdm.auto import tqdm

from baselines.features import dropout, matmul
from torch_geometric_idgl.training.checkpoint import replacing, rng_state, set_rng_state

__all__ = ['fit_lds']

Params = list[Tensor]


class EdgeSampler:
    r"""Draws pairs of nodes, each with a probability of its own.

    Nearly all probabilities are tiny after the first outer step. Of those below
    :obj:`rare`, candidates are found by skipping geometrically distributed numbers of
    pairs, and each is kept with its share of :obj:`rare`: the same distribution as one
    random number for each pair, for the price of the candidates.

    Args:
        theta (torch.Tensor): The probability of each pair.
        rare (float, optional): (default: :obj:`1 / 64`)
    """

    def __init__(self, theta: Tensor, rare: float = 1 / 64):
        self.num_nodes = theta.size(1)
        place = theta.flatten().nonzero().squeeze(1)
        prob = theta.flatten()[place]
        is_rare = prob < rare
        self.rare = rare
        self.likely = (place[~is_rare], prob[~is_rare])
        self.unlikely = (place[is_rare], prob[is_rare] / rare)

    def sample(self) -> tuple[Tensor, Tensor]:
        """The two nodes of each pair drawn."""
        place, prob = self.unlikely
        candidate = self._candidates(place.numel())
        parts = [self.likely, (place[candidate], prob[candidate])]
        drawn = torch.cat([at[torch.rand_like(p) < p] for at, p in parts])
        row = drawn.div(self.num_nodes, rounding_mode='floor')
        return row, drawn % self.num_nodes

    def _candidates(self, total: int) -> Tensor:
        """Which of so many trials succeed with the probability :obj:`rare`."""
        device, found, last = self.likely[0].device, [], -1
        while last < total:
            count = int(1.1 * self.rare * (total - last)) + 64
            uniform = torch.rand(count, dtype=torch.double, device=device)
            skipped = ((1 - uniform).log() / math.log1p(-self.rare)).floor()
            found.append(last + (skipped.long() + 1).cumsum(0))
            last = int(found[-1][-1])
        place = torch.cat(found)
        return place[place < total]


class SampledGraph:
    r"""A sparse undirected graph that learns the gradient of *all* its entries.

    A sampled graph has few edges, but the outer problem needs the derivative for each
    pair. It is a sum of outer products :math:`\sum_k g_k h_k^{\top}`, whose factors
    the products :math:`A h` leave here during the backward pass.
    """

    def __init__(self, adj: Tensor):
        self.adj = adj
        self.token = torch.zeros((), device=adj.device, requires_grad=True)
        self.factors: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def sample(cls, edges: EdgeSampler) -> SampledGraph:
        """Makes pairs `i < j` edges with their probabilities."""
        row, col = edges.sample()
        index = torch.stack([torch.cat([row, col]), torch.cat([col, row])])
        value = edges.likely[1].new_ones(index.size(1))
        shape = (edges.num_nodes, edges.num_nodes)
        adj = torch.sparse_coo_tensor(index, value, shape, check_invariants=False)
        return cls(adj.to_sparse_csr())

    def matmul(self, h: Tensor) -> Tensor:
        """Multiplies the adjacency matrix with dense columns."""
        return _MatMul.apply(h, self.token, self)


class _MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, token: Tensor, graph: SampledGraph) -> Tensor:
        ctx.graph = graph
        ctx.save_for_backward(h, token)
        return graph.adj @ h

    @staticmethod
    def backward(ctx, grad: Tensor):
        h, token = ctx.saved_tensors
        # Inner steps differentiate with `create_graph`; only the backward pass of the
        # outer loss runs without gradients, and gives those of the graph.
        if not torch.is_grad_enabled():
            ctx.graph.factors.append((grad, h.detach()))
        # The graph is symmetric, so this product has a gradient in the same way.
        grad_h = ctx.graph.matmul(grad) if ctx.needs_input_grad[0] else None
        return grad_h, torch.zeros_like(token), None


def gcn(params: Params, x: Tensor, graph: SampledGraph, p: float = 0.0) -> Tensor:
    """A two-layer GCN with dropout on features and hidden units."""
    w1, b1, w2, b2 = params
    # D^-1/2 (A + I) D^-1/2 h without forming the normalised graph.
    scale = (graph.matmul(w1.new_ones(x.size(0), 1)) + 1.0).rsqrt()

    def propagate(h: Tensor) -> Tensor:
        h = scale * h
        return scale * (graph.matmul(h) + h)

    h = (propagate(matmul(dropout(x, p), w1)) + b1).relu()
    return propagate(dropout(h, p) @ w2) + b2


def init_gcn(in_channels: int, hidden_channels: int, out_channels: int) -> Params:
    """Fresh GCN weights (Xavier) and zero biases."""
    params = []
    for shape in ((in_channels, hidden_channels), (hidden_channels, out_channels)):
        params.append(torch.nn.init.xavier_uniform_(torch.empty(shape)))
        params.append(torch.zeros(shape[1]))
    return [p.requires_grad_() for p in params]


class InnerState:
    """Weights of the inner problem, and Adam's two moments of them."""

    def __init__(self, params: Params):
        self.params = params
        self.first = [torch.zeros_like(p) for p in params]
        self.second = [torch.zeros_like(p) for p in params]
        self.step = 0

    def detach(self) -> InnerState:
        """Cuts the history: where the truncated hypergradient ends."""
        self.params = [p.detach().requires_grad_() for p in self.params]
        self.first = [m.detach() for m in self.first]
        self.second = [m.detach() for m in self.second]
        return self


def inner_step(
    state: InnerState,
    loss: Tensor,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> InnerState:
    r"""One differentiable step of Adam.

    :obj:`eps` stands inside of the root, whose derivative would not exist at zero.
    """
    grads = torch.autograd.grad(loss, state.params, create_graph=True)
    new = InnerState([])
    new.step = state.step + 1
    correct1, correct2 = (1 - b**new.step for b in betas)
    for p, m, v, g in zip(state.params, state.first, state.second, grads, strict=True):
        new.first.append(betas[0] * m + (1 - betas[0]) * g)
        new.second.append(betas[1] * v + (1 - betas[1]) * g**2)
        scale = (new.second[-1] / correct2 + eps).sqrt()
        new.params.append(p - lr * (new.first[-1] / correct1) / scale)
    return new


def hypergradient(outer_loss: Tensor, graphs: list[SampledGraph]) -> Tensor:
    r"""The gradient of the outer loss with respect to the edge probabilities.

    With the straight-through estimator a sampled graph passes its gradient on to the
    probabilities unchanged, so those of all sampled graphs add up; a pair
    :math:`i < j` owns both entries of a symmetric graph.
    """
    torch.autograd.grad(outer_loss, [graph.token for graph in graphs])
    factors = [pair for graph in graphs for pair in graph.factors]
    left, right = (torch.cat(part, dim=1) for part in zip(*factors, strict=True))
    total = left @ right.t()
    return total.add_(total.t().contiguous()).triu_(1)


@torch.no_grad()
def predict(params: Params, x: Tensor, theta: Tensor, samples: int) -> Tensor:
    """Class probabilities, averaged over sampled graphs."""
    edges = EdgeSampler(theta)
    graphs = (SampledGraph.sample(edges) for _ in range(samples))
    return sum(gcn(params, x, graph).softmax(-1) for graph in graphs) / samples


@dataclass
class Outer:
    """What the outer problem takes from one start of the GCN to the next."""

    theta: Tensor  # the probability of each pair i < j
    rate: float
    dev: Tensor  # dev nodes: the first half for the outer loss, the second to choose
    restart: int = 0
    steps: int = 0
    stale: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None
    prob: Tensor | None = None  # predictions of the best start

    @classmethod
    def start(cls, data: Data, rate: float) -> Outer:
        """Certain edges where the given graph has some, and none elsewhere."""
        n, device = data.num_nodes, data.x.device
        dev = data.val_mask.nonzero().view(-1)
        dev = dev[torch.randperm(dev.numel(), device=device)]
        theta = torch.zeros(n, n, device=device)
        row, col = to_undirected(data.edge_index, num_nodes=n)
        theta[row, col] = 1.0
        return cls(theta.triu_(1), rate, dev)

    @property
    def outer_nodes(self) -> Tensor:
        return self.dev[: self.dev.numel() // 2]

    @property
    def held_out(self) -> Tensor:
        return self.dev[self.dev.numel() // 2 :]

    def compare(self, prob: Tensor, y: Tensor) -> None:
        """Keeps the predictions of this start if they are the best ones so far."""
        # The loss tells equal accuracies on a small half of the dev set apart.
        prob_held, y_held = prob[self.held_out], y[self.held_out]
        score = float((prob_held.argmax(-1) == y_held).float().mean())
        loss = float(F.nll_loss(prob_held.clamp(min=1e-12).log(), y_held))
        best = self.best
        self.stale += 1
        if best is None or (score, -loss) > (best['dev'], -best['dev_loss']):
            if best is None or score > best['dev']:
                self.stale = 0
            self.best = {'dev': score, 'dev_loss': loss, 'best_epoch': self.restart}
            self.best['expected_edges'] = float(self.theta.sum())
            self.prob = prob
        self.restart += 1

    def save(self, file: Path) -> None:
        """Saves the state with that of the random numbers."""
        with replacing(file) as temporary:
            torch.save({'outer': vars(self), 'rng': rng_state()}, temporary)

    @classmethod
    def load(cls, file: Path, device: torch.device) -> Outer:
        """Goes on from a saved state."""
        content = torch.load(file, map_location='cpu', weights_only=True)
        set_rng_state(content['rng'])
        return cls(
            **{
                key: value.to(device) if isinstance(value, Tensor) else value
                for key, value in content['outer'].items()
            }
        )


def fit_lds(
    data: Data,
    *,
    hidden_channels: int = 16,
    dropout: float = 0.5,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    outer_lr: float = 0.1,
    outer_decay: float = 0.99,
    tau: int = 5,
    samples: int = 16,
    inner_patience: int = 4,
    max_windows: int = 40,
    patience: int = 5,
    max_restarts: int = 50,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> dict:
    r"""Algorithm 1 of the paper, from the given graph or a kNN graph (kNN-LDS).

    The GCN is trained by Adam with :obj:`lr`, with :obj:`weight_decay` on its first
    layer, and starts anew when its training loss has not decreased for
    :obj:`inner_patience` outer steps, or after :obj:`max_windows`. An outer step comes
    after :obj:`tau` inner ones, which its gradient goes through: projected gradient
    descent on the probabilities with the rate :obj:`outer_lr`, times
    :obj:`outer_decay` after each. It ends when :obj:`patience` starts gave nothing
    better on the second half of the dev set, or after :obj:`max_restarts`. Predictions
    average over :obj:`samples` graphs. The run is saved in the file
    :obj:`checkpoint` after each start, and goes on from it.
    """
    x, y = data.x, data.y
    classes = int(y.max()) + 1
    train = data.train_mask.nonzero().view(-1)
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists():
        outer = Outer.load(file, x.device)
    else:
        outer = Outer.start(data, outer_lr)

    def inner_loss(state: InnerState, graph: SampledGraph) -> Tensor:
        out = gcn(state.params, x, graph, dropout)
        decay = weight_decay / 2 * state.params[0].square().sum()
        return F.cross_entropy(out[train], y[train]) + decay

    shown = {'desc': 'LDS', 'disable': not progress, 'leave': False}
    bar = tqdm(total=outer.restart + patience, initial=outer.restart, **shown)
    while outer.restart < max_restarts and outer.stale < patience:
        start = time.perf_counter()
        params = init_gcn(x.size(1), hidden_channels, classes)
        state = InnerState([w.to(x.device) for w in params])
        lowest, waited, window = float('inf'), 0, 0
        while waited < inner_patience and window < max_windows:
            graphs, losses = [], []
            state, edges = state.detach(), EdgeSampler(outer.theta)
            for _ in range(tau):
                graphs.append(SampledGraph.sample(edges))
                loss = inner_loss(state, graphs[-1])
                state = inner_step(state, loss, lr)
                losses.append(loss.item())
            graphs.append(SampledGraph.sample(edges))
            out = gcn(state.params, x, graphs[-1])[outer.outer_nodes]
            outer_loss = F.cross_entropy(out, y[outer.outer_nodes])
            grad = hypergradient(outer_loss, graphs)
            # Projected gradient descent: probabilities stay in [0, 1].
            outer.theta.sub_(grad, alpha=outer.rate).clamp_(0.0, 1.0)
            outer.rate *= outer_decay
            outer.steps += 1
            window += 1
            waited = 0 if sum(losses) / tau < lowest else waited + 1
            lowest = min(lowest, sum(losses) / tau)
            bar.set_postfix(train=f'{lowest:.3f}', outer=f'{outer_loss.item():.3f}')
        outer.compare(predict(state.detach().params, x, outer.theta, samples), y)
        outer.seconds += time.perf_counter() - start
        bar.total = min(max_restarts, outer.restart + patience - outer.stale)
        bar.update()
        if file is not None:
            outer.save(file)
    bar.close()
    if file is not None:
        file.unlink(missing_ok=True)

    assert outer.best is not None and outer.prob is not None
    correct = (outer.prob.argmax(-1) == y).float()
    return {
        'train': float(correct[data.train_mask].mean()),
        **outer.best,
        'test': float(correct[data.test_mask].mean()),
        'epochs': outer.steps * tau,
        'outer_steps': outer.steps,
        'restarts': outer.restart,
        'seconds': outer.seconds,
    }
