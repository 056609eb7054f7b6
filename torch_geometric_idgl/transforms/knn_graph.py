"""The cosine nearest neighbour graph as a transform."""

from __future__ import annotations

from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import to_undirected

from torch_geometric_idgl.checks import check_at_least
from torch_geometric_idgl.ops.knn import knn_graph

from ._edges import check_data, set_edges

__all__ = ['CosineKNNGraph']


@functional_transform('idgl_knn_graph')
class CosineKNNGraph(BaseTransform):
    r"""Connects nodes to their nearest neighbours by the cosine of their features.

    (functional name: :obj:`idgl_knn_graph`). Existing edges and their attributes are
    replaced. In contrast to :class:`torch_geometric.transforms.KNNGraph`, it reads
    :obj:`data.x`, which may be sparse, and needs no compiled package. Edges lead from
    a node to its neighbours, as in the initial graph of the paper; see
    :meth:`torch_geometric_idgl.ops.knn_graph`.

    .. code-block:: python

        data = CosineKNNGraph(k=20)(load('wine'))

    Args:
        k (int, optional): The number of neighbours, the node itself included if
            :obj:`include_self` is set. (default: :obj:`20`)
        include_self (bool, optional): If set to :obj:`False`, a node is not its own
            neighbour. (default: :obj:`True`)
        force_undirected (bool, optional): If set to :obj:`True`, edges are also
            given in the opposite direction. (default: :obj:`False`)
        approximate (bool, optional): If set to :obj:`True`, large graphs are searched
            by :obj:`faiss`, which is faster and may miss some neighbours.
            (default: :obj:`False`)
    """

    def __init__(
        self,
        k: int = 20,
        include_self: bool = True,
        force_undirected: bool = False,
        approximate: bool = False,
    ) -> None:
        check_at_least('k', k, 1, integer=True)
        self.k = k
        self.include_self = include_self
        self.force_undirected = force_undirected
        self.approximate = approximate

    def forward(self, data: Data) -> Data:
        """Returns :obj:`data` with its edges replaced."""
        check_data(data, 'x')
        edge_index = knn_graph(
            data.x,
            self.k,
            data.batch,
            include_self=self.include_self,
            approximate=self.approximate,
        )
        if self.force_undirected:
            edge_index = to_undirected(edge_index, num_nodes=data.num_nodes)
        return set_edges(data, edge_index)

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}(k={self.k})'
