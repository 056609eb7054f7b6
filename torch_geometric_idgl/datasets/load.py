"""Loading the data of the paper by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures

from .ogb import ARXIV_FILES, arxiv_folder, load_arxiv
from .uci import UCI

__all__ = ['load', 'stage_data']

_PLANETOID = {'cora': 'Cora', 'citeseer': 'CiteSeer', 'pubmed': 'PubMed'}
_PLANETOID_PARTS = ['allx', 'ally', 'graph', 'test.index', 'tx', 'ty', 'x', 'y']
_UCI = ['wine', 'cancer', 'digits']
_NAMES = [*_PLANETOID, 'ogbn-arxiv', *_UCI]


def load(
    name: str,
    root: str | os.PathLike,
    seed: int = 0,
    sparse_x: bool = False,
    source: str | os.PathLike | None = None,
) -> Data:
    r"""Loads a node classification graph of the paper by its name.

    Features of Cora, Citeseer and Pubmed are scaled to a row sum of one, those of wine,
    cancer and digits are standardised per column, and those of ogbn-arxiv are taken as
    they are. Edges are undirected; wine, cancer and digits have none.

    Nothing is downloaded: files are expected at :obj:`root/Planetoid/Cora/raw/`
    (likewise :obj:`CiteSeer` and :obj:`PubMed`) and :obj:`root/ogb/ogbn_arxiv/`.
    Processed files are written beside them, so :obj:`root` must be writable (see
    :meth:`stage_data`).

    Args:
        name (str): The name of the data (:obj:`"cora"`, :obj:`"citeseer"`,
            :obj:`"pubmed"`, :obj:`"ogbn-arxiv"`, :obj:`"wine"`, :obj:`"cancer"`,
            :obj:`"digits"`).
        root (str): The directory of the data.
        seed (int, optional): The seed of the split of wine, cancer and digits. The
            other data has one split. (default: :obj:`0`)
        sparse_x (bool, optional): If set to :obj:`True`, :obj:`data.x` is a sparse CSR
            tensor. (default: :obj:`False`)
        source (str, optional): A read-only directory whose files are laid out in
            :obj:`root` first, as by :meth:`stage_data`. (default: :obj:`None`)

    Returns:
        torch_geometric.data.Data: The graph with :obj:`train_mask`, :obj:`val_mask` and
        :obj:`test_mask`.
    """
    root, key = Path(root), name.lower()
    if source is not None:
        stage_data(source, root)
    if key in _PLANETOID:
        folder = root / 'Planetoid' / _PLANETOID[key] / 'raw'
        _check_files(name, folder, [f'ind.{key}.{part}' for part in _PLANETOID_PARTS])
        data = Planetoid(str(root / 'Planetoid'), _PLANETOID[key])[0]
        data = NormalizeFeatures()(data)
    elif key == 'ogbn-arxiv':
        _check_files(name, arxiv_folder(root / 'ogb'), ARXIV_FILES)
        data = load_arxiv(root / 'ogb')
    elif key in _UCI:
        data = UCI(str(root / 'UCI'), key, seed)[0]
    else:
        raise ValueError(f"Expected 'name' to be one of {_NAMES} (got {name!r})")

    if sparse_x:
        data.x = data.x.to_sparse_csr()
    return data


def stage_data(
    source: str | os.PathLike,
    root: str | os.PathLike,
    copy: bool = False,
) -> Path:
    r"""Lays out the files of a read-only data directory in a writable one.

    Loaders write processed files beside the raw ones. Folders are created anew, and
    files are linked to (or copied, where links are not possible). Files in folders
    named :obj:`processed` are left out, files that exist already are left alone.

    Args:
        source (str): The directory to read, in the layout that :meth:`load` expects.
        root (str): The directory to write to.
        copy (bool, optional): If set to :obj:`True`, files are copied.
            (default: :obj:`False`)

    Returns:
        pathlib.Path: The directory that was written to.
    """
    source, root = Path(source).resolve(), Path(root).resolve()
    if not source.is_dir():
        raise FileNotFoundError(f"There is no directory '{source}' to read data from")
    if root.is_relative_to(source):
        raise ValueError(f"Expected 'root' to be outside of '{source}' (got '{root}')")

    for file in sorted(source.rglob('*')):
        target = root / file.relative_to(source)
        if 'processed' in target.relative_to(root).parts or not file.is_file():
            continue
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # A link to a file that is no longer there.
        if copy or not _link(file, target):
            shutil.copyfile(file, target)
    return root


def _link(file: Path, target: Path) -> bool:
    try:
        target.symlink_to(file)
    except OSError:
        return False
    return True


def _check_files(name: str, folder: Path, files: list[str]) -> None:
    # PyG and OGB would start a download at once if a file is missing.
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The '{name}' data is incomplete: {', '.join(missing)} missing. Expected "
            f"{'this file' if len(missing) == 1 else 'these files'} in '{folder}'; "
            f"'source' names a read-only folder to take them from"
        )
