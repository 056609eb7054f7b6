import torch

from torch_geometric_idgl.view.layout import layout


def test_neighbours_are_near():
    place = torch.arange(100)
    ring = torch.stack([place, (place + 1) % 100])
    pos = layout(ring, 100)
    near = (pos[ring[0]] - pos[ring[1]]).norm(dim=1).mean()
    far = (pos - pos.roll(50, 0)).norm(dim=1).mean()
    assert pos.shape == (100, 2)
    assert near < 0.2 * far
    assert torch.equal(pos, layout(ring, 100))
    assert not torch.equal(pos, layout(ring, 100, seed=1))


def test_small_and_empty_graphs():
    for n in range(1, 5):
        pos = layout(torch.empty(2, 0, dtype=torch.long), n)
        assert pos.shape == (n, 2) and pos.isfinite().all()
