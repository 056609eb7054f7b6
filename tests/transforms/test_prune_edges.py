import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import NormalizeFeatures

from torch_geometric_idgl.transforms import PruneEdges

# Nodes 0 and 1 share two of three words, 1 and 2 one of four, and 3 has none.
X = torch.tensor(
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]],
    dtype=torch.float,
)
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3], [1, 0, 2, 1, 3, 2, 3]])


def make_data(x=X):
    weight = torch.arange(7, dtype=torch.float)
    return Data(x=x, edge_index=EDGES, edge_weight=weight, y=torch.arange(4))


def kept(data):
    return data.edge_weight.tolist()


def test_prune_edges_repr():
    expected = "PruneEdges(threshold=0.1, metric='auto')"
    assert str(PruneEdges(0.1)) == expected


@pytest.mark.parametrize('sparse', [None, 'to_sparse', 'to_sparse_csr'])
@pytest.mark.parametrize('normalize', [False, True])
def test_prune_edges_jaccard(sparse, normalize):
    data = make_data()
    data = NormalizeFeatures()(data) if normalize else data
    if sparse:
        data.x = getattr(data.x, sparse)()
    # Jaccard is 2 / 3 and 1 / 4; cosine would be .82 and .41.
    for threshold, expected in [
        (0.0, [0, 1, 2, 3, 4, 5, 6]),
        (0.2, [0, 1, 2, 3, 6]),  # the self-loop is kept
        (0.3, [0, 1, 6]),
        (0.7, [6]),
    ]:
        for metric in ('auto', 'jaccard'):
            out = PruneEdges(threshold, metric)(data)
            assert kept(out) == expected
            assert out.edge_index.equal(EDGES[:, expected])
    assert kept(data) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(PruneEdges(0.7, 'cosine')(data)) == [0, 1, 6]


@pytest.mark.parametrize('sparse', [False, True])
def test_prune_edges_cosine(sparse):
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    cosine = torch.cosine_similarity(x[EDGES[0]], x[EDGES[1]])
    for threshold in (-1.0, -0.1, 0.0, 0.2):
        data = make_data(x.to_sparse() if sparse else x)
        out = PruneEdges(threshold)(data)
        expected = (cosine >= threshold) | (EDGES[0] == EDGES[1])
        assert out.edge_index.equal(EDGES[:, expected])


def test_prune_edges_keeps_equal_rows():
    """Whose cosine may be less than one by rounding."""
    x = torch.randn(1, 30, generator=torch.Generator().manual_seed(0)).repeat(50, 1)
    x *= torch.linspace(0.1, 9.0, 50).unsqueeze(1)
    edge_index = torch.stack([torch.arange(49), torch.arange(1, 50)])
    out = PruneEdges(1.0)(Data(x=x, edge_index=edge_index))
    assert out.num_edges == 49
    with pytest.raises(ValueError, match=r"'x' to be of shape .*got \[4\]"):
        PruneEdges(0.1)(Data(x=torch.rand(4), edge_index=torch.tensor([[0], [1]])))


def test_prune_edges_in_blocks(monkeypatch):
    expected = kept(PruneEdges(0.2)(make_data()))
    monkeypatch.setattr(PruneEdges, '_block_entries', 10)
    assert kept(PruneEdges(0.2)(make_data())) == expected


def test_prune_edges_batch():
    other = make_data(1 - X)
    batch = Batch.from_data_list([make_data(), other])
    first, second = PruneEdges(0.3)(batch).to_data_list()
    assert kept(first) == [0, 1, 6]
    assert kept(second) == kept(PruneEdges(0.3)(other))
    assert second.edge_index.equal(PruneEdges(0.3)(other).edge_index)


def test_prune_edges_without_edges():
    data = Data(x=X, edge_index=EDGES[:, :0])
    assert PruneEdges(0.3)(data).num_edges == 0


def test_prune_edges_errors():
    with pytest.raises(ValueError, match=r"'threshold' to be at most 1 \(got 1.5\)"):
        PruneEdges(1.5)
    with pytest.raises(TypeError, match=r"'threshold' to be a number \(got 'x'\)"):
        PruneEdges('x')
    with pytest.raises(ValueError, match=r"'metric' to be one of .*\(got 'dice'\)"):
        PruneEdges(0.1, 'dice')
    with pytest.raises(ValueError, match="to hold 'x'"):
        PruneEdges(0.1)(Data(edge_index=EDGES, num_nodes=4))
    with pytest.raises(TypeError, match='homogeneous'):
        PruneEdges(0.1)(HeteroData())


def test_prune_edges_does_not_depend_on_the_scale():
    torch.manual_seed(0)
    x, edge_index = torch.rand(50, 64), torch.randint(50, (2, 300))
    expected = PruneEdges(0.75, 'cosine')(Data(x=x, edge_index=edge_index))
    assert 0 < expected.num_edges < 300
    for scale in (2.0**-30, 2.0**70):  # powers of two round nothing
        pruned = PruneEdges(0.75, 'cosine')(Data(x=scale * x, edge_index=edge_index))
        assert pruned.edge_index.equal(expected.edge_index)
    half = Data(x=(100 * x).half(), edge_index=edge_index)
    single = Data(x=half.x.float(), edge_index=edge_index)
    pruned, other = (PruneEdges(0.75, 'cosine')(data) for data in (half, single))
    assert pruned.edge_index.equal(other.edge_index)


@pytest.mark.parametrize('metric', ['auto', 'cosine', 'jaccard'])
def test_prune_edges_refuses_what_is_not_finite(metric):
    data = Data(x=torch.full((4, 3), torch.nan), edge_index=torch.tensor([[0], [1]]))
    for x in (data.x, data.x.to_sparse()):
        data.x = x
        with pytest.raises(ValueError, match="Expected 'x' to be finite"):
            PruneEdges(-1.0, metric)(data)


def test_prune_edges_refuses_edges_that_are_none():
    x = torch.eye(4)
    for edge_index, match in [
        (torch.zeros(3, 5, dtype=torch.long), r'\[2, num_edges\]'),
        (torch.zeros(2, 5), r'torch.long'),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            PruneEdges(0.1)(Data(x=x, edge_index=edge_index))
    data = Data(x=x, edge_index=torch.tensor([[0, 1], [1, 2]]))
    data.edge_weight = torch.ones(3)
    with pytest.raises(ValueError, match=r"'edge_weight' .* 2 edges"):
        PruneEdges(0.1)(data)


def test_prune_edges_of_very_large_features():
    # They would be infinite, and taken for binary, in single precision.
    torch.manual_seed(0)
    x, edge_index = torch.rand(50, 64, dtype=torch.double), torch.randint(50, (2, 300))
    expected, pruned = (
        PruneEdges(0.75)(Data(x=scale * x, edge_index=edge_index))
        for scale in (1.0, 2.0**600)
    )
    assert 0 < expected.num_edges < 300
    assert pruned.edge_index.equal(expected.edge_index)
