"""Which rows of a flat node matrix belong to which graph of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ['Layout']

_RAGGED = 8


@dataclass(frozen=True)
class Layout:
    r"""The graphs of a batch, as contiguous and possibly ragged blocks of rows.

    One graph is the common case and costs nothing: padding is then a view.

    Args:
        sizes (Tuple[int]): The number of rows of each graph.
        device (torch.device): Where index tensors live.
    """

    sizes: tuple[int, ...]
    device: torch.device

    @classmethod
    def from_batch(
        cls, batch: Tensor | None, num_nodes: int, num_graphs: int | None, device
    ) -> Layout:
        """From PyG's sorted batch vector (:obj:`None`: one graph)."""
        if batch is None:
            return cls((num_nodes,), device)
        return cls(
            tuple(torch.bincount(batch, minlength=num_graphs or 0).tolist()) or (0,),
            device,
        )

    @property
    def num_graphs(self) -> int:
        return len(self.sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def max_size(self) -> int:
        return max(self.sizes)

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

    @property
    def is_regular(self) -> bool:
        """Whether all graphs have the same size, so that padding is a view."""
        return min(self.sizes) == self.max_size

    @property
    def num_padded(self) -> int:
        """The number of rows of the padded matrix."""
        return self.num_graphs * self.max_size

    @property
    def is_ragged(self) -> bool:
        """Whether most of the padded matrix would be padding, so that graphs are better
        taken one by one.
        """
        return self.num_padded > _RAGGED * max(self.num_rows, 1)

    @cached_property
    def slot(self) -> Tensor:
        """The place of each row in the padded, flattened matrix."""
        starts = torch.tensor(self.ptr[:-1], device=self.device)
        row = torch.arange(self.num_rows, device=self.device)
        return row - starts[self.batch] + self.batch * self.max_size

    def pad(self, rows: Tensor) -> Tensor:
        """From :obj:`[n, f]` to :obj:`[B, N, f]`, zeros in the padding."""
        if self.is_regular:
            return rows.reshape(self.num_graphs, self.max_size, *rows.shape[1:])
        padded = rows.new_zeros(self.num_padded, *rows.shape[1:])
        padded = padded.index_copy(0, self.slot, rows)
        return padded.view(self.num_graphs, self.max_size, *rows.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """From :obj:`[B, N, f]` to :obj:`[n, f]`, dropping the padding."""
        flat = padded.flatten(0, 1)
        return flat if self.is_regular else flat[self.slot]

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of each graph."""
        return rows.split(self.sizes)

    def per_row(self, total: Tensor, weight: float = 1.0, power: int = 1) -> Tensor:
        r""":math:`w \, t / n^p`, for a value :math:`t` of each graph."""
        if self.num_graphs == 1:
            return total * (weight / max(self.sizes[0], 1) ** power)
        return weight * total / self.count**power

    def sum(self, rows: Tensor) -> Tensor:
        """Sums of the values of each graph: :obj:`[n]` to :obj:`[B]`."""
        if self.num_graphs == 1:
            return rows.sum(0, keepdim=True)
        total = rows.new_zeros(self.num_graphs)
        return total.index_add(0, self.batch, rows)
