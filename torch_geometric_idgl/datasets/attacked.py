"""Citation graphs under attack."""

from __future__ import annotations

import json
import os
import os.path as osp
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset, download_url
from torch_geometric.transforms import LargestConnectedComponents
from torch_geometric.utils import (
    coalesce,
    index_to_mask,
    remove_self_loops,
    to_undirected,
)

from ..checks import check_choice, check_nodes
from .uci import check_name

__all__ = ['AttackedGraph']

_NAMES = ['cora', 'citeseer']
_RATES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)


class AttackedGraph(InMemoryDataset):
    r"""The attacked graphs of Cora and Citeseer that `"Graph Structure Learning for
    Robust Graph Neural Networks" <https://arxiv.org/abs/2005.10203>`_ (Pro-GNN) and
    DeepRobust compare on.

    Metattack has added and deleted edges of the largest connected component, as many as
    the given share of its edges. Features are binary, edges are undirected, and there
    is one split: 10% of the nodes for training, 10% for validation, 80% for testing.

    Files that are not in :obj:`root/raw` are downloaded: :obj:`cora.npz`,
    :obj:`cora_prognn_splits.json` and, for a rate of :obj:`0.25`,
    :obj:`cora_meta_adj_0.25.npz`. They may be in the folders :obj:`clean`,
    :obj:`splits` and :obj:`meta` of :obj:`root` or of :obj:`root/raw` as well.

    .. code-block:: python

        data = AttackedGraph('data/adversarial', 'cora', rate=0.25)[0]

    Args:
        root (str): Root directory where the dataset should be saved.
        name (str, optional): The name of the dataset (:obj:`"cora"`,
            :obj:`"citeseer"`). (default: :obj:`"cora"`)
        attack (str, optional): The attack, of which there is :obj:`"meta"`.
            (default: :obj:`"meta"`)
        rate (float, optional): The share of edges that were changed: :obj:`0` (the
            clean graph), :obj:`0.05`, :obj:`0.1`, :obj:`0.15`, :obj:`0.2` or
            :obj:`0.25`. (default: :obj:`0.25`)
        transform (callable, optional): A transform that is applied on every access.
            (default: :obj:`None`)
        pre_transform (callable, optional): A transform that is applied before saving
            to disk. (default: :obj:`None`)
        force_reload (bool, optional): Whether to re-process the dataset.
            (default: :obj:`False`)
    """

    graphs_url = 'https://raw.githubusercontent.com/ChandlerBang/Pro-GNN/master'
    clean_url = (
        'https://raw.githubusercontent.com/danielzuegner/gnn-meta-attack/master/data'
    )

    def __init__(
        self,
        root: str,
        name: str = 'cora',
        attack: str = 'meta',
        rate: float = 0.25,
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        force_reload: bool = False,
    ) -> None:
        self.name = check_name(name, _NAMES)
        check_choice('attack', attack, ('meta',))
        check_choice('rate', rate, _RATES)
        self.attack = attack
        self.rate = float(rate)
        super().__init__(root, transform, pre_transform, force_reload=force_reload)
        self.load(self.processed_paths[0])

    @property
    def _sources(self) -> dict[str, tuple[str, str]]:
        # The folder and the address of each file.
        files = {
            f'{self.name}.npz': ('clean', self.clean_url),
            f'{self.name}_prognn_splits.json': ('splits', f'{self.graphs_url}/splits'),
        }
        if self.rate > 0:
            graph = f'{self.name}_{self.attack}_adj_{self.rate:g}.npz'
            files[graph] = (self.attack, f'{self.graphs_url}/{self.attack}')
        return files

    @property
    def raw_file_names(self) -> list[str]:
        """The paths of the clean graph, the split and the attacked graph."""
        found = []
        for file, (folder, _) in self._sources.items():
            places = [file, osp.join(folder, file), osp.join('..', folder, file)]
            there = [p for p in places if osp.exists(osp.join(self.raw_dir, p))]
            found.append([*there, file][0])
        return found

    @property
    def processed_file_names(self) -> str:
        """The name of the processed file, one for each graph."""
        return f'{self.name}_{self.attack}_{self.rate:g}.pt'

    def download(self) -> None:
        """Downloads what is not there."""
        sources = self._sources.items()
        for path, (file, (_, url)) in zip(self.raw_paths, sources, strict=True):
            if osp.exists(path):
                continue
            with tempfile.TemporaryDirectory(dir=self.raw_dir) as temp:
                try:
                    download_url(f'{url}/{file}', temp, log=self.log)
                except Exception as e:  # Of the network.
                    names = [f'{file} ({url})' for file, (_, url) in sources]
                    raise FileNotFoundError(
                        f"The attacked '{self.name}' data is not in '{self.raw_dir}' "
                        f'and could not be downloaded ({type(e).__name__}: {e}). Put '
                        f'these files there: {", ".join(names)}'
                    ) from e
                os.replace(osp.join(temp, file), path)

    def process(self) -> None:
        """Takes the largest connected component, and the attacked graph of it."""
        clean, splits, *attacked = self.raw_paths
        with _reading(clean), np.load(clean) as file:
            row, col = _edges(file, 'adj_')
            x = torch.zeros(tuple(file['attr_shape'].tolist()))
            x[_edges(file, 'attr_')] = 1.0
            y = torch.from_numpy(file['labels']).to(torch.long)
        edge_index, _ = remove_self_loops(torch.stack([row, col]))
        edge_index = to_undirected(coalesce(edge_index), num_nodes=y.numel())
        data = Data(x=x, y=y, edge_index=edge_index)
        data = LargestConnectedComponents()(data)
        if attacked:
            with _reading(attacked[0]), np.load(attacked[0]) as file:
                data.edge_index = torch.stack(_edges(file, ''))
                check_nodes(data.edge_index, data.num_nodes)
        with _reading(splits), open(splits, encoding='utf-8') as file:
            split = json.load(file)
            for key in ('train', 'val', 'test'):
                index = torch.tensor(split[f'idx_{key}'])
                data[f'{key}_mask'] = index_to_mask(index, data.num_nodes)
        data = data if self.pre_transform is None else self.pre_transform(data)
        self.save([data], self.processed_paths[0])

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.name!r}, {self.attack!r}, '
            f'rate={self.rate:g})'
        )


@contextmanager
def _reading(path: str) -> Iterator[None]:
    # What is wrong within is said of a file.
    try:
        yield
    except Exception as e:  # of a zip archive, of JSON, of what is in them
        raise OSError(
            f"Cannot read '{path}' ({type(e).__name__}: {e}). If it is damaged, remove "
            f'it to download it again'
        ) from e


def _edges(file, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    # Rows and columns of the entries of a CSR matrix.
    count = torch.from_numpy(file[f'{prefix}indptr']).to(torch.long).diff()
    col = torch.from_numpy(file[f'{prefix}indices']).to(torch.long)
    return torch.arange(count.numel()).repeat_interleave(count), col
