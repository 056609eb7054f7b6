"""Train IDGL-Anch on a large graph in batches of its nodes.

Each batch brings all anchors along, so a node is compared with the same anchors in any
batch of an epoch. Only seeds, the first nodes of a batch, are trained on. Then outputs
for all nodes are exact: they are those of the whole graph, in bounded memory.

Without a data set, a graph is made here: features tell classes badly, and half of the
edges are noise. Parts of its nodes need nothing but PyTorch; samples of neighbours need
the extra `sparse`.

    python examples/mini_batches.py
    python examples/mini_batches.py --dataset PubMed --loader neighbor
"""

import argparse
import os.path as osp

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.loader import NeighborLoader
from torch_geometric.logging import log
from torch_geometric.transforms import NormalizeFeatures
from tqdm import tqdm

from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.loader import AnchorLoader, PartitionLoader

parser = argparse.ArgumentParser()
parser.add_argument('--dataset', help='a name of Planetoid; made here if not given')
parser.add_argument('--root', default='data', help='where the data is, or will be')
parser.add_argument(
    '--num-nodes', type=int, default=20_000, help='of a graph made here'
)
parser.add_argument('--loader', choices=['partition', 'neighbor'], default='partition')
parser.add_argument('--parts', type=int, default=40, help='of the nodes')
parser.add_argument('--batch-size', type=int, help='4 parts, or 512 nodes')
parser.add_argument('--anchors', type=int, default=100)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--epochs', type=int, default=10)
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def make_graph(num_nodes, num_classes=8, noise=0.5):
    """Each node chooses three neighbours, some among all nodes."""
    y = torch.arange(num_nodes) % num_classes
    x = F.one_hot(y, 32) + 0.7 * torch.randn(num_nodes, 32)
    source = torch.arange(num_nodes).repeat_interleave(3)
    # Nodes of the same class are `num_classes` apart.
    steps = num_classes * torch.randint(num_nodes // num_classes, source.size())
    drawn = torch.rand(source.size()) < noise
    steps[drawn] = torch.randint(num_nodes, (int(drawn.sum()),))
    edge_index = torch.stack([source, (source + steps) % num_nodes])
    data = Data(x=x, y=y, edge_index=torch.cat([edge_index, edge_index.flip(0)], dim=1))
    split = torch.rand(num_nodes)
    data.train_mask, data.val_mask = split < 0.1, (0.1 <= split) & (split < 0.3)
    data.test_mask = split >= 0.3
    return data


if args.dataset is None:
    data = make_graph(args.num_nodes)
else:
    path = osp.join(args.root, 'Planetoid')
    data = Planetoid(path, args.dataset, transform=NormalizeFeatures())[0]

model = IDGLAnch(
    data.num_features,
    hidden_channels=32,
    num_layers=2,
    out_channels=int(data.y.max()) + 1,
    dropout=0.5,
    num_anchors=args.anchors,
    epsilon=0.1,
    max_iters=2,
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)

if args.loader == 'partition':
    loader = PartitionLoader(
        data, args.parts, batch_size=args.batch_size or 4, shuffle=True
    )
else:
    loader = NeighborLoader(
        data, [10, 10], data.train_mask, batch_size=args.batch_size or 512, shuffle=True
    )
loader = AnchorLoader(loader, data, model.draw_anchors)  # New ones in each epoch.


def train(epoch):
    model.train()
    total = count = 0
    for batch in tqdm(loader, desc=f'Epoch {epoch:02d}', leave=False):
        batch = batch.to(device)
        seeds = batch.train_mask[: batch.batch_size].nonzero().squeeze(1)
        if seeds.numel() == 0:
            continue
        optimizer.zero_grad()
        _, trace = model(batch, return_trace=True)
        loss = trace.loss(
            lambda out, y=batch.y[seeds], seeds=seeds: F.cross_entropy(out[seeds], y)
        )
        loss.backward()
        optimizer.step()
        total += float(loss) * seeds.numel()
        count += seeds.numel()
    return total / max(count, 1)


def test():
    model.eval()
    pred = model.inference(data.x, data.edge_index).argmax(dim=-1).cpu()
    correct = (pred == data.y).float()
    masks = (data.train_mask, data.val_mask, data.test_mask)
    return [float(correct[mask].mean()) for mask in masks]


best_val_acc = test_acc = 0.0
for epoch in range(1, args.epochs + 1):
    loss = train(epoch)
    train_acc, val_acc, tmp_test_acc = test()
    if val_acc > best_val_acc:
        best_val_acc, test_acc = val_acc, tmp_test_acc
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
print(f'Test accuracy: {test_acc:.4f}')
