import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    DataLoader,
    NeighborLoader,
)
from torch_geometric.utils import subgraph

from torch_geometric_idgl.loader import AnchorLoader, BucketSampler, PartitionLoader

SIZES = [(7 * i) % 41 for i in range(103)]


class Graphs(InMemoryDataset):
    def __init__(self, items, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(items)


def graph(size, features=True):
    if features:
        return Data(x=torch.full((size, 2), float(size)), y=torch.tensor([size]))
    return Data(num_nodes=size, y=torch.tensor([size]))


def spread(batches):
    """How far apart the sizes in a batch are, on average."""
    ranges = [
        max(SIZES[i] for i in batch) - min(SIZES[i] for i in batch) for batch in batches
    ]
    return sum(ranges) / len(ranges)


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize(
    ('batch_size', 'chunk_batches'), [(1, 1), (8, 50), (8, 3), (103, 1), (500, 2)]
)
def test_each_item_comes_once(batch_size, chunk_batches, shuffle):
    sampler = BucketSampler(SIZES, batch_size, shuffle, chunk_batches)
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler) == -(-len(SIZES) // batch_size)
        assert sorted(i for batch in batches for i in batch) == list(range(len(SIZES)))
        lengths = sorted(len(batch) for batch in batches)
        assert set(lengths[1:]) <= {batch_size}


def test_sizes_of_a_batch_are_close():
    torch.manual_seed(0)
    close, random = BucketSampler(SIZES, 8), BucketSampler(SIZES, 8, chunk_batches=1)
    assert spread(close) < 5 < 25 < spread(random)
    # Batches are shuffled too: they do not come from small to large.
    means = [sum(SIZES[i] for i in batch) / len(batch) for batch in close]
    assert means != sorted(means)


def test_order_is_that_of_the_seed():
    sampler = BucketSampler(SIZES, 8)
    torch.manual_seed(1)
    first, second = list(sampler), list(sampler)
    torch.manual_seed(1)
    assert list(sampler) == first != second
    assert list(sampler) == second


def test_without_shuffle_from_small_to_large():
    sampler = BucketSampler([3, 1, 2, 1, 9], 2, shuffle=False)
    before = torch.get_rng_state()
    assert list(sampler) == list(sampler) == [[1, 3], [2, 0], [4]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    'make', [list, torch.tensor, lambda x: torch.tensor(x).numpy()]
)
def test_any_sequence_of_sizes(make):
    assert BucketSampler(make(SIZES), 4).sizes.tolist() == SIZES


@pytest.mark.parametrize('features', [True, False])
def test_data_sets(features):
    items = [graph(size, features) for size in [3, 1, 4, 1, 5]]
    dataset = Graphs(items)
    for given, expected in [
        (items, [3, 1, 4, 1, 5]),
        (dataset, [3, 1, 4, 1, 5]),
        (dataset[1:4], [1, 4, 1]),
        (dataset[torch.tensor([4, 0])], [5, 3]),
        (torch.utils.data.Subset(items, [2, 0]), [4, 3]),
        (Graphs(items[:1]), [3]),
        (
            Graphs(items, transform=lambda data: graph(2 * data.y.item())),
            [6, 2, 8, 2, 10],
        ),
    ]:
        assert BucketSampler(given, 2).sizes.tolist() == expected


def test_in_a_loader():
    torch.manual_seed(0)
    items = [graph(size + 1) for size in SIZES]
    loader = DataLoader(items, batch_sampler=BucketSampler(items, 8))
    batches = list(loader)
    assert len(loader) == len(batches) == 13
    seen = torch.cat([batch.y for batch in batches])
    assert sorted(seen.tolist()) == sorted(size + 1 for size in SIZES)
    assert [batch.num_graphs for batch in batches].count(8) == 12


@pytest.mark.parametrize(
    ('args', 'match'),
    [
        (([], 2), r"'sizes' to be whole numbers, .*\(got shape \[0\]\)"),
        (([[1, 2]], 2), r'\(got shape \[1, 2\]\)'),
        (([1.5, 2.0], 2), r'\(got torch.float32\)'),
        (([True], 2), r'\(got torch.bool\)'),
        (('ab', 2), r'\(got str\)'),
        ((None, 2), r'\(got NoneType\)'),
        ((3, 2), r'\(got shape \[\]\)'),
        (([1, 2], 0), r"'batch_size' to be at least 1 \(got 0\)"),
        (([1, 2], 1.5), r"'batch_size' to be an integer \(got 1.5\)"),
        (([1, 2], 1, True, 0), r"'chunk_batches' to be at least 1 \(got 0\)"),
    ],
)
def test_errors(args, match):
    with pytest.raises((TypeError, ValueError), match=match):
        BucketSampler(*args)


# Batches of nodes --------------------------------------------------------------------


def large_graph(n=40):
    """A ring with chords; the numbers of nodes and edges are among what they hold."""
    node = torch.arange(n)
    edge_index = torch.cat(
        [torch.stack([node, (node + 1) % n]), torch.stack([node, (node * 7) % n])], 1
    )
    return Data(
        x=node.view(-1, 1) + torch.tensor([0.0, 0.5]),
        y=node,
        edge_index=edge_index,
        edge_weight=torch.arange(edge_index.size(1)) + 1.0,
        name='ring',
    )


def edges_of(batch):
    """The edges of a batch, by the numbers of their nodes, with their weights."""
    ends = batch.n_id[batch.edge_index]
    return sorted(zip(*ends.tolist(), batch.edge_weight.tolist(), strict=True))


def induced(data, nodes):
    index, weight = subgraph(nodes, data.edge_index, data.edge_weight)
    return sorted(zip(*index.tolist(), weight.tolist(), strict=True))


def check_holds_its_nodes(data, batch):
    assert batch.n_id.unique().numel() == batch.num_nodes == batch.x.size(0)
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
    assert torch.equal(data.edge_weight[batch.e_id], batch.edge_weight)
    assert batch.name == 'ring'


@pytest.mark.parametrize(('parts', 'batch_size'), [(1, 1), (4, 1), (7, 3), (40, 8)])
def test_partition_loader(parts, batch_size):
    data = large_graph()
    loader = PartitionLoader(data, parts, batch_size=batch_size, shuffle=True)
    assert str(loader) == f'PartitionLoader({parts}, batch_size={batch_size})'
    sizes = loader.part.bincount()
    assert sizes.numel() == parts and int(sizes.max() - sizes.min()) <= 1
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == -(-parts // batch_size)
        nodes = torch.cat([batch.n_id for batch in batches])
        assert sorted(nodes.tolist()) == list(range(40))
        for batch in batches:
            check_holds_its_nodes(data, batch)
            assert batch.batch_size == batch.num_nodes
            assert edges_of(batch) == induced(data, batch.n_id)


def test_parts_are_drawn_and_connected():
    n = 60
    edge_index = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    data = Data(edge_index=edge_index, num_nodes=n)
    torch.manual_seed(0)
    part = PartitionLoader(data, 4).part
    torch.manual_seed(0)
    assert torch.equal(PartitionLoader(data, 4).part, part)
    assert not torch.equal(PartitionLoader(data, 4).part, part)
    # Random parts would cut three edges of four; most of a ring stays together.
    cut = int((part[edge_index[0]] != part[edge_index[1]]).sum())
    assert cut <= 12
    batch = next(iter(PartitionLoader(data, 4)))
    assert batch.num_nodes == 15 and batch.x is None
    # Nodes without edges, and without any edge at all.
    alone = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=5)
    assert sorted(PartitionLoader(alone, 2).part.tolist()) == [0, 0, 0, 1, 1]
    star = Data(edge_index=torch.tensor([[0] * 5, [1, 2, 3, 4, 5]]), num_nodes=8)
    assert PartitionLoader(star, 4).part.bincount().tolist() == [2, 2, 2, 2]


def test_given_parts():
    data = large_graph(6)
    loader = PartitionLoader(data, torch.tensor([9, 1, 1, 9, 1, 5]), batch_size=2)
    first, second = loader
    assert first.n_id.tolist() == [1, 2, 4, 5] and second.n_id.tolist() == [0, 3]
    assert edges_of(first) == induced(data, first.n_id)
    with pytest.raises(ValueError, match=r"'parts' to be .*vector of 6 .*shape \[5\]"):
        PartitionLoader(data, torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r'at most the number of nodes, 6 \(got 7\)'):
        PartitionLoader(data, 7)
    with pytest.raises(ValueError, match=r"a graph with 'edge_index' \(got Data"):
        PartitionLoader(Data(x=data.x), 2)
    with pytest.raises(ValueError, match="leave out 'ToSparseTensor'"):
        PartitionLoader(Data(x=data.x, adj_t=torch.eye(6).to_sparse()), 2)
    wrong = Data(x=data.x, edge_index=data.edge_index + 1)
    with pytest.raises(ValueError, match="'edge_index' to hold nodes from 0 to 5"):
        PartitionLoader(wrong, torch.zeros(6, dtype=torch.long))


def loaders(data):
    """Loaders of batches of nodes that need no extension."""

    class Clusters(ClusterData):  # METIS is part of few installations
        def _metis(self, edge_index, num_nodes):
            return torch.arange(num_nodes) % 5

    pytest.importorskip('pandas')  # PyG takes nodes apart with it
    return [
        PartitionLoader(data, 5, batch_size=2),
        ClusterLoader(Clusters(data, 5, log=False), batch_size=2),
    ]


ANCHORS = torch.tensor([17, 3, 30, 4])


def check_anchors(data, batch, before):
    """Compares a batch with the one it is made of."""
    own = before.n_id
    assert batch.batch_size == before.get('batch_size', own.numel())
    assert torch.equal(batch.n_id[: own.numel()], own)  # seeds come first
    added = set(batch.n_id[own.numel() :].tolist())
    assert added == set(ANCHORS.tolist()) - set(own.tolist())
    # The same anchors in the same order, with what they hold.
    assert torch.equal(batch.n_id[batch.anchor_index], ANCHORS)
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    new = [e for e in induced(data, batch.n_id) if e[0] in added or e[1] in added]
    assert edges_of(batch) == sorted(edges_of(before) + new)


def test_anchor_loader():
    data = large_graph()
    for loader in loaders(data):
        anchored = AnchorLoader(loader, data, ANCHORS)
        assert len(anchored) == len(loader) == 3
        for batch, before in zip(anchored, loader, strict=True):
            check_anchors(data, batch, before)
            assert batch.name == 'ring'
            assert edges_of(batch) == induced(data, batch.n_id)
    assert str(anchored).startswith('AnchorLoader(')


@pytest.mark.sparse
def test_neighbor_loader():
    pytest.importorskip('torch_sparse')
    data = large_graph()
    loader = NeighborLoader(data, [2, 1], torch.arange(10, 30), batch_size=6)
    sampled = list(loader)
    for batch, before in zip(
        AnchorLoader(sampled, data, ANCHORS), sampled, strict=True
    ):
        check_anchors(data, batch, before)
        check_holds_its_nodes(data, batch)
        assert 'num_sampled_nodes' not in batch
    assert len(list(AnchorLoader(loader, data, ANCHORS))) == 4


def test_cluster_loader():
    """With the clusters of METIS, by the package that has wheels of it."""
    pymetis = pytest.importorskip('pymetis')

    class Metis(ClusterData):
        def _metis(self, edge_index, num_nodes):
            neighbours = [edge_index[1, edge_index[0] == i] for i in range(num_nodes)]
            graph = [own.tolist() for own in neighbours]
            return torch.tensor(pymetis.part_graph(self.num_parts, graph)[1])

    data = large_graph()
    clusters = Metis(data, 4, log=False)
    assert clusters.partition.partptr.diff().tolist() != [data.num_nodes, 0, 0, 0]
    seeds = []
    for batch in AnchorLoader(ClusterLoader(clusters, batch_size=2), data, ANCHORS):
        assert torch.equal(batch.n_id[batch.anchor_index], ANCHORS)
        assert edges_of(batch) == induced(data, batch.n_id)
        seeds += batch.n_id[: batch.batch_size].tolist()
    assert sorted(seeds) == list(range(data.num_nodes))


@pytest.mark.parametrize('convert', ['to_sparse', 'to_sparse_csr'])
def test_sparse_features(convert):
    data = large_graph()
    sparse = data.clone()
    sparse.x = getattr(data.x, convert)()
    for batch in AnchorLoader(PartitionLoader(sparse, 4), sparse, ANCHORS):
        assert batch.x.layout == torch.sparse_coo
        assert torch.equal(batch.x.to_dense(), data.x[batch.n_id])


def test_batches_are_made_by_workers():
    data = large_graph()
    part = torch.arange(40) % 5
    alone, others = (PartitionLoader(data, part, num_workers=n) for n in (0, 2))
    for batch, expected in zip(others, alone, strict=True):
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.edge_index, expected.edge_index)


def test_anchors_are_drawn_once_per_epoch():
    data, asked = large_graph(), []

    def draw(num_nodes):
        asked.append(num_nodes)
        return ANCHORS + len(asked)

    loader = AnchorLoader(PartitionLoader(data, 4), data, draw)
    for epoch in (1, 2):
        for batch in loader:
            assert torch.equal(batch.n_id[batch.anchor_index], ANCHORS + epoch)
    assert asked == [40, 40]


def test_anchor_loader_errors():
    data = large_graph()
    loader = PartitionLoader(data, 4)
    with pytest.raises(TypeError, match=r"'anchors' to be a tensor.*\(got 'int'\)"):
        AnchorLoader(loader, data, 5)
    for anchors, error, match in [
        (ANCHORS.float(), TypeError, r'torch.long \(got torch.float32\)'),
        (ANCHORS[:0], ValueError, r'vector of nodes \(got shape \[0\]\)'),
        (ANCHORS + 10, ValueError, r'from 0 to 39 \(got 13 to 40\)'),
        (lambda n: [1], TypeError, r'torch.long \(got list\)'),
    ]:
        with pytest.raises(error, match=match):
            next(iter(AnchorLoader(loader, data, anchors)))
    with pytest.raises(ValueError, match=r"batches to hold 'n_id'.*torch.arange"):
        next(iter(AnchorLoader([data], data, ANCHORS)))
    others = PartitionLoader(Data(x=torch.rand(99, 2), edge_index=data.edge_index), 1)
    with pytest.raises(ValueError, match="'n_id' to hold nodes from 0 to"):
        next(iter(AnchorLoader(others, data, ANCHORS)))
    several = data.clone()
    several.n_id, several.batch = torch.arange(40), torch.arange(40) // 20
    with pytest.raises(ValueError, match=r'of one graph.*use disjoint=False'):
        next(iter(AnchorLoader([several], data, ANCHORS)))
    with pytest.raises(ValueError, match=r"a graph with 'edge_index' \(got Data"):
        AnchorLoader(loader, Data(x=data.x), ANCHORS)
