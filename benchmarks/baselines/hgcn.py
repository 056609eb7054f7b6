"""H-GCN: coarsen the graph step by step, then refine it back with residuals.

Hu, Zhu, Wu, Wang, Tan, `"Hierarchical Graph Convolutional Networks for
Semi-supervised Node Classification" <https://arxiv.org/abs/1902.06667>`_, IJCAI 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from baselines.features import dropout, matmul

__all__ = ['HGCN', 'Level', 'build_hierarchy', 'group_nodes']


@dataclass
class Level:
    """One graph of the hierarchy, and how its nodes form those of the next.

    Args:
        adj (sp.csr_matrix): Weighted adjacency matrix without normalisation.
        weight (np.ndarray): How many original nodes each node stands for.
        group (np.ndarray, optional): The hyper-node of each node at the next level;
            :obj:`None` at the last.
    """

    adj: sp.csr_matrix
    weight: np.ndarray
    group: np.ndarray | None = None


def group_nodes(
    adj: sp.csr_matrix, weight: np.ndarray, max_weight: int = 50
) -> np.ndarray:
    r"""Assigns each node to a hyper-node: first nodes with the same neighbours
    (structural equivalence), then pairs of neighbours (structural similarity
    :math:`A_{jk} / \sqrt{d_j d_k}`), poorest nodes first.

    Args:
        adj (sp.csr_matrix): Symmetric weighted adjacency matrix.
        weight (np.ndarray): How many original nodes each node stands for.
        max_weight (int, optional): No pair heavier than this is formed.
            (default: :obj:`50`)
    """
    n = adj.shape[0]
    indptr, indices, values = adj.indptr, adj.indices, adj.data
    group = np.full(n, -1)
    count = 0

    # Isolated nodes have nothing in common but the lack of neighbours: left alone.
    same: dict[bytes, list[int]] = {}
    for i in range(n):
        neighbours = np.sort(indices[indptr[i] : indptr[i + 1]])
        if neighbours.size > 0:
            same.setdefault(neighbours.tobytes(), []).append(i)
    for members in same.values():
        if len(members) > 1:
            group[members] = count
            count += 1

    degree = np.asarray(adj.sum(1)).ravel()
    for i in np.argsort(np.diff(indptr), kind='stable'):
        if group[i] >= 0:
            continue
        row = slice(indptr[i], indptr[i + 1])
        others = indices[row]
        free = (group[others] < 0) & (others != i)
        free &= weight[others] + weight[i] <= max_weight
        group[i] = count
        if free.any():
            others = others[free]
            similarity = values[row][free] / np.sqrt(degree[i] * degree[others])
            group[others[similarity.argmax()]] = count
        count += 1
    return group


def build_hierarchy(
    edge_index: Tensor, num_nodes: int, levels: int = 4, max_weight: int = 50
) -> list[Level]:
    """Coarsens a graph :obj:`levels` times; returns :obj:`levels + 1` graphs."""
    row, col = edge_index.cpu().numpy()
    adj = sp.csr_matrix((np.ones(row.size), (row, col)), shape=(num_nodes, num_nodes))
    adj = adj.maximum(adj.T)
    adj.data[:] = 1.0
    level = Level(adj.tocsr(), np.ones(num_nodes, dtype=np.int64))
    hierarchy = [level]
    for _ in range(levels):
        level.group = group_nodes(level.adj, level.weight, max_weight)
        size = level.group.max() + 1
        n = level.group.size
        # A' = M^T A M: weights of merged edges add up, those inside become loops.
        assign = sp.csr_matrix(
            (np.ones(n), (np.arange(n), level.group)), shape=(n, size)
        )
        level = Level(
            (assign.T @ level.adj @ assign).tocsr(),
            np.bincount(level.group, level.weight, size).astype(np.int64),
        )
        hierarchy.append(level)
    return hierarchy


def _normalized(adj: sp.csr_matrix) -> Tensor:
    """The symmetric normalisation of `A + I`, as a torch CSR matrix."""
    adj = adj + sp.identity(adj.shape[0], format='csr')
    scale = sp.diags(np.asarray(adj.sum(1)).ravel() ** -0.5)
    return _to_torch((scale @ adj @ scale).tocsr())


def _to_torch(mat: sp.csr_matrix) -> Tensor:
    return torch.sparse_csr_tensor(
        torch.from_numpy(mat.indptr.astype(np.int64)),
        torch.from_numpy(mat.indices.astype(np.int64)),
        torch.from_numpy(mat.data.astype(np.float32)),
        mat.shape,
        check_invariants=False,
    )


class MultiChannelConv(torch.nn.Module):
    """Parallel graph convolutions, added up with learned channel weights."""

    def __init__(self, in_channels: int, out_channels: int, channels: int):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(channels, in_channels, out_channels)
        )
        self.attention = torch.nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weight:
            torch.nn.init.xavier_uniform_(weight)
        # As Xavier gives for a one-by-one convolution over the channels.
        bound = (6.0 / (self.attention.numel() + 1)) ** 0.5
        torch.nn.init.uniform_(self.attention, -bound, bound)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        # sum_c a_c (A X W_c) = A X (sum_c a_c W_c): one product for all channels.
        weight = torch.einsum('c,cio->io', self.attention, self.weight)
        return matmul(adj, matmul(x, weight))


class HGCN(torch.nn.Module):
    r"""The hierarchical graph convolutional network of Hu et al. (2019).

    :obj:`levels` coarsening layers (convolution, then pooling into hyper-nodes), as
    many refining layers (convolution, then copying back, plus what the coarsening
    layer of the same size gave), and an output layer. Hidden layers also see an
    embedding of the hyper-nodes' weights. The hierarchy is made from the first graph
    the module sees, and kept.
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
        max_weight: int = 50,
    ):
        super().__init__()
        self.levels = levels
        self.dropout = dropout
        self.max_weight = max_weight
        self.embedding = torch.nn.Embedding(max_weight + 1, weight_channels)
        inner = hidden_channels + weight_channels
        sizes = [(in_channels, hidden_channels)]
        sizes += [(inner, hidden_channels)] * (2 * levels - 1)
        sizes += [(hidden_channels, out_channels)]
        self.convs = torch.nn.ModuleList(
            MultiChannelConv(*size, channels) for size in sizes
        )
        self._hierarchy: list[tuple] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets all learnable parameters and forgets the hierarchy."""
        for conv in self.convs:
            conv.reset_parameters()
        torch.nn.init.xavier_uniform_(self.embedding.weight)
        self._hierarchy = None

    def _levels(self, edge_index: Tensor, num_nodes: int):
        if self._hierarchy is None:
            self._hierarchy = []
            sizes = (self.levels, self.max_weight)
            for level in build_hierarchy(edge_index, num_nodes, *sizes):
                # Equivalence may form hyper-nodes heavier than the table is long.
                weight = torch.from_numpy(level.weight.clip(max=self.max_weight))
                group = None if level.group is None else torch.from_numpy(level.group)
                parts = (_normalized(level.adj), weight, group)
                self._hierarchy.append(
                    tuple(t if t is None else t.to(edge_index.device) for t in parts)
                )
        return self._hierarchy

    def _conv(self, i: int, x: Tensor, adj: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = torch.cat([x, self.embedding(weight)], dim=-1)
        x = dropout(x, self.dropout, self.training)
        return self.convs[i](x, adj)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the logits of every node."""
        graphs = self._levels(edge_index, x.size(0))
        skips = []
        for i in range(self.levels):
            adj, weight, group = graphs[i]
            x = self._conv(i, x, adj, weight if i > 0 else None).relu()
            skips.append(x)
            size = graphs[i + 1][0].size(0)
            pooled = x.new_zeros(size, x.size(1)).index_add(0, group, x)
            # Groups are scaled by the root of their size, between a sum and a mean.
            x = pooled / group.bincount(minlength=size).sqrt().unsqueeze(-1)
        for i in reversed(range(self.levels)):
            adj, weight, _ = graphs[i + 1]
            x = self._conv(2 * self.levels - 1 - i, x, adj, weight).relu()
            x = x[graphs[i][2]] + skips[i]
        return self._conv(2 * self.levels, x, graphs[0][0], None)
