"""Learn a graph with IDGL, then train any other GNN on it.

`LearnGraph` runs a trained model and writes its graph to `edge_index` and
`edge_weight`, as any PyG transform would. What follows is plain PyG: GCN reads the
edge weights, GAT gets them as edge features, GraphSAGE takes only the edges. The
same GNN is trained on the kNN graph for comparison. The data comes with scikit-learn.

    python examples/learned_graph_transform.py --gnn GAT
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.nn import GAT, GCN, GraphSAGE

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.transforms import CosineKNNGraph, LearnGraph

parser = argparse.ArgumentParser()
parser.add_argument('--gnn', choices=['GAT', 'GCN', 'GraphSAGE'], default='GAT')
parser.add_argument('--dataset', choices=['wine', 'cancer'], default='cancer')
parser.add_argument('--root', default='data', help='where the split is stored')
parser.add_argument('--epochs', type=int, default=200)
parser.add_argument('--top-k', type=int, default=20, help='edges kept at each node')
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
table = load(args.dataset, args.root, seed=args.seed).to(device)
num_classes = int(table.y.max()) + 1

# Settings of the paper for Cancer.
learner = IDGL(
    table.num_features,
    hidden_channels=16,
    num_layers=2,
    out_channels=num_classes,
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
    cached=True,
).to(device)
record = fit(
    learner,
    table,
    max_epochs=args.epochs,
    first_phase=args.epochs // 8,
    desc=f'IDGL, seed {args.seed}',
)
print(f'IDGL itself: test accuracy {record.test_score:.4f}')

graphs = {
    'kNN graph': CosineKNNGraph(k=args.top_k)(table),
    'learned graph': LearnGraph(learner, top_k=args.top_k)(table),
}
graphs['kNN graph'].edge_weight = torch.ones(graphs['kNN graph'].num_edges).to(device)


def forward(model, data):
    # Of weights and features of edges, PyG's models take what they have a use for.
    edge_attr = data.edge_weight.view(-1, 1)
    return model(data.x, data.edge_index, data.edge_weight, edge_attr)


def train(model, optimizer, data):
    model.train()
    optimizer.zero_grad()
    out = forward(model, data)[data.train_mask]
    F.cross_entropy(out, data.y[data.train_mask]).backward()
    optimizer.step()


@torch.no_grad()
def test(model, data):
    model.eval()
    out = forward(model, data)
    correct = (out.argmax(dim=-1) == data.y).float()
    val_loss = F.cross_entropy(out[data.val_mask], data.y[data.val_mask])
    return float(val_loss), float(correct[data.test_mask].mean())


kwargs = {'heads': 4, 'edge_dim': 1} if args.gnn == 'GAT' else {}
Model = {'GAT': GAT, 'GCN': GCN, 'GraphSAGE': GraphSAGE}[args.gnn]
for name, data in graphs.items():
    seed_everything(args.seed)  # Both start from the same weights.
    model = Model(data.num_features, 16, 2, num_classes, dropout=0.5, **kwargs)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best_val_loss, test_acc = float('inf'), 0.0
    for _ in range(args.epochs):
        train(model, optimizer, data)
        val_loss, tmp_test_acc = test(model, data)
        if val_loss < best_val_loss:
            best_val_loss, test_acc = val_loss, tmp_test_acc
    print(f'{args.gnn} on the {name}, {data.num_edges} edges: test {test_acc:.4f}')
