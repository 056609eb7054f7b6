"""Learn a graph for a plain table, compare with GCN, and draw what was learned.

The table is scikit-learn's Digits (1,797 images of 8 x 8 pixels, 50 labels), split as
in the paper's released code. IDGL gets the paper's settings, but fewer epochs. The
picture shows the kNN graph that IDGL starts from and the graph it ends with, for a
sample of the nodes. One seed and one split say little: see `--seed` and `--split`.

    python examples/demo.py --out demo/learned_graph.png
"""

import argparse
from pathlib import Path

import networkx as nx
import torch
from matplotlib.figure import Figure
from torch_geometric import seed_everything
from torch_geometric.nn import GCN
from torch_geometric.utils import homophily, remove_self_loops

from torch_geometric_idgl import IDGL
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.transforms import CosineKNNGraph, LearnGraph

parser = argparse.ArgumentParser()
parser.add_argument('--root', default='data', help='where the split is stored')
parser.add_argument('--out', type=Path, default=Path('demo/learned_graph.png'))
parser.add_argument('--epochs', type=int, default=180, help='at most')
parser.add_argument('--first-phase', type=int, default=120)
parser.add_argument('--patience', type=int, default=30)
parser.add_argument('--split', type=int, default=7545, help='seed of the split')
parser.add_argument('--seed', type=int, default=0)
args = parser.parse_args()

seed_everything(args.seed)
table = load('digits', args.root, seed=args.split)
knn = CosineKNNGraph(k=24)(table)
lonely = table.clone()  # No edges: GCN adds its self-loops and sees one row each.
lonely.edge_index = torch.empty((2, 0), dtype=torch.long)

model = IDGL(
    table.num_features,
    hidden_channels=16,
    num_layers=2,
    out_channels=10,
    dropout=0.5,
    iter_dropout=0.3,
    k=24,
    heads=8,
    epsilon=0.65,
    initial_weight=0.4,
    update_weight=0.1,
    smoothness=0.4,
    connectivity=0.1,
    sparsity=0.0,
    tol=1e-4,
    max_iters=10,
    cached=True,
)


def gcn():
    return GCN(table.num_features, 16, num_layers=2, out_channels=10, dropout=0.5)


options = {'max_epochs': args.epochs, 'patience': args.patience}
records = {
    'GCN without a graph': fit(gcn(), lonely, **options),
    'GCN on the 24-NN graph': fit(gcn(), knn, **options),
    'IDGL': fit(model, table, first_phase=args.first_phase, **options),
}
print(f'\n{"Digits":<24}{"accuracy":>10}{"epochs":>9}{"seconds":>9}')
for name, record in records.items():
    score = f'{100 * record.test_score:.1f} %'
    print(f'{name:<24}{score:>10}{record.epochs:>9}{record.seconds:>9.1f}')
print()

learned = LearnGraph(model, kind='learned', top_k=24)(table)
graphs = {'kNN graph': knn, 'learned graph': learned}
sample = torch.randperm(table.num_nodes)[:300].tolist()
figure = Figure(figsize=(14, 7))
for ax, (name, data) in zip(figure.subplots(1, 2), graphs.items(), strict=True):
    edge_index, _ = remove_self_loops(data.edge_index)
    same = 100 * homophily(edge_index, data.y, method='edge')
    title = f'{name}: {same:.1f} % of its edges join images of the same digit'
    print(title)
    graph = nx.Graph(edge_index.t().tolist()).subgraph(sample)
    graph = graph.subgraph(node for node, degree in graph.degree if degree > 0)
    nx.draw_networkx(
        graph,
        nx.spring_layout(graph, k=0.15, seed=0),
        ax=ax,
        with_labels=False,
        node_color=data.y[list(graph)].tolist(),
        node_size=28,
        cmap='tab10',
        vmin=0,
        vmax=9,
        edge_color='#00000026',
    )
    ax.set_title(title)
    ax.set_axis_off()
args.out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out, dpi=120, bbox_inches='tight')
print(f'Drawn to {args.out}: 300 nodes, a colour for each digit')
