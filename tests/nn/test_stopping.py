"""When graphs stop: bounds decide as exact values do."""

from types import SimpleNamespace

import pytest
import torch

from tests.nn.common import MODELS, assert_close, make_graph, make_model
from torch_geometric_idgl.graphs import FeatureGraph
from torch_geometric_idgl.nn import IDGL, loss
from torch_geometric_idgl.nn.loss import Stopping


def first_graph(*bounds):
    """A first graph whose norm is known by ever closer bounds."""
    pairs = [tuple(torch.tensor(bound) for bound in pair) for pair in bounds[:-1]]
    norm = torch.tensor(bounds[-1])
    affinity = SimpleNamespace(
        sq_norm=lambda: norm,
        sq_norm_bounds=lambda degree: iter([*pairs, (norm, norm)]),
    )
    rows = SimpleNamespace(device=norm.device)
    return SimpleNamespace(affinity=affinity, rows=rows, sq_norm=None, degree=None)


def refined(change, lacks_norm):
    return SimpleNamespace(sq_dist=torch.tensor(change), lacks_norm=lacks_norm)


@pytest.mark.parametrize('free', [True, False])
@pytest.mark.parametrize('lacks_norm', [True, False])
def test_bounds_decide_as_exact_values(lacks_norm, free, monkeypatch):
    monkeypatch.setattr(loss, 'reads_are_free', lambda device: free)
    first = first_graph(([0.5, 2.0], [3.0, 9.0]), ([0.9, 3.9], [1.1, 4.1]), [1.0, 4.0])
    norm = torch.tensor([1.0, 4.0])
    for tol in (0.1, 0.3, 1.0):
        stopping = Stopping(first, tol)
        active = torch.ones(2, dtype=torch.bool)
        for share in [(2.0, 2.0), (1.2, 0.2), (1.02, 1.5), (0.4, 0.98), (2.0, 2.0)]:
            change = torch.tensor(share) * tol * norm
            expected = active & (change > tol * norm)
            given = change - norm if lacks_norm else change
            graph = refined(given.tolist(), lacks_norm)
            active, going_on = stopping.still_changing(graph, active)
            assert torch.equal(active, expected)  # what has stopped stays so
            assert going_on == bool(expected.any())


def test_closer_bounds_are_asked_for_only_where_needed():
    asked = []
    first = first_graph(([0.5], [2.0]), ([0.9], [1.1]), [1.0])
    bounds = first.affinity.sq_norm_bounds

    def spy(degree):
        for pair in bounds(degree):
            asked.append(pair)
            yield pair

    first.affinity.sq_norm_bounds = spy
    stopping = Stopping(first, 0.1)
    active = torch.ones(1, dtype=torch.bool)
    for change, count in [(1.0, 1), (0.5, 1), (0.12, 2), (0.115, 2), (0.105, 3)]:
        assert stopping.still_changing(refined([change], False), active)[1]
        assert len(asked) == count


def test_a_known_norm_is_taken():
    first = first_graph(([0.5], [2.0]), [1.0])
    first.sq_norm = torch.tensor([1.0], requires_grad=True)
    first.affinity = None
    stopping = Stopping(first, 0.1)
    active = torch.ones(1, dtype=torch.bool)
    assert stopping.still_changing(refined([0.11], False), active)[1]
    still, going_on = stopping.still_changing(refined([0.09], False), active)
    assert still.tolist() == [False] and not going_on


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('tol', [1e-5, 1e-2, 0.3])
def test_models_stop_alike(cls, tol, monkeypatch):
    x, edge_index = make_graph()
    for backend in ('auto', 'low_rank'):
        model = make_model(cls, tol=tol, max_iters=8, backend=backend).eval()
        traces = []
        for free in [True, False]:
            monkeypatch.setattr(loss, 'reads_are_free', lambda device, f=free: f)
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
    assert isinstance(trace.first, FeatureGraph)
    change = [float(delta) for delta in trace.deltas]
    assert change == sorted(change, reverse=True)
    efforts = []
    bounds = FeatureGraph.sq_norm_bounds

    def spy(self, degree):
        norm = self.sq_norm()
        for low, high in bounds(self, degree):
            assert bool((low <= norm).all() and (norm <= high).all())
            efforts.append(high - low)
            yield low, high

    monkeypatch.setattr(FeatureGraph, 'sq_norm_bounds', spy)
    model.tol = share * change[step]
    state = torch.random.get_rng_state()
    trace = model(x, return_trace=True)[1]
    assert torch.equal(state, torch.random.get_rng_state())
    stops = [value <= model.tol for value in change] + [True]
    assert int(trace.num_iters) == min(stops.index(True) + 1, 4)
    if 0.9 < share < 1.1:
        assert len(efforts) > 1
