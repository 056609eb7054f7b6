"""Classify graphs: IDGL refines the graph of each one, PyG pools its nodes.

`trace.readout` turns outputs for nodes into outputs for graphs, of every iteration, and
`trace.loss` is the joint loss of them. Batches are those of PyG's `DataLoader`. A GCN
on the given edges is trained for comparison, with the same read-out.

Without a data set, graphs are made whose edges are mostly noise: nodes are in four
groups, which their features tell, and carry a sign. In one class all nodes of a group
have the same sign, in the other one they are drawn. Who averages over groups can see
it; who averages over the given edges hardly can. They are made to show what IDGL is
for, and say nothing about other graphs.

    python examples/graph_classification.py
    python examples/graph_classification.py --dataset MUTAG
"""

import argparse
import os.path as osp

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.logging import log
from torch_geometric.nn import GCN, global_mean_pool
from torch_geometric.transforms import LocalDegreeProfile

from torch_geometric_idgl import IDGL

parser = argparse.ArgumentParser()
parser.add_argument('--dataset', help='a name of TUDataset; made here if not given')
parser.add_argument('--root', default='data', help='where the data is, or will be')
parser.add_argument('--hidden-channels', type=int, default=32)
parser.add_argument('--batch-size', type=int, default=32)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--epochs', type=int, default=40)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def make_graph(label, noise=0.8):
    """Each node chooses three neighbours, most of them among all nodes."""
    group = torch.randint(4, (int(torch.randint(16, 33, (1,))),))
    num_nodes = group.numel()
    sign = torch.randint(2, (num_nodes,)) * 2.0 - 1.0
    if label == 1:
        sign = (torch.randint(2, (4,)) * 2.0 - 1.0)[group]
    x = torch.cat([2 * F.one_hot(group, 4), sign.view(-1, 1)], dim=1)
    wanted = (group.view(-1, 1) == group).float()
    wanted[torch.rand(num_nodes) < noise] = 1.0
    neighbor = torch.multinomial(wanted, 3, replacement=True)
    source = torch.arange(num_nodes).repeat_interleave(3)
    edge_index = torch.stack([source, neighbor.flatten()])
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    x = x + 0.5 * torch.randn_like(x)
    return Data(x=x, edge_index=edge_index, y=torch.tensor([label]))


if args.dataset is None:
    dataset = [make_graph(i % 2) for i in range(400)]
else:
    path = osp.join(args.root, 'TUDataset')
    dataset = TUDataset(path, args.dataset, use_node_attr=True)
    if dataset.num_features == 0:
        dataset.transform = LocalDegreeProfile()
graphs = [dataset[i] for i in torch.randperm(len(dataset)).tolist()]
num_val = len(graphs) // 5  # As many for testing, the others for training.
train_loader = DataLoader(graphs[2 * num_val :], args.batch_size, shuffle=True)
val_loader = DataLoader(graphs[:num_val], args.batch_size)
test_loader = DataLoader(graphs[num_val : 2 * num_val], args.batch_size)
in_channels = graphs[0].num_features
num_classes = 1 + max(int(data.y) for data in graphs)


class Classifier(torch.nn.Module):
    def __init__(self, gnn):
        super().__init__()
        self.gnn = gnn
        self.lin = torch.nn.Linear(args.hidden_channels, num_classes)

    def readout(self, h, batch):
        return self.lin(global_mean_pool(h.relu(), batch.batch, batch.num_graphs))

    def forward(self, batch):
        h = self.gnn(batch.x, batch.edge_index, batch=batch.batch)
        return self.readout(h, batch)

    def loss(self, batch):
        if not isinstance(self.gnn, IDGL):
            return F.cross_entropy(self(batch), batch.y)
        _, trace = self.gnn(batch, return_trace=True)
        trace = trace.readout(lambda h: self.readout(h, batch))
        return trace.loss(lambda out: F.cross_entropy(out, batch.y))


gnns = {
    'GCN': GCN(in_channels, args.hidden_channels, num_layers=2, dropout=0.2),
    'IDGL': IDGL(
        in_channels,
        args.hidden_channels,
        num_layers=2,
        dropout=0.2,
        bias=True,
        epsilon=0.5,
        initial_weight=0.2,
        update_weight=0.3,
        smoothness=0.0,
        tol=1e-2,
        max_iters=5,
    ),
}


def train(model, optimizer):
    model.train()
    total_loss = 0.0
    for batch in train_loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        total_loss += float(loss.detach()) * batch.num_graphs
    return total_loss / len(train_loader.dataset)


@torch.no_grad()
def test(model, loader):
    model.eval()
    correct = 0
    for batch in loader:
        batch = batch.to(device)
        correct += int((model(batch).argmax(dim=-1) == batch.y).sum())
    return correct / len(loader.dataset)


results = {}
for name, gnn in gnns.items():
    model = Classifier(gnn).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    best_val_acc = test_acc = 0.0
    for epoch in range(1, args.epochs + 1):
        loss = train(model, optimizer)
        val_acc = test(model, val_loader)
        if val_acc > best_val_acc:
            best_val_acc, test_acc = val_acc, test(model, test_loader)
        log(Model=name, Epoch=epoch, Loss=loss, Val=val_acc, Test=test_acc)
    results[name] = test_acc
for name, test_acc in results.items():
    print(f'{name:<5}test accuracy: {test_acc:.4f}')
