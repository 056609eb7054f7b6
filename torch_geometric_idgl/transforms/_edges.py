"""Reading and replacing the edges of a :class:`Data` or :class:`Batch` object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import cumsum

from torch_geometric_idgl.checks import check_nodes

# PyG tells attributes of edges by their size. Sizes may coincide, or be wrong: these
# always are such attributes, or never.
_EDGE_ATTRS = {'edge_attr', 'edge_type', 'edge_weight'}
_NEVER_EDGE_ATTRS = {'x', 'y', 'pos', 'batch', 'ptr', 'edge_index'}


def check_data(data: Any, *keys: str) -> None:
    """Raises if :obj:`data` is not homogeneous or lacks one of :obj:`keys`."""
    if not isinstance(data, Data):
        raise TypeError(
            f"Expected 'data' to be a homogeneous 'Data' or 'Batch' object (got "
            f"'{type(data).__name__}')"
        )
    for key in keys:
        if data.get(key) is None:
            raise ValueError(
                f"Expected 'data' to hold '{key}' (got {sorted(data.keys())})"
            )


def check_edges(
    edge_index: Tensor, attrs: dict[str, Tensor], num_nodes: int | None
) -> None:
    """Raises unless edges connect nodes, and attributes have an entry for each."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to be of shape [2, num_edges] (got "
            f'{list(edge_index.size())})'
        )
    if edge_index.dtype != torch.long:
        raise TypeError(
            f"Expected 'edge_index' to be of type torch.long (got {edge_index.dtype})"
        )
    for key, value in attrs.items():
        if value.dim() == 0 or value.size(0) != edge_index.size(1):
            raise ValueError(
                f"Expected '{key}' to have an entry for each of the "
                f'{edge_index.size(1)} edges (got shape {list(value.size())})'
            )
    check_nodes(edge_index, num_nodes)  # type: ignore[arg-type]


def edge_attrs(data: Data) -> dict[str, Tensor]:
    """Returns the attributes of the edges of :obj:`data`."""
    return {
        key: value
        for key, value in data.to_dict().items()
        if isinstance(value, Tensor) and _is_edge_attr(data, key)
    }


def _is_edge_attr(data: Data, key: str) -> bool:
    if key in _EDGE_ATTRS:
        return True
    if key in _NEVER_EDGE_ATTRS or key.startswith('edge_index_'):
        return False
    if 'edge_label' in key or key.endswith('_index'):  # Of pairs to predict.
        return False
    return data.get('edge_index') is not None and data.is_edge_attr(key)


def set_edges(data: Data, edge_index: Tensor, **attrs: Tensor) -> Data:
    """Gives :obj:`data` other edges, with these attributes and no others.

    A :class:`Batch` still separates into its graphs afterwards: its edges are brought
    into the order of its graphs, and the slices it keeps for
    :meth:`Batch.to_data_list` are renewed (on the copy only: they are shared with the
    object that was copied).
    """
    stale = [*edge_attrs(data), 'adj', 'adj_t', 'edge_index_batch', 'edge_index_ptr']
    followed = 'edge_index_batch' in data
    for key in stale:
        if key in data:
            del data[key]

    if not (isinstance(data, Batch) and hasattr(data, '_slice_dict')):
        data.edge_index = edge_index
        data.update(attrs)
        return data

    graph = data.batch[edge_index[0]]
    order = graph.argsort(stable=True)
    count = graph.bincount(minlength=data.num_graphs)
    data.edge_index = edge_index[:, order]
    data.update({key: value[order] for key, value in attrs.items()})
    if followed:
        data.edge_index_batch = graph[order]
        data.edge_index_ptr = cumsum(count)

    gone = {*stale, 'edge_index'}
    slices = {k: v for k, v in data._slice_dict.items() if k not in gone}
    incs = {k: v for k, v in data._inc_dict.items() if k not in gone}
    slices['edge_index'] = cumsum(count.cpu())
    incs['edge_index'] = data.ptr[:-1].cpu()
    for key in attrs:
        slices[key] = slices['edge_index']
        incs[key] = torch.zeros_like(incs['edge_index'])
    data._slice_dict, data._inc_dict = slices, incs
    return data
