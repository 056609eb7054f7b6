"""Small graphs, comparisons, and the bridge from a model to the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.reference import ReferenceRun, idgl_reference
from torch_geometric_idgl.nn import IDGL, IDGLAnch

BACKENDS = ['auto', 'dense', 'low_rank', 'tiled', 'sparse']
MODELS = [IDGL, IDGLAnch]


def make_graph(n=10, d=6, seed=0, dtype=torch.float32, negative=False):
    """Features and the edges of a ring with chords, in both directions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    x = x - 0.5 if negative else x * (x > 0.3)
    node = torch.arange(n)
    edge_index = torch.cat(
        [torch.stack([node, (node + 1) % n]), torch.stack([node, (node + 3) % n])], 1
    )
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return x.to(dtype), edge_index


def make_model(cls=IDGL, *args, seed=0, **kwargs):
    """A model with seeded weights; anchors are fixed unless said otherwise."""
    torch.manual_seed(seed)
    if issubclass(cls, IDGLAnch):
        kwargs = {'num_anchors': 4, 'anchor_sampling': 'fixed', **kwargs}
    return cls(*(args or (6, 8, 2, 3)), **kwargs)


def labels(n, num_classes=3):
    return torch.arange(n) % num_classes


def cross_entropy(y):
    return lambda out: F.cross_entropy(out, y)


def joint_loss(model, *args, y=None, **kwargs):
    """The joint loss on all nodes, and the trace."""
    out, trace = model(*args, return_trace=True, **kwargs)
    y = labels(out.size(0), out.size(1)) if y is None else y
    return trace.loss(cross_entropy(y)), trace


def gradients(model):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def loss_and_gradients(model, *args, **kwargs):
    model.zero_grad()
    loss, trace = joint_loss(model, *args, **kwargs)
    loss.backward()
    return loss.detach(), gradients(model), trace


def assert_close(actual, expected, tol=1e-5):
    """Equal up to a share of the largest entry."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach(), expected.detach()
    if expected.numel() == 0:
        return
    scale = max(float(expected.abs().max()), 1e-6)
    gap = float((actual - expected).abs().max())
    assert gap <= tol * scale, f'differs by {gap / scale:.2e} of the largest entry'


def assert_same(actual, expected, tol=1e-5):
    """Two results of `loss_and_gradients` are equal."""
    loss, grads, trace = actual
    other_loss, other_grads, other_trace = expected
    assert trace.num_iters.tolist() == other_trace.num_iters.tolist()
    for out, other in zip(trace.outs, other_trace.outs, strict=True):
        assert_close(out, other, tol)
    for reg, other in zip(trace.regs, other_trace.regs, strict=True):
        assert_close(reg, other, tol)
    assert_close(loss, other_loss, tol)
    assert grads.keys() == other_grads.keys()
    for name in grads:
        assert_close(grads[name], other_grads[name], 10 * tol)


def all_finite(result):
    """Whether loss, gradients and outputs hold neither NaN nor infinity."""
    loss, grads, trace = result
    tensors = [loss, *grads.values(), *trace.outs, *trace.regs]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def set_weights(model, weights, w_raw, w_hidden):
    """Give a GCN model the weights of the reference."""
    with torch.no_grad():
        for conv, weight in zip(model.backbone.convs, weights, strict=True):
            conv.lin.weight.copy_(weight.t())
        model.feature_learner.metric.weight.copy_(w_raw)
        model.embedding_learner.metric.weight.copy_(w_hidden)


def weights_of(model):
    """The weights of a GCN model, as the reference takes them."""
    weights = [conv.lin.weight.t() for conv in model.backbone.convs]
    learners = model.feature_learner, model.embedding_learner
    return weights, *(learner.metric.weight for learner in learners)


def reference_of(model, x, initial, anchors=None, graph_x=None) -> ReferenceRun:
    """The reference with the weights and hyper-parameters of a GCN model."""
    return idgl_reference(
        x,
        initial,
        *weights_of(model),
        lam=model.initial_weight,
        eta=model.update_weight,
        eps=model.feature_learner.epsilon,
        alpha=model.smoothness,
        beta=model.connectivity,
        gamma=model.sparsity,
        delta=0.0 if model.tol is None else model.tol,
        T=model.max_iters,
        anchors=anchors,
        fixed_iters=model.tol is None,
        scaled=getattr(model, 'scale_regularizer', False),
        graph_x=graph_x,
    )
