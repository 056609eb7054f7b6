import math

import torch

from torch_geometric_idgl.ops.numeric import safe_log, safe_reciprocal, safe_rsqrt


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
