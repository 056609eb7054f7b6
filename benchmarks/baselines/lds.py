"""LDS: learn a Bernoulli probability for each pair of nodes by bilevel programming.

Franceschi, Niepert, Pontil, He, `"Learning Discrete Structures for Graph Neural
Networks" <https://arxiv.org/abs/1903.11960>`_, ICML 2019.

The inner problem trains a GCN on graphs sampled anew at each step; the outer one moves
the edge probabilities along the gradient of the loss on half of the dev set, through
the last few inner steps.
"""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_adj, to_torch_csr_tensor, to_undirected
from tqdm.auto import tqdm

from baselines.features import dropout, matmul
from torch_geometric_idgl.training.checkpoint import replacing, rng_state, set_rng_state

State = list[tuple[Tensor, ...]]  # each parameter with Adam's two moments of it


class _MatMul(torch.autograd.Function):
    r"""The product :math:`A h` with a sparse symmetric graph, in which *all* pairs get
    a gradient: a sum of outer products :math:`\sum_k g_k h_k^{\top}`, whose factors
    the backward pass leaves in :obj:`A.factors`.
    """

    @staticmethod
    def forward(ctx, adj: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(adj, h)
        return adj @ h

    @staticmethod
    def backward(ctx, grad: Tensor):
        adj, h = ctx.saved_tensors
        # Inner steps differentiate with `create_graph`; only the backward pass of the
        # outer loss runs without gradients, and gives those of the graph.
        if not torch.is_grad_enabled():
            adj.factors.append((grad, h.detach()))
        return None, _MatMul.apply(adj, grad) if ctx.needs_input_grad[1] else None


def sample(theta: Tensor, count: int) -> list[Tensor]:
    """Graphs in which pairs `i < j` are edges with their probabilities."""
    place = theta.flatten().nonzero().squeeze(1)
    prob, graphs = theta.flatten()[place], []
    for _ in range(count):
        drawn = place[torch.rand_like(prob) < prob]
        pair = torch.stack([drawn // theta.size(0), drawn % theta.size(0)])
        both = torch.cat([pair, pair.flip(0)], dim=1)
        graphs.append(to_torch_csr_tensor(both, size=theta.shape).requires_grad_())
        graphs[-1].factors = []
    return graphs


def gcn(state: State, x: Tensor, adj: Tensor, p: float = 0.0) -> Tensor:
    """A two-layer GCN with dropout on features and hidden units."""
    w1, b1, w2, b2 = (param for param, _, _ in state)
    # D^-1/2 (A + I) D^-1/2 h without forming the normalised graph.
    scale = (_MatMul.apply(adj, w1.new_ones(x.size(0), 1)) + 1.0).rsqrt()

    def propagate(h: Tensor) -> Tensor:
        h = scale * h
        return scale * (_MatMul.apply(adj, h) + h)

    h = (propagate(matmul(dropout(x, p), w1)) + b1).relu()
    return propagate(dropout(h, p) @ w2) + b2


def init_gcn(x: Tensor, hidden_channels: int, out_channels: int) -> State:
    """Fresh GCN weights (Xavier) and zero biases, which have moments of zero."""
    params = []
    for size in ((x.size(1), hidden_channels), (hidden_channels, out_channels)):
        weight = torch.empty(size, dtype=x.dtype, device=x.device)
        params += [torch.nn.init.xavier_uniform_(weight), weight.new_zeros(size[1])]
    return [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params]


def inner_step(state: State, step: int, loss: Tensor, lr: float, eps=1e-8) -> State:
    """A differentiable step of Adam, counted from one. `eps` stands inside of the root,
    whose derivative would not exist at zero.
    """
    grads = torch.autograd.grad(loss, [p for p, _, _ in state], create_graph=True)
    new = []
    for (p, m, v), grad in zip(state, grads, strict=True):
        m, v = m.lerp(grad, 0.1), v.lerp(grad**2, 0.001)
        scale = (v / (1 - 0.999**step) + eps).sqrt()
        new.append((p - lr / (1 - 0.9**step) * m / scale, m, v))
    return new


def hypergradient(outer_loss: Tensor, graphs: list[Tensor]) -> Tensor:
    """The gradient with respect to the edge probabilities: the sum of those of all
    sampled graphs (straight-through), where a pair `i < j` owns two entries.
    """
    torch.autograd.grad(outer_loss, graphs, allow_unused=True)
    factors = [pair for graph in graphs for pair in graph.factors]
    left, right = (torch.cat(part, dim=1) for part in zip(*factors, strict=True))
    total = left @ right.t()
    return total.add_(total.t().contiguous()).triu_(1)


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
    desc: str = 'LDS',
    checkpoint: str | os.PathLike | None = None,
) -> dict:
    """Algorithm 1 of the paper, from the given graph or a kNN graph (kNN-LDS).

    After :obj:`tau` steps of Adam comes one on the probabilities, whose rate
    :obj:`outer_lr` decays by :obj:`outer_decay`. The GCN starts anew when its training
    loss has not decreased for :obj:`inner_patience` such windows. All ends when
    :obj:`patience` starts gave nothing better on the second half of the dev set.
    Predictions average over :obj:`samples` graphs. The run is saved in the file
    :obj:`checkpoint` after each start, and goes on from it.
    """
    x, y = data.x, data.y
    edge_index = to_undirected(data.edge_index, num_nodes=data.num_nodes)
    theta = to_dense_adj(edge_index, max_num_nodes=data.num_nodes)[0].triu(1)
    dev = data.val_mask.nonzero().view(-1)
    dev = dev[torch.randperm(dev.numel(), device=dev.device)]
    starts: list[dict] = []  # the scores of each start of the GCN
    if checkpoint and Path(checkpoint).exists():
        theta, dev, starts, rng = torch.load(checkpoint, weights_only=True)
        set_rng_state(rng)
    # One half of the dev nodes is for the outer loss, the other to choose.
    outer, held_out = dev.tensor_split(2)
    parts = {'train': data.train_mask, 'dev': held_out}
    parts |= {'test': data.test_mask} if 'test_mask' in data else {}

    shown = {'desc': desc, 'disable': not progress, 'leave': False}
    bar = tqdm(total=max_restarts, initial=len(starts), **shown)
    while len(starts) < max_restarts:
        dev_scores = [start['dev'] for start in starts]
        if starts and len(starts) - dev_scores.index(max(dev_scores)) > patience:
            break
        began = time.perf_counter()
        windows = sum(start['epochs'] for start in starts) // tau
        state, losses = init_gcn(x, hidden_channels, int(y.max()) + 1), []
        for window in range(max_windows):
            graphs = sample(theta, tau + 1)
            # Here ends the history that the gradient goes through.
            state = [tuple(t.detach().requires_grad_() for t in s) for s in state]
            losses.append(0.0)
            for step, graph in enumerate(graphs[:-1], window * tau + 1):
                out = gcn(state, x, graph, dropout)[data.train_mask]
                loss = F.cross_entropy(out, y[data.train_mask])
                loss = loss + weight_decay / 2 * state[0][0].square().sum()
                state = inner_step(state, step, loss, lr)
                losses[-1] += loss.item() / tau
            loss = F.cross_entropy(gcn(state, x, graphs[-1])[outer], y[outer])
            bar.set_postfix(train=losses[-1], outer=loss.item())
            # Projected gradient descent: probabilities stay in [0, 1].
            rate = outer_lr * outer_decay ** (windows + window)
            theta.sub_(hypergradient(loss, graphs), alpha=rate).clamp_(0.0, 1.0)
            if window - losses.index(min(losses)) >= inner_patience:
                break
        with torch.no_grad():
            outs = [gcn(state, x, graph) for graph in sample(theta, samples)]
        prob = torch.stack(outs).softmax(-1).mean(0)
        correct = (prob.argmax(-1) == y).float()
        loss = F.nll_loss(prob[held_out].clamp(min=1e-12).log(), y[held_out])
        score = {key: float(correct[part].mean()) for key, part in parts.items()}
        score |= {'dev_loss': float(loss), 'best_epoch': len(starts)}
        score |= {'epochs': len(losses) * tau, 'seconds': time.perf_counter() - began}
        starts.append(score | {'expected_edges': float(theta.sum())})
        bar.update()
        if checkpoint:
            with replacing(Path(checkpoint)) as temporary:
                torch.save((theta, dev, starts, rng_state()), temporary)
    bar.close()
    if checkpoint:
        Path(checkpoint).unlink(missing_ok=True)
    # The loss tells equal accuracies on a small half of the dev set apart.
    best = max(starts, key=lambda start: (start['dev'], -start['dev_loss']))
    return best | {k: sum(start[k] for start in starts) for k in ('epochs', 'seconds')}
