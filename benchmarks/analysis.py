"""The analyses of the paper, and attacked graphs: tables and plots.

    python benchmarks/analysis.py attacks
    python benchmarks/analysis.py edges --dataset cora --seeds 0 1 --systems gcn idgl
    python benchmarks/analysis.py lambda --quick

edges        random edges deleted or added (Cora, Citeseer)
attacks      graphs attacked by Metattack (Cora, Citeseer)
convergence  change of the graph and test accuracy in each iteration
stopping     fixed numbers of iterations against the stopping criterion
lambda       the weight of the initial graph (Cora)
anchors      the number of anchors, with the paper's regulariser and the rescaled one
graphs       the initial and the learned graph (Cora, Wine)

An analysis is a list of cells: settings and a seed. Each finished cell is written to
benchmarks/results/analysis/NAME.json at once and never run again, so that runs can be
made in portions. The table (printed, and on the pages by `report.py --update`) and the
plot (NAME.svg) show what is there.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import matplotlib
import torch
from baselines import fit_lds
from common import CONFIGS, mean_and_deviation, read_json, read_yaml, write_json
from matplotlib.figure import Figure
from options import add_options, explain_errors, run_options, stage
from records import checkpoint_file
from systems import FIT, System, cross_entropy, load_data, load_settings, make_model
from systems import TITLES as SYSTEMS
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import coalesce, to_torch_csr_tensor

from torch_geometric_idgl.datasets import AttackedGraph
from torch_geometric_idgl.training import accuracy, fit
from torch_geometric_idgl.transforms import CosineKNNGraph, PerturbEdges, PruneEdges

Cell = dict[str, Any]  # data, system, what is varied, seed
Result = dict[str, Any]

# The colours of Okabe and Ito, which the colour-blind can tell apart.
COLOURS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000']
BOTH = ('cora', 'citeseer')
MARKERS = 'osD^vP*'
GREY = '#999999'
TITLES = common.TITLES | {'delete': 'edges deleted', 'add': 'edges added'}
PERTURBED_TITLES = SYSTEMS | {
    'idgl-anch': 'IDGL-Anch, 100 anchors',
    'gcn-pruned': 'GCN, pruned',
    'gcn-knn': 'GCN, given + kNN edges',
    'idgl-pruned': 'IDGL, pruned',
}
# Of perturbed and attacked graphs: what this package has by default, but fewer anchors.
FEW_ANCHORS = {'num_anchors': 100, 'scale_regularizer': True}


# Training -----------------------------------------------------------------------------


def train(
    base: str, data: Data, settings: dict[str, Any], cell: Cell, options: Cell
) -> tuple[torch.nn.Module, Result]:
    """Trains a system, and goes on where it was stopped."""
    if options['quick']:
        settings = {**settings, 'max_epochs': 3, 'first_phase': 0}
    data = data.to(options['device'])
    seed, progress = cell['seed'], options['progress']
    file = checkpoint_file(
        options['root'], cell['dataset'], base, [cell, settings], seed, 'analysis'
    )
    model = make_model(base, settings, data).to(options['device'])
    record = fit(
        model,
        data,
        progress=progress,
        desc=' '.join(map(str, cell.values())),
        checkpoint=file,
        **{key: settings[key] for key in FIT if key in settings},
    )
    return model, {
        'dev': record.val_score,
        'test': record.test_score,
        'dev_cross_entropy': cross_entropy(model, data),
        'epochs': record.epochs,
        'iterations': record.iterations,
        'seconds': round(record.seconds, 1),
    }


def train_changed(cell: Cell, options: Cell, **changes: Any) -> Any:
    """Trains a system on its data with some of the paper's settings changed."""
    base = cell['system']
    settings = {**load_settings(System(base), cell['dataset']), **changes}
    data = load_data(base, cell['dataset'], settings, options['root'], cell['seed'])
    return (*train(base, data, settings, cell, options), data)


# Robustness to random edges -----------------------------------------------------------

# The paper's settings for perturbed graphs; the others are those of the clean one.
PERTURBED = {
    'delete': {'initial_weight': 0.7, 'update_weight': 0.1},
    'add': {'initial_weight': 0.1, 'update_weight': 0.2},
}
PERTURBED_LABELS = {
    'delete': 'probability that an edge is deleted',
    'add': 'probability that a missing edge is added',
}


def edges_result(cell: Cell, options: Cell) -> Result:
    """IDGL has the paper's settings for Cora on both data sets: those of graphs with
    random edges are known for Cora alone.
    """
    base, dataset, seed = cell['system'], cell['dataset'], cell['seed']
    own = base.startswith('idgl')
    settings = load_settings(System(base), 'cora' if own else dataset)
    data = load_data(base, dataset, settings, options['root'], seed)
    data = PerturbEdges(**{cell['kind']: cell['rate']}, seed=seed)(data)
    if base == 'lds':
        short = {'max_windows': 1, 'max_restarts': 1, 'samples': 1}
        settings |= short if options['quick'] else {}
        name = (dataset, base, [cell, settings], seed, 'analysis')
        file = checkpoint_file(options['root'], *name)
        data = data.to(options['device'])
        lds = fit_lds(data, progress=options['progress'], checkpoint=file, **settings)
        return lds | {'seconds': round(lds['seconds'], 1)}
    if base == 'gcn':  # of millions of edges, a matrix is multiplied much sooner
        index, weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
        shape = (data.num_nodes, data.num_nodes)
        data.edge_index = to_torch_csr_tensor(index, weight, shape)
    if own:
        settings |= PERTURBED[cell['kind']]
    if base == 'idgl-anch':
        settings |= FEW_ANCHORS
    return train(base, data, settings, cell, options)[1]


def edges_panels(found: list[Result]) -> list[Panel]:
    return [
        Panel(
            f'{TITLES[dataset]}, {TITLES[kind]}',
            PERTURBED_LABELS[kind],
            lines(own, 'rate', PERTURBED_TITLES),
        )
        for (dataset, kind), own in grouped(found, 'dataset', 'kind').items()
    ]


# Robustness to attacks ----------------------------------------------------------------

# What is chosen on the dev nodes, by cross-entropy: IDGL's weight of the initial graph,
# the smallest similarity of edges that are kept, the number of neighbours.
WEIGHTS = [0.8, 0.5, 0.25, 0.1, 0.0]
THRESHOLDS = [0.01, 0.02, 0.03, 0.04, 0.05]
ATTACK_OPTIONS: dict[str, tuple[str, list[Any]]] = {
    'gcn': ('', [None]),
    'gcn-pruned': ('threshold', THRESHOLDS),
    'gcn-knn': ('k', [5, 10, 20]),
    'idgl': ('initial_weight', WEIGHTS),
    'idgl-pruned': ('threshold', THRESHOLDS),
    'idgl-anch': ('initial_weight', WEIGHTS),
}
ATTACK_RATES = (0.25, 0.2, 0.15, 0.1, 0.05, 0.0)


def attacks_cells(seeds: list[int], found: list[Result]) -> Iterator[Cell]:
    for dataset in BOTH:
        for system, (_, values) in ATTACK_OPTIONS.items():
            for rate in ATTACK_RATES:
                cell = {'dataset': dataset, 'system': system, 'rate': rate}
                # Seed 0 tries every option; the others take the one that is chosen.
                for option in values if 0 in seeds else ():
                    yield {**cell, 'option': option, 'seed': 0}
                # By now, these cells have been run.
                for best in chosen([r for r in found if matches(r, cell)]):
                    for seed in (seed for seed in seeds if seed):
                        yield {**cell, 'option': best, 'seed': seed}


def chosen(found: list[Result]) -> list[Any]:
    """The option with the lowest dev cross-entropy of seed 0; none before it has tried
    them all.
    """
    if not found:
        return []
    values = ATTACK_OPTIONS[found[0]['system']][1]
    losses = {r['option']: r['dev_cross_entropy'] for r in found if r['seed'] == 0}
    return [min(losses, key=losses.get)] if losses.keys() >= {*values} else []


def attacks_result(cell: Cell, options: Cell) -> Result:
    """IDGL has the paper's settings for Cora on both data sets: those for Citeseer take
    ten times as long. GCN has binary features, as where its figures were published;
    IDGL has rows scaled to a sum of one, as the paper's smoothness wants.
    """
    base = (
        'idgl-anch' if cell['system'] == 'idgl-anch' else cell['system'].split('-')[0]
    )
    settings = load_settings(System(base), 'cora')
    settings |= FEW_ANCHORS if base == 'idgl-anch' else {}
    option = ATTACK_OPTIONS[cell['system']][0]
    root = str(Path(options['root']) / 'adversarial')
    data = AttackedGraph(root, cell['dataset'], rate=cell['rate'])[0]
    if option == 'threshold':
        data = PruneEdges(cell['option'])(data)
    elif option == 'k':
        knn = CosineKNNGraph(cell['option'], force_undirected=True)(data)
        both = torch.cat([data.edge_index, knn.edge_index], dim=1)
        data.edge_index = coalesce(both[:, both[0] != both[1]])
    elif option:
        settings[option] = cell['option']
    if base == 'gcn':
        data.x = data.x.to_sparse_csr()
    else:
        data = NormalizeFeatures()(data)
    return train(base, data, settings, cell, options)[1]


def attacks_panels(found: list[Result]) -> list[Panel]:
    published = read_yaml(CONFIGS / 'analysis.yaml')['attacks']
    panels = []
    for (dataset,), own in grouped(found, 'dataset').items():
        shown = []
        for runs in grouped(own, 'system', 'rate').values():
            shown += [r for r in runs if r['option'] in chosen(runs)]
        dashed = {f'{key} (published)': v for key, v in published[dataset].items()}
        title = f'{TITLES[dataset]}, attacked by Metattack'
        values = lines(shown, 'rate', PERTURBED_TITLES)
        panels.append(Panel(title, 'share of edges changed', values, dashed))
    return panels


# Convergence and stopping -------------------------------------------------------------


@torch.no_grad()
def convergence_result(cell: Cell, options: Cell) -> Result:
    with torch.enable_grad():
        model, result, data = train_changed(cell, options)
    model.eval()
    model.tol = None  # goes on to the end
    changes, scores, previous = [], [], None
    for t in range(model.max_iters + 1):
        out, trace = model(data, max_iters=t, return_trace=True)
        scores.append(accuracy(out[data.test_mask], data.y[data.test_mask]))
        if previous is not None:
            distance = trace.learned.sq_dist(previous)
            changes.append(float(distance / trace.learned.sq_norm()))
        previous = trace.learned
    return {**result, 'changes': changes, 'scores': scores}


def convergence_panels(found: list[Result]) -> list[Panel]:
    panels = []
    for (dataset,), own in grouped(found, 'dataset').items():
        for key, ylabel, first in (
            ('changes', '‖A(t) − A(t−1)‖² / ‖A(t)‖²', 1),
            ('scores', 'test accuracy (%)', 0),
        ):
            scale = 100 if key == 'scores' else 1
            values: dict[float, list[float]] = {}
            for r in own:
                for t, value in enumerate(r[key], first):
                    values.setdefault(t, []).append(scale * value)
            title = TITLES[dataset]
            panels.append(
                Panel(title, 'iteration', {'IDGL': values}, {}, ylabel, scale == 1)
            )
    return panels


STOPPING = (0, 1, 2, 3, 4, 6, 8, 10)


def stopping_result(cell: Cell, options: Cell) -> Result:
    """Trained with that number of iterations, or (none given) with the criterion."""
    fixed = {'max_iters': cell['iterations'], 'tol': None}
    changes = {} if cell['iterations'] is None else fixed
    _, result, _ = train_changed(cell, options, **changes)
    result['mean_iterations'] = result.pop('iterations')
    return result


def stopping_panels(found: list[Result]) -> list[Panel]:
    panels = []
    for (dataset,), own in grouped(found, 'dataset').items():
        fixed = [r for r in own if r['iterations'] is not None]
        dynamic = [100 * r['test'] for r in own if r['iterations'] is None]
        dashed = {}
        if dynamic:
            mean = statistics.fmean(dynamic)
            dashed['stopping criterion'] = dict.fromkeys(STOPPING, mean)
        values = {'fixed number': tests(fixed, 'iterations')} if fixed else {}
        panels.append(Panel(TITLES[dataset], 'iterations', values, dashed))
    return panels


# The weight of the initial graph, and the number of anchors ---------------------------


def lambda_result(cell: Cell, options: Cell) -> Result:
    return train_changed(cell, options, initial_weight=cell['lambda'])[1]


def lambda_panels(found: list[Result]) -> list[Panel]:
    published = read_yaml(CONFIGS / 'analysis.yaml')['lambda']['cora']
    dashed = {f'{key} (paper)': values for key, values in published.items()}
    label = 'weight λ of the initial graph'
    return [Panel('Cora', label, lines(found, 'lambda'), dashed)]


def anchors_result(cell: Cell, options: Cell) -> Result:
    changes = {'num_anchors': cell['anchors'], 'scale_regularizer': cell['scaled']}
    return train_changed(cell, options, **changes)[1]


def anchors_panels(found: list[Result]) -> list[Panel]:
    published = read_yaml(CONFIGS / 'analysis.yaml')['anchors']
    labels = {True: 'rescaled regulariser', False: "paper's regulariser"}
    panels = []
    for (dataset,), own in grouped(found, 'dataset').items():
        values = {
            labels[scaled]: tests(runs, 'anchors')
            for (scaled,), runs in grouped(own, 'scaled').items()
        }
        dashed = {f'{key} (paper)': v for key, v in published[dataset].items()}
        panels.append(Panel(TITLES[dataset], 'number of anchors', values, dashed))
    return panels


# Learned graphs -----------------------------------------------------------------------


@torch.no_grad()
def graphs_result(cell: Cell, options: Cell) -> Result:
    with torch.enable_grad():
        model, result, data = train_changed(cell, options)
    model.eval()
    _, trace = model(data, return_trace=True)
    order = data.y.argsort(stable=True)  # nodes of a class side by side
    place = order.argsort()
    result['classes'] = data.y.bincount().tolist()
    count = 0
    for name in ('initial', 'learned', 'mixed'):
        edge_index, weight = getattr(trace, name).to_edges()
        edge = edge_index[0] != edge_index[1]
        (row, col), weight = edge_index[:, edge], weight[edge]
        same = data.y[row] == data.y[col]
        result[name] = {
            'within_class': float(weight[same].sum() / weight.sum()),
            'edges': edge_index.size(1),
        }
        if name != 'mixed':  # of the learned graph the strongest, as many as are given
            pairs, weight = coalesce(
                place[torch.stack([row, col])].sort(dim=0)[0], weight, reduce='max'
            )
            count = count or pairs.size(1)
            top = weight.argsort(descending=True, stable=True)[:count]
            top = pairs[:, top].t().flatten().tolist()
            result[name]['pairs'] = ' '.join(map(str, top))
    return result


def drawn_pairs(result: Result, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of nodes that are drawn of a graph, and their classes."""
    pairs = torch.tensor([int(i) for i in result[name]['pairs'].split()]).view(-1, 2)
    ends = torch.tensor(result['classes']).cumsum(0)
    return pairs, torch.bucketize(pairs, ends, right=True)


def drawn_share(result: Result, name: str) -> float:
    """How many of the drawn pairs are within a class, in percent."""
    label = drawn_pairs(result, name)[1]
    return 100 * float((label[:, 0] == label[:, 1]).float().mean())


def draw_graphs(found: list[Result]) -> Figure:
    """Both graphs of each data set as matrices of nodes that are sorted by class."""
    found = first_of_each(found)
    figure = Figure(figsize=(8, 4.2 * len(found)), layout='constrained')
    for row, result in enumerate(found):
        ends = torch.tensor(result['classes']).cumsum(0)
        for column, name in enumerate(('initial', 'learned')):
            axes = figure.add_subplot(len(found), 2, 2 * row + column + 1)
            pairs, label = (
                torch.cat([given, given.flip(1)]) for given in drawn_pairs(result, name)
            )
            same = label[:, 0] == label[:, 1]
            palette = [COLOURS[i % len(COLOURS)] for i in range(len(ends))]
            for dots, colours in (
                (pairs[~same], GREY),
                (pairs[same], [palette[i] for i in label[same][:, 0]]),
            ):
                size = 40 / len(ends) ** 0.5 / ends[-1].sqrt().item()
                style = {'s': size, 'linewidths': 0, 'rasterized': True}
                axes.scatter(dots[:, 1], dots[:, 0], c=colours, **style)
            share = 100 * result[name]['within_class']
            axes.set_title(
                f'{TITLES[result["dataset"]]}, {name} graph; within classes:\n'
                f'{share:.0f} % of all weight, {drawn_share(result, name):.0f} % of '
                f'the drawn pairs',
                fontsize=11,
            )
            limit = int(ends[-1])
            axes.set(xlim=(0, limit), ylim=(limit, 0), aspect='equal')
            axes.set(xlabel='node, sorted by class', ylabel='node, sorted by class')
    colours = COLOURS[: max(len(result['classes']) for result in found)]
    handles = [_dot(c, f'within class {i}') for i, c in enumerate(colours, 1)]
    handles.append(_dot(GREY, 'between classes'))
    figure.legend(handles=handles, loc='outside lower center', ncols=4, fontsize=9)
    return figure


def _dot(colour: str, label: str) -> Any:
    style = {'marker': 'o', 'linestyle': '', 'color': colour, 'label': label}
    return matplotlib.lines.Line2D([], [], **style)


def first_of_each(found: list[Result]) -> list[Result]:
    """One result of each data set."""
    return [runs[0] for _, runs in sorted(grouped(found, 'dataset').items())]


def graphs_table(found: list[Result]) -> str:
    """The shares of weight, and of drawn pairs, within classes; and the accuracy."""
    header = ['within classes (%)', 'initial graph', 'learned graph', 'mixed graph']
    header += ['drawn pairs of the initial graph', 'of the learned graph', 'accuracy']
    rows = [
        [TITLES[r['dataset']]]
        + [f'{100 * r[n]["within_class"]:.1f}' for n in ('initial', 'learned', 'mixed')]
        + [f'{drawn_share(r, n):.1f}' for n in ('initial', 'learned')]
        + [f'{100 * r["test"]:.1f}']
        for r in first_of_each(found)
    ]
    return common.table(header, rows)


# Tables and plots ---------------------------------------------------------------------


@dataclass
class Panel:
    """Lines of a plot: values of all seeds for each point, and what others report."""

    title: str
    xlabel: str
    lines: dict[str, dict[float, list[float]]]
    dashed: dict[str, dict[float, float]] = field(default_factory=dict)
    ylabel: str = 'test accuracy (%)'
    log: bool = False

    @property
    def points(self) -> list[float]:
        """Where there is a value; others may have more than we."""
        shown = [*self.lines.values(), *self.dashed.values()]
        return sorted({x for values in shown for x in values})


def matches(result: Result, cell: Cell) -> bool:
    return all(result.get(key) == value for key, value in cell.items())


def grouped(found: list[Result], *keys: str) -> dict[tuple, list[Result]]:
    groups: dict[tuple, list[Result]] = {}
    for result in found:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    return groups


def tests(found: list[Result], key: str) -> dict[float, list[float]]:
    """Test accuracies in percent for each value of a key, in its order."""
    groups = grouped(found, key)
    return {x: [100 * r['test'] for r in groups[x,]] for (x,) in sorted(groups)}


def lines(
    found: list[Result], key: str, titles: dict[str, str] = SYSTEMS
) -> dict[str, dict[float, list[float]]]:
    """The same for each system, in the order of their titles."""
    groups = grouped(found, 'system')
    return {
        title: tests(groups[name,], key)
        for name, title in titles.items()
        if (name,) in groups
    }


def draw_panels(panels: list[Panel]) -> Figure:
    """Means of the seeds as lines, their deviations as bars."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8.4, 3.2 * rows + 1), layout='constrained')
    handles: dict[str, Any] = {}
    styles = ['--', ':', '-.', (0, (1, 3))]
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    others = list(dict.fromkeys(label for panel in panels for label in panel.dashed))
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        for label, values in panel.lines.items():
            place = labels.index(label) % len(COLOURS)
            means, stds = zip(*map(common.mean_std, values.values()), strict=True)
            style = {'color': COLOURS[place], 'marker': MARKERS[place], 'capsize': 2}
            handles[label] = axes.errorbar(list(values), means, stds, **style)
        for label, figures in panel.dashed.items():
            shade = str(0.2 + 0.5 * others.index(label) / max(len(others), 1))
            style = {'color': shade, 'linestyle': styles[others.index(label) % 4]}
            points = sorted(figures.items())
            (handles[label],) = axes.plot(*zip(*points, strict=True), **style)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.set_xticks(panel.points)
        axes.set_yscale('log' if panel.log else 'linear')
        axes.grid(alpha=0.3)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc='outside lower center',
        ncols=3 if len(handles) > 4 else 2,
        fontsize=9,
    )
    return figure


def panels_table(panels: list[Panel]) -> str:
    """A table for each panel: a row for each line, a column for each point."""
    parts = []
    for panel in panels:
        digits = (lambda v: f'{statistics.fmean(v):.2g}') if panel.log else None
        rows = []
        for label, values in panel.lines.items():
            cells = [
                (digits or mean_and_deviation)(values[x]) if x in values else '–'
                for x in panel.points
            ]
            count = {len(v) for v in values.values()}
            span = f'{min(count)}' if len(count) == 1 else f'{min(count)}–{max(count)}'
            rows.append([label, *cells, span])
        for label, figures in panel.dashed.items():
            cells = [f'{figures[x]:.1f}' if x in figures else '–' for x in panel.points]
            rows.append([label, *cells, ''])
        header = [panel.xlabel, *(f'{x:g}' for x in panel.points), 'runs']
        parts.append(f'{panel.title}: {panel.ylabel}\n\n{common.table(header, rows)}')
    return '\n\n'.join(parts)


# The command --------------------------------------------------------------------------


@dataclass
class Analysis:
    """Which cells there are, what a cell gives, and how results are shown."""

    title: str
    cells: dict[str, Any] | Callable[[list[int], list[Result]], Iterator[Cell]]
    result: Callable[[Cell, Cell], Result]
    panels: Callable[[list[Result]], list[Panel]] | None  # of graphs: none
    varied: str = ''  # the key that `--values` is about
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def list_cells(self, seeds: list[int], found: list[Result]) -> Iterator[Cell]:
        if callable(self.cells):
            yield from self.cells(seeds, found)
            return
        table = {**self.cells, 'seed': seeds}
        for values in itertools.product(*table.values()):
            yield dict(zip(table, values, strict=True))


ANALYSES = {
    'edges': Analysis(
        'Random edges',
        {
            'dataset': BOTH,
            'system': ('gcn', 'idgl', 'idgl-anch', 'lds'),
            'kind': tuple(PERTURBED),
            'rate': (0.25, 0.5, 0.75),
        },
        edges_result,
        edges_panels,
        'rate',
    ),
    'attacks': Analysis(
        'Attacked graphs',
        attacks_cells,
        attacks_result,
        attacks_panels,
        'rate',
        tuple(range(10)),
    ),
    'convergence': Analysis(
        'Convergence',
        {'dataset': BOTH, 'system': ('idgl',)},
        convergence_result,
        convergence_panels,
    ),
    'stopping': Analysis(
        'Stopping',
        {'dataset': BOTH, 'system': ('idgl',), 'iterations': (None, *STOPPING)},
        stopping_result,
        stopping_panels,
        'iterations',
    ),
    'lambda': Analysis(
        'Weight of the initial graph',
        {
            'dataset': ('cora',),
            'system': ('idgl', 'idgl-anch'),
            'lambda': (0.9, 0.8, 0.7, 0.6, 0.5),
        },
        lambda_result,
        lambda_panels,
        'lambda',
    ),
    'anchors': Analysis(
        'Number of anchors',
        {
            'dataset': ('cora', 'pubmed'),
            'system': ('idgl-anch',),
            'scaled': (True, False),
            'anchors': (100, 400, 700, 1000, 1300, 1600),
        },
        anchors_result,
        anchors_panels,
        'anchors',
    ),
    'graphs': Analysis(
        'Learned graphs',
        {'dataset': ('wine', 'cora'), 'system': ('idgl',)},
        graphs_result,
        None,
        seeds=(0,),
    ),
}


def results_file(name: str, folder: Path, quick: bool = False) -> Path:
    """Where the cells of an analysis are kept; quick ones do not mix with others."""
    return folder / 'analysis' / f'{name}{"-quick" if quick else ""}.json'


def wanted(cell: Cell, args: argparse.Namespace) -> bool:
    """Whether a cell is in the portion that was asked for."""
    varied = ANALYSES[args.name].varied
    return (
        (not args.dataset or cell['dataset'] in args.dataset)
        and (not args.systems or cell['system'] in args.systems)
        and (not args.values or not varied or cell[varied] in args.values)
    )


def run(args: argparse.Namespace) -> list[Result]:
    """Runs the cells that are wanted and not there yet; returns all there are."""
    analysis = ANALYSES[args.name]
    file = results_file(args.name, args.results, args.quick)
    new = {'analysis': args.name, 'versions': common.versions(), 'cells': []}
    found = (read_json(file) or new)['cells']
    options = {**run_options(args), 'root': args.root, 'quick': args.quick}
    seeds = [0] if args.quick else args.seeds or list(analysis.seeds)
    for cell in analysis.list_cells(seeds, found):
        name = ' '.join(map(str, cell.values()))
        if args.show or not wanted(cell, args) or any(matches(r, cell) for r in found):
            continue
        seed_everything(cell['seed'])
        result = {**cell, **analysis.result(cell, options), 'commit': common.COMMIT}
        print(
            f'{name}: test {100 * result["test"]:.1f}, {result["seconds"]} s',
            flush=True,
        )
        with common.locked(file):  # others may run other portions
            content = read_json(file) or new
            if not any(matches(r, cell) for r in content['cells']):
                content['cells'].append(result)
                write_json(file, content)
            found[:] = content['cells']
    return found


def make_table(name: str, found: list[Result]) -> str:
    """The table of an analysis; nothing where there is nothing to show yet."""
    panels = ANALYSES[name].panels
    if panels is None:
        return graphs_table(found) if found else ''
    return panels_table([panel for panel in panels(found) if panel.lines])


def draw(name: str, found: list[Result], file: Path) -> None:
    """Draws the plot; the same results give the same file."""
    panels = ANALYSES[name].panels
    with matplotlib.rc_context({'svg.hashsalt': name, 'font.size': 10}):
        if panels is None:
            figure = draw_graphs(found)
        else:
            figure = draw_panels([panel for panel in panels(found) if panel.lines])
        figure.savefig(file, dpi=120, metadata={'Date': None})


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', choices=ANALYSES)
    parser.add_argument('--quick', action='store_true', help='three epochs, one seed')
    parser.add_argument('--show', action='store_true', help='run nothing, only show')
    parser.add_argument('--seeds', type=int, nargs='+')
    parser.add_argument('--dataset', nargs='+', help='only these')
    parser.add_argument('--systems', nargs='+', help='only these')
    parser.add_argument(
        '--rates',
        '--values',
        dest='values',
        type=float,
        nargs='+',
        help='only these values of what is varied',
    )
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    found = run(args)
    file = results_file(args.name, args.results, args.quick)
    if text := make_table(args.name, found):
        draw(args.name, found, file.with_suffix('.svg'))
    print(text or 'Nothing to show yet')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
