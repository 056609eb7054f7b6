"""Nodes that were not there in training: IDGL places them in its graph.

What IDGL learns is a metric, not a list of edges, so a trained model takes a table
with new rows as it is: the kNN graph and the learned graph are made anew for them.
A third of the test nodes is hidden in training. The data comes with scikit-learn.

    python examples/inductive_nodes.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.logging import log

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument('--root', default='data', help='where the split is stored')
parser.add_argument('--epochs', type=int, default=200)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
data = load('cancer', args.root, seed=args.seed).to(device)

new = data.test_mask & (torch.rand(data.num_nodes, device=device) < 1 / 3)
# Nothing may be known of new nodes: standardise by the others only.
mean, std = data.x[~new].mean(dim=0), data.x[~new].std(dim=0)
data.x = (data.x - mean) / std
known = data.subgraph(~new)

# Settings of the paper for Cancer, all epochs with iteration. Not `cached`: the nodes
# change.
model = IDGL(
    data.num_features,
    hidden_channels=16,
    num_layers=2,
    out_channels=int(data.y.max()) + 1,
    dropout=0.5,
    k=40,
    heads=1,
    epsilon=0.9,
    initial_weight=0.25,
    update_weight=0.1,
    smoothness=0.4,
    connectivity=0.2,
    sparsity=0.1,
    tol=1e-3,
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def loss_on(trace, mask):
    return trace.loss(lambda out: F.cross_entropy(out[mask], known.y[mask]))


def train():
    model.train()
    optimizer.zero_grad()
    _, trace = model(known.x, return_trace=True)
    loss = loss_on(trace, known.train_mask)
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    out, trace = model(known.x, return_trace=True)
    val_loss = float(loss_on(trace, known.val_mask))
    known_correct = out.argmax(dim=-1) == known.y
    new_correct = model(data.x).argmax(dim=-1) == data.y  # All nodes, no retraining.
    known_acc = float(known_correct[known.test_mask].float().mean())
    return val_loss, known_acc, float(new_correct[new].float().mean())


best_val_loss, known_acc, new_acc = float('inf'), 0.0, 0.0
for epoch in range(1, args.epochs + 1):
    loss = train()
    val_loss, *accs = test()
    if val_loss < best_val_loss:
        best_val_loss, (known_acc, new_acc) = val_loss, accs
    log(Epoch=epoch, Loss=loss, ValLoss=val_loss, Known=known_acc, New=new_acc)
print(f'{int(known.test_mask.sum())} test nodes known in training: {known_acc:.4f}')
print(f'{int(new.sum())} test nodes new at test time: {new_acc:.4f}')
