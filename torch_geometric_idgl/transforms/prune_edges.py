"""Pruning edges between nodes that have little in common."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import is_torch_sparse_tensor

from torch_geometric_idgl.checks import check_at_least, check_choice
from torch_geometric_idgl.ops.knn import unit_rows
from torch_geometric_idgl.ops.sparse import SparseMatrix

from ._edges import check_data, check_edges, edge_attrs, set_edges

__all__ = ['PruneEdges']


@functional_transform('idgl_prune_edges')
class PruneEdges(BaseTransform):
    r"""Removes edges between nodes whose features are dissimilar.

    (functional name: :obj:`idgl_prune_edges`). Attacks on graphs mostly connect nodes
    that have little in common, as `"Adversarial Examples on Graph Data"
    <https://arxiv.org/abs/1903.01610>`_ has shown. Edges whose similarity is below the
    threshold are removed, before a model sees the graph. Features may be sparse.
    Self-loops are kept, and edges that are kept keep their attributes.

    .. code-block:: python

        data = PruneEdges(threshold=0.03)(data)

    Args:
        threshold (float): The smallest similarity of an edge that is kept, from
            :obj:`-1` to :obj:`1`.
        metric (str, optional): :obj:`"jaccard"`, the number of features that two nodes
            share, divided by the number that one of them has; :obj:`"cosine"`; or
            :obj:`"auto"`, Jaccard for binary features, whose rows may be scaled (as by
            :class:`~torch_geometric.transforms.NormalizeFeatures`), and cosine for all
            others. A node without features is similar to none (zero). Jaccard counts
            entries that are not zero, whatever they are: it is for sparse features.
            (default: :obj:`"auto"`)
    """

    # Entries of dense rows at a time, which bounds the memory.
    _block_entries = 2**22

    def __init__(self, threshold: float, metric: str = 'auto') -> None:
        check_at_least('threshold', threshold, -1)
        if threshold > 1:
            raise ValueError(f"Expected 'threshold' to be at most 1 (got {threshold})")
        check_choice('metric', metric, ('auto', 'jaccard', 'cosine'))
        self.threshold = threshold
        self.metric = metric

    def forward(self, data: Data) -> Data:
        """Returns :obj:`data` without the edges of dissimilar nodes."""
        check_data(data, 'x', 'edge_index')
        edge_index = data.edge_index.as_subclass(Tensor)
        attrs = edge_attrs(data)
        check_edges(edge_index, attrs, data.num_nodes)
        if data.x.dim() != 2:
            raise ValueError(
                f"Expected 'x' to be of shape [num_nodes, num_features] (got "
                f'{list(data.x.size())})'
            )
        row, col = edge_index
        similarity = self._similarity(data.x.detach(), row, col)
        # Equal rows are less than one by rounding.
        keep = similarity >= self.threshold - 8 * torch.finfo(similarity.dtype).eps
        keep |= row == col
        attrs = {key: value[keep] for key, value in attrs.items()}
        return set_edges(data, edge_index[:, keep], **attrs)

    def _similarity(self, x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        # Of the two nodes of each edge.
        x = x if x.dtype in (torch.float, torch.double) else x.to(torch.float)
        unit, rows = (
            SparseMatrix.from_torch(part) if is_torch_sparse_tensor(part) else part
            for part in (unit_rows(x), x)  # the first is checked
        )
        metric = self.metric
        if metric == 'auto':
            metric = 'jaccard' if _is_binary(rows) else 'cosine'
        if metric == 'cosine':
            return self._inner(unit, row, col)
        rows = _support(rows)
        size = _sq_norms(rows)
        inner = self._inner(rows, row, col)
        return inner / (size[row] + size[col] - inner).clamp(min=1.0)

    def _inner(self, rows: Tensor | SparseMatrix, row: Tensor, col: Tensor) -> Tensor:
        # A block of edges at a time.
        step = max(1, self._block_entries // max(rows.size(1), 1))
        blocks = [
            (_dense_rows(rows, one) * _dense_rows(rows, other)).sum(dim=1)
            for one, other in zip(row.split(step), col.split(step), strict=True)
        ]
        return torch.cat(blocks)

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}(threshold={self.threshold}, '
            f'metric={self.metric!r})'
        )


def _support(rows: Tensor | SparseMatrix) -> Tensor | SparseMatrix:
    # One where there is an entry.
    if isinstance(rows, SparseMatrix):
        return rows.with_value((rows.value != 0).to(rows.dtype))
    return (rows != 0).to(rows.dtype)


def _dense_rows(rows: Tensor | SparseMatrix, index: Tensor) -> Tensor:
    if isinstance(rows, SparseMatrix):
        return rows.rows(index).to_dense()
    return rows[index]


def _sq_norms(rows: Tensor | SparseMatrix) -> Tensor:
    if isinstance(rows, SparseMatrix):
        zeros = rows.value.new_zeros(rows.size(0))
        return zeros.index_add(0, rows.pattern.row, rows.value.square())
    return rows.square().sum(dim=1)


def _is_binary(rows: Tensor | SparseMatrix) -> bool:
    # Whether entries are zero or the one positive number of their row.
    if isinstance(rows, SparseMatrix):
        value, row = rows.value, rows.pattern.row
        zeros = value.new_zeros(rows.size(0))
        largest = zeros.scatter_reduce(0, row, value, 'amax')[row]
    else:
        value = rows
        largest = rows.amax(dim=1, keepdim=True) if rows.numel() else rows
    return bool(((value == 0) | ((value == largest) & (value > 0))).all())
