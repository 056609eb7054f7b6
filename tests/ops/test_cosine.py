import pytest
import torch
from torch.autograd import gradcheck

from torch_geometric_idgl.ops.cosine import weighted_unit_vectors


def inputs(heads=3, n=4, d=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64) - 0.5
    w = torch.rand(heads, d, generator=generator, dtype=torch.float64) - 0.5
    return x, w


@pytest.mark.parametrize('heads', [1, 3])
def test_vectors(heads):
    x, w = inputs(heads)
    out = weighted_unit_vectors(x, w)
    assert out.shape == (4, heads * 5)
    parts = [torch.nn.functional.normalize(x * w_p, dim=1) for w_p in w]
    torch.testing.assert_close(out, torch.cat(parts, dim=1) / heads**0.5)
    ones = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(out.square().sum(1), ones)


@pytest.mark.parametrize('heads', [1, 3])
def test_gradcheck(heads):
    x, w = (tensor.requires_grad_() for tensor in inputs(heads))
    assert gradcheck(weighted_unit_vectors, (x, w))


def test_zero_vectors_stay_zero_and_get_no_gradient():
    x, w = inputs()
    x[1] = 0.0
    x.requires_grad_()
    w.requires_grad_()
    out = weighted_unit_vectors(x, w)
    assert out[1].eq(0).all()
    (out * torch.arange(15)).sum().backward()
    assert x.grad[1].eq(0).all()
    assert bool(torch.isfinite(x.grad).all() and torch.isfinite(w.grad).all())


def test_tiny_and_huge_vectors_keep_their_direction():
    x, w = inputs()
    expected = weighted_unit_vectors(x, w).float()
    for scale in (1e-9, 1e-4, 1e4, 1e9):
        out = weighted_unit_vectors((scale * x).float(), w.float())
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('channels', [3, 300])
def test_gradients_of_short_and_long_vectors(channels):
    generator = torch.Generator().manual_seed(0)
    options = {'generator': generator, 'dtype': torch.float64}
    x, w = torch.randn(4, channels, **options), torch.randn(2, channels, **options)
    cotangent = torch.randn(4, 2 * channels, **options)
    for wanted in [(True, True), (False, True), (True, False)]:
        a, b = (
            t.clone().requires_grad_(g) for t, g in zip((x, w), wanted, strict=True)
        )
        leaves = [leaf for leaf in (a, b) if leaf.requires_grad]
        plain = a.unsqueeze(1) * b
        plain = plain / plain.norm(dim=2, keepdim=True) / 2**0.5
        expected = torch.autograd.grad(plain.flatten(1), leaves, cotangent)
        actual = torch.autograd.grad(weighted_unit_vectors(a, b), leaves, cotangent)
        for grad, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(grad, other)
