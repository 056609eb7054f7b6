"""Loading the data of the paper by name."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures

from ..ops.sparse import csr_without_warning
from .ogb import ARXIV_FILES, ARXIV_GRAPH_FILES, load_arxiv, read_arxiv_graph
from .uci import UCI, check_name

__all__ = ['load', 'load_arxiv_graph', 'stage_data']

# The name of PyG and the size of each file in bytes: what was not downloaded
# completely is shorter.
_PARTS = ['x', 'tx', 'allx', 'y', 'ty', 'ally', 'graph', 'test.index']
_PLANETOID = {
    'cora': ('Cora', [22119, 148025, 257305, 4054, 28135, 47959, 59847, 5000]),
    'citeseer': ('CiteSeer', [31087, 260321, 595021, 3014, 24135, 55623, 61987, 5000]),
    'pubmed': ('PubMed', [23172, 405505, 7578385, 854, 12135, 224739, 471808, 6000]),
}
_NAMES = [*_PLANETOID, 'ogbn-arxiv', 'wine', 'cancer', 'digits']


def load(
    name: str,
    root: str | os.PathLike = 'data',
    seed: int = 0,
    sparse_x: bool = False,
) -> Data:
    r"""Loads a node classification graph of the paper by its name.

    Features of Cora, Citeseer and Pubmed are scaled to a row sum of one, those of wine,
    cancer and digits are standardised per column, and those of ogbn-arxiv are taken as
    they are. Edges are undirected; wine, cancer and digits have none.

    Data that is not (completely) in :obj:`root/Planetoid` or :obj:`root/ogb` is
    downloaded by PyG or OGB. Without a network, an error says which files to put where.

    .. code-block:: python

        data = load('cora')
        data = load('wine', seed=1)

    Args:
        name (str): The name of the data (:obj:`"cora"`, :obj:`"citeseer"`,
            :obj:`"pubmed"`, :obj:`"ogbn-arxiv"`, :obj:`"wine"`, :obj:`"cancer"`,
            :obj:`"digits"`).
        root (str, optional): The directory of the data. (default: :obj:`"data"`)
        seed (int, optional): The seed of the split of wine, cancer and digits. The
            other data has one split. (default: :obj:`0`)
        sparse_x (bool, optional): If set to :obj:`True`, :obj:`data.x` is a sparse CSR
            tensor. (default: :obj:`False`)

    Returns:
        torch_geometric.data.Data: The graph with :obj:`train_mask`, :obj:`val_mask` and
        :obj:`test_mask`.
    """
    name, root = check_name(name, _NAMES), _path('root', root)
    if name in _PLANETOID:
        folder, sizes = _PLANETOID[name]
        parts = zip(_PARTS, sizes, strict=True)
        data = _load(
            name,
            root / 'Planetoid' / folder,
            {f'raw/ind.{name}.{part}': size for part, size in parts},
            lambda root: Planetoid(str(root), folder)[0],
        )
        data = NormalizeFeatures()(data)
    elif name == 'ogbn-arxiv':
        data = _load_arxiv(root, ARXIV_FILES, load_arxiv)
    else:
        data = UCI(str(root / 'UCI'), name, seed)[0]

    if sparse_x:
        with csr_without_warning():
            data.x = data.x.to_sparse_csr()
    return data


def load_arxiv_graph(root: str | os.PathLike = 'data') -> Data:
    r"""Loads ogbn-arxiv without its features, whose file need not be there.

    Args:
        root (str, optional): The directory of the data, as in :meth:`load`.
            (default: :obj:`"data"`)

    Returns:
        torch_geometric.data.Data: What :meth:`load` returns, but :obj:`x`.
    """
    return _load_arxiv(_path('root', root), ARXIV_GRAPH_FILES, read_arxiv_graph)


def stage_data(source: str | os.PathLike, root: str | os.PathLike) -> Path:
    r"""Lays out the files of a read-only data directory in a writable one.

    Loaders write processed files beside the raw ones. Folders are created anew, and
    files are linked to (or copied, where links are not possible). Files in folders
    named :obj:`processed` are left out, files that exist already are left alone.

    Args:
        source (str): The directory to read, in the layout that :meth:`load` expects.
        root (str): The directory to write to.

    Returns:
        pathlib.Path: The directory that was written to.
    """
    source, root = _path('source', source).resolve(), _path('root', root).resolve()
    if not source.is_dir():
        raise FileNotFoundError(f"There is no directory '{source}' to read data from")
    if root.is_relative_to(source):
        raise ValueError(f"Expected 'root' to be outside of '{source}' (got '{root}')")

    for file in sorted(source.rglob('*')):
        path = file.relative_to(source)
        target = root / path
        if 'processed' in path.parts or not file.is_file() or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # A link to a file that is no longer there.
        try:
            target.symlink_to(file)
        except OSError:
            shutil.copyfile(file, target)
    return root


def _path(name: str, value: str | os.PathLike) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"Expected '{name}' to be the path of a folder (got {value!r})")
    return Path(value).expanduser()


def _load_arxiv(root: Path, files: list[str], read: Callable[[Path], Data]) -> Data:
    # Archives know themselves whether they are complete.
    least = dict.fromkeys(files, 1)
    return _load('ogbn-arxiv', root / 'ogb' / 'ogbn_arxiv', least, read)


def _load(
    name: str, folder: Path, sizes: dict[str, int], read: Callable[[Path], Data]
) -> Data:
    if missing := _incomplete(folder, sizes):
        try:
            _download(folder, sizes, read)
        except ImportError:
            raise
        except Exception as e:  # Of the network, an archive, a pickle, ...
            raise FileNotFoundError(
                f"The '{name}' data is not complete in '{folder}' and could not be "
                f'downloaded ({type(e).__name__}: {e}). Put these files there: '
                f'{", ".join(missing)}'
            ) from e
    try:
        return read(folder.parent)
    except ImportError:
        raise
    except Exception as e:
        what = "If it is damaged, remove the folder 'processed' in it, or all of it"
        if damaged := _damaged(folder, sizes):
            what = f'Cut short or damaged: {", ".join(damaged)}. Remove these'
        raise OSError(
            f"Cannot read the '{name}' data in '{folder}' ({type(e).__name__}: {e}). "
            f'{what} to download it again'
        ) from e


def _download(
    folder: Path, sizes: dict[str, int], read: Callable[[Path], Data]
) -> None:
    # PyG and OGB download where there is nothing. The data is moved to its place when
    # it is known to be complete, so that an interruption leaves nothing broken behind.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='download-', dir=folder.parent) as temp:
        new = Path(temp, folder.name)
        try:
            read(new.parent)
        except Exception:
            _check_complete(new, sizes)  # A better reason, perhaps.
            raise
        _check_complete(new, sizes)
        for file in sorted(new.rglob('*')):
            if file.is_file():
                target = folder / file.relative_to(new)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)


def _check_complete(folder: Path, sizes: dict[str, int]) -> None:
    short = [file for file in _incomplete(folder, sizes) if (folder / file).exists()]
    if short:
        raise EOFError(f'{", ".join(short)} cut short')


def _incomplete(folder: Path, sizes: dict[str, int]) -> list[str]:
    files = {name: folder / name for name in sizes}
    return [
        name
        for name, file in files.items()
        if not file.is_file() or file.stat().st_size < sizes[name]
    ]


def _damaged(folder: Path, names: Iterable[str]) -> list[str]:
    # Archives that cannot be read to their end.
    found = []
    for name in names:
        if name.endswith('.gz'):
            try:
                with gzip.open(folder / name) as file:
                    while file.read(1 << 20):
                        pass
            except (OSError, EOFError, zlib.error):
                found.append(name)
    return found
