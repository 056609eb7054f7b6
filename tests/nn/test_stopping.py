"""When graphs stop: bounds decide as exact values do."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.common import MODELS, assert_close, make_graph, make_model
from torch_geometric_idgl.graphs import LowRankGraph
from torch_geometric_idgl.nn import IDGL
from torch_geometric_idgl.nn import idgl as module
from torch_geometric_idgl.nn.stopping import still_changing


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Interval:
    """A value between two bounds, as changes and norms are."""

    def __init__(self, low, value, high):
        low, value, high = (torch.tensor(x) for x in (low, value, high))
        self.exact = self.sq_norm = lambda: value
        self.bounds = self.sq_norm_bounds = lambda effort: (
            (low, high) if effort == 0 else (value, value)
        )


@pytest.mark.parametrize(
    'value, going_on',
    [
        (([0.5], [0.6], [0.7]), [True]),
        (([0.05], [0.3], [0.7]), [True]),  # the bounds leave it open
        (([0.05], [0.15], [0.7]), [False]),
        (([0.01], [0.02], [0.05]), [False]),
        (([0.5, 0.0], [0.6, 0.1], [0.7, 0.15]), [True, False]),
        (([0.05, 0.5], [0.15, 0.6], [0.7, 0.7]), [False, True]),
    ],
)
def test_bounds_decide_as_exact_values(value, going_on):
    change = Interval(*value)
    count = len(going_on)
    scale = Interval([0.8] * count, [1.0] * count, [2.0] * count)
    active = torch.ones(count, dtype=torch.bool)
    for exact in [False, True]:
        still, any_is = still_changing(active, change, scale, 0.2, exact)
        assert still.tolist() == going_on and any_is == any(going_on)
    # A graph that has stopped does not start again.
    still, any_is = still_changing(torch.zeros_like(active), change, scale, 0.2, True)
    assert not still.any() and not any_is


def test_exact_values_are_read_once():
    change, scale = Interval([0.05], [0.3], [0.7]), Interval([0.8], [1.0], [2.0])
    with Reads() as reads:
        still_changing(torch.ones(1, dtype=torch.bool), change, scale, 0.2, exact=True)
    assert reads.count == 1


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('tol', [1e-5, 1e-2, 0.3])
def test_models_stop_alike(cls, tol, monkeypatch):
    x, edge_index = make_graph()
    model = make_model(cls, tol=tol, max_iters=8).eval()
    traces = []
    for exact in [False, True]:
        torch.manual_seed(0)
        decide = functools.partial(_decide, exact=exact)
        monkeypatch.setattr(module, 'still_changing', decide)
        traces.append(model(x, edge_index, return_trace=True)[1])
    assert torch.equal(traces[0].num_iters, traces[1].num_iters)
    assert_close(traces[0].out, traces[1].out)


@pytest.mark.parametrize('step', [0, 1])
@pytest.mark.parametrize('share', [0.5, 0.97, 1.03, 2.0])
def test_closer_bounds_decide_alike(step, share, monkeypatch):
    # Dense features have no list of pairs, and the graph is large enough for subspaces.
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(300, 40, generator=generator).pow(4)
    torch.manual_seed(2)
    model = IDGL(40, 4, 2, 3, heads=3, k=5, tol=0.0, max_iters=4).eval()
    trace = model(x, return_trace=True)[1]
    change = [float(delta) for delta in trace.deltas]
    assert change == sorted(change, reverse=True)
    efforts = []
    bounds = LowRankGraph.sq_norm_bounds

    def spy(self, effort=0):
        efforts.append(effort)
        low, high = bounds(self, effort)
        norm = self.sq_norm()
        assert bool((low <= norm).all() and (norm <= high).all())
        return low, high

    monkeypatch.setattr(LowRankGraph, 'sq_norm_bounds', spy)
    model.tol = share * change[step]
    state = torch.random.get_rng_state()
    trace = model(x, return_trace=True)[1]
    assert torch.equal(state, torch.random.get_rng_state())
    stops = [value <= model.tol for value in change] + [True]
    assert int(trace.num_iters) == min(stops.index(True) + 1, 4)
    if 0.9 < share < 1.1:
        assert max(efforts) > 0


def _decide(active, change, scale, tol, _, exact):
    return still_changing(active, change, scale, tol, exact)
