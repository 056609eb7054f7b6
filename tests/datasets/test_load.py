import builtins
import gzip
import sys

import pytest
import torch

from torch_geometric_idgl.datasets import load, stage_data

ARXIV = {
    'raw/edge.csv.gz': '0,1\n2,1\n3,0\n1,0\n',
    'raw/node-feat.csv.gz': '0.5,-1.0\n0.25,2.0\n0.0,3.0\n1.5,4.0\n',
    'raw/node-label.csv.gz': '2\n0\n1\n2\n',
    'raw/node_year.csv.gz': '2015\n2018\n2019\n2016\n',
    'raw/num-node-list.csv.gz': '4\n',
    'raw/num-edge-list.csv.gz': '4\n',
    'split/time/train.csv.gz': '0\n3\n',
    'split/time/valid.csv.gz': '1\n',
    'split/time/test.csv.gz': '2\n',
}


@pytest.fixture
def arxiv(tmp_path):
    """A graph of four nodes in the layout of ogbn-arxiv."""
    for name, content in ARXIV.items():
        file = tmp_path / 'ogb' / 'ogbn_arxiv' / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(content.encode()))
    return tmp_path


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may ask, nor reach for the network."""

    def fail(*args, **kwargs):
        raise AssertionError('not allowed here')

    monkeypatch.setattr(builtins, 'input', fail)
    monkeypatch.setattr('urllib.request.urlopen', fail)
    monkeypatch.setattr('torch_geometric.io.fs.cp', fail)


@pytest.mark.parametrize(
    ('name', 'size', 'num_edges', 'num_classes', 'split'),
    [
        ('cora', (2708, 1433), 10556, 7, (140, 500, 1000)),
        ('citeseer', (3327, 3703), 9104, 6, (120, 500, 1000)),
        ('pubmed', (19717, 500), 88648, 3, (60, 500, 1000)),
    ],
)
def test_load_planetoid(data_root, name, size, num_edges, num_classes, split):
    data = load(name, data_root)
    assert data.x.size() == size
    assert data.num_edges == num_edges and data.is_undirected()
    assert int(data.y.max()) + 1 == num_classes
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(dim=1).tolist() == list(split)

    row_sum = data.x.sum(dim=1)
    row_sum = row_sum[row_sum != 0]  # Citeseer has nodes without features.
    assert torch.allclose(row_sum, torch.ones(1), atol=1e-5)

    sparse = load(name.upper(), data_root, sparse_x=True)
    assert sparse.x.layout == torch.sparse_csr
    assert sparse.num_nodes == size[0]
    assert torch.equal(sparse.x.to_dense(), data.x)


def test_load_uci(tmp_path):
    pytest.importorskip('sklearn')
    data = load('wine', tmp_path, seed=1)
    assert data.x.size() == (178, 13)
    assert not torch.equal(data.train_mask, load('wine', tmp_path, seed=2).train_mask)


def test_load_arxiv(arxiv, capfd):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')
    for _ in range(2):  # From the raw files, then from the processed one.
        data = load('ogbn-arxiv', arxiv)
        assert data.x.tolist() == [[0.5, -1.0], [0.25, 2.0], [0.0, 3.0], [1.5, 4.0]]
        assert data.edge_index.tolist() == [[0, 0, 1, 1, 2, 3], [1, 3, 0, 2, 1, 0]]
        assert data.y.tolist() == [2, 0, 1, 2]
        assert data.node_year.tolist() == [2015, 2018, 2019, 2016]
        assert data.train_mask.tolist() == [True, False, False, True]
        assert data.val_mask.tolist() == [False, True, False, False]
        assert data.test_mask.tolist() == [False, False, True, False]
    assert capfd.readouterr().out == ''
    assert module.torch is torch and not hasattr(module, 'input')


def test_load_arxiv_restores_after_an_error(arxiv):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')
    (arxiv / 'ogb' / 'ogbn_arxiv' / 'raw' / 'edge.csv.gz').write_bytes(b'no archive')
    with pytest.raises(gzip.BadGzipFile):
        load('ogbn-arxiv', arxiv)
    assert module.torch is torch and not hasattr(module, 'input')


@pytest.mark.parametrize('name', list(ARXIV))
def test_load_arxiv_missing_file(arxiv, name):
    folder = arxiv / 'ogb' / 'ogbn_arxiv'
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError) as e:
        load('ogbn-arxiv', arxiv)
    assert f"incomplete: {name} missing. Expected this file in '{folder}'" in str(
        e.value
    )
    assert not (folder / 'processed').exists()


def test_load_arxiv_without_features(data_root):
    folder = data_root / 'ogb' / 'ogbn_arxiv'
    if not (folder / 'raw' / 'edge.csv.gz').exists():
        pytest.skip('needs the real ogbn-arxiv graph')
    if (folder / 'raw' / 'node-feat.csv.gz').exists():
        pytest.skip('the real ogbn-arxiv data is complete here')
    with pytest.raises(FileNotFoundError) as e:
        load('ogbn-arxiv', data_root)
    assert f"raw/node-feat.csv.gz missing. Expected this file in '{folder}'" in str(
        e.value
    )


def test_load_without_ogb(arxiv, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ogb.nodeproppred.dataset_pyg', None)
    with pytest.raises(ImportError, match=r'torch_geometric_idgl\[datasets\]'):
        load('ogbn-arxiv', arxiv)


def test_load_planetoid_missing_files(tmp_path):
    folder = tmp_path / 'Planetoid' / 'CiteSeer' / 'raw'
    folder.mkdir(parents=True)
    for part in ['allx', 'ally', 'graph', 'tx', 'ty', 'x']:
        (folder / f'ind.citeseer.{part}').touch()
    with pytest.raises(FileNotFoundError) as e:
        load('citeseer', tmp_path)
    assert 'ind.citeseer.test.index, ind.citeseer.y missing' in str(e.value)
    assert f"these files in '{folder}'" in str(e.value)
    assert "'source' names a read-only folder" in str(e.value)
    source = tmp_path / 'source'
    source.mkdir()
    (source / 'w').touch()
    with pytest.raises(FileNotFoundError, match='is incomplete'):
        load('citeseer', tmp_path / 'root', source=source)
    assert (tmp_path / 'root' / 'w').exists()


def test_load_unknown(tmp_path):
    with pytest.raises(ValueError, match=r"'cora', .*'ogbn-arxiv', .*\(got 'core'\)"):
        load('core', tmp_path)


@pytest.mark.parametrize('copy', [False, True])
def test_stage_data(tmp_path, copy):
    source, root = tmp_path / 'source', tmp_path / 'root'
    for name in ['a/raw/x', 'a/raw/y', 'a/processed/z', 'w']:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)

    assert stage_data(source, root, copy=copy) == root.resolve()
    files = sorted(str(f.relative_to(root)) for f in root.rglob('*') if f.is_file())
    assert files == ['a/raw/x', 'a/raw/y', 'w']
    assert (root / 'w').is_symlink() != copy
    assert (root / 'a' / 'raw' / 'x').read_text() == 'a/raw/x'

    # What is there stays, what is missing or dangling comes back.
    (root / 'a' / 'processed').mkdir()
    (root / 'a' / 'raw' / 'y').unlink()
    (root / 'w').unlink()
    (root / 'w').symlink_to(tmp_path / 'nowhere')
    stage_data(source, root, copy=copy)
    assert (root / 'a' / 'raw' / 'y').read_text() == 'a/raw/y'
    assert (root / 'w').read_text() == 'w'
    assert not (tmp_path / 'nowhere').exists()
    assert (source / 'a' / 'processed' / 'z').exists()


def test_stage_data_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match='no directory'):
        stage_data(tmp_path / 'nothing', tmp_path / 'root')
    with pytest.raises(ValueError, match="'root' to be outside"):
        stage_data(tmp_path, tmp_path / 'root')
