import gzip
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch_geometric.io import fs

from torch_geometric_idgl.datasets import load, stage_data
from torch_geometric_idgl.datasets.load import load_arxiv_graph

CORA = ['x', 'tx', 'allx', 'y', 'ty', 'ally', 'graph', 'test.index']
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
def planetoid(data_source, monkeypatch):
    """PyG's downloads come from the real data; gives those that were asked for."""
    urls = []

    def cp(url, folder):
        urls.append(url)
        name = url.rpartition('/')[2]
        raw = next(data_source.glob(f'Planetoid/*/raw/{name}'))
        shutil.copyfile(raw, Path(folder, name))

    monkeypatch.setattr(fs, 'cp', cp)
    return urls


@pytest.fixture
def arxiv(tmp_path):
    """A graph of four nodes in the layout of ogbn-arxiv."""
    write_arxiv(tmp_path / 'ogb' / 'ogbn_arxiv')
    return tmp_path


def write_arxiv(folder):
    for name, content in ARXIV.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(content.encode()))


def check_arxiv(data):
    assert data.x.tolist() == [[0.5, -1.0], [0.25, 2.0], [0.0, 3.0], [1.5, 4.0]]
    assert data.edge_index.tolist() == [[0, 0, 1, 1, 2, 3], [1, 3, 0, 2, 1, 0]]
    assert data.y.tolist() == [2, 0, 1, 2]
    assert data.node_year.tolist() == [2015, 2018, 2019, 2016]
    assert data.train_mask.tolist() == [True, False, False, True]
    assert data.val_mask.tolist() == [False, True, False, False]
    assert data.test_mask.tolist() == [False, False, True, False]


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


def test_load_downloads_planetoid(planetoid, data_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = load('Cora')  # In 'data', the default.
    assert [url.rpartition('/')[2] for url in planetoid] == [
        f'ind.cora.{part}' for part in CORA
    ]
    expected = load('cora', data_root)
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.edge_index, expected.edge_index)
    # Nothing else is left, and nothing is downloaded again.
    assert [path.name for path in (tmp_path / 'data' / 'Planetoid').iterdir()] == [
        'Cora'
    ]
    load('cora')
    assert len(planetoid) == len(CORA)


@pytest.mark.parametrize('part', ['allx', 'graph', 'test.index'])
def test_load_downloads_files_that_were_cut_short(
    planetoid, data_source, tmp_path, part
):
    folder = stage_data(data_source / 'Planetoid' / 'Cora', tmp_path / 'Planetoid/Cora')
    file = folder / 'raw' / f'ind.cora.{part}'
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])
    assert int(load('cora', tmp_path).test_mask.sum()) == 1000
    assert planetoid and file.read_bytes() == content
    # Links were replaced, not written through.
    assert not (folder / 'raw' / 'ind.cora.y').is_symlink()


@pytest.mark.parametrize('part', ['tx', 'test.index'])
def test_load_names_a_download_that_was_cut_short(
    planetoid, tmp_path, monkeypatch, part
):
    whole = fs.cp

    def cut(url, folder):
        whole(url, folder)
        file = Path(folder, url.rpartition('/')[2])
        if file.name == f'ind.cora.{part}':
            file.write_bytes(file.read_bytes()[:3000])

    monkeypatch.setattr(fs, 'cp', cut)
    with pytest.raises(FileNotFoundError, match=rf'raw/ind.cora.{part} cut short\)'):
        load('cora', tmp_path)
    # Nothing broken is left: with a better network, it works.
    assert list((tmp_path / 'Planetoid').iterdir()) == []
    monkeypatch.setattr(fs, 'cp', whole)
    assert load('cora', tmp_path).num_nodes == 2708


def test_load_interrupted(planetoid, tmp_path, monkeypatch):
    def interrupt(url, folder):
        Path(folder, url.rpartition('/')[2]).write_bytes(b'half')
        raise KeyboardInterrupt

    monkeypatch.setattr(fs, 'cp', interrupt)
    with pytest.raises(KeyboardInterrupt):
        load('cora', tmp_path)
    assert list((tmp_path / 'Planetoid').iterdir()) == []


def test_load_planetoid_without_network(tmp_path):
    folder = tmp_path / 'Planetoid' / 'CiteSeer'
    (folder / 'raw').mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as e:
        load('citeseer', tmp_path)
    assert f"'{folder}' and could not be downloaded (URLError: " in str(e.value)
    assert str(e.value).endswith(
        'Put these files there: '
        + ', '.join(f'raw/ind.citeseer.{part}' for part in CORA)
    )
    assert isinstance(e.value.__cause__, URLError)
    assert list(folder.rglob('*')) == [folder / 'raw']


def test_load_names_a_damaged_folder(data_source, tmp_path):
    folder = stage_data(data_source / 'Planetoid' / 'Cora', tmp_path / 'Planetoid/Cora')
    load('cora', tmp_path)
    file = folder / 'processed' / 'data.pt'
    file.write_bytes(file.read_bytes()[:1000])  # As if killed while writing.
    with pytest.raises(OSError, match=f"Cannot read .*'{folder}' .* 'processed'"):
        load('cora', tmp_path)
    shutil.rmtree(file.parent)
    assert load('cora', tmp_path).num_nodes == 2708


def test_load_arxiv(arxiv, capfd):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')
    decide_download = module.decide_download
    for _ in range(2):  # From the raw files, then from the processed one.
        check_arxiv(load('ogbn-arxiv', arxiv))
    assert capfd.readouterr().out == ''
    assert module.torch is torch and not hasattr(module, 'input')
    assert module.decide_download is decide_download


@pytest.mark.parametrize('present', [[], ['raw/edge.csv.gz', 'raw/node-label.csv.gz']])
def test_load_downloads_arxiv(tmp_path, monkeypatch, present):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')

    def download_url(url, folder):
        write_arxiv(tmp_path / 'web' / 'arxiv')
        return shutil.make_archive(f'{folder}/arxiv', 'zip', tmp_path / 'web', 'arxiv')

    monkeypatch.setattr(module, 'download_url', download_url)
    folder = tmp_path / 'ogb' / 'ogbn_arxiv'
    for name in present:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'')
    for _ in range(2):
        check_arxiv(load('ogbn-arxiv', tmp_path))
        monkeypatch.setattr(module, 'download_url', None)
    assert list((tmp_path / 'ogb').iterdir()) == [folder]


def test_load_arxiv_cut_short(tmp_path, monkeypatch):
    """OGB would find the broken archive again and again."""
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')

    def download_url(url, folder):
        file = Path(folder, 'arxiv.zip')
        file.write_bytes(b'PK\x03\x04')
        return str(file)

    monkeypatch.setattr(module, 'download_url', download_url)
    with pytest.raises(FileNotFoundError, match=r'\(BadZipFile: ') as e:
        load('ogbn-arxiv', tmp_path)
    assert isinstance(e.value.__cause__, zipfile.BadZipFile)
    assert list((tmp_path / 'ogb').iterdir()) == []


@pytest.mark.parametrize('name', list(ARXIV))
def test_load_arxiv_without_network(arxiv, name):
    pytest.importorskip('ogb')
    folder = arxiv / 'ogb' / 'ogbn_arxiv'
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError) as e:
        load('ogbn-arxiv', arxiv)
    assert f"not complete in '{folder}'" in str(e.value)
    assert str(e.value).endswith(f'Put these files there: {name}')
    assert isinstance(e.value.__cause__, URLError)
    assert len([*folder.glob('*/**/*.gz')]) == len(ARXIV) - 1


def test_load_damaged_arxiv(arxiv):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')
    decide_download = module.decide_download
    folder = arxiv / 'ogb' / 'ogbn_arxiv'
    (folder / 'raw' / 'edge.csv.gz').write_bytes(b'no archive')
    with pytest.raises(OSError, match=f"Cannot read .*'{folder}'") as e:
        load('ogbn-arxiv', arxiv)
    assert isinstance(e.value.__cause__, gzip.BadGzipFile)
    assert module.torch is torch and not hasattr(module, 'input')
    assert module.decide_download is decide_download


@pytest.mark.parametrize('name', list(ARXIV))
def test_load_arxiv_cut_off(arxiv, name):
    pytest.importorskip('ogb')
    file = arxiv / 'ogb' / 'ogbn_arxiv' / name
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(OSError, match=f'Cut short or damaged: {name}. Remove these'):
        load('ogbn-arxiv', arxiv)


def test_load_arxiv_graph(arxiv):
    pytest.importorskip('pandas')
    folder = arxiv / 'ogb' / 'ogbn_arxiv'
    (folder / 'raw' / 'node-feat.csv.gz').unlink()
    data = load_arxiv_graph(arxiv)
    assert data.x is None
    data.x = torch.tensor([[0.5, -1.0], [0.25, 2.0], [0.0, 3.0], [1.5, 4.0]])
    check_arxiv(data)

    edges = folder / 'raw' / 'edge.csv.gz'
    edges.write_bytes(gzip.compress(b'0,1\n2,1\n'))
    with pytest.raises(OSError, match=r'of 4 nodes, and 4 edges \(got 4 and 2\)'):
        load_arxiv_graph(arxiv)
    edges.unlink()
    with pytest.raises(FileNotFoundError, match=r'there: raw/edge.csv.gz$'):
        load_arxiv_graph(arxiv)


def test_load_arxiv_graph_downloads(tmp_path, monkeypatch):
    module = pytest.importorskip('ogb.nodeproppred.dataset_pyg')

    def download_url(url, folder):
        write_arxiv(tmp_path / 'web' / 'arxiv')
        return shutil.make_archive(f'{folder}/arxiv', 'zip', tmp_path / 'web', 'arxiv')

    monkeypatch.setattr(module, 'download_url', download_url)
    graph = load_arxiv_graph(tmp_path)
    monkeypatch.setattr(module, 'download_url', None)
    assert graph.x is None
    assert graph.y.tolist() == load('ogbn-arxiv', tmp_path).y.tolist() == [2, 0, 1, 2]


def test_load_without_ogb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ogb.nodeproppred.dataset_pyg', None)
    with pytest.raises(ImportError, match=r'torch_geometric_idgl\[datasets\]'):
        load('ogbn-arxiv', tmp_path)


def test_load_uci(tmp_path, monkeypatch):
    pytest.importorskip('sklearn')
    monkeypatch.setenv('HOME', str(tmp_path))
    data = load('wine', '~/here', seed=1)
    assert (tmp_path / 'here' / 'UCI' / 'wine').is_dir()
    assert data.x.size() == (178, 13)
    assert not torch.equal(data.train_mask, load('wine', tmp_path, seed=2).train_mask)


def test_load_sparse_does_not_warn(tmp_path):
    pytest.importorskip('sklearn')
    data = load('wine', tmp_path)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # PyTorch says most things only once otherwise.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            sparse = load('WINE', tmp_path, sparse_x=True)
    finally:
        torch.set_warn_always(always)
    assert sparse.x.layout == torch.sparse_csr
    assert sparse.num_nodes == data.num_nodes
    assert torch.equal(sparse.x.to_dense(), data.x)


def test_load_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"'cora', .*'ogbn-arxiv', .*\(got 'core'\)"):
        load('core', tmp_path)
    for name in [None, 3, ['cora']]:
        with pytest.raises(TypeError, match=r"'name' to be a string \(got "):
            load(name, tmp_path)
    for root in [None, 3]:
        with pytest.raises(TypeError, match=rf"'root' to be the path .*\(got {root}\)"):
            load('cora', root)
    with pytest.raises(TypeError, match=r"'seed' to be an integer \(got None\)"):
        load('wine', tmp_path, seed=None)


@pytest.mark.parametrize('links', [True, False])
def test_stage_data(tmp_path, monkeypatch, links):
    source, root = tmp_path / 'source', tmp_path / 'root'
    for name in ['a/raw/x', 'a/raw/y', 'a/processed/z', 'w']:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    root.mkdir()
    (root / 'w').symlink_to(tmp_path / 'nowhere')
    if not links:

        def symlink_to(*args):
            raise OSError('not on this system')

        monkeypatch.setattr(Path, 'symlink_to', symlink_to)

    assert stage_data(source, root) == root.resolve()
    files = sorted(str(f.relative_to(root)) for f in root.rglob('*') if f.is_file())
    assert files == ['a/raw/x', 'a/raw/y', 'w']
    assert (root / 'a' / 'raw' / 'x').is_symlink() == links
    assert (root / 'a' / 'raw' / 'x').read_text() == 'a/raw/x'
    assert (root / 'w').read_text() == 'w'
    assert not (tmp_path / 'nowhere').exists()

    # What is there stays.
    (root / 'w').unlink()
    (root / 'w').write_text('mine')
    stage_data(source, root)
    assert (root / 'w').read_text() == 'mine'
    assert (source / 'a' / 'processed' / 'z').exists()


def test_stage_data_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match='no directory'):
        stage_data(tmp_path / 'nothing', tmp_path / 'root')
    with pytest.raises(ValueError, match="'root' to be outside"):
        stage_data(tmp_path, tmp_path / 'root')
    with pytest.raises(TypeError, match=r"'source' to be the path .*\(got None\)"):
        stage_data(None, tmp_path)
