import pytest
import torch

from torch_geometric_idgl.ops import Layout

CPU = torch.device('cpu')


def test_one_graph():
    layout = Layout.from_batch(None, 4, None, CPU)
    assert layout.sizes == (4,)
    assert (layout.num_graphs, layout.num_rows, layout.max_size) == (1, 4, 4)
    assert layout.ptr == (0, 4)
    assert layout.batch.tolist() == [0, 0, 0, 0]
    rows = torch.rand(4, 3)
    assert layout.pad(rows).shape == (1, 4, 3)
    assert layout.pad(rows).data_ptr() == rows.data_ptr()  # a view
    assert torch.equal(layout.unpad(layout.pad(rows)), rows)
    torch.testing.assert_close(layout.sum(rows[:, 0]), rows[:, 0].sum().view(1))


def test_from_batch():
    batch = torch.tensor([0, 0, 2, 2, 2])
    assert Layout.from_batch(batch, 5, None, CPU).sizes == (2, 0, 3)
    assert Layout.from_batch(batch, 5, 4, CPU).sizes == (2, 0, 3, 0)
    empty = torch.zeros(0, dtype=torch.long)
    assert Layout.from_batch(empty, 0, None, CPU).sizes == (0,)
    assert Layout.from_batch(empty, 0, 2, CPU).sizes == (0, 0)


@pytest.mark.parametrize('sizes', [(3, 3), (2, 0, 3), (0, 1), (1, 4, 0), (0, 0)])
def test_batches(sizes):
    layout = Layout(sizes, CPU)
    n, width = sum(sizes), max(sizes)
    assert (layout.num_graphs, layout.num_rows) == (len(sizes), n)
    assert layout.max_size == width
    assert layout.is_regular == (len(set(sizes)) == 1)
    expected = [g for g, size in enumerate(sizes) for _ in range(size)]
    assert layout.batch.tolist() == expected
    assert layout.count.tolist() == [max(size, 1) for size in sizes]

    rows = torch.rand(n, 2, dtype=torch.float64).requires_grad_()
    padded = layout.pad(rows)
    assert padded.shape == (len(sizes), width, 2)
    for g, size in enumerate(sizes):
        assert torch.equal(padded[g, :size], rows[layout.ptr[g] : layout.ptr[g + 1]])
        assert padded[g, size:].eq(0).all()
    assert torch.equal(layout.unpad(padded), rows)
    (grad,) = torch.autograd.grad(padded.square().sum(), rows)
    torch.testing.assert_close(grad, 2 * rows.detach())

    flat = layout.pad(rows[:, 0])
    assert flat.shape == (len(sizes), width)
    expected = [rows[layout.batch == g, 0].sum() for g in range(len(sizes))]
    torch.testing.assert_close(layout.sum(rows[:, 0]), torch.stack(expected))
