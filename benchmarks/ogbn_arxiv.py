"""ogbn-arxiv as OGB's leaderboard wants it: ten runs, with OGB's split and evaluator.

    python benchmarks/ogbn_arxiv.py                    # IDGL-Anch, the paper's settings
    python benchmarks/ogbn_arxiv.py --model gcn        # or sage, with OGB's settings
    python benchmarks/ogbn_arxiv.py --features structural --runs 3
    python benchmarks/ogbn_arxiv.py --table            # all results side by side

A run that was stopped goes on where it was, and finished ones (in
benchmarks/results/ogbn_arxiv/) are not run again. At the end stands what OGB's
submission form asks for.

Where OGB's node features cannot be had, `--features structural` makes 128 from the
graph alone (:meth:`structural_features`): figures are not the leaderboard's then.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from common import RESULTS, machine, mean_and_deviation, read_json, table
from options import add_options, explain_errors, positive, stage
from records import checkpoint_file, read_runs, run_missing
from systems import FIT, TITLES, System, load_settings, make_model
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, to_torch_csr_tensor

from torch_geometric_idgl.datasets.load import load, load_arxiv_graph
from torch_geometric_idgl.ops.sparse import SparseMatrix
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.training.checkpoint import replacing

DATASET = 'ogbn-arxiv'
MODELS = {'idgl-anch': 'idgl-anch', 'gcn': 'gcn', 'sage': 'graphsage'}
# What tables and files say about the features. Another recipe needs another text:
# results and stored features of another text are not used.
FEATURES = {'ogb': "OGB's node features"}
FEATURES['structural'] = (
    'structural: made from the graph alone, 128 singular vectors of its '
    'log-weighted edges, smoothed over four hops'
)
NUM_FEATURES = 128
LEADERBOARD_RUNS = 10
LOGGED = ('highest_train', 'highest_valid', 'final_train', 'final_test')
CHECKPOINT_EVERY = 10  # epochs, of which some take a quarter of a minute


def structural_features(edge_index: Tensor, num_nodes: int) -> Tensor:
    r"""128 features of each node, made from an undirected graph alone, as by ProNE
    (Zhang et al., IJCAI 2019) with a simpler filter: the largest singular vectors of
    the edges, weighted by :math:`\max(0, \log(1 / d_i) - \log q_j)` with the degree
    :math:`d_i` and word2vec's noise :math:`q_j \sim d_j^{3/4}`, smoothed by products
    with GCN's adjacency. Of a dozen recipes, this was the best one for a linear model
    on the dev nodes.
    """
    n, (row, col) = num_nodes, edge_index
    deg = degree(row, n)
    noise = deg.pow(0.75) / deg.pow(0.75).sum()
    weight = (-deg[row].log() - noise[col].log()).clamp(min=0)
    edges = SparseMatrix.from_coo(row, col, weight, (n, n))
    turned = SparseMatrix.from_coo(col, row, weight, (n, n))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(n, min(n, NUM_FEATURES + 12), generator=generator)
    for _ in range(4):
        q = torch.linalg.qr(edges.matmul(q))[0]
        q = torch.linalg.qr(turned.matmul(q))[0]
    u, s, _ = torch.linalg.svd(edges.matmul(q), full_matrices=False)
    x = F.normalize((u * s.sqrt())[:, :NUM_FEATURES])

    (source, target), weight = gcn_norm(edge_index, num_nodes=n)
    adj = SparseMatrix.from_coo(target, source, weight, (n, n))
    for _ in range(2):
        x = F.normalize(adj.matmul(adj.matmul(x)))
    x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-6)
    return F.pad(x, (0, NUM_FEATURES - x.size(1)))  # of a graph of fewer nodes


def load_data(features: str, root: str) -> Data:
    """The graph with OGB's features, or with structural ones, which are kept."""
    if features == 'ogb':
        return load(DATASET, root)
    data, folder = load_arxiv_graph(root), Path(root).expanduser() / 'ogb/ogbn_arxiv'
    file = folder / 'processed' / 'structural_features.pt'
    kept = torch.load(file, weights_only=True) if file.exists() else {}
    if kept.get('recipe') != FEATURES[features]:
        x = structural_features(data.edge_index, len(data.y))
        kept = {'recipe': FEATURES[features], 'x': x}
        with replacing(file) as temporary:
            torch.save(kept, temporary)
    data.x = kept['x']
    return data


def with_matrix(data: Data, model: str) -> Data:
    """Makes edges the matrix that GCN or GraphSAGE multiplies by, which is faster."""
    index, n = data.edge_index, len(data.y)
    if model == 'gcn':
        index, weight = gcn_norm(index, num_nodes=n)
    elif model == 'sage':  # the mean of the neighbours
        weight = 1 / degree(index[1], n)[index[1]]
    else:  # IDGL-Anch makes its own
        return data
    data.edge_index = to_torch_csr_tensor(index.flip(0), weight, (n, n))
    return data


def settings_of(model: str) -> dict[str, Any]:
    """The paper's settings of IDGL-Anch; of the others OGB's, that never stop early."""
    settings = load_settings(System(MODELS[model]), DATASET)
    if model != 'idgl-anch':
        settings.update(monitor='score', patience=settings['max_epochs'])
    return settings


def ogb_accuracy(out: Tensor, y: Tensor) -> float:
    """The accuracy that OGB's evaluator gives."""
    from ogb.nodeproppred import Evaluator  # tables do without

    found = {'y_true': y.view(-1, 1), 'y_pred': out.argmax(dim=-1, keepdim=True)}
    return float(Evaluator(DATASET).eval(found)['acc'])


def run(args: argparse.Namespace, data: Data, seed: int, kept: dict) -> dict[str, Any]:
    """Trains a model once and prints its epochs; returns what is kept of the run."""
    settings, whole = settings_of(args.model), kept['max_epochs']
    settings['max_epochs'] = min(args.max_epochs or whole, whole)
    root, name = str(Path(args.root).expanduser()), f'{args.features}_{args.model}'
    seed_everything(seed)
    network = make_model(MODELS[args.model], settings, data).to(args.device)
    clock = [time.process_time()]  # after each epoch of this process

    def log(epoch: int, values: dict[str, Any]) -> None:
        clock.append(time.process_time())
        if not args.quiet and (epoch + 1) % args.log_steps == 0:
            text = f'Run: {seed + 1:02d}, Epoch: {epoch + 1:02d}, '
            text += f'Loss: {values["train_loss"]:.4f}, '
            text += f'Train: {100 * values["train_score"]:.2f}%, '
            text += f'Valid: {100 * values["val_score"]:.2f}% '
            print(text + f'Test: {100 * values["test_score"]:.2f}%', flush=True)

    record = fit(
        network,
        data.to(args.device),
        score_fn=ogb_accuracy,
        progress=False,
        checkpoint=checkpoint_file(root, DATASET, name, kept, seed, 'ogbn_arxiv'),
        checkpoint_every=CHECKPOINT_EVERY,
        history=True,
        callback=log,
        **{key: settings[key] for key in FIT if key in settings},
    )
    epochs = record.history or []
    spent = [after - before for before, after in itertools.pairwise(clock)]
    best = max(epochs, key=lambda values: values['val_score'])  # the first, as in OGB
    lowest = min(epochs, key=lambda values: values['val_loss'])
    return {
        'highest_train': max(values['train_score'] for values in epochs),
        'highest_valid': best['val_score'],
        'final_train': best['train_score'],
        'final_test': best['test_score'],
        'best_epoch': best['epoch'],
        'lowest_loss_test': lowest['test_score'],  # the weights that the paper takes
        'epochs': record.epochs,
        'seconds': record.seconds,
        # Of all threads; what others on the machine do changes it little.
        'cpu_seconds_per_epoch': median(spent) if spent else None,
        'parameters': sum(p.numel() for p in network.parameters()),
        'cut_short': settings['max_epochs'] == record.epochs < whole,
        'hardware': hardware(args.device),
        'ogb': metadata.version('ogb'),
    }


def hardware(device: torch.device | str) -> str:
    """What the submission form wants to know of the machine."""
    info, found = Path('/proc/cpuinfo'), machine(device)
    name = re.search('model name\t: (.+)', info.read_text()) if info.exists() else None
    cpu = name[1] if name else platform.processor() or platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    text = f'{cpu}, {found["threads"]} threads, {memory:.0f} GB of memory'
    return text if found['device'] == 'cpu' else f'{found["device"]}, {text}'


def run_seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the seeds that are not in the results file yet; returns its content."""
    model, features = args.model, args.features
    settings = {**settings_of(model), 'features': FEATURES[features]}
    about = {'dataset': DATASET, 'model': model, 'settings': settings}
    command = f'python benchmarks/ogbn_arxiv.py --model {model} --features {features}'
    command += f' --max-epochs {args.max_epochs}' if args.max_epochs else ''
    file = args.results / 'ogbn_arxiv' / f'{features}-features_{model}.json'

    @functools.cache
    def data() -> Data:
        return with_matrix(load_data(features, args.root), model)

    def run_seed(seed: int) -> dict[str, Any]:
        return run(args, data(), seed, settings)

    def describe(_: dict, run: dict[str, Any]) -> str:
        return logged(f'Run {run["seed"] + 1:02d}', [run])

    seeds = range(args.first, args.first + args.runs)
    runs = run_missing(file, about, command, seeds, run_seed, args.device, describe)
    return {**read_runs(file, about), 'runs': runs}


def figure(runs: list[dict], key: str, scale: float = 100, digits: int = 2) -> str:
    """Mean and unbiased standard deviation, which a single run has not."""
    return mean_and_deviation([scale * run[key] for run in runs], digits)


def logged(title: str, runs: list[dict[str, Any]]) -> str:
    """Runs as OGB's logger shows them."""
    names = {key: key.replace('_', ' ').title() for key in LOGGED}
    lines = [f'{name:>13}: {figure(runs, key)}' for key, name in names.items()]
    return '\n'.join([f'{title}:', *lines])


def submission(content: dict[str, Any]) -> str:
    """What the submission form of OGB asks for, and what stands against one."""
    runs, settings = content['runs'], content['settings']
    score = functools.partial(figure, runs, scale=1, digits=4)
    versions = [_pairs({**run['versions'], 'ogb': run['ogb']}) for run in runs]
    form = {
        'Method': TITLES[MODELS[content['model']]],
        'Dataset': DATASET,
        'Features': settings['features'],
        'Test accuracy': score('final_test'),
        'Validation accuracy': score('highest_valid'),
        'Test accuracy at the lowest validation loss': score('lowest_loss_test'),
        'Runs': f'{len(runs)}, seeds {", ".join(str(run["seed"]) for run in runs)}',
        'Parameters': runs[0]['parameters'],
        'Hardware': '; '.join(dict.fromkeys(run['hardware'] for run in runs)),
        'Command': content['command'],
        'Versions': '; '.join(dict.fromkeys(versions)),
        'Settings': _pairs(settings),
    }
    against = {
        "the features are not OGB's": settings['features'] != FEATURES['ogb'],
        f'OGB asks for {LEADERBOARD_RUNS} runs': len(runs) < LEADERBOARD_RUNS,
        'runs were cut short by --max-epochs': any(run['cut_short'] for run in runs),
    }
    if reasons := [reason for reason, holds in against.items() if holds]:
        form['Not to be submitted'] = '; '.join(reasons)
    lines = [f'{name}: {text}' for name, text in form.items()]
    return '\n'.join(['For the submission form:', *lines])


def _pairs(content: dict[str, Any]) -> str:
    return ', '.join(f'{key} {value}' for key, value in content.items())


def make_table(folder: Path = RESULTS) -> str:
    """All results side by side, each kind of features under its name."""
    found, parts = [*map(read_json, (folder / 'ogbn_arxiv').glob('*.json'))], []
    for text in FEATURES.values():
        same = {c['model']: c for c in found if c['settings']['features'] == text}
        rows = [_row(model, same[model]['runs']) for model in MODELS if model in same]
        if rows:
            cells = table([*rows[0]], [[*row.values()] for row in rows])
            parts.append(f'{DATASET}, features: {text}\n\n{cells}')
    return '\n\n'.join(parts) or 'There are no results yet.'


def _row(model: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    key = 'cpu_seconds_per_epoch'  # not known if a killed process had run all epochs
    spent = [run[key] for run in runs if run[key] is not None]
    epochs = f'{fmean(run["epochs"] for run in runs):.0f}'
    seconds = fmean(run['seconds'] / run['epochs'] for run in runs)
    return {
        '': TITLES[MODELS[model]],
        'valid (%)': figure(runs, 'highest_valid'),
        'test (%)': figure(runs, 'final_test'),
        'test, lowest valid loss (%)': figure(runs, 'lowest_loss_test'),
        'runs': str(len(runs)),
        'epochs': epochs + ' (cut short)' * any(run['cut_short'] for run in runs),
        'seconds per epoch': f'{seconds:.1f}',
        'of CPUs': f'{fmean(spent):.1f}' if spent else '–',
        'peak memory (MB)': f'{max(run["peak_memory_mb"] for run in runs):,.0f}',
        'parameters': f'{runs[0]["parameters"]:,}',
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('--model', choices=[*MODELS], default='idgl-anch')
    add('--features', choices=[*FEATURES], default='ogb', help="OGB's or structural")
    add('--runs', type=positive, default=LEADERBOARD_RUNS, help='number of seeds')
    add('--first', type=int, default=0, help='first seed')
    add('--max-epochs', type=positive, help='stop there; a killed run may be ended so')
    add('--log-steps', type=positive, default=1, help='epochs from line to line')
    add('--table', action='store_true', help='only show all results')
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if not args.table:
        stage(args)
        content = run_seeds(args)
        print(logged('All runs', content['runs']))
        print(f'\n{submission(content)}\n')
    print(make_table(args.results))
    return 0


if __name__ == '__main__':
    sys.exit(main())
