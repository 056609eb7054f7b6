import json

import numpy as np
import pytest
import torch

from torch_geometric_idgl.datasets import AttackedGraph

pytest.importorskip('scipy')


def csr(prefix, rows, num_cols):
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return {
        f'{prefix}data': np.ones(indptr[-1], dtype=np.float32),
        f'{prefix}indices': np.concatenate(rows).astype(np.int32),
        f'{prefix}indptr': indptr,
        f'{prefix}shape': np.array([len(rows), num_cols]),
    }


def write_files(folder, nested=True):
    """Five nodes, the second of which is on its own but for a loop."""
    places = {key: folder / key if nested else folder for key in ('clean', 'meta')}
    places['splits'] = folder / 'splits' if nested else folder
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    adj = csr('adj_', [[2], [1], [3], [0, 4], []], 5)
    attr = csr('attr_', [[0], [1], [0, 2], [], [3]], 4)
    labels = np.array([0, 1, 1, 0, 2], dtype=np.int8)
    np.savez(places['clean'] / 'cora.npz', **adj, **attr, labels=labels)
    attacked = csr('', [[1, 3], [0], [], [0]], 4)
    np.savez(places['meta'] / 'cora_meta_adj_0.05.npz', **attacked, format='csr')
    split = {'idx_train': [2], 'idx_val': [0], 'idx_test': [3, 1]}
    (places['splits'] / 'cora_prognn_splits.json').write_text(json.dumps(split))


@pytest.mark.parametrize('place', ['', 'raw', 'raw/'])
def test_attacked_graph(tmp_path, place):
    write_files(tmp_path / place, nested=not place.endswith('/'))
    dataset = AttackedGraph(str(tmp_path), 'Cora', rate=0.05)
    assert str(dataset) == "AttackedGraph('cora', 'meta', rate=0.05)"
    assert dataset.num_classes == 3
    data = dataset[0]
    assert data.edge_index.tolist() == [[0, 0, 1, 3], [1, 3, 0, 0]]
    x = [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert data.x.tolist() == x
    assert data.y.tolist() == [0, 1, 0, 2]
    assert data.train_mask.tolist() == [False, False, True, False]
    assert data.val_mask.tolist() == [True, False, False, False]
    assert data.test_mask.tolist() == [False, True, False, True]

    clean = AttackedGraph(str(tmp_path), rate=0)[0]
    edges = {(0, 1), (1, 2), (2, 0), (2, 3)}
    edges |= {(j, i) for i, j in edges}
    assert set(map(tuple, clean.edge_index.t().tolist())) == edges
    assert clean.x.equal(data.x) and clean.test_mask.equal(data.test_mask)


def test_attacked_graph_missing(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        AttackedGraph(str(tmp_path), 'citeseer', rate=0.1)
    message = str(error.value)
    assert str(tmp_path / 'raw') in message
    for file in ('.npz', '_prognn_splits.json', '_meta_adj_0.1.npz'):
        assert f'citeseer{file} (https://raw.githubusercontent.com/' in message


def test_attacked_graph_errors(tmp_path):
    with pytest.raises(ValueError, match=r"\['cora', 'citeseer'\] \(got 'pubmed'\)"):
        AttackedGraph(str(tmp_path), 'pubmed')
    with pytest.raises(ValueError, match=r"'attack' to be one of .*\(got 'dice'\)"):
        AttackedGraph(str(tmp_path), attack='dice')
    with pytest.raises(ValueError, match=r"'rate' to be one of .*\(got 0.3\)"):
        AttackedGraph(str(tmp_path), rate=0.3)


@pytest.mark.parametrize(
    ('name', 'rate', 'sizes', 'split'),
    [
        ('cora', 0, (2485, 10138), (247, 249, 1988)),
        ('cora', 0.25, (2485, 12492), (247, 249, 1988)),
        ('citeseer', 0.1, (2110, 8064), (210, 211, 1688)),
    ],
)
def test_attacked_graph_real(data_root, name, rate, sizes, split):
    root = data_root / 'adversarial'
    if not root.exists():
        pytest.skip(f"needs the attacked graphs in '{root}'")
    data = AttackedGraph(str(root), name, rate=rate)[0]
    assert (data.num_nodes, data.num_edges) == sizes
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(dim=1).tolist() == list(split)
    assert int(masks.sum(dim=0).max()) == 1
    assert data.is_undirected() and not data.has_self_loops()
    assert data.x.unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ('file', 'content', 'match'),
    [
        ('clean/cora.npz', b'no', 'cora.npz'),
        ('meta/cora_meta_adj_0.05.npz', b'PK', 'adj_0.05.npz'),
        ('splits/cora_prognn_splits.json', b'{}', 'splits.json'),
        ('splits/cora_prognn_splits.json', b'no', 'splits.json'),
    ],
)
def test_attacked_graph_of_damaged_files(tmp_path, file, content, match):
    write_files(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(OSError, match=rf'Cannot read .*{match}.*download it again'):
        AttackedGraph(str(tmp_path), rate=0.05)


def test_attacked_graph_of_another_graph(tmp_path):
    write_files(tmp_path)
    attacked = csr('', [[1, 5], [0], [], [0], [], [0]], 6)
    np.savez(tmp_path / 'meta' / 'cora_meta_adj_0.05.npz', **attacked, format='csr')
    with pytest.raises(OSError, match=r'adj_0.05.npz'):
        AttackedGraph(str(tmp_path), rate=0.05)
