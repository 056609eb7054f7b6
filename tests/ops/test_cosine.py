import pytest
import torch
from torch.autograd import gradcheck

from torch_geometric_idgl.ops.numeric import weighted_unit_vectors


def vectors(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 5, generator=generator, dtype=torch.float64) - 0.4


def plain_unit_vectors(x, w):
    out = x.unsqueeze(1) * w
    return (out / out.norm(dim=2, keepdim=True) / len(w) ** 0.5).flatten(1)


@pytest.mark.parametrize('channels', [3, 300])
@pytest.mark.parametrize('heads', [1, 3])
def test_weighted_unit_vectors(heads, channels):
    generator = torch.Generator().manual_seed(0)
    options = {'generator': generator, 'dtype': torch.float64}
    x, w = torch.randn(4, channels, **options), torch.randn(heads, channels, **options)
    cotangent = torch.randn(4, heads * channels, **options)
    for wanted in [(True, True), (False, True), (True, False)]:
        given = [
            t.clone().requires_grad_(g) for t, g in zip((x, w), wanted, strict=True)
        ]
        leaves = [leaf for leaf in given if leaf.requires_grad]
        expected, actual = plain_unit_vectors(*given), weighted_unit_vectors(*given)
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual, leaves, cotangent)
        others = torch.autograd.grad(expected, leaves, cotangent)
        for grad, other in zip(grads, others, strict=True):
            torch.testing.assert_close(grad, other)


def test_gradcheck_of_weighted_unit_vectors():
    x, w = vectors(4).requires_grad_(), vectors(3, seed=1).requires_grad_()
    assert gradcheck(weighted_unit_vectors, (x, w))


def test_zero_vectors_stay_zero_and_get_no_gradient():
    x, w = vectors(4), vectors(3, seed=1).requires_grad_()
    x[1] = 0.0
    x.requires_grad_()
    out = weighted_unit_vectors(x, w)
    assert out[1].eq(0).all()
    (out * torch.arange(15)).sum().backward()
    assert x.grad[1].eq(0).all()
    assert bool(torch.isfinite(x.grad).all() and torch.isfinite(w.grad).all())
    assert weighted_unit_vectors(x[:0], w).shape == (0, 15)


@pytest.mark.parametrize('scale', [1e-9, 1e-4, 1e4, 1e9, 1e16, 1e18])
def test_tiny_and_huge_vectors_keep_their_direction(scale):
    x, w = vectors(4), vectors(3, seed=1)
    expected = weighted_unit_vectors(x, w).float()
    mixed = torch.tensor([1.0, scale, 1.0, scale]).unsqueeze(1)
    for factor in (scale, mixed):
        given = (factor * x).float().requires_grad_()
        weight = w.float().requires_grad_()
        out = weighted_unit_vectors(given, weight)
        torch.testing.assert_close(out, expected)
        (out * torch.arange(15.0)).sum().backward()
        assert bool(given.grad.isfinite().all() and weight.grad.isfinite().all())
