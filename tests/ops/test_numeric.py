import math

import pytest
import torch

from torch_geometric_idgl.ops.numeric import (
    different_rows,
    dropout,
    relu_dropout,
    safe_log,
    safe_reciprocal,
    safe_rsqrt,
    symmetric_product,
    widen,
)


def both(fn, values):
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    y = fn(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return y.tolist(), grad.tolist()


def test_safe_reciprocal():
    value, grad = both(safe_reciprocal, [4.0, 0.0, 1e-20, 0.5])
    assert value == [0.25, 0.0, 0.0, 2.0]
    assert grad == [-1 / 16, 0.0, 0.0, -4.0]


def test_safe_rsqrt():
    value, grad = both(safe_rsqrt, [4.0, 0.0, 0.25])
    assert value == [0.5, 0.0, 2.0]
    assert grad == [-1 / 16, 0.0, -4.0]


def test_safe_log():
    value, grad = both(safe_log, [1.0, 0.0, 2.0])
    assert value == [0.0, math.log(1e-12), math.log(2.0)]
    assert grad == [1.0, 0.0, 0.5]


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16, torch.float])
@pytest.mark.parametrize('fn', [safe_reciprocal, safe_rsqrt, safe_log])
def test_finite_in_every_precision(fn, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([0.0, tiny / 2, tiny, 1.0], dtype=dtype, requires_grad=True)
    y = fn(x)
    y.sum().backward()
    assert bool(y.isfinite().all())
    assert bool(x.grad[[0, 1, 3]].isfinite().all())


@pytest.mark.parametrize('p', [0.3, 0.5, 0.9])
@pytest.mark.parametrize('shape', [(3001,), (500, 7)])
def test_dropout(p, shape):
    torch.manual_seed(0)
    x = torch.rand(shape, dtype=torch.float64).add_(1.0).requires_grad_()
    out = dropout(x, p)
    kept = out != 0
    # p is a multiple of 2^-16, and so is the scale.
    scale = out[kept] / x[kept]
    torch.testing.assert_close(
        scale, torch.full_like(scale, 1 / (1 - p)), rtol=2e-4, atol=0
    )
    assert abs(kept.double().mean() - (1 - p)) < 0.03
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, kept * scale[0])
    assert not torch.equal(dropout(x, p) != 0, kept)


def test_dropout_of_neighbours_is_independent():
    """The four entries that one random number decides about."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(40_000), 0.5) != 0).view(-1, 4).double()
    torch.testing.assert_close(
        kept.mean(0), torch.full((4,), 0.5).double(), atol=0.02, rtol=0
    )
    correlation = torch.corrcoef(kept.t()) - torch.eye(4)
    assert correlation.abs().max() < 0.04


def test_dropout_at_the_ends():
    x = torch.rand(5, 3)
    assert torch.equal(dropout(x, 0.0), x)
    assert torch.equal(dropout(x, 1.0), torch.zeros_like(x))
    assert torch.equal(dropout(x, 0.5, training=False), x)
    assert dropout(x[:0], 0.5).shape == (0, 3)
    before = x.clone()
    dropout(x, 0.5)
    assert torch.equal(x, before)


@pytest.mark.parametrize('training', [False, True])
def test_relu_dropout(training):
    x = torch.randn(301, 7, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    results = []
    for fn in [
        lambda h: relu_dropout(h, 0.25, training),
        lambda h: dropout(h.relu(), 0.25, training),
    ]:
        torch.manual_seed(0)
        hidden = x * 1.0
        before = hidden.detach().clone()
        out = fn(hidden)
        results.append((out, torch.autograd.grad(out, x, grad)[0]))
        assert torch.equal(hidden, before)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize('batch', [1, 2])
def test_symmetric_product(batch):
    """In one strip and in several, the last of which may be narrow."""
    for size in [0, 1, 256, 257, 600, 1100]:
        b = torch.randn(batch, 5, size, dtype=torch.float64)
        a = b * torch.randn(batch, 5, 1, dtype=torch.float64)
        torch.testing.assert_close(symmetric_product(a, b), a.transpose(1, 2) @ b)


def test_widen():
    sizes = {0: 0, 1: 1, 2: 16, 15: 16, 16: 16, 17: 32, 31: 32, 32: 32, 33: 33}
    for width, expected in sizes.items():
        x = torch.rand(3, width)
        wide = widen(x)
        assert wide.size(1) == expected
        assert torch.equal(wide[:, :width], x) and not wide[:, width:].any()


def test_different_rows():
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [2.0, 1.0], [-0.0, 0.0]])
    first, kind = different_rows(x)
    assert first.numel() == 3 and torch.equal(x[first][kind], x)
    assert kind[0] == kind[2] and kind[1] == kind[4]
    # Rows that cannot be told apart by their sums are not mixed up.
    large = torch.tensor([[1e30, 1.0], [1e30, 2.0]], dtype=torch.float64)
    first, kind = different_rows(large)
    assert torch.equal(large[first][kind], large)
    state = torch.get_rng_state()
    different_rows(x)
    assert torch.equal(torch.get_rng_state(), state)
