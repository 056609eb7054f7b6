"""Loading graphs in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torch_geometric.data import Data, InMemoryDataset

from .checks import check_at_least

__all__ = ['BucketSampler']


class BucketSampler(Sampler[list[int]]):
    r"""Puts graphs of similar size into the same batch.

    The order is drawn anew for each epoch, from the random numbers of PyTorch: graphs
    are shuffled and cut into chunks, each chunk is sorted by size and cut into batches,
    and the batches of all chunks are shuffled. Every graph comes once per epoch.

    .. code-block:: python

        from torch_geometric.loader import DataLoader

        sampler = BucketSampler(dataset, batch_size=16)
        loader = DataLoader(dataset, batch_sampler=sampler)

    Args:
        sizes (sequence): The size of each graph, or a data set of graphs, whose numbers
            of nodes are taken.
        batch_size (int): The number of graphs in a batch. The last batch of the last
            chunk may have fewer.
        shuffle (bool, optional): If set to :obj:`False`, all graphs are sorted by size,
            the smallest first, in every epoch. (default: :obj:`True`)
        chunk_batches (int, optional): The number of batches in a chunk. With more of
            them sizes in a batch are closer, and its graphs are less of a random
            choice. (default: :obj:`50`)
    """

    def __init__(
        self,
        sizes: Sequence[int] | Tensor | Dataset,
        batch_size: int,
        shuffle: bool = True,
        chunk_batches: int = 50,
    ) -> None:
        super().__init__()
        check_at_least('batch_size', batch_size, 1, integer=True)
        check_at_least('chunk_batches', chunk_batches, 1, integer=True)
        self.sizes = _sizes(sizes)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.chunk_batches = chunk_batches

    def __len__(self) -> int:
        return -(-self.sizes.numel() // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            order = self.sizes.argsort(stable=True)
            yield from (batch.tolist() for batch in order.split(self.batch_size))
            return
        batches: list[Tensor] = []
        order = torch.randperm(self.sizes.numel())
        for chunk in order.split(self.chunk_batches * self.batch_size):
            # Graphs of the same size stay in their random order.
            chunk = chunk[self.sizes[chunk].argsort(stable=True)]
            batches += chunk.split(self.batch_size)
        for i in torch.randperm(len(batches)).tolist():
            yield batches[i].tolist()

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.sizes.numel()}, '
            f'batch_size={self.batch_size}, shuffle={self.shuffle})'
        )


def _sizes(value: Any) -> Tensor:
    found = value
    if isinstance(value, Dataset) or (
        isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Data)
    ):
        found = _numbers_of_nodes(value)
    try:
        sizes = torch.as_tensor(found).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_sizes(type(value).__name__) from error
    if sizes.dim() != 1 or sizes.numel() == 0:
        raise _not_sizes(f'shape {list(sizes.size())}')
    if sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool:
        raise _not_sizes(str(sizes.dtype))
    return sizes.to(torch.long)


def _numbers_of_nodes(dataset: Any) -> Any:
    # Without looking at each graph, where all are stored as one.
    if isinstance(dataset, InMemoryDataset) and dataset.transform is None:
        slices = dataset.slices or {}
        ends = slices.get('x')
        if isinstance(ends, Tensor) and ends.dim() == 1 and 'num_nodes' not in slices:
            return ends.diff()[torch.as_tensor(dataset.indices())]
    return [dataset[i].num_nodes for i in range(len(dataset))]


def _not_sizes(got: str) -> ValueError:
    return ValueError(
        f"Expected 'sizes' to be whole numbers, one for each graph, or a data set of "
        f'graphs (got {got})'
    )
