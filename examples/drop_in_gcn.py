"""A standard PyG script, and the one word that turns its GCN into IDGL, side by side.

    python examples/drop_in_gcn.py
    python examples/drop_in_gcn.py --dataset wine

`IDGL` has the constructor and the call of PyG's `GCN` and returns logits, so the script
trains and tests both alike. (Algorithm 1's joint loss and the learned graph are there
when asked for with `return_trace=True`, see `idgl_cora.py`.)
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.logging import log
from torch_geometric.nn import GCN

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.transforms import CosineKNNGraph

parser = argparse.ArgumentParser()
parser.add_argument('--dataset', default='cora', help='for example cora, wine, digits')
parser.add_argument('--root', default='data', help='Cora: holds Planetoid/Cora/raw')
parser.add_argument('--source', help='read-only folder to fill ROOT from')
parser.add_argument('--hidden-channels', type=int, default=16)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--epochs', type=int, default=200)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
data = load(args.dataset, args.root, source=args.source)
if data.edge_index is None:  # A table: give both models the same kNN graph.
    data = CosineKNNGraph(k=20)(data)
data = data.to(device)
sizes = {'num_layers': 2, 'out_channels': int(data.y.max()) + 1}


def train(model, optimizer):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test(model):
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return [
        float((pred[mask] == data.y[mask]).float().mean())
        for mask in (data.train_mask, data.val_mask, data.test_mask)
    ]


def run(model):
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    best_val_acc = test_acc = 0.0
    for epoch in range(1, args.epochs + 1):
        loss = train(model, optimizer)
        train_acc, val_acc, tmp_test_acc = test(model)
        if val_acc > best_val_acc:
            best_val_acc, test_acc = val_acc, tmp_test_acc
        log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
    return test_acc


seed_everything(args.seed)
gcn = run(GCN(data.num_features, args.hidden_channels, dropout=0.5, **sizes))
seed_everything(args.seed)
idgl = run(IDGL(data.num_features, args.hidden_channels, dropout=0.5, **sizes))
print(f'GCN:  test accuracy {gcn:.4f} at the best validation accuracy')
print(f'IDGL: test accuracy {idgl:.4f} at the best validation accuracy')
