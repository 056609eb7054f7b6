import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import erdos_renyi_graph, to_dense_adj

from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.transforms import PerturbEdges


def path_graph(num_nodes):
    row = torch.arange(num_nodes - 1)
    edge_index = torch.stack([row, row + 1])
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return Data(edge_index=edge_index, num_nodes=num_nodes)


def edge_set(data):
    edges = [tuple(edge) for edge in data.edge_index.t().tolist()]
    assert len(edges) == len(set(edges))
    return set(edges)


def test_perturb_edges_repr():
    assert str(PerturbEdges(0.25, 0.5)) == 'PerturbEdges(delete=0.25, add=0.5)'


def test_perturb_edges_extremes():
    data = path_graph(5)
    same = PerturbEdges()(data)
    assert torch.equal(same.edge_index, data.edge_index)
    assert PerturbEdges(delete=1.0)(data).num_edges == 0
    complete = {(i, j) for i in range(5) for j in range(5) if i != j}
    assert edge_set(PerturbEdges(add=1.0)(data)) == complete
    # Only pairs without an edge *before* can be added.
    complement = complete - edge_set(data)
    assert edge_set(PerturbEdges(delete=1.0, add=1.0)(data)) == complement
    assert data.num_edges == 8


def test_perturb_edges_rates():
    torch.manual_seed(0)
    n = 400
    data = Data(edge_index=erdos_renyi_graph(n, 0.3), num_nodes=n)
    before = to_dense_adj(data.edge_index, max_num_nodes=n)[0]
    out = PerturbEdges(delete=0.4, add=0.1, seed=1)(data)
    after = to_dense_adj(out.edge_index, max_num_nodes=n)[0]

    assert after.max() == 1 and torch.equal(after, after.t())
    assert after.diagonal().sum() == 0
    pairs = torch.ones(n, n).triu(1).bool()
    kept = after[pairs & (before == 1)].mean()
    added = after[pairs & (before == 0)].mean()
    assert abs(kept - 0.6) < 4 * (0.6 * 0.4 / (0.3 * n * n / 2)) ** 0.5
    assert abs(added - 0.1) < 4 * (0.1 * 0.9 / (0.7 * n * n / 2)) ** 0.5


def test_perturb_edges_every_pair_is_drawn():
    # A pair of 6 nodes that is never (or always) drawn would show in 400 trials.
    count = torch.zeros(6, 6)
    data = Data(edge_index=torch.tensor([[0, 4], [4, 0]]), num_nodes=6)
    for seed in range(400):
        out = PerturbEdges(delete=0.5, add=0.5, seed=seed)(data)
        count += to_dense_adj(out.edge_index, max_num_nodes=6)[0]
    pairs = torch.ones(6, 6).triu(1).bool()
    assert count[pairs].min() > 150 and count[pairs].max() < 250


@pytest.mark.parametrize('block_size', [1, 7, 45, 1000])
def test_perturb_edges_blocks(block_size, monkeypatch):
    data = path_graph(10)
    transform = PerturbEdges(delete=0.3, add=0.4, seed=0)
    expected = transform(data)
    monkeypatch.setattr(PerturbEdges, '_block_size', block_size)
    # The random stream does not depend on how it is cut.
    assert edge_set(transform(data)) == edge_set(expected)


def test_perturb_edges_seed():
    data = path_graph(40)
    state = torch.get_rng_state()
    first = PerturbEdges(0.5, 0.1, seed=0)(data).edge_index
    assert torch.equal(torch.get_rng_state(), state)
    transform = PerturbEdges(0.5, 0.1, seed=0)
    assert torch.equal(transform(data).edge_index, first)
    assert torch.equal(transform(data).edge_index, first)
    assert not torch.equal(PerturbEdges(0.5, 0.1, seed=1)(data).edge_index, first)

    transform = PerturbEdges(0.5, 0.1)
    torch.manual_seed(5)
    first = transform(data).edge_index
    assert not torch.equal(transform(data).edge_index, first)
    torch.manual_seed(5)
    assert torch.equal(transform(data).edge_index, first)


def test_perturb_edges_weights_and_loops():
    data = Data(
        edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 1, 3]]),
        edge_weight=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        num_nodes=5,
    )
    out = PerturbEdges(add=1.0)(data)
    weight = to_dense_adj(out.edge_index, edge_attr=out.edge_weight, max_num_nodes=5)[0]
    expected = torch.ones(5, 5).fill_diagonal_(0)
    expected[0, 1], expected[1, 0], expected[1, 1] = 0.1, 0.2, 0.3
    expected[2, 3] = expected[3, 2] = 0.4  # The missing direction is added.
    assert torch.equal(weight, expected)

    out = PerturbEdges(delete=1.0)(data)
    assert out.edge_index.tolist() == [[1], [1]]
    assert out.edge_weight.tolist() == pytest.approx([0.3])
    assert data.edge_weight.numel() == 4


def test_perturb_edges_attributes():
    data = path_graph(20)
    data.edge_attr = data.edge_index.t().clone()
    out = PerturbEdges(delete=0.5, seed=0)(data)
    assert 0 < out.num_edges < data.num_edges
    assert torch.equal(out.edge_attr, out.edge_index.t())
    with pytest.raises(ValueError, match=r"edge attributes \['edge_attr'\]"):
        PerturbEdges(add=0.1)(data)


def test_perturb_edges_batch():
    graphs = [path_graph(6), path_graph(1), path_graph(9), path_graph(2)]
    for graph in graphs:
        graph.edge_weight = torch.arange(1.0, graph.num_edges + 1)
        graph.x = torch.randn(graph.num_nodes, 2)
        graph.y = torch.tensor([graph.num_nodes])
    batch = Batch.from_data_list(graphs, follow_batch=['edge_index'])
    out = PerturbEdges(add=1.0)(batch)
    assert torch.equal(out.batch[out.edge_index[0]], out.batch[out.edge_index[1]])
    assert torch.equal(out.edge_index_batch, out.batch[out.edge_index[0]])
    assert out.edge_index_ptr.diff().tolist() == [30, 0, 72, 2]
    for graph, part in zip(graphs, out.to_data_list(), strict=True):
        n = graph.num_nodes
        assert part.num_nodes == n and part.num_edges == n * (n - 1)
        assert torch.equal(part.x, graph.x) and torch.equal(part.y, graph.y)
        alone = PerturbEdges(add=1.0)(graph)
        assert edge_set(part) == edge_set(alone)
        adj, alone = (
            to_dense_adj(d.edge_index, edge_attr=d.edge_weight, max_num_nodes=n)
            for d in (part, alone)
        )
        assert torch.equal(adj, alone)

    # The caller's batch is as before, and a batch of the parts is the whole.
    for graph, part in zip(graphs, batch.to_data_list(), strict=True):
        assert torch.equal(part.edge_index, graph.edge_index)
        assert torch.equal(part.edge_weight, graph.edge_weight)
    again = Batch.from_data_list(out.to_data_list())
    assert torch.equal(again.edge_index, out.edge_index)

    out = PerturbEdges(delete=1.0)(batch)
    assert [part.num_edges for part in out.to_data_list()] == [0, 0, 0, 0]


def test_perturb_edges_errors():
    for p in [-0.1, 1.1, float('nan')]:
        with pytest.raises(ValueError, match=r"'delete' to be in \[0, 1\]"):
            PerturbEdges(delete=p)
        with pytest.raises(ValueError, match=r"'add' to be in \[0, 1\]"):
            PerturbEdges(add=p)
    with pytest.raises(ValueError, match="'data' to hold 'edge_index'"):
        PerturbEdges()(Data(x=torch.ones(3, 1)))
    with pytest.raises(TypeError, match="got 'HeteroData'"):
        PerturbEdges()(HeteroData())
    with pytest.raises(TypeError, match=r"'delete' to be a number \(got 'a'\)"):
        PerturbEdges('a')
    with pytest.raises(ValueError, match=r'nodes from 0 to 5.*\(got 0 to 9\)'):
        PerturbEdges()(Data(edge_index=torch.tensor([[0], [9]]), num_nodes=6))
    data = path_graph(4)
    data.batch = torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match='not to connect different graphs'):
        PerturbEdges()(data)

    data = path_graph(4)
    data.edge_index = data.edge_index.t()
    with pytest.raises(ValueError, match=r'shape \[2, num_edges\] \(got \[6, 2\]\)'):
        PerturbEdges()(data)
    data.edge_index = data.edge_index.t().to(torch.float)
    with pytest.raises(TypeError, match=r'torch.long \(got torch.float32\)'):
        PerturbEdges()(data)


@pytest.mark.parametrize('key', ['edge_weight', 'edge_attr'])
@pytest.mark.parametrize('size', [(), (4,), (5, 2)])
def test_perturb_edges_attributes_of_other_edges(key, size):
    data = Data(num_nodes=4)
    data[key] = torch.ones(size)
    data.edge_index = path_graph(4).edge_index
    with pytest.raises(ValueError, match=rf"'{key}' .* each of the 6 edges \(got"):
        PerturbEdges(delete=0.5)(data)


def test_perturb_edges_gaps_between_graphs():
    data = Batch.from_data_list([path_graph(4), path_graph(3)])
    gaps = Data(
        edge_index=data.edge_index, batch=10**12 * (1 + data.batch), num_nodes=7
    )
    out = PerturbEdges(0.5, 0.5, seed=0)(gaps)
    assert edge_set(out) == edge_set(PerturbEdges(0.5, 0.5, seed=0)(data))


def test_perturb_edges_cora(data_root):
    data = load('cora', data_root)
    out = PerturbEdges(add=0.25, seed=0)(data)
    new = (out.num_edges - data.num_edges) / 2
    pairs = 2708 * 2707 / 2 - 5278
    assert abs(new - 0.25 * pairs) < 5 * (pairs * 0.25 * 0.75) ** 0.5
    assert round(new, -3) == pytest.approx(916_000, abs=5_000)
    assert out.is_undirected() and not out.has_self_loops()

    out = PerturbEdges(delete=0.75, seed=0)(data)
    assert abs(out.num_edges / 2 - 0.25 * 5278) < 5 * (5278 * 0.25 * 0.75) ** 0.5
