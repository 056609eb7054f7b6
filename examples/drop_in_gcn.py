"""A PyG script with a GCN of its own, and the lines that turn it into IDGL.

    python examples/drop_in_gcn.py
    python examples/drop_in_gcn.py --dataset CiteSeer

All but the lines marked `IDGL` is the script one would write for the GCN alone. Those
in `train` are optional: the model returns logits as the GCN does, and trains on any
loss of them; the trace gives the joint loss of Algorithm 1, with graph regularisers.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import Planetoid
from torch_geometric.logging import log
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import NormalizeFeatures

from torch_geometric_idgl import to_idgl

parser = argparse.ArgumentParser()
names = ['Cora', 'CiteSeer', 'PubMed']
parser.add_argument('--dataset', default='Cora', choices=names)
parser.add_argument('--root', default='data', help='holds Planetoid/, or will')
parser.add_argument('--hidden-channels', type=int, default=16)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--epochs', type=int, default=200)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
path = Path(args.root) / 'Planetoid'
dataset = Planetoid(str(path), args.dataset, transform=NormalizeFeatures())
data = dataset[0].to(device)


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


model = GCN(dataset.num_features, args.hidden_channels, dataset.num_classes)
model = to_idgl(model, in_channels=dataset.num_features)  # IDGL
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def loss_fn(out):
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def train():
    model.train()
    optimizer.zero_grad()
    _, trace = model(data.x, data.edge_index, return_trace=True)  # IDGL
    loss = trace.loss(loss_fn)  # IDGL; else loss_fn(model(data.x, data.edge_index))
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    masks = (data.train_mask, data.val_mask, data.test_mask)
    return [float((pred[mask] == data.y[mask]).float().mean()) for mask in masks]


best_val_acc = test_acc = 0.0
for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, tmp_test_acc = test()
    if val_acc > best_val_acc:
        best_val_acc, test_acc = val_acc, tmp_test_acc
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
