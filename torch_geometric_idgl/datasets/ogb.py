"""Reading ogbn-arxiv through OGB's loader, which needs some guarding."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask, to_undirected

__all__ = ['ARXIV_FILES', 'ARXIV_GRAPH_FILES', 'load_arxiv', 'read_arxiv_graph']

# What OGB's loader reads; its own check covers the first two only.
ARXIV_FILES = [
    'raw/edge.csv.gz',
    'raw/node-feat.csv.gz',
    'raw/node-label.csv.gz',
    'raw/node_year.csv.gz',
    'raw/num-edge-list.csv.gz',
    'raw/num-node-list.csv.gz',
    'split/time/test.csv.gz',
    'split/time/train.csv.gz',
    'split/time/valid.csv.gz',
]
# All but the features, which are nearly all of the download.
ARXIV_GRAPH_FILES = [name for name in ARXIV_FILES if name != 'raw/node-feat.csv.gz']


def load_arxiv(root: Path) -> Data:
    """Reads ogbn-arxiv, downloaded if it is not there, with undirected edges."""
    try:
        import ogb.nodeproppred.dataset_pyg as module
    except ImportError as e:
        raise ImportError(
            "The 'ogbn-arxiv' data is read by the package 'ogb'. Install it with "
            "'pip install torch_geometric_idgl[datasets]'"
        ) from e

    with _guarded(module):
        dataset = module.PygNodePropPredDataset('ogbn-arxiv', root=str(root))
        data, split = dataset[0], dataset.get_idx_split()

    graph = _graph(data.edge_index, data.y, data.node_year, split)
    graph.x = data.x
    return graph


def read_arxiv_graph(root: Path) -> Data:
    """Reads ogbn-arxiv without its features, from the files that OGB's loader reads;
    downloads them all if some are not there.
    """
    folder = root / 'ogbn_arxiv'
    if not all((folder / name).is_file() for name in ARXIV_GRAPH_FILES):
        graph = load_arxiv(root)
        del graph.x
        return graph
    edge_index = _table(folder / 'raw/edge.csv.gz').t().contiguous()
    y = _table(folder / 'raw/node-label.csv.gz')
    year = _table(folder / 'raw/node_year.csv.gz')
    split = {
        name: _table(folder / f'split/time/{name}.csv.gz').view(-1)
        for name in ('train', 'valid', 'test')
    }
    expected = [
        int(_table(folder / f'raw/num-{name}-list.csv.gz')) for name in ('node', 'edge')
    ]
    if [y.numel(), edge_index.size(1)] != expected:
        raise ValueError(
            f'Expected labels of {expected[0]} nodes, and {expected[1]} edges (got '
            f'{y.numel()} and {edge_index.size(1)})'
        )
    return _graph(edge_index, y, year, split)


def _table(file: Path) -> Tensor:
    import pandas as pd

    return torch.from_numpy(pd.read_csv(file, header=None).to_numpy(copy=True))


def _graph(edge_index: Tensor, y: Tensor, year: Tensor, split: dict) -> Data:
    num_nodes = y.size(0)
    return Data(
        edge_index=to_undirected(edge_index, num_nodes=num_nodes),
        y=y.view(-1),
        node_year=year.view(-1),
        train_mask=index_to_mask(split['train'], num_nodes),
        val_mask=index_to_mask(split['valid'], num_nodes),
        test_mask=index_to_mask(split['test'], num_nodes),
    )


class _Torch:
    # `torch`, but `load` also reads the `Data` objects that OGB has saved itself,
    # which `weights_only=True`, the default since PyTorch 2.6, refuses.
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(*args: Any, **kwargs: Any) -> Any:
        return torch.load(*args, **{'weights_only': False, **kwargs})


@contextlib.contextmanager
def _guarded(module: ModuleType) -> Iterator[None]:
    # OGB asks on the standard input whether to replace data without the mark of the
    # newest release (no: it is the user's) and whether to download much, prints its
    # progress, and fails on newer versions of PyTorch. Names are replaced in OGB's
    # module only, and only meanwhile.
    names: dict[str, Any] = {
        'torch': _Torch(),
        'input': lambda _='': 'n',
        'decide_download': lambda url: True,
    }
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    vars(module).update(names)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for name in names:
            del vars(module)[name]
        vars(module).update(before)
