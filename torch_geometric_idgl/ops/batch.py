"""Which rows of a node matrix belong to which graph of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ['Nodes']


class Nodes:
    r"""The nodes (or anchors) of a batch: contiguous blocks of rows, one for each
    graph, and possibly of different sizes. Immutable; what is cached are values of it.

    One graph is the common case and costs nothing: padding is then a view.

    Args:
        sizes (Sequence[int]): The number of rows of each graph.
        device (torch.device): Where index tensors live.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self.device = device
        self.num_graphs = len(self.sizes)
        self.num_rows = sum(self.sizes)
        self.num_total = self.num_rows  # with those of other processes
        self.max_size = max(self.sizes)
        # Whether all graphs have the same size, so that padding is a view.
        self.is_regular = min(self.sizes) == self.max_size

    @cached_property
    def ptr(self) -> tuple[int, ...]:
        """Where each graph starts, and the end of the last."""
        ptr = [0]
        for size in self.sizes:
            ptr.append(ptr[-1] + size)
        return tuple(ptr)

    @cached_property
    def count(self) -> Tensor:
        """The number of rows of each graph, at least one, for dividing by it."""
        return torch.tensor([max(size, 1) for size in self.sizes], device=self.device)

    @cached_property
    def batch(self) -> Tensor:
        """The graph of each row."""
        index = torch.arange(self.num_graphs, device=self.device)
        repeats = torch.tensor(self.sizes, device=self.device)
        return index.repeat_interleave(repeats, output_size=self.num_rows)

    @cached_property
    def start(self) -> Tensor:
        """The first row of each graph."""
        return torch.tensor(self.ptr[:-1], device=self.device)

    @cached_property
    def slot(self) -> Tensor:
        """The place of each row in the padded, flattened matrix."""
        row = torch.arange(self.num_rows, device=self.device)
        return row - self.start[self.batch] + self.batch * self.max_size

    def pad(self, rows: Tensor) -> Tensor:
        """From :obj:`[n, f]` to :obj:`[B, N, f]`, zeros in the padding."""
        shape = (self.num_graphs, self.max_size, *rows.shape[1:])
        if self.is_regular:
            return rows.reshape(shape)
        padded = rows.new_zeros(self.num_graphs * self.max_size, *rows.shape[1:])
        return padded.index_copy(0, self.slot, rows).view(shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """From :obj:`[B, N, f]` to :obj:`[n, f]`, dropping the padding."""
        flat = padded.flatten(0, 1)
        return flat if self.is_regular else flat[self.slot]

    def of(self, graphs: Sequence[int]) -> Nodes:
        """The nodes of some of the graphs alone."""
        return Nodes([self.sizes[graph] for graph in graphs], self.device)

    def rows_of(self, graphs: Sequence[int]) -> Tensor:
        """The rows of some of the graphs."""
        own = self.of(graphs)
        shift = [self.ptr[g] - own.ptr[i] for i, g in enumerate(graphs)]
        row = torch.arange(own.num_rows, device=self.device)
        return row + torch.tensor(shift, device=self.device)[own.batch]

    def sum(self, rows: Tensor) -> Tensor:
        """Sums of the values of each graph: :obj:`[n]` to :obj:`[B]`."""
        if self.num_graphs == 1:
            return rows.sum(0, keepdim=True)
        return rows.new_zeros(self.num_graphs).index_add(0, self.batch, rows)

    # What a matrix whose rows are spread over processes answers otherwise ------------

    spread = False  # whether other processes have some of the nodes

    @property
    def whole(self) -> Nodes:
        """All nodes, of which other processes may have some."""
        return self

    def total(self, part: Tensor) -> Tensor:
        """A sum over all nodes, from the sum over those that are here."""
        return part

    def take(self, rows: Tensor, index: Tensor) -> Tensor:
        """The rows of chosen nodes, wherever they are."""
        return rows[index]

    def same(self, drawn: Tensor) -> Tensor:
        """Random numbers that all processes have to share."""
        return drawn

    def agreed(self, choice: int) -> int:
        """A choice that all processes have to make in the same way: the least."""
        return choice

    def where(self, active: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """New rows for the nodes of active graphs, old ones for the others."""
        if self.num_graphs == 1:
            return new
        return torch.where(active[self.batch].unsqueeze(1), new, old)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nodes) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({list(self.sizes)})'
