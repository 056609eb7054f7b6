"""Learn a graph for a plain table, compare with GCN, and draw what was learned.

The table is scikit-learn's Digits (1,797 images of 8 x 8 pixels, 50 labels), split as
in the paper's released code. IDGL gets the paper's settings, but stops after 30 epochs
without gain, and after 180 in any case.
The picture shows the kNN graph that IDGL starts from and the graph it ends with, for a
sample of the nodes.

    python examples/demo.py --out demo/learned_graph.png
"""

import argparse
import statistics
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

K = 24


def make_idgl(data):
    return IDGL(
        data.num_features,
        hidden_channels=16,
        num_layers=2,
        out_channels=int(data.y.max()) + 1,
        dropout=0.5,
        iter_dropout=0.3,
        k=K,
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


def make_gcn(data):
    return GCN(data.num_features, 16, 2, int(data.y.max()) + 1, dropout=0.5)


def run(seed, args):
    """Trains the three models and returns their records and the two graphs."""
    table = load('digits', args.root, seed=args.split)
    lonely = table.clone()  # No edges: GCN adds its self-loops and sees one row each.
    lonely.edge_index = torch.empty(2, 0, dtype=torch.long)
    knn = CosineKNNGraph(k=K)(table)

    fit_args = {'max_epochs': args.epochs, 'patience': args.patience}
    seed_everything(seed)
    records = {
        'GCN without a graph': fit(make_gcn(lonely), lonely, **fit_args),
        f'GCN on the {K}-NN graph': fit(make_gcn(knn), knn, **fit_args),
    }
    model = make_idgl(table)
    records['IDGL'] = fit(model, table, first_phase=args.first_phase, **fit_args)
    learned = LearnGraph(model, kind='learned', top_k=K)(table)
    return records, {'kNN graph (initial)': knn, 'learned graph': learned}


def report(runs):
    """Prints a table of the test accuracies."""
    seeds = f'mean and standard deviation of {len(runs)} seeds'
    print(f'\nDigits, test accuracy in % ({seeds if len(runs) > 1 else "one seed"})\n')
    print(f'{"model":<24}{"accuracy":>14}{"epochs":>9}{"seconds":>9}')
    for name in runs[0]:
        scores = [100 * records[name].test_score for records in runs]
        accuracy = f'{statistics.mean(scores):.1f}'
        if len(scores) > 1:
            accuracy += f' ± {statistics.stdev(scores):.1f}'
        epochs = statistics.mean(records[name].epochs for records in runs)
        seconds = statistics.mean(records[name].seconds for records in runs)
        print(f'{name:<24}{accuracy:>14}{epochs:>9.0f}{seconds:>9.1f}')
    if len(runs) == 1:
        print('One seed and one split say little: see --seeds and --split for others.')
    print()


def draw(graphs, out, num_nodes=300):
    """Draws the graphs side by side, on the same sample of nodes."""
    fig = Figure(figsize=(7 * len(graphs), 7))
    axes = fig.subplots(1, len(graphs))
    for ax, (name, data) in zip(axes, graphs.items(), strict=True):
        edge_index, _ = remove_self_loops(data.edge_index)
        same = 100 * homophily(edge_index, data.y, method='edge')
        print(f'{name}: {same:.1f} % of its edges join images of the same digit')

        generator = torch.Generator().manual_seed(0)
        sample = torch.randperm(data.num_nodes, generator=generator)[:num_nodes]
        graph = nx.Graph()
        graph.add_edges_from(edge_index.t().tolist())
        graph = graph.subgraph(sample.tolist()).copy()
        graph.remove_nodes_from(list(nx.isolates(graph)))
        pos = nx.spring_layout(graph, k=0.15, seed=0)
        nx.draw_networkx_edges(graph, pos, ax=ax, alpha=0.15)
        color = data.y[list(graph)].tolist()
        nodes = ax.scatter(
            *zip(*(pos[node] for node in graph), strict=True),
            c=color,
            cmap='tab10',
            vmin=-0.5,
            vmax=9.5,
            s=28,
            zorder=2,
        )
        ax.set_title(f'{name}: {same:.1f} % of all edges join equal digits')
        ax.set_axis_off()
    fig.colorbar(nodes, ax=axes, ticks=range(10), label='digit', shrink=0.6)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120, bbox_inches='tight')
    print(f'Drawn to {out} ({num_nodes} nodes, up to {K} edges into each)')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--root', default='data', help='the split is stored here')
    parser.add_argument('--out', type=Path, default=Path('demo/learned_graph.png'))
    parser.add_argument('--epochs', type=int, default=180, help='at most')
    parser.add_argument('--first-phase', type=int, default=120)
    parser.add_argument('--patience', type=int, default=30)
    parser.add_argument('--split', type=int, default=7545, help='seed of the split')
    parser.add_argument('--seeds', type=int, default=1, help='how many seeds')
    args = parser.parse_args()

    runs, graphs = zip(*(run(seed, args) for seed in range(args.seeds)), strict=True)
    report(runs)
    draw(graphs[0], args.out)


if __name__ == '__main__':
    main()
