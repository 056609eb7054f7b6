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

Each finished cell (settings and a seed) is in benchmarks/results/analysis/NAME.json at
once, and never run again. The table (printed, and on the pages by `report.py --update`)
and the plot (NAME.svg) show what is there.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common
import matplotlib
import systems
import torch
from common import CONFIGS, TITLES, mean_and_deviation, read_json, write_json
from matplotlib.figure import Figure
from options import add_options, explain_errors, stage
from records import checkpoint_file
from systems import TITLES as SYSTEMS
from systems import System, load_data, load_settings
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import coalesce, remove_self_loops, to_torch_csr_tensor

from torch_geometric_idgl.datasets import AttackedGraph
from torch_geometric_idgl.training import accuracy
from torch_geometric_idgl.transforms import CosineKNNGraph, PerturbEdges, PruneEdges

Row = dict[str, Any]  # a cell (data, system, what is varied, seed), and its result

# The colours of Okabe and Ito, which the colour-blind can tell apart.
COLOURS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000']
GREY = '#999999'
MARKERS = 'osD^vP*'
DASHES = ['--', ':', '-.', (0, (3, 1, 1, 1))]
PERTURBED_TITLES = SYSTEMS | {
    'idgl-anch': 'IDGL-Anch, 100 anchors',
    'gcn-pruned': 'GCN, pruned',
    'gcn-knn': 'GCN, given + kNN edges',
    'idgl-pruned': 'IDGL, pruned',
}
PUBLISHED = common.read_yaml(CONFIGS / 'analysis.yaml')
CHANGE = '‖A(t) − A(t−1)‖² / ‖A(t)‖²'
STOPPING = (0, 1, 2, 3, 4, 6, 8, 10)

# The settings that keys of a cell are.
CHANGED = {'lambda': 'initial_weight', 'iterations': 'max_iters'}
CHANGED |= {'anchors': 'num_anchors', 'scaled': 'scale_regularizer'}
# The paper's settings of graphs with random edges; the others are those of clean ones.
PERTURBED = {
    'delete': {'initial_weight': 0.7, 'update_weight': 0.1},
    'add': {'initial_weight': 0.1, 'update_weight': 0.2},
}
# Of perturbed graphs: what this package has by default, but fewer anchors.
FEW_ANCHORS = {'num_anchors': 100, 'scale_regularizer': True}
# What is chosen on the dev nodes, by cross-entropy: IDGL's weight of the initial graph,
# the smallest similarity of edges that are kept, the number of neighbours.
WEIGHTS = [0.8, 0.5, 0.25, 0.1, 0.0]
THRESHOLDS = [0.01, 0.02, 0.03, 0.04, 0.05]
ATTACK_OPTIONS = {'gcn': [None], 'gcn-pruned': [*THRESHOLDS, 0.075, 0.1, 0.15]}
ATTACK_OPTIONS |= {'gcn-knn': [5, 10, 20]}
ATTACK_OPTIONS |= {'idgl': WEIGHTS, 'idgl-pruned': THRESHOLDS}


def prepare(cell: Row, root: str) -> tuple[str, Row, Data]:
    """The network, its settings and the data of a cell. On all changed graphs, IDGL has
    the paper's settings for Cora: those for Citeseer are not known for random edges,
    and take ten times as long on attacked graphs. On these, GCN has binary features, as
    where its figures were published, and IDGL rows scaled to a sum of one, as the
    paper's smoothness wants.
    """
    dataset, system, seed = cell['dataset'], cell['system'], cell['seed']
    base = system.removesuffix('-pruned').removesuffix('-knn')
    own, option = base.startswith('idgl'), cell.get('option')
    published = 'cora' if own and 'rate' in cell else dataset
    settings = load_settings(System(base), published)
    if base == 'idgl-anch' and 'rate' in cell:
        settings |= FEW_ANCHORS
    settings |= {
        CHANGED[k]: v for k, v in cell.items() if k in CHANGED and v is not None
    }
    if cell.get('iterations') is not None:  # without the stopping criterion
        settings['tol'] = None
    if 'option' not in cell:
        data = load_data(base, dataset, settings, root, seed)
    else:
        folder = str(Path(root) / 'adversarial')
        data = AttackedGraph(folder, dataset, rate=cell['rate'])[0]
        if system.endswith('-pruned'):
            data = PruneEdges(option)(data)
        elif system.endswith('-knn'):
            knn = CosineKNNGraph(option, force_undirected=True)(data)
            index = torch.cat([data.edge_index, knn.edge_index], dim=1)
            data.edge_index = coalesce(remove_self_loops(index)[0])
        elif own:
            settings['initial_weight'] = option
        if own:
            data = NormalizeFeatures()(data)
        else:
            data.x = data.x.to_sparse_csr()
    if 'kind' in cell:
        settings |= PERTURBED[cell['kind']] if own else {}
        data = PerturbEdges(**{cell['kind']: cell['rate']}, seed=seed)(data)
        if base == 'gcn':  # of millions of edges, a matrix is multiplied much sooner
            index, weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
            data.edge_index = to_torch_csr_tensor(index, weight, data.num_nodes)
    return base, settings, data


def train(cell: Row, args: argparse.Namespace) -> tuple[Any, Data, Row]:
    """Trains a system, or goes on; returns model, data and what it reached."""
    base, settings, data = prepare(cell, args.root)
    if args.quick and base == 'lds':
        settings |= {'max_windows': 1, 'max_restarts': 1, 'samples': 1}
    elif args.quick:
        settings |= {'max_epochs': 3, 'first_phase': 0}
    about = (cell['dataset'], base, [cell, settings], cell['seed'], 'analysis')
    how = {'progress': not args.quiet, 'checkpoint': checkpoint_file(args.root, *about)}
    how['desc'] = ' '.join(map(str, cell.values()))
    data = data.to(args.device)
    model, result = systems.train(System(base), settings, data, cell['seed'], **how)
    if 'iterations' in cell:
        result['mean_iterations'] = result.pop('iterations')
    return model, data, {**result, 'seconds': round(result['seconds'], 1)}


@dataclass
class Panel:
    """A plot: values of all seeds for each point of a line; dashed ones are no runs."""

    xlabel: str
    title: str = '{}'  # with the name of the data set
    ylabel: str = 'test accuracy (%)'
    lines: dict[str, dict[float, list[float]]] = field(default_factory=dict)
    dashed: set[str] = field(default_factory=set)


@dataclass
class Analysis:
    """Which cells there are, what is asked of a trained model, and what is shown."""

    title: str
    varied: dict[str, Sequence]  # of all combinations, with each system and seed
    panels: dict[str | None, Panel]  # by kind, if any
    x: str = 'iteration'  # the key of the x-axis, which `--values` is about
    datasets: Sequence[str] = ('cora', 'citeseer')
    systems: Sequence[str] = ('idgl',)
    line: str = 'system'  # the key that lines differ in
    labels: dict[Any, str] = field(default_factory=lambda: SYSTEMS)  # in their order
    others: str = 'paper'  # where the dashed lines are from
    seeds: Sequence[int] = range(5)

    def list_cells(self, seeds: Sequence[int], found: list[Row]) -> Iterator[Row]:
        table = {'dataset': self.datasets, 'system': self.systems, **self.varied}
        for values in itertools.product(*table.values(), seeds):
            yield dict(zip([*table, 'seed'], values, strict=True))

    def inspect(self, model: torch.nn.Module, data: Data) -> Row:
        return {}

    def rows(self, found: list[Row]) -> list[Row]:
        """What is shown of results, with a `value`; without a seed it is no run."""
        return [{**r, 'value': 100 * r['test']} for r in found]


class Attacks(Analysis):
    def list_cells(self, seeds: Sequence[int], found: list[Row]) -> Iterator[Row]:
        for cell in super().list_cells([0], found):
            del cell['seed']
            # Seed 0 tries every option; the others take the one that is chosen.
            for option in ATTACK_OPTIONS[cell['system']] if 0 in seeds else ():
                yield {**cell, 'option': option, 'seed': 0}
            # By now, these cells have been run.
            best = chosen([r for r in found if cell.items() <= r.items()])
            for option, seed in itertools.product(best, filter(None, seeds)):
                yield {**cell, 'option': option, 'seed': seed}

    def rows(self, found: list[Row]) -> list[Row]:
        groups = grouped(found, 'dataset', 'system', 'rate').values()
        shown = [r for runs in groups for r in runs if r['option'] in chosen(runs)]
        return super().rows(shown)


def chosen(found: list[Row]) -> list[Any]:
    """The option with the lowest dev cross-entropy, once seed 0 has tried them all."""
    losses = {r['option']: r['dev_cross_entropy'] for r in found if r['seed'] == 0}
    tried = losses and losses.keys() >= {*ATTACK_OPTIONS[found[0]['system']]}
    return [min(losses, key=losses.get)] if tried else []


class Convergence(Analysis):
    @torch.no_grad()
    def inspect(self, model: torch.nn.Module, data: Data) -> Row:
        model.tol = None  # goes on to the end
        changes, scores, graph = [], [], None
        for t in range(model.max_iters + 1):
            previous = graph
            out, trace = model(data, max_iters=t, return_trace=True)
            scores.append(accuracy(out[data.test_mask], data.y[data.test_mask]))
            graph = trace.learned
            if t:
                changes.append(float(graph.sq_dist(previous) / graph.sq_norm()))
        return {'changes': changes, 'scores': scores}

    def rows(self, found: list[Row]) -> list[Row]:
        return [
            {**r, 'kind': kind, 'iteration': t, 'value': scale * value}
            for r in found
            for kind, first, scale in (('changes', 1, 1), ('scores', 0, 100))
            for t, value in enumerate(r[kind], first)
        ]


class Stopping(Analysis):
    def rows(self, found: list[Row]) -> list[Row]:
        rows = super().rows([r for r in found if r['iterations'] is not None])
        for (dataset, number), runs in grouped(found, 'dataset', 'iterations').items():
            if number is None:
                row = {'dataset': dataset, 'system': 'stopping criterion'}
                row['value'] = statistics.fmean(100 * r['test'] for r in runs)
                rows += [{**row, 'iterations': x} for x in STOPPING]
        return rows


class Graphs(Analysis):
    """Both graphs as shares of weight within classes, and as the strongest pairs of
    nodes, of the learned graph as many as are given.
    """

    @torch.no_grad()
    def inspect(self, model: torch.nn.Module, data: Data) -> Row:
        _, trace = model(data, return_trace=True)
        place = data.y.argsort(stable=True).argsort()  # beside nodes of the same class
        result: Row = {'classes': data.y.bincount().tolist()}
        count = None
        for name in ('initial', 'learned', 'mixed'):
            edge_index, weight = getattr(trace, name).to_edges()
            index, weight = remove_self_loops(edge_index, weight)
            same = data.y[index[0]] == data.y[index[1]]
            share = float(weight[same].sum() / weight.sum())
            result[name] = {'within_class': share, 'edges': edge_index.size(1)}
            if name != 'mixed':
                pairs = place[index].sort(dim=0)[0]
                pairs, weight = coalesce(pairs, weight, reduce='max')
                top = weight.argsort(descending=True, stable=True)[:count]
                count = top.numel()
                top = pairs[:, top].t().flatten().tolist()
                result[name]['pairs'] = ' '.join(map(str, top))
        return result

    def rows(self, found: list[Row]) -> list[Row]:
        """One of each data set."""
        return [runs[0] for _, runs in sorted(grouped(found, 'dataset').items())]


def grouped(found: list[Row], *keys: str) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for result in found:
        groups.setdefault(tuple(map(result.get, keys)), []).append(result)
    return groups


def make_panels(name: str, found: list[Row]) -> list[Panel]:
    """The panels of all data sets (and kinds) that have runs."""
    analysis = ANALYSES[name]
    line, x, rows, panels = analysis.line, analysis.x, analysis.rows(found), []
    for dataset, figures in PUBLISHED.get(name, {}).items():
        for other, values in figures.items():
            row = {'dataset': dataset, line: f'{other} ({analysis.others})'}
            rows += [{**row, x: place, 'value': v} for place, v in values.items()]
    dashed = {r[line]: r[line] for r in rows if 'seed' not in r}
    for (dataset, kind), own in grouped(rows, 'dataset', 'kind').items():
        lines: dict[str, dict[float, list[float]]] = {}
        for key, label in {**analysis.labels, **dashed}.items():
            points = grouped([r for r in own if r[line] == key], x)
            for (place,), runs in sorted(points.items()):
                lines.setdefault(label, {})[place] = [r['value'] for r in runs]
        if lines.keys() - dashed.keys():
            panel = replace(analysis.panels[kind], lines=lines, dashed={*dashed})
            panel.title = panel.title.format(TITLES[dataset])
            panels.append(panel)
    return panels


def make_table(name: str, found: list[Row]) -> str:
    """The table of an analysis; nothing where there is nothing to show yet."""
    if name == 'graphs':
        return graphs_table(ANALYSES[name].rows(found))
    parts = []
    for panel in make_panels(name, found):
        points = sorted(set().union(*panel.lines.values()))
        rows = []
        for label, values in panel.lines.items():
            texts = {x: mean_and_deviation(v) for x, v in values.items()}
            if panel.ylabel == CHANGE:
                texts = {x: f'{statistics.fmean(v):.2g}' for x, v in values.items()}
            runs = [] if label in panel.dashed else [len(v) for v in values.values()]
            count = '–'.join(map(str, sorted({min(runs), max(runs)}))) if runs else ''
            rows.append([label, *(texts.get(x, '–') for x in points), count])
        header = [panel.xlabel, *(f'{x:g}' for x in points), 'runs']
        parts.append(f'{panel.title}: {panel.ylabel}\n\n{common.table(header, rows)}')
    return '\n\n'.join(parts)


def draw(name: str, found: list[Row], file: Path) -> None:
    """Draws the plot; the same results give the same file."""
    with matplotlib.rc_context({'svg.hashsalt': name, 'legend.fontsize': 9}):
        if name == 'graphs':
            figure = draw_graphs(ANALYSES[name].rows(found))
        else:
            figure = draw_panels(make_panels(name, found))
        figure.savefig(file, dpi=120, metadata={'Date': None})


def draw_panels(panels: list[Panel]) -> Figure:
    """Means of the seeds as lines, their deviations as bars."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8.4, 3.2 * rows + 1), layout='constrained')
    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    ours = [label for label in labels if label not in panels[0].dashed]
    others = [label for label in labels if label in panels[0].dashed]
    styles: dict[str, Row] = {}
    for label, colour, marker in zip(ours, COLOURS, MARKERS, strict=False):
        styles[label] = {'color': colour, 'marker': marker, 'capsize': 2}
    for i, (label, dashes) in enumerate(zip(others, DASHES, strict=False)):
        styles[label] = {'color': str(0.2 + 0.4 * i / len(others)), 'linestyle': dashes}
    handles = {}
    for i, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, i)
        for label, values in panel.lines.items():
            means, stds = zip(*map(common.mean_std, values.values()), strict=True)
            bars = stds if label in ours else None
            handles[label] = axes.errorbar([*values], means, bars, **styles[label])
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.set_xticks(sorted(set().union(*panel.lines.values())))
        axes.set_yscale('log' if panel.ylabel == CHANGE else 'linear')
        axes.grid(alpha=0.3)
    style = {'loc': 'outside lower center', 'ncols': 3 if len(handles) > 4 else 2}
    figure.legend(handles.values(), handles.keys(), **style)
    return figure


def drawn_pairs(r: Row, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The pairs of nodes that are drawn of a graph; the class that each of them is
    within, from one, or zero; and how many are within one, in percent.
    """
    pairs = torch.tensor([int(i) for i in r[name]['pairs'].split()]).view(-1, 2)
    ends = torch.tensor(r['classes']).cumsum(0)
    first, second = torch.bucketize(pairs, ends, right=True).t()
    same = first == second
    return pairs, (first + 1) * same, 100 * float(same.float().mean())


def draw_graphs(found: list[Row]) -> Figure:
    """Both graphs of each data set as matrices of nodes that are sorted by class."""
    figure = Figure(figsize=(8, 4.2 * len(found)), layout='constrained')
    panels = itertools.product(found, ('initial', 'learned'))
    for place, (result, name) in enumerate(panels, 1):
        axes = figure.add_subplot(len(found), 2, place)
        pairs, label, share = drawn_pairs(result, name)
        label, order = label.sort(stable=True)  # those between classes lie below
        x, y = torch.cat([pairs[order].flip(1), pairs[order]]).t()
        n, classes = sum(result['classes']), len(result['classes'])
        colours = [[GREY, *COLOURS][i] for i in label.repeat(2)]
        style = {'s': 40 / (classes * n) ** 0.5, 'linewidths': 0, 'rasterized': True}
        axes.scatter(x, y, c=colours, **style)
        weight = 100 * result[name]['within_class']
        title = f'{TITLES[result["dataset"]]}, {name} graph; within classes:\n'
        title += f'{weight:.0f} % of all weight, {share:.0f} % of the drawn pairs'
        axes.set_title(title, fontsize=11)
        axes.set(xlim=(0, n), ylim=(n, 0), aspect='equal')
        axes.set(xlabel='node, sorted by class', ylabel='node, sorted by class')
    for i, colour in enumerate(COLOURS[: max(len(r['classes']) for r in found)], 1):
        axes.plot([], [], 'o', color=colour, label=f'within class {i}')
    axes.plot([], [], 'o', color=GREY, label='between classes')
    figure.legend(loc='outside lower center', ncols=4)
    return figure


def graphs_table(found: list[Row]) -> str:
    """The shares of weight, and of drawn pairs, within classes; and the accuracy."""
    header = ['within classes (%)', 'initial graph', 'learned graph', 'mixed graph']
    header += ['drawn pairs of the initial graph', 'of the learned graph', 'accuracy']
    rows = []
    for r in found:
        cells = [100 * r[n]['within_class'] for n in ('initial', 'learned', 'mixed')]
        cells += [drawn_pairs(r, n)[2] for n in ('initial', 'learned')]
        cells = [f'{x:.1f}' for x in (*cells, 100 * r['test'])]
        rows.append([TITLES[r['dataset']], *cells])
    return common.table(header, rows) if rows else ''


ANALYSES = {
    'edges': Analysis(
        'Random edges',
        {'kind': ('delete', 'add'), 'rate': (0.25, 0.5, 0.75)},
        {
            'delete': Panel('probability that an edge is deleted', '{}, edges deleted'),
            'add': Panel('probability that a missing edge is added', '{}, edges added'),
        },
        'rate',
        systems=('gcn', 'idgl', 'idgl-anch', 'lds'),
        labels=PERTURBED_TITLES,
    ),
    'attacks': Attacks(
        'Attacked graphs',
        {'rate': (0.25, 0.2, 0.15, 0.1, 0.05, 0.0)},
        {None: Panel('share of edges changed', '{}, attacked by Metattack')},
        'rate',
        systems=tuple(ATTACK_OPTIONS),
        labels=PERTURBED_TITLES,
        others='published',
        seeds=range(10),
    ),
    'convergence': Convergence(
        'Convergence',
        {},
        {'changes': Panel('iteration', ylabel=CHANGE), 'scores': Panel('iteration')},
    ),
    'stopping': Stopping(
        'Stopping',
        {'iterations': (None, *STOPPING)},
        {None: Panel('iterations')},
        'iterations',
        labels={'idgl': 'fixed number'},
    ),
    'lambda': Analysis(
        'Weight of the initial graph',
        {'lambda': (0.9, 0.8, 0.7, 0.6, 0.5)},
        {None: Panel('weight λ of the initial graph')},
        'lambda',
        datasets=('cora',),
        systems=('idgl', 'idgl-anch'),
    ),
    'anchors': Analysis(
        'Number of anchors',
        {'scaled': (True, False), 'anchors': (100, 400, 700, 1000, 1300, 1600)},
        {None: Panel('number of anchors')},
        'anchors',
        datasets=('cora', 'pubmed'),
        systems=('idgl-anch',),
        line='scaled',
        labels={True: 'rescaled regulariser', False: "paper's regulariser"},
    ),
    'graphs': Graphs('Learned graphs', {}, {}, datasets=('wine', 'cora'), seeds=(0,)),
}


def results_file(name: str, folder: Path, quick: bool = False) -> Path:
    """Where the cells of an analysis are kept; quick ones do not mix with others."""
    return folder / 'analysis' / f'{name}{"-quick" if quick else ""}.json'


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', choices=ANALYSES)
    parser.add_argument('--quick', action='store_true', help='three epochs, one seed')
    parser.add_argument('--show', action='store_true', help='run nothing, only show')
    parser.add_argument('--seeds', type=int, nargs='+')
    for option in ('--dataset', '--systems'):
        parser.add_argument(option, nargs='+', help='only these')
    varied = {'dest': 'values', 'help': 'only these values of what is varied'}
    parser.add_argument('--rates', '--values', type=float, nargs='+', **varied)
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the cells that are wanted and not there yet, and shows all there are."""
    args = parse_args(argv)
    stage(args)
    analysis = ANALYSES[args.name]
    file = results_file(args.name, args.results, args.quick)
    new = {'analysis': args.name, 'versions': common.versions(), 'cells': []}
    found = (read_json(file) or new)['cells']
    seeds = [0] if args.quick else args.seeds or analysis.seeds
    asked = {'dataset': args.dataset, 'system': args.systems, analysis.x: args.values}
    asked = {key: values for key, values in asked.items() if values}
    known = {
        'dataset': analysis.datasets,
        'system': analysis.systems,
        **analysis.varied,
    }
    for key, values in asked.items():
        if wrong := [value for value in values if value not in known.get(key, ())]:
            raise ValueError(
                f"Expected '{key}' to be among {list(known.get(key, ()))} for the "
                f"analysis '{args.name}' (got {wrong})"
            )
    for cell in () if args.show else analysis.list_cells(seeds, found):
        portion = all(cell[key] in asked[key] for key in asked.keys() & cell.keys())
        if not portion or any(cell.items() <= r.items() for r in found):
            continue
        seed_everything(cell['seed'])
        model, data, result = train(cell, args)
        result = {**cell, **result, **analysis.inspect(model, data)}
        result['commit'] = common.COMMIT
        score = f'test {100 * result["test"]:.1f}, {result["seconds"]} s'
        print(*cell.values(), score, flush=True)
        with common.locked(file):  # others may run other portions
            content = read_json(file) or new
            if not any(cell.items() <= r.items() for r in content['cells']):
                content['cells'].append(result)
                write_json(file, content)
            found[:] = content['cells']
    if text := make_table(args.name, found):
        draw(args.name, found, file.with_suffix('.svg'))
    print(text or 'Nothing to show yet')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
