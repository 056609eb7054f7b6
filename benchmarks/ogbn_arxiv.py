"""ogbn-arxiv as OGB's leaderboard wants it: ten runs, with OGB's split and evaluator.

    python benchmarks/ogbn_arxiv.py                    # IDGL-Anch, the paper's settings
    python benchmarks/ogbn_arxiv.py --model gcn        # or sage, with OGB's settings
    python benchmarks/ogbn_arxiv.py --features structural --runs 3
    python benchmarks/ogbn_arxiv.py --table            # all results side by side

A run that was stopped goes on where it was, and finished ones are in
benchmarks/results/ogbn_arxiv/ and not run again. At the end stands what OGB's
submission form asks for.

`--features structural` is for where OGB's node features cannot be had: 128 features
made from the graph alone, so that figures are not comparable with the leaderboard's.
See :meth:`structural_features` for the recipe.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from common import RESULTS, machine, mean_std, read_json, table
from options import add_options, explain_errors, positive, run_options, stage
from records import add_run, checkpoint_file, read_runs
from systems import FIT, TITLES, System, load_settings, make_model
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree

from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.datasets.load import load_arxiv_graph
from torch_geometric_idgl.ops.sparse import SparseMatrix, csr_without_warning
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.training.checkpoint import replacing

DATASET = 'ogbn-arxiv'
MODELS = {'idgl-anch': 'idgl-anch', 'gcn': 'gcn', 'sage': 'graphsage'}
# What tables and files say about the features. Another recipe needs another text:
# results and cached features of another text are not used.
FEATURES = {
    'ogb': "OGB's node features",
    'structural': (
        'structural: made from the graph alone, 128 singular vectors of its '
        'log-weighted edges, smoothed over four hops'
    ),
}
NUM_FEATURES = 128
LEADERBOARD_RUNS = 10
LOGGED = {
    'Highest Train': 'highest_train',
    'Highest Valid': 'highest_valid',
    '  Final Train': 'final_train',
    '   Final Test': 'final_test',
}
CHECKPOINT_EVERY = 10  # epochs, of which some take a quarter of a minute


# The data


def structural_features(edge_index: Tensor, num_nodes: int, seed: int = 0) -> Tensor:
    r"""128 features of each node, made from an undirected graph alone.

    With :math:`d_i` the degree of a node and :math:`q_j \sim d_j^{3/4}` the noise
    distribution of word2vec, each edge has the weight
    :math:`\max(0, \log(1 / d_i) - \log q_j)`. The 128 largest singular vectors of this
    sparse matrix, times the root of their singular values, are found by a randomised
    SVD with four power iterations. Rows are scaled to unit length, then smoothed by two
    products with GCN's normalised adjacency and scaled to unit length again, twice. At
    last columns are standardised. (It is ProNE of Zhang et al., IJCAI 2019, with a
    simpler filter.) Labels are not used; of a dozen recipes, this was the best one for
    a linear model on the dev nodes.

    Args:
        edge_index (Tensor): Both directions of each edge.
        num_nodes (int): The number of nodes.
        seed (int, optional): The seed of the random projection. (default: :obj:`0`)
    """
    n, (row, col) = num_nodes, edge_index
    deg = degree(row, n)
    noise = deg.pow(0.75) / deg.pow(0.75).sum()
    weight = (-deg[row].log() - noise[col].log()).clamp(min=0)
    edges = SparseMatrix.from_coo(row, col, weight, (n, n))
    turned = SparseMatrix.from_coo(col, row, weight, (n, n))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, min(n, NUM_FEATURES + 12), generator=generator)
    for _ in range(4):
        q = torch.linalg.qr(edges.matmul(q))[0]
        q = torch.linalg.qr(turned.matmul(q))[0]
    u, s, _ = torch.linalg.svd(edges.matmul(q), full_matrices=False)
    x = F.normalize((u * s.sqrt())[:, :NUM_FEATURES])

    adj = _normalized(edge_index, n)
    for _ in range(2):
        x = F.normalize(adj.matmul(adj.matmul(x)))
    x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-6)
    return F.pad(x, (0, NUM_FEATURES - x.size(1)))  # of a graph of fewer nodes


def _normalized(edge_index: Tensor, n: int) -> SparseMatrix:
    """What GCN multiplies by, with self-loops."""
    (source, target), weight = gcn_norm(edge_index, num_nodes=n)
    return SparseMatrix.from_coo(target, source, weight, (n, n))


def _averaging(edge_index: Tensor, n: int) -> SparseMatrix:
    """What GraphSAGE multiplies by: the mean of the neighbours."""
    source, target = edge_index
    weight = (1 / degree(target, n))[target]
    return SparseMatrix.from_coo(target, source, weight, (n, n))


def load_data(features: str, root: str) -> Data:
    """The graph with OGB's features, or with structural ones, which are kept beside
    OGB's processed files.
    """
    if features == 'ogb':
        return load(DATASET, root)
    data = load_arxiv_graph(root)
    edges = hashlib.sha256(data.edge_index.numpy().tobytes()).hexdigest()
    made_of = {'recipe': FEATURES[features], 'edges': edges}
    folder = Path(root).expanduser() / 'ogb' / 'ogbn_arxiv' / 'processed'
    file = folder / 'structural_features.pt'
    try:
        content = torch.load(file, weights_only=True)
    except Exception:  # absent or damaged; torch raises many kinds
        content = {}
    if {**content, **made_of} != content:
        x = structural_features(data.edge_index, data.y.numel())
        content = {**made_of, 'x': x}
        with replacing(file) as temporary:
            torch.save(content, temporary)
    data.x = content['x']
    return data


def with_matrix(data: Data, model: str) -> Data:
    """Turns the edges into the matrix that GCN or GraphSAGE multiplies by; IDGL-Anch
    makes its own.
    """
    if model == 'idgl-anch':
        return data
    n = data.y.numel()
    matrix = (_normalized if model == 'gcn' else _averaging)(data.edge_index, n)
    pattern = matrix.pattern
    with csr_without_warning():
        data.edge_index = torch.sparse_csr_tensor(
            pattern.rowptr, pattern.col, matrix.value, (n, n), check_invariants=False
        )
    return data


# A run


def settings_of(model: str) -> dict[str, Any]:
    """The paper's settings of IDGL-Anch, OGB's of GCN and GraphSAGE: these train for
    500 epochs, whatever comes.
    """
    settings = load_settings(System(MODELS[model]), DATASET)
    if model != 'idgl-anch':
        settings.update(monitor='score', patience=settings['max_epochs'])
    return settings


@functools.cache
def _evaluator() -> Any:
    from ogb.nodeproppred import Evaluator

    return Evaluator(name=DATASET)


def ogb_accuracy(out: Tensor, y: Tensor) -> float:
    """The accuracy that OGB's evaluator gives."""
    pred = out.argmax(dim=-1, keepdim=True)
    return float(_evaluator().eval({'y_true': y.view(-1, 1), 'y_pred': pred})['acc'])


def run(
    model: str,
    data: Data,
    seed: int,
    settings: dict[str, Any],
    *,
    device: torch.device | str = 'cpu',
    checkpoint: Path | None = None,
    log_steps: int | None = 1,
) -> dict[str, Any]:
    r"""Trains a model once; returns figures, epochs and seconds. Every
    :obj:`log_steps` epochs a line is printed, without it none.
    """
    seed_everything(seed)
    network = make_model(MODELS[model], settings, data).to(device)
    clock = [time.process_time()]  # after each epoch of this process

    def log(epoch: int, values: dict[str, Any]) -> None:
        clock.append(time.process_time())
        if log_steps is not None and (epoch + 1) % log_steps == 0:
            text = f'Run: {seed + 1:02d}, Epoch: {epoch + 1:02d}, '
            text += f'Loss: {values["train_loss"]:.4f}, '
            text += f'Train: {100 * values["train_score"]:.2f}%, '
            text += f'Valid: {100 * values["val_score"]:.2f}% '
            print(text + f'Test: {100 * values["test_score"]:.2f}%', flush=True)

    record = fit(
        network,
        data.to(device),
        score_fn=ogb_accuracy,
        progress=False,
        checkpoint=checkpoint,
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
        # The paper takes the weights of the lowest dev loss.
        'lowest_loss_epoch': lowest['epoch'],
        'lowest_loss_valid': lowest['val_score'],
        'lowest_loss_test': lowest['test_score'],
        'epochs': record.epochs,
        'seconds': record.seconds,
        'seconds_per_epoch': record.seconds / record.epochs,
        # Of all threads; what others on the machine do changes it little.
        'cpu_seconds_per_epoch': statistics.median(spent) if spent else None,
        'iterations': record.iterations,
        'parameters': sum(p.numel() for p in network.parameters()),
    }


def hardware(device: torch.device | str) -> str:
    """What the submission form wants to know of the machine."""
    cpu = platform.processor() or platform.machine()
    info = Path('/proc/cpuinfo')
    if info.exists():
        lines = [line.partition(':') for line in info.read_text().splitlines()]
        cpu = next((text.strip() for key, _, text in lines if 'model name' in key), cpu)
    memory = psutil.virtual_memory().total / 2**30
    found = machine(device)
    text = f'{cpu}, {found["threads"]} threads, {memory:.0f} GB of memory'
    return text if found['device'] == 'cpu' else f'{found["device"]}, {text}'


# Results


def results_file(model: str, features: str, folder: Path = RESULTS) -> Path:
    """Where the runs of a model are kept."""
    return folder / 'ogbn_arxiv' / f'{features}-features_{model}.json'


def run_seeds(
    model: str,
    features: str,
    seeds: range,
    root: str,
    *,
    folder: Path = RESULTS,
    device: torch.device | str = 'cpu',
    max_epochs: int | None = None,
    log_steps: int | None = 1,
) -> dict[str, Any]:
    """Runs the seeds that are not in the results file yet and adds each to it; returns
    what the file holds of these seeds.
    """
    import ogb

    settings = settings_of(model)
    kept = {**settings, 'features': FEATURES[features]}
    about = {'dataset': DATASET, 'model': model, 'settings': kept}
    file = results_file(model, features, folder)
    end = min(max_epochs or settings['max_epochs'], settings['max_epochs'])
    data = None

    command = f'python benchmarks/ogbn_arxiv.py --model {model} --features {features}'
    command += f' --max-epochs {max_epochs}' * (max_epochs is not None)

    for seed in seeds:
        runs = {run['seed']: run for run in read_runs(file, about)['runs']}
        if seed not in runs:
            if data is None:  # not before it is known to be needed
                data = with_matrix(load_data(features, root), model)
            name = f'{features}_{model}'
            where = (str(Path(root).expanduser()), DATASET, name, kept, seed)
            record = run(
                *(model, data, seed, {**settings, 'max_epochs': end}),
                device=device,
                checkpoint=checkpoint_file(*where, 'ogbn_arxiv'),
                log_steps=log_steps,
            )
            record['cut_short'] = end == record['epochs'] < settings['max_epochs']
            record |= {'hardware': hardware(device), 'ogb': ogb.__version__}
            runs[seed] = add_run(file, about, command, seed, record, device)
        print('\n'.join(run_lines(runs[seed])))
    content = read_runs(file, about)
    return {**content, 'runs': [runs[seed] for seed in seeds]}


# What is printed


def run_lines(run: dict[str, Any]) -> Iterator[str]:
    """A run as OGB's logger shows it."""
    yield f'Run {run["seed"] + 1:02d}:'
    for title, key in LOGGED.items():
        yield f'{title}: {100 * run[key]:.2f}'


def all_lines(runs: list[dict[str, Any]]) -> Iterator[str]:
    """All runs as OGB's logger shows them."""
    yield 'All runs:'
    for title, key in LOGGED.items():
        yield f'{title}: {figure(runs, key)}'


def figure(runs: list[dict[str, Any]], key: str, scale: float = 100.0) -> str:
    """Mean and unbiased standard deviation, which a single run has not."""
    digits = 2 if scale == 100.0 else 4
    mean, std = mean_std([scale * run[key] for run in runs])
    text = f'{mean:.{digits}f}'
    return text + f' ± {std:.{digits}f}' if len(runs) > 1 else text


def submission(content: dict[str, Any]) -> Iterator[str]:
    """What the submission form of OGB asks for, and what stands against one."""
    runs, settings = content['runs'], content['settings']
    yield 'For the submission form:'
    yield f'Method: {TITLES[MODELS[content["model"]]]}'
    yield f'Dataset: {DATASET}'
    yield f'Features: {settings["features"]}'
    yield f'Test accuracy: {figure(runs, "final_test", 1.0)}'
    yield f'Validation accuracy: {figure(runs, "highest_valid", 1.0)}'
    by_loss = figure(runs, 'lowest_loss_test', 1.0)
    yield f'Test accuracy at the lowest validation loss: {by_loss}'
    yield f'Runs: {len(runs)}, seeds {", ".join(str(run["seed"]) for run in runs)}'
    yield f'Parameters: {runs[0]["parameters"]}'
    yield f'Hardware: {"; ".join(dict.fromkeys(run["hardware"] for run in runs))}'
    yield f'Command: {content["command"]}'
    for text in dict.fromkeys(
        _pairs({**run['versions'], 'ogb': run['ogb']}) for run in runs
    ):
        yield f'Versions: {text}'
    yield f'Settings: {_pairs(settings)}'
    against = {
        "the features are not OGB's": settings['features'] != FEATURES['ogb'],
        f'OGB asks for {LEADERBOARD_RUNS} runs': len(runs) < LEADERBOARD_RUNS,
        'runs were cut short by --max-epochs': any(run['cut_short'] for run in runs),
    }
    if any(against.values()):
        reasons = (reason for reason, holds in against.items() if holds)
        yield f'Not to be submitted: {"; ".join(reasons)}'


def _pairs(content: dict[str, Any]) -> str:
    return ', '.join(f'{key} {value}' for key, value in content.items())


def make_table(folder: Path = RESULTS) -> str:
    """All results side by side, each kind of features under its name."""
    header = ['', 'valid (%)', 'test (%)', 'test, lowest valid loss (%)', 'runs']
    header += ['epochs', 'seconds per epoch', 'of CPUs', 'peak memory (MB)']
    header += ['parameters']
    parts = []
    for features, text in FEATURES.items():
        found = {m: read_json(results_file(m, features, folder)) for m in MODELS}
        rows = [_row(model, c['runs']) for model, c in found.items() if c]
        if rows:
            parts.append(f'{DATASET}, features: {text}\n\n{table(header, rows)}')
    return '\n\n'.join(parts) or 'There are no results yet.'


def _row(model: str, runs: list[dict[str, Any]]) -> list[str]:
    def mean(key: str, digits: int = 1) -> str:
        values = [run[key] for run in runs if run[key] is not None]
        return f'{statistics.fmean(values):.{digits}f}' if values else '–'

    row = [TITLES[MODELS[model]]]
    row += [
        figure(runs, f) for f in ('highest_valid', 'final_test', 'lowest_loss_test')
    ]
    cut = ' (cut short)' * any(run['cut_short'] for run in runs)
    row += [str(len(runs)), mean('epochs', 0) + cut, mean('seconds_per_epoch')]
    row += [mean('cpu_seconds_per_epoch')]
    row += [f'{max(run["peak_memory_mb"] for run in runs):,.0f}']
    return [*row, f'{runs[0]["parameters"]:,}']


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
        options = {**run_options(args), 'max_epochs': args.max_epochs}
        options['log_steps'] = args.log_steps if options.pop('progress') else None
        seeds = range(args.first, args.first + args.runs)
        content = run_seeds(args.model, args.features, seeds, args.root, **options)
        print('\n'.join(all_lines(content['runs'])))
        print('\n' + '\n'.join(submission(content)) + '\n')
    print(make_table(args.results))
    return 0


if __name__ == '__main__':
    sys.exit(main())
