import itertools
import sys
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from torch_geometric_idgl.ops.knn import knn_graph


def reference(x, k, include_self=True):
    """Edges of one graph from a full sort of all similarities."""
    sim = normalize(x, dim=1) @ normalize(x, dim=1).t()
    sim.fill_diagonal_(2.0 if include_self else -2.0)
    k = min(k, len(x) if include_self else len(x) - 1)
    edges = []
    for i in range(len(x)):
        order = sorted(range(len(x)), key=lambda j: (-float(sim[i, j]), j))
        edges += [[i, j] for j in order[:k]]
    return torch.tensor(edges, dtype=torch.long).view(-1, 2).t()


def test_knn_graph_by_hand():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 2.0]])
    assert knn_graph(x, 2).tolist() == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 1, 1, 0, 2, 3, 3, 2],
    ]
    assert knn_graph(x, 1, include_self=False).tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]


@pytest.mark.parametrize('k', [1, 3, 17, 18, 100])
def test_knn_graph_equals_full_sort(k):
    x = torch.randn(18, 4, generator=torch.Generator().manual_seed(0))
    for include_self, block_size in itertools.product([True, False], [1, 5, 1024]):
        out = knn_graph(x, k, include_self=include_self, block_size=block_size)
        assert out.tolist() == reference(x, k, include_self).tolist()


@pytest.mark.parametrize('convert', ['to_sparse', 'to_sparse_csr', 'to_sparse_csc'])
def test_knn_graph_sparse(convert):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 12, generator=generator)
    x = x * (torch.rand(30, 12, generator=generator) < 0.3)
    batch = torch.tensor([0] * 13 + [1] * 1 + [3] * 16)
    sparse = getattr(x, convert)()
    for kwargs in [{}, {'batch': batch}, {'batch': batch, 'block_size': 4}]:
        assert torch.equal(knn_graph(sparse, 4, **kwargs), knn_graph(x, 4, **kwargs))


def test_knn_graph_uncoalesced():
    index = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 1]])
    x = torch.sparse_coo_tensor(index, torch.tensor([2.0, -1.0, 1.0, 1.0]), (3, 2))
    assert torch.equal(knn_graph(x, 2), knn_graph(x.to_dense(), 2))


def test_knn_graph_batch():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    sizes = [5, 1, 0, 6]
    batch = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    out = knn_graph(x, 3, batch)
    expected = [reference(x[:5], 3), reference(x[5:6], 3) + 5, reference(x[6:], 3) + 6]
    assert torch.equal(out, torch.cat(expected, dim=1))
    assert torch.equal(batch[out[0]], batch[out[1]])
    assert out[0].bincount().tolist() == [3] * 5 + [1] + [3] * 6

    out = knn_graph(x, 100, batch, include_self=False)
    assert out[0].bincount(minlength=12).tolist() == [4] * 5 + [0] + [5] * 6


def test_knn_graph_ties_and_zero_rows():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
    out = knn_graph(x, 2)
    # A node is its own first neighbour, and the first of equals comes next.
    assert out[1].view(-1, 2).tolist() == [[0, 1], [1, 2], [2, 1], [3, 1], [4, 0]]
    for block_size in [1, 2, 3]:
        assert torch.equal(knn_graph(x, 2, block_size=block_size), out)


def test_knn_graph_other_dtypes():
    x = torch.tensor([[1, 0], [1, 1], [0, 3]])
    expected = knn_graph(x.to(torch.float), 2)
    for dtype in [torch.long, torch.bool, torch.half, torch.bfloat16, torch.double]:
        x_other = x.clamp(max=1) if dtype == torch.bool else x
        assert torch.equal(knn_graph(x_other.to(dtype), 2), expected)


def test_knn_graph_has_no_gradient_and_keeps_x():
    x = torch.randn(4, 2, requires_grad=True)
    before = x.detach().clone()
    assert not knn_graph(x, 2).requires_grad
    assert torch.equal(x, before)


def test_knn_graph_empty():
    assert knn_graph(torch.empty(0, 3), 2).size() == (2, 0)
    batch = torch.empty(0, dtype=torch.long)
    assert knn_graph(torch.empty(0, 3), 2, batch).size() == (2, 0)
    assert knn_graph(torch.ones(1, 3), 2, include_self=False).size() == (2, 0)
    batch = torch.tensor([0, 0, 1, 1])
    expected = [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 0, 2, 3, 3, 2]]
    assert knn_graph(torch.empty(4, 0), 2, batch).tolist() == expected


@pytest.mark.parametrize('size', [1e-43, 1e-30, 1e-13, 1e20, 1e38])
def test_knn_graph_of_tiny_and_huge_features(size):
    x = torch.rand(12, 5, generator=torch.Generator().manual_seed(0)) * size
    x[3] = 0.0
    x[5] *= 1e-5 if size > 1 else 1.0  # Rows of different scale in one graph.
    expected = knn_graph(x.to(torch.double), 4)
    for layout in ['to_dense', 'to_sparse', 'to_sparse_csr']:
        assert torch.equal(knn_graph(getattr(x, layout)(), 4), expected)
    assert torch.equal(expected, reference(x.to(torch.double) / size, 4))


@pytest.mark.parametrize('layout', ['to_dense', 'to_sparse'])
def test_knn_graph_of_many_graphs(layout, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(6, (200,), generator=generator)
    sizes[7] = 30  # Does not fit into a block.
    batch = (10**12 * torch.arange(200)).repeat_interleave(sizes)
    x = torch.randn(len(batch), 3, generator=generator)
    expected, begin = [], 0
    for size in sizes.tolist():
        expected.append(reference(x[begin : begin + size], 3) + begin)
        begin += size

    # Neither empty graphs, of which there are 10^14, nor small ones are taken singly.
    calls = []
    topk = Tensor.topk
    monkeypatch.setattr(
        Tensor, 'topk', lambda *a, **k: calls.append(1) or topk(*a, **k)
    )
    out = knn_graph(getattr(x, layout)(), 3, batch, block_size=20)
    assert torch.equal(out, torch.cat(expected, dim=1))
    assert len(calls) < 60


@pytest.mark.parametrize('batch', [None, torch.tensor([0, 0, 1, 1, 4])])
def test_knn_graph_does_not_warn(batch):
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # PyTorch says most things only once otherwise.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            knn_graph(torch.eye(5).to_sparse(), 2, batch)
    finally:
        torch.set_warn_always(always)


def test_knn_graph_wrong_arguments():
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r'two-dimensional \(got 1 dimensions\)'):
        knn_graph(torch.ones(3), 1)
    for name in ['k', 'block_size']:
        with pytest.raises(ValueError, match=rf"'{name}' to be at least 1 \(got 0\)"):
            knn_graph(x, **{'k': 1, name: 0})
        for value in [1.5, True, None]:
            with pytest.raises(TypeError, match=f"'{name}' to be an integer"):
                knn_graph(x, **{'k': 1, name: value})
    with pytest.raises(ValueError, match="'batch' to be sorted"):
        knn_graph(x, 1, torch.tensor([0, 1, 0]))
    with pytest.raises(
        ValueError, match=r"'batch' to be of shape \[3\].*\(got \[2\]\)"
    ):
        knn_graph(x, 1, torch.tensor([0, 1]))
    for layout in ['to_dense', 'to_sparse']:
        for value in [float('nan'), float('inf')]:
            with pytest.raises(ValueError, match="'x' to be finite"):
                knn_graph(getattr(torch.tensor([[1.0], [value]]), layout)(), 1)


# The approximate search; graphs are large from 200 nodes on ---------------------------


def few_clusters(num_nodes=600):
    """Rows around ten centres, so that a cell holds the neighbours of its nodes."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randint(10, (num_nodes,), generator=generator)
    x = 10.0 * torch.randn(10, 8, generator=generator)[centre]
    return x + torch.randn(num_nodes, 8, generator=generator)


@pytest.fixture
def knn(monkeypatch):
    pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    module = sys.modules[knn_graph.__module__]
    monkeypatch.setattr(module, '_LARGE', 200)
    monkeypatch.setattr(module, '_FEW', 2)
    return module


def searched(knn, monkeypatch):
    """What the search of cells returns in the calls that follow: nothing if it leaves
    a graph to the exact search.
    """
    results = []
    search = knn._nearest_in_cells

    def record(*args):
        results.append(search(*args))
        return results[-1]

    monkeypatch.setattr(knn, '_nearest_in_cells', record)
    return results


def test_exact_search_finds_what_faiss_finds():
    faiss = pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
    rows = normalize(x, dim=1).numpy()
    near = faiss.knn(rows, rows, 20, metric=faiss.METRIC_INNER_PRODUCT)[1]
    same = knn_graph(x, 20)[1].view(-1, 20) == torch.from_numpy(near)
    assert same.float().mean() > 0.999  # but for similarities that rounding makes equal


def test_approximate_search_as_it_comes():
    pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    x = few_clusters(12_000)
    exact, near = (
        knn_graph(x, 20, approximate=approximate)[1].view(-1, 20)
        for approximate in (False, True)
    )
    assert (near.unsqueeze(2) == exact.unsqueeze(1)).any(1).float().mean() >= 0.9
    assert not torch.equal(near, exact)  # or it was not approximate at all


@pytest.mark.parametrize('include_self', [True, False])
def test_approximate_recall_and_order(knn, monkeypatch, include_self):
    x, k = few_clusters(), 20
    before, state = x.clone(), torch.get_rng_state()
    results = searched(knn, monkeypatch)
    options = {'include_self': include_self, 'approximate': True}
    out = knn_graph(x, k, block_size=50, **options)
    assert len(results) == 1 and results[0] is not None
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(knn_graph(x, k, **options), out)

    centre, near = out.view(2, len(x), k)
    exact = knn_graph(x, k, include_self=include_self)[1].view(-1, k)
    assert (centre == torch.arange(len(x)).unsqueeze(1)).all()
    assert (near.unsqueeze(2) == exact.unsqueeze(1)).any(1).float().mean() >= 0.9
    assert all(len(set(row)) == k for row in near.tolist())
    own = near == centre
    assert own[:, 0].all() if include_self else not own.any()
    unit = normalize(x, dim=1).to(torch.double)
    sim = (unit[centre] * unit[near]).sum(2)[:, include_self:]
    assert (sim.diff(dim=1) < 1e-6).all()


def test_approximate_copies_come_by_index(knn, monkeypatch):
    monkeypatch.setattr(knn, '_num_cells_to_visit', lambda *args: args[-1] // 2)
    generator = torch.Generator().manual_seed(0)
    # Ten different rows far from each other, and many copies: cells hold all copies.
    index = torch.randint(10, (300,), generator=generator)
    x = torch.eye(10)[index]
    out = knn_graph(x, 5, approximate=True)
    assert torch.equal(out[1].view(-1, 5)[:, 0], torch.arange(300))
    assert torch.equal(index[out[0]], index[out[1]])  # Copies are the nearest.
    rest = out[1].view(-1, 5)[:, 1:]
    assert (rest.diff(dim=1) > 0).all()  # Equally similar ones come by index.


def test_cells_with_too_few_nodes(knn, monkeypatch):
    monkeypatch.setattr(knn, '_num_cells_to_visit', lambda *_: 1)
    x = few_clusters()
    x[0] = -x.sum(0)
    for include_self in (True, False):
        out = knn_graph(x, 100, include_self=include_self, approximate=True)
        assert out[0].bincount().tolist() == [100] * len(x)
        assert out.min() >= 0
        # No cell holds as many: all of these rows are searched exactly.
        assert torch.equal(out, knn_graph(x, 100, include_self=include_self))


def test_exact_search_where_many_cells_are_near(knn, monkeypatch):
    x = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    results = searched(knn, monkeypatch)
    assert torch.equal(knn_graph(x, 20, approximate=True), knn_graph(x, 20))
    assert results == [None]


def test_cells_to_visit():
    faiss = pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    module = sys.modules[knn_graph.__module__]
    # The neighbours of a node on a circle are in its own cell, or in the next one.
    angle = torch.linspace(0, 6.28, 400)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    cells = faiss.IndexFlatIP(2)
    cells.add(x[20::40].numpy())
    assert module._num_cells_to_visit(cells, x, 2, 10) == 1
    assert module._num_cells_to_visit(cells, x, 30, 10) == 2
    assert module._num_cells_to_visit(cells, x, 399, 10) == 10


def test_exact_search_of_all_other_input(knn, monkeypatch):
    x = few_clusters()
    results = searched(knn, monkeypatch)
    batch = torch.arange(2).repeat_interleave(300)
    for other in [x.to(torch.double), x.to_sparse(), x[:199], x[:, :0]]:
        out = knn_graph(other, 4, approximate=True)
        assert torch.equal(out, knn_graph(other, 4))
    out = knn_graph(x, 4, batch, approximate=True)
    assert torch.equal(out, knn_graph(x, 4, batch))
    assert results == []
    assert torch.equal(knn_graph(x, 1, approximate=True), knn_graph(x, 1))
    assert len(results) == 1


def test_approximate_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, 'faiss', None)
    x = torch.rand(5, 2)
    with pytest.raises(ImportError, match=r'torch_geometric_idgl\[knn\]'):
        knn_graph(x, 2, approximate=True)
    assert knn_graph(x, 2).size(1) == 10
