import sys

import pytest
import torch

from torch_geometric_idgl.datasets import UCI

pytest.importorskip('sklearn')


@pytest.mark.parametrize(
    ('name', 'size', 'num_classes', 'split'),
    [
        ('wine', (178, 13), 3, (10, 20, 148)),
        ('cancer', (569, 30), 2, (10, 20, 539)),
        ('digits', (1797, 64), 10, (50, 100, 1647)),
    ],
)
def test_uci(tmp_path, name, size, num_classes, split):
    dataset = UCI(str(tmp_path), name, seed=3)
    assert str(dataset) == f"UCI('{name}', seed=3)"
    assert len(dataset) == 1
    assert dataset.num_classes == num_classes

    data = dataset[0]
    assert data.x.size() == size and data.x.dtype == torch.float
    assert data.edge_index is None
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(dim=1).tolist() == list(split)
    assert (masks.sum(dim=0) == 1).all()

    mean, std = data.x.mean(dim=0), data.x.std(dim=0, correction=0)
    assert mean.abs().max() < 1e-5
    constant = std < 1e-6  # Digits has pixels that are always white.
    assert int(constant.sum()) == (3 if name == 'digits' else 0)
    assert torch.allclose(std[~constant], torch.ones(1), atol=1e-4)

    # Stratified: every class is there about as often as in all of the data.
    share = data.y.bincount() / data.num_nodes
    for mask in masks:
        count = data.y[mask].bincount(minlength=num_classes)
        assert (count - share * mask.sum()).abs().max() <= 1.5


def test_uci_seeds(tmp_path):
    first, second = (UCI(str(tmp_path), 'wine', seed=seed)[0] for seed in (0, 1))
    assert torch.equal(first.x, second.x)
    assert not torch.equal(first.train_mask, second.train_mask)
    again = UCI(str(tmp_path / 'other'), 'Wine', seed=0)[0]
    assert torch.equal(first.train_mask, again.train_mask)
    assert torch.equal(first.test_mask, again.test_mask)


def test_uci_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"\['wine', 'cancer', 'digits'\] .*'iris'"):
        UCI(str(tmp_path), 'iris')
    with pytest.raises(TypeError, match=r"'name' to be a string \(got None\)"):
        UCI(str(tmp_path), None)
    with pytest.raises(TypeError, match=r"'seed' to be an integer \(got 0.5\)"):
        UCI(str(tmp_path), 'wine', seed=0.5)


def test_uci_without_sklearn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ImportError, match=r'torch_geometric_idgl\[datasets\]'):
        UCI(str(tmp_path), 'wine')


def test_uci_damaged_file(tmp_path):
    expected = UCI(str(tmp_path), 'wine')[0]
    (tmp_path / 'wine' / 'processed' / 'data_0.pt').write_bytes(b'xx')
    data = UCI(str(tmp_path), 'wine')[0]
    assert data.x.equal(expected.x) and data.train_mask.equal(expected.train_mask)
