"""The edge perturbations of the paper's robustness study."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import cumsum

from torch_geometric_idgl.checks import (
    check_at_least,
    check_unit_interval,
)
from torch_geometric_idgl.ops.knn import graph_sizes

from ._edges import check_data, check_edges, edge_attrs, set_edges

__all__ = ['PerturbEdges']


@functional_transform('idgl_perturb_edges')
class PerturbEdges(BaseTransform):
    r"""Deletes and adds edges at random, as in the robustness study of the paper.

    (functional name: :obj:`idgl_perturb_edges`). Every unordered pair of distinct nodes
    of a graph is drawn once: an existing edge is kept with probability
    :obj:`1 - delete`, and a missing one appears with probability :obj:`add`. Note that
    there are far more missing edges than existing ones: :obj:`add=0.25` gives Cora
    about 916,000 new edges beside its 5,278.

    The result is undirected; an edge that has only one direction receives the other
    with the same attributes. Self-loops are neither added nor touched. Edges that are
    kept keep their attributes, and new ones have an :obj:`edge_weight` of one if there
    are weights.

    Args:
        delete (float, optional): The probability of deleting an edge.
            (default: :obj:`0.`)
        add (float, optional): The probability of adding a missing edge.
            (default: :obj:`0.`)
        seed (int, optional): If given, equal data is always perturbed equally, and
            the global random state is not used. (default: :obj:`None`)
    """

    # Pairs drawn at a time, which bounds the memory beside that of the result.
    _block_size = 2**22

    def __init__(
        self,
        delete: float = 0.0,
        add: float = 0.0,
        seed: int | None = None,
    ) -> None:
        check_unit_interval('delete', delete)
        check_unit_interval('add', add)
        if seed is not None:
            check_at_least('seed', seed, 0, integer=True)
        self.delete = delete
        self.add = add
        self.seed = seed

    def forward(self, data: Data) -> Data:
        """Returns :obj:`data` with its edges perturbed."""
        check_data(data, 'edge_index')
        attrs = edge_attrs(data)
        check_edges(data.edge_index, attrs, data.num_nodes)
        unknown = sorted(set(attrs) - {'edge_weight'})
        if self.add > 0 and unknown:
            raise ValueError(
                f"Cannot add edges to 'data' with the edge attributes {unknown}: only "
                f"'edge_weight' has a value for new edges"
            )

        generator = torch.default_generator
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)

        device = data.edge_index.device
        row, col = edge_index = data.edge_index.as_subclass(Tensor).cpu()
        offset = _pair_offsets(data)
        lower, upper = torch.minimum(row, col), torch.maximum(row, col)
        if bool((upper - lower > offset.diff()[lower]).any()):
            raise ValueError("Expected 'edge_index' not to connect different graphs")

        # Edges of the same pair, in whatever direction, share their fate.
        edge = (row != col).nonzero().view(-1)
        pair, inverse = (offset[lower] + upper - lower - 1)[edge].unique(
            return_inverse=True
        )
        keep_pair = _draw(pair.numel(), generator) >= self.delete
        keep = torch.ones_like(row, dtype=torch.bool)
        keep[edge] = keep_pair[inverse]

        ascending, descending = torch.zeros((2, pair.numel()), dtype=torch.bool)
        ascending[inverse[row[edge] < col[edge]]] = True
        descending[inverse[row[edge] > col[edge]]] = True
        lone = edge[(keep_pair & (ascending ^ descending))[inverse]]

        added = self._add(offset, pair, generator)
        edge_index = torch.cat(
            [edge_index[:, keep], edge_index[:, lone].flip(0), added, added.flip(0)],
            dim=1,
        )
        keep, lone = keep.to(device), lone.to(device)
        for key, value in attrs.items():
            new = value.new_ones((2 * added.size(1), *value.size()[1:]))
            attrs[key] = torch.cat([value[keep], value[lone], new])
        return set_edges(data, edge_index.to(device), **attrs)

    def _add(
        self, offset: Tensor, existing: Tensor, generator: torch.Generator
    ) -> Tensor:
        total = int(offset[-1]) if self.add > 0 else 0
        pairs = [offset.new_empty(0)]
        for start in range(0, total, self._block_size):
            size = min(self._block_size, total - start)
            on = _draw(size, generator) < self.add
            begin, end = torch.searchsorted(
                existing, torch.tensor([start, start + size])
            )
            on[existing[begin:end] - start] = False
            pairs.append(on.nonzero().view(-1) + start)
        pair = torch.cat(pairs)
        lower = torch.searchsorted(offset, pair, right=True) - 1
        return torch.stack([lower, pair - offset[lower] + lower + 1])

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}(delete={self.delete}, add={self.add})'


def _pair_offsets(data: Data) -> Tensor:
    # Number the pairs i < j of nodes of the same graph row by row, and say at which
    # number row i begins: pair (i, j) has the number `offset[i] + j - i - 1`.
    sizes = graph_sizes(data.batch, data.num_nodes).cpu()
    end = sizes.cumsum(0).repeat_interleave(sizes)
    return cumsum(end - 1 - torch.arange(data.num_nodes))


def _draw(size: int, generator: torch.Generator) -> Tensor:
    # Double precision, so that small probabilities are not rounded to multiples of
    # 2^-24.
    return torch.rand(size, generator=generator, dtype=torch.double)
