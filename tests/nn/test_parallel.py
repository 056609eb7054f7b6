"""Replicas of a model, as :class:`torch.nn.DataParallel` makes them."""

import pytest
import torch

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    loss_and_gradients,
    make_graph,
    make_model,
)


def replicate(model):
    """One replica on the same device: parameters and buffers are plain tensors that
    lead back to those of the model.
    """
    copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, copy in copies.items():
        copy._former_parameters = {}
        for key, child in module._modules.items():
            copy._modules[key] = None if child is None else copies[child]
        for key, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[key] = None
            else:
                setattr(copy, key, parameter * 1.0)
                copy._former_parameters[key] = getattr(copy, key)
        for key, buffer in module._buffers.items():
            copy._buffers[key] = None if buffer is None else buffer.clone()
    return copies[model]


class Scaled(torch.nn.Module):
    """A user's metric with a parameter."""

    symmetric = True

    def __init__(self, in_channels):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(in_channels))

    def forward(self, u, v):
        return torch.exp(-torch.cdist(u * self.scale, v * self.scale).square())


def check(model, *args):
    expected = loss_and_gradients(model, *args)
    replica = replicate(model)
    assert next(iter(replica.parameters()), None) is None
    model.zero_grad()
    _, trace = replica(*args, return_trace=True)
    y = torch.arange(trace.out.size(0)) % 3
    loss = trace.loss(lambda out: torch.nn.functional.cross_entropy(out, y))
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    assert all_finite((loss, grads, trace))
    assert_close(trace.out, expected[2].out, 1e-9)
    assert_close(loss, expected[0], 1e-9)
    for name, grad in expected[1].items():
        assert_close(grads[name], grad, 1e-8)


@pytest.mark.parametrize('backend', ['auto', 'dense', 'low_rank', 'tiled', 'sparse'])
@pytest.mark.parametrize('cls', MODELS)
def test_replicas(cls, backend):
    x, edge_index = make_graph(12, dtype=torch.float64)
    epsilon = 0.0 if backend == 'low_rank' else 0.2
    model = make_model(cls, backend=backend, epsilon=epsilon, sparsity=0.1).double()
    check(model, x, edge_index)
    check(model, x.to_sparse_csr(), edge_index)


@pytest.mark.parametrize('cls', MODELS)
def test_replicas_with_other_metrics(cls):
    x, edge_index = make_graph(12, dtype=torch.float64)
    for metric, backend in [
        ('rbf', 'dense'),
        ('rbf', 'tiled'),
        ('attention', 'sparse'),
    ]:
        model = make_model(cls, metric=metric, epsilon=0.1, backend=backend).double()
        check(model, x, edge_index)


@pytest.mark.parametrize('backend', ['tiled', 'sparse'])
@pytest.mark.parametrize('cls', MODELS)
def test_replicas_with_a_users_metric(cls, backend):
    x, edge_index = make_graph(12, dtype=torch.float64)
    model = make_model(cls, metric=Scaled, epsilon=0.1, backend=backend).double()
    check(model, x, edge_index)
