import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from torch_geometric_idgl.loader import BucketSampler

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
