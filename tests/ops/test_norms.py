"""Bounds of norms hold, and tighten."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_geometric_idgl.ops.norms import psd_sq_norm_bounds


def bounds(a, columns, seed=0, trace=None):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(a.size(0), columns, generator=generator, dtype=a.dtype)
    trace = float(a.trace()) if trace is None else trace
    return psd_sq_norm_bounds(lambda x: a @ x, start, trace)


@given(st.integers(1, 30), st.integers(1, 40), st.data())
def test_bounds_hold(n, rank, data):
    columns = data.draw(st.integers(1, n))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    u = torch.randn(n, rank, generator=generator, dtype=torch.double)
    a = u @ u.t()
    for trace in [None, 2.0 * float(a.trace())]:
        lower, upper = bounds(a, columns, trace=trace)
        assert float(lower) <= float(a.square().sum()) <= float(upper)


def test_bounds_tighten():
    u = torch.rand(60, 20, dtype=torch.double)
    a = u @ u.t()
    gaps = [float(high - low) for low, high in (bounds(a, k) for k in (1, 5, 20))]
    assert gaps == sorted(gaps, reverse=True)
    # All of the range is in the subspace: nothing is left but the room for rounding.
    torch.testing.assert_close(bounds(a, 20)[0], a.square().sum(), rtol=2e-4, atol=0.0)
    torch.testing.assert_close(bounds(a, 20)[1], a.square().sum(), rtol=2e-4, atol=0.0)


@pytest.mark.parametrize('dtype', [torch.float, torch.double])
def test_zero(dtype):
    lower, upper = bounds(torch.zeros(5, 5, dtype=dtype), 2)
    assert float(lower) == float(upper) == 0.0
    assert lower.dtype == dtype
