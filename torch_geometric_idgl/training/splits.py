"""The batches of the splits: of one graph with masks, or of loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData
from tqdm import tqdm

__all__ = ['LoaderSplits', 'MaskSplits', 'Rows', 'call_by_parts']

_SPLITS = ['train', 'val', 'test']
_ARGUMENTS = {'train': 'data', 'val': 'val_data', 'test': 'test_data'}

# Which rows of a batch's outputs and labels are of which split.
Rows = dict[str, Tensor | slice]


class MaskSplits:
    """One graph with masks: a single batch, which holds all splits."""

    items = 'nodes'
    checkpoint_every = 50
    compared = 'train'  # the split whose outputs tell whether they have collapsed

    def __init__(self, data: Data, needs_graph: bool) -> None:
        _check_data(data, needs_graph)
        self.data = data
        masks = {split: data.get(f'{split}_mask') for split in _SPLITS}
        self.rows: Rows = {
            split: mask.nonzero().squeeze(1)
            for split, mask in masks.items()
            if mask is not None
        }

    def batches(self, split: str) -> Iterator[tuple[Data, Rows]]:
        yield self.data, self.rows

    def call(self, model: torch.nn.Module, data: Data) -> Tensor:
        """Calls a model that learns no graph."""
        return call_by_parts(model, data)

    def generators(self) -> list[torch.Generator]:
        return []


class LoaderSplits:
    """A loader for each split."""

    items = 'items'
    checkpoint_every = 1
    compared = 'val'  # training outputs are those of changing weights

    def __init__(
        self, train: Any, val: Any, test: Any, device: torch.device, progress: bool
    ) -> None:
        given = {'train': train, 'val': val, 'test': test}
        _check_loaders(given)
        self.data = {key: value for key, value in given.items() if value is not None}
        self.device = device
        self.progress = progress

    def batches(self, split: str) -> Iterator[tuple[Data, Rows]]:
        desc = 'dev' if split == 'val' else split
        found = False
        for batch in tqdm(
            self.data[split], desc=desc, leave=False, disable=not self.progress
        ):
            _check_loaded(batch, _ARGUMENTS[split])
            if isinstance(batch, Batch):
                rows: Tensor | slice = slice(None)
            else:
                rows = _seeds(batch, split)
                if rows.numel() == 0:
                    continue
            found = True
            batch, rows = batch.to(self.device), _moved(rows, self.device)
            yield batch, {split: rows}
        if not found:
            raise ValueError(
                f"Expected '{_ARGUMENTS[split]}' to yield a batch with nodes of its "
                f'split (got none)'
            )

    def call(self, model: torch.nn.Module, data: Data) -> Tensor:
        """Calls a model that learns no graph."""
        return model(data) if isinstance(data, Batch) else call_by_parts(model, data)

    def generators(self) -> list[torch.Generator]:
        """The random number generators that loaders and samplers have of their own."""
        found: dict[int, torch.Generator] = {}
        for part in self.data.values():
            part = getattr(part, 'loader', part)  # that of an 'AnchorLoader'
            for name in ['', 'sampler', 'batch_sampler', 'batch_sampler.sampler']:
                owner: Any = part
                for attribute in filter(None, name.split('.')):
                    owner = getattr(owner, attribute, None)
                generator = getattr(owner, 'generator', None)
                if isinstance(generator, torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())


def call_by_parts(model: torch.nn.Module, data: Data, **options: Any) -> Any:
    """Calls a model with features, edges and, if there are some, their weights."""
    weight = data.get('edge_weight')
    parts = (data.x, data.edge_index, *([] if weight is None else [weight]))
    return model(*parts, **options)


def _seeds(batch: Data, split: str) -> Tensor:
    """The seeds of a batch of nodes that are of a split."""
    mask = batch.get(f'{split}_mask')
    if mask is None:
        return torch.arange(batch.batch_size)
    return mask[: batch.batch_size].nonzero().squeeze(1)


def _moved(rows: Tensor | slice, device: torch.device) -> Tensor | slice:
    return rows if isinstance(rows, slice) else rows.to(device)


def _check_loaders(loaders: dict[str, Any]) -> None:
    if loaders['val'] is None:
        raise ValueError(
            "Expected 'val_data' to be a loader, as 'data' is, to stop early on (got "
            'None)'
        )
    for split, loader in loaders.items():
        if loader is None:
            continue
        # An iterator would have nothing left in the second epoch.
        again = isinstance(loader, Iterable) and not isinstance(loader, Iterator)
        if not again or isinstance(loader, BaseData):
            raise TypeError(
                f"Expected '{_ARGUMENTS[split]}' to be a loader that yields batches "
                f"anew for each epoch, such as PyG's 'DataLoader' (got "
                f"'{type(loader).__name__}')"
            )


def _check_loaded(batch: Any, name: str) -> None:
    of_nodes = isinstance(batch, Data) and batch.get('batch_size') is not None
    if not (isinstance(batch, Batch) or of_nodes):
        raise TypeError(
            f"Expected '{name}' to yield batches of graphs, as PyG's 'DataLoader' "
            f"does, or of nodes with 'batch_size' seeds, as 'NeighborLoader' does "
            f"(got '{type(batch).__name__}')"
        )
    if batch.get('y') is None:
        raise ValueError(f"Expected the batches of '{name}' to hold 'y' (got {batch})")


def _check_data(data: Data, needs_graph: bool) -> None:
    if hasattr(data.get('adj_t'), 'check'):
        raise TypeError(
            "Expected 'data' to be a whole graph (got the nodes of one rank; write the "
            "loop of training with 'shard.mean', as 'examples/distributed_arxiv.py')"
        )
    keys = ['x', 'y', 'train_mask', 'val_mask'] + ['edge_index'] * needs_graph
    missing = [key for key in keys if data.get(key) is None]
    if missing:
        raise ValueError(
            f"Expected 'data' to hold {keys} (missing {missing}; a graph can be made "
            f"by 'CosineKNNGraph')"
        )
    for split in _SPLITS:
        mask = data.get(f'{split}_mask')
        if mask is None:
            continue
        if mask.dtype != torch.bool or mask.size() != (data.num_nodes,):
            raise ValueError(
                f"Expected '{split}_mask' to be a boolean vector of {data.num_nodes} "
                f'entries (got {mask.dtype} of shape {list(mask.size())})'
            )
        if not bool(mask.any()):
            raise ValueError(f"Expected '{split}_mask' to select a node (got none)")
