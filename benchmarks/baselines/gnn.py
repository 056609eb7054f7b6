"""GCN, GAT, GraphSAGE, APPNP and GCN on a diffused graph, from PyG's own layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, BatchNorm, GATConv, GCNConv, Linear, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_torch_csr_tensor

from baselines.features import FeatureLinear, dropout, matmul


class GNN(torch.nn.Module):
    """A stack of the layers that a system's name begins with, dropout before each. Of
    GAT's heads, those of hidden layers are put side by side, those of the last layer
    averaged. APPNP predicts with linear layers, then propagates.
    """

    def __init__(
        self,
        system: str,
        in_channels: int,
        out_channels: int,
        hidden_channels: int,
        num_layers: int = 2,
        dropout: float = 0.5,
        input_dropout: float | None = None,
        batch_norm: bool = False,
        heads: int = 8,
        out_heads: int = 1,
        K: int = 10,
        alpha: float = 0.1,
    ):
        super().__init__()
        kind = system.split('-')[0]
        self.dropout = dropout
        self.input_dropout = dropout if input_dropout is None else input_dropout
        self.act = F.elu if kind == 'gat' else F.relu
        self.convs, self.norms = torch.nn.ModuleList(), torch.nn.ModuleList()
        width = in_channels
        for i in range(num_layers):
            last = i == num_layers - 1
            out = out_channels if last else hidden_channels
            if kind == 'gcn':
                layer = GCNConv(width, out, cached=True)
            elif kind == 'gat':
                m = out_heads if last else heads
                layer = GATConv(width, out, m, concat=not last, dropout=dropout)
                out *= 1 if last else m
            else:
                layer = (SAGEConv if kind == 'graphsage' else Linear)(width, out)
            for linear in layer.modules():
                if isinstance(linear, Linear):
                    linear.__class__ = FeatureLinear
            self.convs.append(layer)
            if not last:
                self.norms.append(BatchNorm(out) if batch_norm else torch.nn.Identity())
            width = out
        # No dropout on edges: PyG's layer drops from what the step before left over,
        # so that hardly an edge survives K steps.
        self.prop = APPNP(K, alpha, cached=True) if kind == 'appnp' else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """The logits of all nodes."""
        x = dropout(x, self.input_dropout, self.training)
        x = _convolve(self.convs[0], x, edge_index)
        for norm, conv in zip(self.norms, self.convs[1:], strict=True):
            x = F.dropout(self.act(norm(x)), self.dropout, self.training)
            x = _convolve(conv, x, edge_index)
        return x if self.prop is None else self.prop(x, edge_index)


def _convolve(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """What PyG's layer does. A CSR matrix is a graph that is normalised already."""
    is_matrix = edge_index.layout == torch.sparse_csr
    if isinstance(layer, Linear):
        return layer(x)
    if isinstance(layer, GCNConv) and is_matrix:
        return matmul(edge_index, layer.lin(x)) + layer.bias
    if not isinstance(layer, SAGEConv):
        return layer(x, edge_index)
    # PyG's layer averages neighbours, then projects. The other order gives the same
    # values (a mean is linear), and averages short vectors in place of bags of words.
    h = matmul(x, layer.lin_l.weight.t())
    h = matmul(edge_index, h) if is_matrix else layer.propagate(edge_index, x=(h, h))
    return h + layer.lin_l.bias + layer.lin_r(x)


def diffuse(data: Data, alpha: float = 0.05, k: int = 128) -> Data:
    r"""Replaces the graph by a CSR matrix: the :obj:`k` largest weights of each node in
    its personalised PageRank :math:`\alpha (I - (1 - \alpha) T)^{-1}`, made to sum up
    to 1, with :math:`T` the normalised graph with self-loops.

    Unlike :class:`torch_geometric.transforms.GDC`, this inverts no dense matrix:
    Chebyshev's iteration solves for some columns at a time.
    """
    n, rho = data.num_nodes, 1 - alpha
    index, value = gcn_norm(data.edge_index, num_nodes=n)
    adj = to_torch_csr_tensor(index, rho * value, (n, n))
    # The eigenvalues of (1 - α) T are within ±(1 - α), which gives the rate.
    steps = math.ceil(math.log(1e-6) / math.log(rho / (1 + math.sqrt(1 - rho**2))))
    found = []
    for columns in torch.arange(n).split(64):
        start = alpha * (torch.arange(n).unsqueeze(1) == columns)
        before, x, omega = start, adj @ start + start, 2.0
        for _ in range(steps):
            omega = 1 / (1 - rho**2 / 4 * omega)
            before, x = x, before.lerp(adj @ x + start, omega)
        found.append(x.topk(min(k, n), dim=0))
    weight, source = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
    index = torch.stack([torch.arange(n).expand_as(source), source]).flatten(1)
    weight = (weight / weight.sum(0)).flatten()
    data.edge_index = to_torch_csr_tensor(index, weight, (n, n))
    return data
