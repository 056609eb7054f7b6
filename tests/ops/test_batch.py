import pytest
import torch

from torch_geometric_idgl.ops import Nodes

CPU = torch.device('cpu')


@pytest.mark.parametrize('sizes', [(4,), (3, 3), (2, 0, 3), (1, 4, 0), (0, 0), (0,)])
def test_nodes(sizes):
    nodes = Nodes(sizes, CPU)
    n, width = sum(sizes), max(sizes)
    assert (nodes.num_graphs, nodes.num_rows) == (len(sizes), n)
    assert nodes.max_size == width
    assert nodes.is_regular == (len(set(sizes)) == 1)
    expected = [g for g, size in enumerate(sizes) for _ in range(size)]
    assert nodes.batch.tolist() == expected
    assert nodes.count.tolist() == [max(size, 1) for size in sizes]
    assert nodes.ptr[-1] == n and nodes.start.tolist() == list(nodes.ptr[:-1])

    rows = torch.rand(n, 2, dtype=torch.float64).requires_grad_()
    padded = nodes.pad(rows)
    assert padded.shape == (len(sizes), width, 2)
    for g, own in enumerate(rows.split(sizes)):
        assert torch.equal(padded[g, : sizes[g]], own)
        assert padded[g, sizes[g] :].eq(0).all()
    assert torch.equal(nodes.unpad(padded), rows)
    if nodes.is_regular and n:
        assert padded.data_ptr() == rows.data_ptr()  # a view
    (grad,) = torch.autograd.grad(padded.square().sum(), rows)
    torch.testing.assert_close(grad, 2 * rows.detach())
    assert nodes.pad(rows[:, 0]).shape == (len(sizes), width)

    expected = [rows[nodes.batch == g, 0].sum() for g in range(len(sizes))]
    torch.testing.assert_close(nodes.sum(rows[:, 0]), torch.stack(expected))


def test_where():
    new, old = torch.ones(5, 2), torch.zeros(5, 2)
    active = torch.tensor([False, True, True])
    rows = Nodes((2, 0, 3), CPU).where(active, new, old)
    assert rows[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    # A graph that is alone would not have been refined otherwise.
    assert Nodes((5,), CPU).where(torch.tensor([True]), new, old) is new


def test_some_of_the_graphs():
    nodes = Nodes((2, 0, 3, 1), CPU)
    assert nodes.of([3, 0]) == Nodes((1, 2), CPU)
    assert nodes.rows_of([3, 0]).tolist() == [5, 0, 1]
    assert nodes.rows_of([1]).tolist() == []
    assert nodes.rows_of(range(4)).tolist() == list(range(6))


def test_equality():
    nodes = Nodes((2, 3), CPU)
    assert nodes == Nodes([2, 3], CPU) and hash(nodes) == hash(Nodes((2, 3), CPU))
    assert nodes != Nodes((3, 2), CPU) and nodes != (2, 3)
    assert str(nodes) == 'Nodes([2, 3])'
