r"""Time and memory of one epoch: against the literal algorithm, GCN, and size.

An epoch is a training step (forward, backward, Adam) and an evaluation of the dev loss,
with all ten refinements. Times are medians of interleaved repeats in one process;
memory is the peak of a fresh process for each case.

    python benchmarks/speed.py                      # everything
    python benchmarks/speed.py --only reference     # or gcn, scaling, arxiv
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import coalesce, to_undirected

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.datasets import load, stage_data

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'tests'))

from common import RESULTS, exponent, machine, versions, write_json  # noqa: E402
from reference import idgl_reference  # noqa: E402

# Shapes and shares of non-zero features, for data of the same size where the real files
# are absent.
SHAPES = {
    'cora': (2708, 5278, 1433, 7, 0.0127),
    'citeseer': (3327, 4552, 3703, 6, 0.0085),
    'pubmed': (19717, 44324, 500, 3, 0.1002),
}
SETTINGS: dict[tuple[str, str], dict] = {
    ('cora', 'idgl'): {},
    ('cora', 'idgl-anch'): {'num_anchors': 1000},
    ('citeseer', 'idgl'): {
        'initial_weight': 0.6,
        'update_weight': 0.5,
        'smoothness': 0.4,
        'sparsity': 0.2,
        'epsilon': 0.3,
        'heads': 1,
    },
    ('digits', 'idgl'): {
        'initial_weight': 0.4,
        'smoothness': 0.4,
        'connectivity': 0.1,
        'epsilon': 0.65,
        'heads': 8,
        'k': 24,
    },
    ('pubmed', 'idgl-anch'): {
        'initial_weight': 0.7,
        'update_weight': 0.3,
        'smoothness': 0.0,
        'connectivity': 0.03,
        'sparsity': 0.0,
        'epsilon': 0.1,
        'heads': 6,
        'num_anchors': 700,
    },
    ('pubmed', 'idgl'): {
        'initial_weight': 0.7,
        'update_weight': 0.3,
        'smoothness': 0.0,
        'connectivity': 0.03,
        'heads': 6,
    },
    # Thresholded graphs of all pairs at that size, which the paper could not run.
    ('pubmed', 'idgl-tiled'): {
        'initial_weight': 0.7,
        'update_weight': 0.3,
        'smoothness': 0.0,
        'connectivity': 0.03,
        'epsilon': 0.1,
        'heads': 1,
    },
}
TARGETS = {
    ('cora', 'idgl'): (150, 5),
    ('cora', 'idgl-anch'): (40, None),
    ('citeseer', 'idgl'): (30, 5),
    ('digits', 'idgl'): (8, None),
    ('pubmed', 'idgl-anch'): (15, None),
}
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
TILED_SIZES = (3_000, 10_000, 30_000)  # quadratic in time
# Tells the C library to keep freed memory. By default it gives tensors of more than
# 32 MB back at once, and the next ones are paged in again: a jump between two sizes.
KEEP_MEMORY = {'MALLOC_MMAP_MAX_': '0', 'MALLOC_TRIM_THRESHOLD_': str(1 << 40)}
REFINEMENTS = 10
KINDS = ('low-rank', 'anchor', 'tiled')


# Data -------------------------------------------------------------------------------


def get_data(name: str, root: str) -> Data:
    """Real data, or data of the same shape (`data.synthetic` says which)."""
    try:
        data = load(name, root)
        data.synthetic = False
        return data
    except FileNotFoundError:
        n, m, d, classes, share = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(n, d, generator=generator) < share).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1.0)
    edge_index = torch.randint(n, (2, m), generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    return masked(Data(x=x, edge_index=to_undirected(edge_index), y=y, synthetic=True))


def masked(data: Data) -> Data:
    """The first tenth for training, the next for evaluation."""
    index = torch.arange(data.num_nodes) * 10 // max(data.num_nodes, 1)
    data.train_mask, data.val_mask = index == 0, index == 1
    return data


def made_up(n: int, edges: int, nonnegative: bool, classes: int = 40) -> Data:
    """Features around class centres, so that some pairs are similar, most are not."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n,), generator=generator)
    x = torch.randn(classes, 128, generator=generator)[y]
    x += 0.3 * torch.randn(n, 128, generator=generator)
    x = x.relu_() if nonnegative else x
    edge_index = torch.randint(n, (2, edges), generator=generator)
    edge_index = coalesce(torch.cat([edge_index, edge_index.flip(0)], dim=1))
    return masked(Data(x=x, edge_index=edge_index, y=y))


# Systems: each gives a function that runs one epoch -----------------------------------


def epoch_of(
    forward: Callable[[Tensor], Tensor], parameters: list[Tensor], module, data: Data
) -> Callable[[], None]:
    """A training step and an evaluation; `forward` gives the loss of some nodes."""
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)
    train, val = data.train_mask.nonzero()[:, 0], data.val_mask.nonzero()[:, 0]

    def epoch() -> None:
        if module is not None:
            module.train()
        optimizer.zero_grad()
        forward(train).backward()
        optimizer.step()
        if module is not None:
            module.eval()
        with torch.no_grad():
            forward(val)

    return epoch


def make_model(name: str, system: str, data: Data, **changes) -> IDGL:
    """IDGL or IDGL-Anch with the paper's settings and a fixed number of refinements."""
    cls = IDGLAnch if system == 'idgl-anch' else IDGL
    # A tolerance that is never met: the stopping criterion is computed all the same.
    settings = {'dropout': 0.5, 'tol': 1e-30, 'max_iters': REFINEMENTS, 'cached': True}
    settings |= SETTINGS.get((name, system), {}) | changes
    channels = (data.num_features, 16, 2, int(data.y.max()) + 1)
    return cls(*channels, **settings)


def graph_of(name: str, data: Data) -> Tensor | None:
    return None if name == 'digits' else data.edge_index


def model_epoch(model: IDGL, data: Data, graph: Tensor | None) -> Callable[[], None]:
    """An epoch with the joint loss over all iterations."""

    def forward(index: Tensor) -> Tensor:
        _, trace = model(data.x, graph, return_trace=True)
        return trace.loss(lambda out: F.cross_entropy(out[index], data.y[index]))

    return epoch_of(forward, list(model.parameters()), model, data)


def idgl_epoch(name: str, system: str, data: Data) -> Callable[[], None]:
    """This package."""
    model = make_model(name, system, data)
    return model_epoch(model, data, graph_of(name, data))


def reference_epoch(name: str, system: str, data: Data) -> Callable[[], None]:
    """The literal algorithm with dense matrices, heads stacked."""
    model = make_model(name, system, data, max_iters=0)
    with torch.no_grad():
        _, trace = model.eval()(data.x, graph_of(name, data), return_trace=True)
    initial = trace.initial.to_dense(max_entries=1 << 30)
    weights = [conv.lin.weight.t().detach().clone() for conv in model.backbone.convs]
    heads = [
        learner.metric.weight.detach().clone()
        for learner in (model.feature_learner, model.embedding_learner)
    ]
    parameters = [tensor.requires_grad_() for tensor in [*weights, *heads]]

    def forward(index: Tensor) -> Tensor:
        anchors = None
        if system == 'idgl-anch':
            anchors = torch.randperm(data.num_nodes)[: model.num_anchors]
        run = idgl_reference(
            data.x,
            initial,
            weights,
            *heads,
            lam=model.initial_weight,
            eta=model.update_weight,
            eps=model.feature_learner.epsilon,
            alpha=model.smoothness,
            beta=model.connectivity,
            gamma=model.sparsity,
            T=REFINEMENTS,
            anchors=anchors,
            fixed_iters=True,
            recover=False,
        )
        return run.loss(lambda out: F.cross_entropy(out[index], data.y[index]))

    return epoch_of(forward, parameters, None, data)


def gcn_epoch(data: Data, **settings) -> Callable[[], None]:
    """PyG's GCN on the same data (without a graph: on the cosine kNN graph)."""
    settings = {'hidden_channels': 16, 'num_layers': 2, 'cached': True} | settings
    model = GCN(
        data.num_features, out_channels=int(data.y.max()) + 1, dropout=0.5, **settings
    )
    graph = data.edge_index
    if graph is None:
        from torch_geometric_idgl.ops import knn_graph

        graph = knn_graph(data.x, 24)

    def forward(index: Tensor) -> Tensor:
        return F.cross_entropy(model(data.x, graph)[index], data.y[index])

    return epoch_of(forward, list(model.parameters()), model, data)


ARXIV = {
    'epsilon': 0.9,
    'heads': 1,
    'max_iters': 2,
    'tol': 1e-30,
    'num_anchors': 300,
    'sparsity': 0.0,
    'dropout': 0.3,
    'norm': 'batch_norm',
    'cached': True,
}


def large_epoch(case: dict) -> Callable[[], None]:
    """IDGL or IDGL-Anch on made-up data of a given size."""
    kind, n = case['kind'], case['n']
    if kind.startswith('arxiv'):
        data = made_up(n, case['edges'], nonnegative=False)
        if kind == 'arxiv-gcn':
            layers = {'hidden_channels': 256, 'num_layers': 3, 'norm': 'batch_norm'}
            return gcn_epoch(data, **layers)
        model: IDGL = IDGLAnch(128, 256, 3, 40, **ARXIV)
    elif kind == 'anchor':
        data = made_up(n, case['edges'], nonnegative=False)
        model = IDGLAnch(128, 16, 2, 40, **{**ARXIV, 'norm': None})
    else:
        data = made_up(n, case['edges'], nonnegative=True)
        extra = {'epsilon': 0.6, 'backend': 'tiled'} if kind == 'tiled' else {}
        model = IDGL(128, 16, 2, 40, tol=1e-30, max_iters=2, cached=True, **extra)
    return model_epoch(model, data, data.edge_index)


# Measuring ----------------------------------------------------------------------------


def timed(
    epochs: dict[str, Callable[[], None]], repeats: int
) -> dict[str, list[float]]:
    """Interleaved repeats, after one epoch each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for name, epoch in epochs.items():
        if name != 'reference':  # nothing to cache, and minutes long
            epoch()
    for _ in range(repeats):
        for name, epoch in epochs.items():
            # Several epochs of what is fast for each one of what is slow.
            count = 1 if name == 'reference' else 5
            for _ in range(count):
                start = time.perf_counter()
                epoch()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def run_case(case: dict) -> dict:
    """One case in this process."""
    torch.manual_seed(0)
    if case['job'] == 'time':
        name, system = case['data'], case['system']
        data = get_data(name, case['root'])
        epochs = {
            'idgl': idgl_epoch(name, system, data),
            'gcn': gcn_epoch(data),
        }
        if case['reference']:
            epochs['reference'] = reference_epoch(name, system, data)
        seconds = timed(epochs, case['repeats'])
        return {'seconds': seconds, 'synthetic': bool(data.synthetic)}
    before = peak_memory()
    if case['job'] == 'memory':
        data = get_data(case['data'], case['root'])
        make = reference_epoch if case['reference'] else idgl_epoch
        epoch = make(case['data'], case['system'].replace('-tiled', ''), data)
        if case['system'] == 'idgl-tiled':
            epoch = idgl_epoch_of_tiled(case['data'], data)
    else:
        epoch = large_epoch(case)
    seconds = []
    for _ in range(case.get('repeats', 1)):
        start = time.perf_counter()
        epoch()
        seconds.append(time.perf_counter() - start)
    return {'seconds': seconds, 'peak_mb': peak_memory(), 'start_mb': before}


def idgl_epoch_of_tiled(name: str, data: Data) -> Callable[[], None]:
    """IDGL with a threshold on all pairs, two refinements."""
    model = make_model(name, 'idgl-tiled', data, max_iters=2)
    return model_epoch(model, data, data.edge_index)


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh(case: dict, environment: dict[str, str] | None = None) -> dict:
    """One case in a fresh process."""
    command = [sys.executable, __file__, '--case', json.dumps(case)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise RuntimeError(f'{case} failed:\n{done.stderr}')
    return json.loads(done.stdout.strip().splitlines()[-1])


def median(values: list[float]) -> float:
    return statistics.median(values)


# Tables -------------------------------------------------------------------------------


def compare(
    args: argparse.Namespace, with_reference: bool, known: list[dict]
) -> list[dict]:
    """Epochs on real data against GCN and, if asked, the literal algorithm.

    Rows of cases that are not asked for stay as they are.
    """
    rows = []
    for name, system in SETTINGS:
        if args.cases and f'{name}/{system}' not in args.cases:
            rows += [r for r in known if (r['data'], r['system']) == (name, system)]
            continue
        if system == 'idgl-tiled':
            rows.append(compare_tiled(args))
            continue
        reference = with_reference and (name, system) in TARGETS
        case = {'data': name, 'system': system, 'root': str(args.root)}
        case |= {'repeats': args.repeats, 'reference': reference}
        result = fresh({'job': 'time', **case})
        seconds = {key: median(value) for key, value in result['seconds'].items()}
        memory = fresh({'job': 'memory', **case, 'reference': False, 'repeats': 1})
        row = {
            'data': name,
            'system': system,
            'synthetic': result['synthetic'],
            'seconds': seconds,
            'all_seconds': result['seconds'],
            'gcn_epochs': seconds['idgl'] / seconds['gcn'],
            'peak_mb': memory['peak_mb'],
            'start_mb': memory['start_mb'],  # PyTorch and PyG alone
        }
        if reference:
            slow = fresh({'job': 'memory', **case, 'repeats': 1})
            row['reference_peak_mb'] = slow['peak_mb']
            row['speedup'] = seconds['reference'] / seconds['idgl']
            row['memory_ratio'] = slow['peak_mb'] / memory['peak_mb']
            used = memory['peak_mb'] - memory['start_mb']
            row['used_memory_ratio'] = (slow['peak_mb'] - slow['start_mb']) / used
            row['targets'] = TARGETS[name, system]
        rows.append(row)
        print(describe(row), flush=True)
    return rows


def compare_tiled(args: argparse.Namespace) -> dict:
    """A threshold on all pairs of Pubmed, which the literal algorithm cannot hold."""
    case = {'data': 'pubmed', 'system': 'idgl-tiled', 'root': str(args.root)}
    tiled = fresh({'job': 'memory', **case, 'reference': False, 'repeats': 1})
    print(
        f'pubmed idgl, threshold on all pairs: {tiled["seconds"][0]:.1f} s, '
        f'{tiled["peak_mb"]:.0f} MB (target: under 3000)'
    )
    return {'data': 'pubmed', 'system': 'idgl-tiled', **tiled}


def describe(row: dict) -> str:
    seconds = row['seconds']
    made = ' (made-up data)' if row['synthetic'] else ''
    text = f'{row["data"]:9}{row["system"]:10}{seconds["idgl"] * 1e3:8.0f} ms'
    text += f' = {row["gcn_epochs"]:.1f} GCN epochs, {row["peak_mb"]:.0f} MB{made}'
    if 'speedup' in row:
        speed, memory = row['targets']
        text += f'; {row["speedup"]:.0f}x the literal algorithm (target {speed}x), '
        text += f'{row["memory_ratio"]:.1f}x less memory'
        text += f' (target {memory}x)' if memory else ''
        text += f', {row["used_memory_ratio"]:.1f}x beside PyTorch itself'
    return text


def scaling(
    args: argparse.Namespace, rows: list[dict], save: Callable[[list[dict]], None]
) -> None:
    """Time and memory against the number of nodes, with fitted exponents.

    Kinds and sizes that are not asked for stay as they are.
    """
    rows = list(rows)
    for kind in args.kinds:
        sizes = args.sizes or (TILED_SIZES if kind == 'tiled' else SIZES)
        before = next((row for row in rows if row['kind'] == kind), {'points': []})
        rows = [row for row in rows if row['kind'] != kind]
        found = [point for point in before['points'] if point['n'] not in sizes]
        row: dict = {'kind': kind, 'points': found}
        rows.append(row)
        for n in sizes:
            found.append(measure_size(kind, n, 1 if kind == 'tiled' else 3))
            found.sort(key=lambda point: point['n'])
            # Other allocators have other slopes: the line is that of the first point's.
            alike = [p for p in found if p['environment'] == found[0]['environment']]
            if len(alike) > 1:
                row['time_exponent'] = exponent(alike, 'seconds')
                row['memory_exponent'] = exponent(alike, 'used_mb')
            save(rows)
        if 'time_exponent' in row:
            print(
                f'{kind:9} time ~ n^{row["time_exponent"]:.2f}, '
                f'memory ~ n^{row["memory_exponent"]:.2f}'
            )


def measure_size(kind: str, n: int, repeats: int) -> dict:
    """One size; with the default allocator where keeping memory takes too much."""
    case = {'job': 'large', 'kind': kind, 'n': n, 'edges': 7 * n, 'repeats': repeats}
    environment: dict[str, str] = KEEP_MEMORY
    try:
        result = fresh(case, environment)
    except RuntimeError:
        environment = {}
        result = fresh(case, environment)
    seconds, memory = median(result['seconds']), result['peak_mb']
    note = '' if environment else ' (default allocator)'
    print(f'{kind:9} {n:9,} nodes {seconds:8.2f} s {memory:8.0f} MB{note}', flush=True)
    return {
        'n': n,
        'seconds': seconds,
        'peak_mb': memory,
        'used_mb': memory - result['start_mb'],
        'environment': environment,
    }


def arxiv(args: argparse.Namespace) -> dict:
    """At the size of ogbn-arxiv: an epoch of IDGL-Anch over one of GCN.

    Both take turns in fresh processes, and the medians are compared.
    """
    case = {'job': 'large', 'n': args.arxiv_nodes, 'edges': args.arxiv_edges}
    runs: dict[str, list[dict]] = {'idgl': [], 'gcn': []}
    for _ in range(args.repeats):
        for kind, results in runs.items():
            results.append(fresh({**case, 'kind': f'arxiv-{kind}', 'repeats': 2}))
    ours, gcn = (
        {
            # The first epoch of a process is a warm-up.
            'seconds': [result['seconds'][-1] for result in results],
            'peak_mb': max(result['peak_mb'] for result in results),
        }
        for results in runs.values()
    )
    seconds = median(ours['seconds']), median(gcn['seconds'])
    ratio = seconds[0] / seconds[1]
    print(
        f'arxiv size: {seconds[0]:.1f} s against {seconds[1]:.1f} s of GCN = '
        f'{ratio:.2f} (target 1.0), {ours["peak_mb"]:.0f} MB (target 8000)'
    )
    return {'idgl_anch': ours, 'gcn': gcn, 'ratio': ratio}


def save_part(path: Path, result: dict, name: str, part) -> None:
    """Write the results so far, with a part of them renewed."""
    write_json(path, result | {name: part})


def plot(rows: list[dict], path: Path) -> None:
    """Time and memory against n, log-log."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, label in zip(
        axes, ('seconds', 'peak_mb'), ('seconds an epoch', 'peak MB'), strict=True
    ):
        for row in rows:
            xs = [point['n'] for point in row['points']]
            axis.loglog(xs, [p[key] for p in row['points']], 'o-', label=row['kind'])
        axis.set_xlabel('nodes')
        axis.set_ylabel(label)
        axis.grid(True, which='both', alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--only', choices=['reference', 'gcn', 'scaling', 'arxiv'])
    parser.add_argument('--cases', nargs='+', help='such as cora/idgl; default: all')
    parser.add_argument('--sizes', type=int, nargs='+', help='numbers of nodes')
    parser.add_argument('--kinds', nargs='+', default=list(KINDS), choices=KINDS)
    parser.add_argument('--arxiv-nodes', type=int, default=169_343)
    parser.add_argument('--arxiv-edges', type=int, default=1_166_243)
    parser.add_argument('--out', type=Path, default=RESULTS / 'speed.json')
    parser.add_argument('--case', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(json.loads(args.case))))
        return
    if args.source:
        stage_data(args.source, args.root)
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    command = 'python benchmarks/speed.py'
    result |= {'command': command, 'versions': versions(), 'machine': machine()}
    if args.only in (None, 'reference', 'gcn'):
        known = result.get('epochs', [])
        result['epochs'] = compare(args, args.only != 'gcn', known)
        write_json(args.out, result)
    if args.only in (None, 'scaling'):
        known = result.get('scaling', [])
        save = functools.partial(save_part, args.out, result, 'scaling')
        scaling(args, known, save)
        result = json.loads(args.out.read_text())
        plot(result['scaling'], args.out.with_suffix('.png'))
    if args.only in (None, 'arxiv'):
        result['arxiv'] = arxiv(args)
        write_json(args.out, result)


if __name__ == '__main__':
    main()
