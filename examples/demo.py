"""A graph with wrong edges: GCN is led astray, IDGL learns a better graph from it.

The data are 600 of scikit-learn's images of digits, of five kinds that look alike.
Three images of each kind have a label to train on, ten more a label to stop early on.
Two graphs join similar images: each to its nearest ones, and the same graph with three
of four edges put anywhere else. Logistic regression sees pixels and no graph. All GNNs
have the same layers, labels and epochs. The case, with its digits and its
number of labels, was picked because it shows what IDGL is for.

The picture shows the wrong graph, and what IDGL made of it.

    python examples/demo.py --out demo/learned_graph.png
"""

import argparse
import json
from pathlib import Path

import networkx as nx
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import homophily, remove_self_loops, to_undirected

from torch_geometric_idgl import IDGL, __version__
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.transforms import CosineKNNGraph, LearnGraph

parser = argparse.ArgumentParser()
parser.add_argument('--out', type=Path, default=Path('demo/learned_graph.png'))
parser.add_argument('--epochs', type=int, default=200, help='at most')
parser.add_argument('--wrong', type=float, default=0.75, help='share of moved edges')
parser.add_argument('--seeds', type=int, default=5, help='how many')
args = parser.parse_args()

torch.set_num_threads(1)  # Graphs are small; threads would wait for each other.

DIGITS = [1, 3, 5, 8, 9]
COLOURS = ['#0072B2', '#E69F00', '#009E73', '#56B4E9', '#CC79A7']  # safe to tell apart
K = 10
images, digits = load_digits(return_X_y=True)
chosen = np.flatnonzero(np.isin(digits, DIGITS))[:600]
x = torch.from_numpy(scale(images[chosen])).float()
y = torch.from_numpy(np.searchsorted(DIGITS, digits[chosen]))


def make_graphs():
    """Both graphs, with labels drawn anew."""
    place = torch.empty_like(y)  # among the images of the same digit, in random order
    for digit in range(len(DIGITS)):
        rows = (y == digit).nonzero().squeeze(1)
        place[rows] = torch.randperm(len(rows))
    masks = {
        'train_mask': place < 3,
        'val_mask': (place >= 3) & (place < 13),
        'test_mask': place >= 13,
    }
    knn = CosineKNNGraph(K)(Data(x=x, y=y, **masks))
    edges, _ = remove_self_loops(knn.edge_index)
    knn.edge_index = to_undirected(edges)
    wrong = knn.clone()
    moved = torch.rand(edges.size(1)) < args.wrong
    anywhere = torch.randint(len(y), edges.size())
    wrong.edge_index = to_undirected(torch.where(moved, anywhere, edges))
    return {'kNN graph': knn, 'wrong edges': wrong}


def make_model(name):
    if name == 'GCN':
        return GCN(x.size(1), 16, num_layers=2, out_channels=len(DIGITS), dropout=0.5)
    return IDGL(
        x.size(1),
        hidden_channels=16,
        num_layers=2,
        out_channels=len(DIGITS),
        dropout=0.5,
        epsilon=0.5,
        initial_weight=0.2,
        update_weight=0.3,
        connectivity=0.1,
        tol=1e-3,
        max_iters=3,
        cached=True,
    )


print(f'{len(y)} images of digits, three labels of each kind, and two graphs of them:')
print('kNN graph:   joins each image to similar ones')
print(f'wrong edges: the same graph, {args.wrong:.0%} of its edges put anywhere else')
scores = {}
for seed in range(args.seeds):
    seed_everything(seed)
    graphs = make_graphs()
    table = graphs['kNN graph']
    known, test = table.train_mask.numpy(), table.test_mask.numpy()
    linear = LogisticRegression(max_iter=1000).fit(x[known], y[known])
    score = linear.score(x[test], y[test])
    scores.setdefault(('Logistic regression', 'no graph'), []).append(score)
    for name in ['GCN', 'IDGL']:
        for graph, data in graphs.items():
            model = make_model(name)
            record = fit(
                model,
                data,
                max_epochs=args.epochs,
                patience=50,
                first_phase=args.epochs // 2 if name == 'IDGL' else 0,
                desc=f'{name}, {graph}, seed {seed}',
            )
            scores.setdefault((name, graph), []).append(record.test_score)
    if seed == 0:
        given = graphs['wrong edges']
        learned = LearnGraph(model, kind='learned', top_k=K)(given)

mean = {key: f'{100 * np.mean(values):.0f} %' for key, values in scores.items()}
columns = ['no graph', 'kNN graph', 'wrong edges']
print(f'\nDigits recognised, mean of {args.seeds} seeds')
print(f'{"":<20}' + ''.join(f'{column:>13}' for column in columns))
for name in ['Logistic regression', 'GCN', 'IDGL']:
    cells = [mean.get((name, column), '') for column in columns]
    print(f'{name:<20}' + ''.join(f'{cell:>13}' for cell in cells))
print()

panels = [
    (
        'The graph as given',
        given,
        f'GCN on it recognises {mean["GCN", "wrong edges"]} of the digits',
    ),
    (
        'The graph IDGL made of it',
        learned,
        f'IDGL recognises {mean["IDGL", "wrong edges"]} of the digits',
    ),
]
sample = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:300]
figure = Figure(figsize=(14, 8.5))
figure.suptitle('IDGL learns a better graph than it was given', fontsize=22, y=1.02)
for ax, (title, data, caption) in zip(figure.subplots(1, 2), panels, strict=True):
    edge_index, _ = remove_self_loops(data.edge_index)
    same = f'{100 * homophily(edge_index, y, method="edge"):.0f} %'
    print(f'{title}: {same} of the edges join images of the same digit')
    graph = nx.Graph(edge_index.t().tolist()).subgraph(sample.tolist())
    graph = graph.subgraph(node for node, degree in graph.degree if degree > 0)
    place = nx.spring_layout(graph, k=0.2, iterations=100, seed=0)
    for right, colour in [(True, '#BBBBBB'), (False, '#D5000055')]:
        edges = [(i, j) for i, j in graph.edges if (y[i] == y[j]) == right]
        nx.draw_networkx_edges(graph, place, edges, ax=ax, edge_color=colour)
    for number, digit in enumerate(DIGITS):
        points = np.array([place[i] for i in graph if y[i] == number]).reshape(-1, 2)
        ax.scatter(*points.T, s=70, c=COLOURS[number], marker=f'${digit}$', zorder=3)
    ax.set_title(f'{title}\n{same} of its edges join the same digit', fontsize=16)
    ax.text(0.5, -0.02, caption, transform=ax.transAxes, ha='center', fontsize=16)
    ax.set_axis_off()
lines = [Line2D([], [], color=colour) for colour in ['#BBBBBB', '#D50000']]
figure.legend(
    lines,
    ['joins the same digit', 'joins different digits'],
    loc='lower center',
    ncols=2,
    fontsize=13,
    frameon=False,
)
args.out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out, dpi=110, bbox_inches='tight')
record = {
    'command': f'python examples/demo.py --seeds {args.seeds} --epochs {args.epochs}',
    'versions': {'torch': torch.__version__, 'torch_geometric_idgl': __version__},
    'seeds': list(range(args.seeds)),
    'test': {', '.join(key): values for key, values in scores.items()},
}
args.out.with_suffix('.json').write_text(json.dumps(record, indent=2) + '\n')
print(f'Drawn to {args.out}: 300 of the images, each as the digit it shows')
print(f"All seeds' scores: {args.out.with_suffix('.json')}")
