"""Refinements that are computed once more in backward instead of being kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch_geometric.nn import GCN

from tests.nn.common import MODELS, cross_entropy, labels, make_graph, make_model
from torch_geometric_idgl import to_idgl


def step(model, x, edge_index):
    """The loss and gradients of one training step, with the same random numbers."""
    torch.manual_seed(1)
    _, trace = model(x, edge_index, return_trace=True)
    loss = trace.loss(cross_entropy(labels(x.size(0))))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [loss, *grads]


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('norm', [None, 'batch_norm'])
def test_same_as_kept(cls, backend, norm):
    x, edge_index = make_graph(n=14)
    model = make_model(
        cls, backend=backend, norm=norm, epsilon=0.2, dropout=0.4, max_iters=3, tol=None
    )
    other = copy.deepcopy(model)
    other.checkpoint_iters = True
    kept, recomputed = step(model, x, edge_index), step(other, x, edge_index)
    for a, b in zip(kept, recomputed, strict=True):
        torch.testing.assert_close(a, b)
    for name, buffer in model.named_buffers():  # statistics are not counted twice
        torch.testing.assert_close(buffer, other.get_buffer(name))


@pytest.mark.parametrize('cls', [*MODELS, 'to_idgl'])
@pytest.mark.parametrize(
    'options',
    [{'num_layers': 3}, {'jk': 'cat'}, {'num_layers': 3, 'graph_dropout': 0.3}],
)
def test_later_products_with_the_first_graph(cls, options):
    # They take what the first graph hands out once, and take it again in backward.
    x, edge_index = make_graph(n=14)
    options, kwargs = dict(options), {'epsilon': 0.2, 'max_iters': 3, 'tol': None}
    if cls == 'to_idgl':
        options = {'num_layers': options.get('num_layers', 2)}
        gnn = GCN(x.size(1), 4, out_channels=3, **options).to(x.dtype)
        model = to_idgl(gnn, x.size(1), backend='tiled', **kwargs).to(x.dtype)
    else:
        layers = options.pop('num_layers', 2)
        shape = (x.size(1), 8, layers, 3)
        model = make_model(cls, *shape, backend='tiled', **kwargs, **options)
    other = copy.deepcopy(model)
    other.checkpoint_iters = True
    kept, recomputed = step(model, x, edge_index), step(other, x, edge_index)
    for a, b in zip(kept, recomputed, strict=True):
        torch.testing.assert_close(a, b)


def test_keeps_less():
    x, edge_index = make_graph(n=60)
    sizes = []
    for checkpoint_iters in (False, True):
        model = make_model(max_iters=6, tol=None, checkpoint_iters=checkpoint_iters)
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            _, trace = model(x, edge_index, return_trace=True)
            loss = trace.loss(cross_entropy(labels(60)))
        loss.backward()
        sizes.append(sum(kept.values()))
    assert sizes[1] < 0.6 * sizes[0]


@torch.no_grad()
def test_without_gradients():
    x, edge_index = make_graph()
    model = make_model(max_iters=2).eval()
    expected = model(x, edge_index)
    model.checkpoint_iters = True
    torch.testing.assert_close(model(x, edge_index), expected)
