"""GCN, GAT, GraphSAGE, APPNP and GCN on a diffused graph, from PyG's own layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, BatchNorm, GATConv, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter, to_torch_csr_tensor

from baselines.features import FeatureLinear, dropout, linear, matmul

__all__ = ['GNN', 'APPNPNet', 'diffuse', 'make_gnn']


class GNN(torch.nn.Module):
    r"""A stack of PyG convolutions with dropout before each layer.

    Args:
        conv (str): :obj:`'gcn'`, :obj:`'gat'` or :obj:`'graphsage'`.
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample (per head for GAT).
        out_channels (int): The number of classes.
        dropout (float, optional): On the input of each layer and on GAT's attention.
        heads (int, optional): GAT's heads of hidden layers.
        out_heads (int, optional): Averaged heads of its last layer.
        batch_norm (bool, optional): Batch norm after hidden layers.
        normalize (bool, optional): Whether GCN normalises the graph.
        input_dropout (float, optional): Dropout on the features, if different.
    """

    def __init__(
        self,
        conv: str,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        dropout: float = 0.5,
        heads: int = 8,
        out_heads: int = 1,
        batch_norm: bool = False,
        normalize: bool = True,
        input_dropout: float | None = None,
    ):
        super().__init__()
        if conv not in ('gcn', 'gat', 'graphsage'):
            raise ValueError(f"Expected 'gcn', 'gat' or 'graphsage' (got '{conv}')")
        self.conv = conv
        self.dropout = dropout
        self.input_dropout = dropout if input_dropout is None else input_dropout
        self.convs = torch.nn.ModuleList()
        self.norms = torch.nn.ModuleList()
        width = in_channels
        for i in range(num_layers):
            last = i == num_layers - 1
            out = out_channels if last else hidden_channels
            if conv == 'gcn':
                layer = GCNConv(width, out, cached=normalize, normalize=normalize)
            elif conv == 'graphsage':
                layer = SAGEConv(width, out)
            else:
                m = out_heads if last else heads
                layer = GATConv(width, out, m, concat=not last, dropout=dropout)
                out = out if last else out * m
            if i == 0 and conv != 'graphsage':
                layer.lin = FeatureLinear(layer.lin)
            self.convs.append(layer)
            if batch_norm and not last:
                self.norms.append(BatchNorm(out))
            width = out

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        for layer in [*self.convs, *self.norms]:
            layer.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the logits of every node."""
        for i, conv in enumerate(self.convs):
            p = self.dropout if i > 0 else self.input_dropout
            x = dropout(x, p, self.training)
            x = _convolve(conv, x, edge_index)
            if i < len(self.convs) - 1:
                x = self.norms[i](x) if len(self.norms) > 0 else x
                x = F.elu(x) if self.conv == 'gat' else F.relu(x)
        return x


def _convolve(conv: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    # A matrix is the normalised graph already, and is multiplied by: the same as PyG's
    # layers do, by a product whose backward pass does not sort the edges anew.
    is_matrix = edge_index.layout == torch.sparse_csr
    if isinstance(conv, GCNConv) and is_matrix:
        return matmul(edge_index, conv.lin(x)) + conv.bias
    if not isinstance(conv, SAGEConv):
        return conv(x, edge_index)
    # PyG's layer averages neighbours, then projects. The other order gives the same
    # values (a mean is linear), and averages short vectors in place of bags of words.
    h = linear(x, conv.lin_l.weight)
    if is_matrix:
        h = matmul(edge_index, h)
    else:
        h = conv.propagate(edge_index, x=(h, h), size=None)
    return h + conv.lin_l.bias + linear(x, conv.lin_r.weight)


class APPNPNet(torch.nn.Module):
    """Predict, then propagate: a two-layer MLP followed by personalised PageRank."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        dropout: float = 0.5,
        K: int = 10,
        alpha: float = 0.1,
    ):
        super().__init__()
        self.dropout = dropout
        self.lin1 = torch.nn.Linear(in_channels, hidden_channels)
        self.lin2 = torch.nn.Linear(hidden_channels, out_channels)
        # No dropout on edges: PyG's layer drops from what the step before left over,
        # so that hardly an edge survives K steps.
        self.prop = APPNP(K, alpha, cached=True)

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.lin1.reset_parameters()
        self.lin2.reset_parameters()
        self.prop.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the logits of every node."""
        x = dropout(x, self.dropout, self.training)
        x = linear(x, self.lin1.weight, self.lin1.bias).relu()
        x = F.dropout(x, self.dropout, self.training)
        return self.prop(self.lin2(x), edge_index)


def diffuse(
    data: Data, alpha: float = 0.05, k: int = 128, max_dense: int = 5000
) -> Data:
    r"""Replaces the graph by its personalised PageRank diffusion, the :obj:`k`
    largest weights of each node (:class:`torch_geometric.transforms.GDC`).

    The weighted graph becomes a sparse matrix in :obj:`data.edge_index`, which PyG's
    convolutions take in place of an edge list. For more than :obj:`max_dense` nodes,
    where PyG's inverse of a dense matrix takes too long, columns are solved for in
    blocks.
    """
    n = data.num_nodes
    if n <= max_dense:
        top_k = {'method': 'topk', 'k': min(k, n), 'dim': 0}
        ppr = {'method': 'ppr', 'alpha': alpha}
        gdc = T.GDC(1, 'sym', 'col', ppr, top_k, exact=True)
        data = gdc(data)
        edge_index, weight = data.edge_index, data.edge_attr
        del data.edge_attr
    else:
        edge_index, weight = pagerank_top_k(data.edge_index, n, alpha, k)
        total = scatter(weight, edge_index[1], 0, n)
        weight = weight / total[edge_index[1]]
    data.edge_index = to_torch_csr_tensor(edge_index.flip(0), weight, (n, n))
    return data


def pagerank_top_k(
    edge_index: Tensor, n: int, alpha: float, k: int, block: int = 64
) -> tuple[Tensor, Tensor]:
    r"""The :obj:`k` largest entries of each column of
    :math:`\alpha (I - (1 - \alpha) T)^{-1}`, with :math:`T` the normalised graph with
    self-loops, by Chebyshev's iteration.
    """
    index, value = gcn_norm(edge_index, num_nodes=n, add_self_loops=True)
    adj = to_torch_csr_tensor(index, (1 - alpha) * value, (n, n))
    # The eigenvalues of (1 - α) T are within ±(1 - α), which gives the rate.
    rho = 1 - alpha
    steps = math.ceil(math.log(1e-6) / math.log(rho / (1 + math.sqrt(1 - rho**2))))
    rows, weights = [], []
    for columns in torch.arange(n).split(block):
        start = torch.zeros(n, columns.numel())
        start[columns, torch.arange(columns.numel())] = alpha
        before, x, omega = start, adj @ start + start, 2.0
        for _ in range(steps):
            omega = 1 / (1 - rho**2 / 4 * omega)
            after = (adj @ x).add_(start).sub_(before).mul_(omega).add_(before)
            before, x = x, after
        weight, row = x.topk(min(k, n), dim=0)
        rows.append(row.t())
        weights.append(weight.t())
    row = torch.cat(rows)
    col = torch.arange(n).unsqueeze(-1).expand_as(row)
    return torch.stack([row.flatten(), col.flatten()]), torch.cat(weights).flatten()


def make_gnn(
    system: str, in_channels: int, out_channels: int, **kwargs
) -> torch.nn.Module:
    """Builds the network of one of the baselines made of PyG layers."""
    if system == 'appnp':
        return APPNPNet(in_channels, out_channels=out_channels, **kwargs)
    conv = system.split('-')[0]
    # The diffused graph is normalised already.
    normalize = system != 'gcn-gdc'
    return GNN(
        conv, in_channels, out_channels=out_channels, normalize=normalize, **kwargs
    )
