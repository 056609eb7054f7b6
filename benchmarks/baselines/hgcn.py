"""H-GCN: coarsen the graph step by step, then refine it back with residuals.

Hu, Zhu, Wu, Wang, Tan, `"Hierarchical Graph Convolutional Networks for
Semi-supervised Node Classification" <https://arxiv.org/abs/1902.06667>`_, IJCAI 2019.
"""

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.inits import glorot

from baselines.features import dropout, matmul

MAX_WEIGHT = 50  # no pair of nodes heavier than this is formed


def group_nodes(adj: sp.csr_matrix, weight: np.ndarray) -> np.ndarray:
    r"""Assigns each node to a hyper-node: first nodes with the same neighbours
    (structural equivalence), then pairs of neighbours (structural similarity
    :math:`A_{jk} / \sqrt{d_j d_k}`), poorest nodes first.
    """
    adj = adj.sorted_indices()
    n, count = adj.shape[0], np.diff(adj.indptr)
    degree = np.asarray(adj.sum(1)).ravel()
    neighbours = np.split(adj.indices, adj.indptr[1:-1])
    similar = np.split(adj.data / np.sqrt(degree[adj.indices]), adj.indptr[1:-1])

    keys = np.array([row.tobytes() for row in neighbours], dtype=object)
    _, same, size = np.unique(keys, return_inverse=True, return_counts=True)
    # Isolated nodes have nothing in common but the lack of neighbours: left alone.
    group = np.where((size[same] > 1) & (count > 0), same, -1)
    for i in np.argsort(count, kind='stable'):
        if group[i] < 0:
            group[i] = n + i
            others = neighbours[i]
            free = (group[others] < 0) & (weight[others] + weight[i] <= MAX_WEIGHT)
            if free.any():
                group[others[np.where(free, similar[i], -1.0).argmax()]] = n + i
    return np.unique(group, return_inverse=True)[1]


def build_hierarchy(edge_index: Tensor, num_nodes: int, levels: int = 4) -> list[tuple]:
    """The graph and those it is coarsened to: of each the adjacency matrix, and of its
    nodes the weights (how many original ones they stand for) and the hyper-nodes.
    """
    edge_index = utils.to_undirected(edge_index, num_nodes=num_nodes)
    adj = utils.to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes).tocsr()
    weight, hierarchy = np.ones(num_nodes, dtype=int), []
    for _ in range(levels + 1):
        group = group_nodes(adj, weight)
        hierarchy.append((adj, weight, group))
        # A' = M^T A M: weights of merged edges add up, those inside become loops.
        assign = sp.csr_matrix((np.ones(group.size), (np.arange(group.size), group)))
        adj = (assign.T @ adj @ assign).tocsr()
        # Equivalence may form hyper-nodes heavier than the table of weights is long.
        weight = np.bincount(group, weight).clip(max=MAX_WEIGHT).astype(int)
    return hierarchy


def _normalized(adj: sp.csr_matrix) -> Tensor:
    """The symmetric normalisation of `A + I`, as a CSR tensor."""
    index, value = utils.from_scipy_sparse_matrix(adj + sp.identity(adj.shape[0]))
    index, value = gcn_norm(index, value.float(), adj.shape[0], add_self_loops=False)
    return utils.to_torch_csr_tensor(index, value, adj.shape)


class HGCN(torch.nn.Module):
    """The network of Hu et al.: :obj:`levels` coarsening layers (convolution, then
    pooling into hyper-nodes), as many refining layers (convolution, then copying back,
    plus what the coarsening layer of the same size gave), and an output layer. Hidden
    layers also see an embedding of the hyper-nodes' weights. The hierarchy is made
    from the first graph the module sees, and kept.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        levels: int = 4,
        channels: int = 4,
        weight_channels: int = 8,
        dropout: float = 0.85,
    ):
        super().__init__()
        self.levels, self.dropout = levels, dropout
        self.embedding = torch.nn.Embedding(MAX_WEIGHT + 1, weight_channels)
        inner = (hidden_channels + weight_channels, hidden_channels)
        sizes = [(in_channels, hidden_channels), *[inner] * (2 * levels - 1)]
        sizes.append((hidden_channels, out_channels))
        weights = [torch.empty(channels, *size) for size in sizes]
        self.weights = torch.nn.ParameterList(weights)
        self.attention = torch.nn.Parameter(torch.empty(len(sizes), channels, 1))
        for parameter in self.parameters():
            glorot(parameter)
        self.graphs: list[tuple[Tensor, ...]] = []

    def _conv(self, i: int, x: Tensor, adj: Tensor, weight: Tensor) -> Tensor:
        """Parallel convolutions (channels), added up with learned weights."""
        if 0 < i < 2 * self.levels:
            x = torch.cat([x, self.embedding(weight)], dim=-1)
        x = dropout(x, self.dropout, self.training)
        # sum_c a_c (A X W_c) = A X (sum_c a_c W_c): one product for all channels.
        total = (self.attention[i].unsqueeze(-1) * self.weights[i]).sum(0)
        return matmul(adj, matmul(x, total))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logits of all nodes."""
        if not self.graphs:
            for adj, *parts in build_hierarchy(edge_index, x.size(0), self.levels):
                weight, group = (torch.from_numpy(part).to(x.device) for part in parts)
                self.graphs.append((_normalized(adj).to(x.device), weight, group))
        *fine, (adj, weight, _) = self.graphs
        skips = []
        for i, (*graph, group) in enumerate(fine):
            skips.append(self._conv(i, x, *graph).relu())
            # Groups are scaled by the root of their size, between a sum and a mean.
            x = utils.scatter(skips[-1], group) / group.bincount().sqrt().unsqueeze(-1)
        for i in reversed(range(self.levels)):
            x = self._conv(2 * self.levels - 1 - i, x, adj, weight).relu()
            adj, weight, group = fine[i]
            x = x[group] + skips[i]
        return self._conv(2 * self.levels, x, adj, weight)
