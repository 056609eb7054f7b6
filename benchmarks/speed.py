r"""Time and memory of an epoch: against the literal algorithm and GCN, and with size.

    python benchmarks/speed.py                      # everything
    python benchmarks/speed.py --only scaling       # parts, or rows such as cora/idgl

    git worktree add ../before REVISION
    python benchmarks/speed.py --before ../before   # two revisions of the package

An epoch is a training step and an evaluation with ten refinements, on made-up data with
two; of documents it is forward and backward alone, with three. What is compared takes
turns in fresh processes, whose peak memory is their own. Rows are written at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import HERE, exponent, peak_memory_mb
from options import positive, stage
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN
from torch_geometric.utils import to_dense_batch, to_undirected

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.ops import knn_graph

sys.path.insert(0, str(HERE.parent / 'tests'))

from padded_documents import padded_idgl
from reference import idgl_reference

Epoch = Callable[[], Any]

SETTINGS = {'initial_weight', 'update_weight', 'smoothness', 'connectivity', 'sparsity'}
SETTINGS |= {'epsilon', 'heads', 'k', 'num_anchors'}
# A tolerance that is never met: the stopping criterion is computed all the same.
FIXED: dict[str, Any] = {'tol': 1e-30, 'cached': True}
ANCHORS = dict(epsilon=0.9, heads=1, num_anchors=300, sparsity=0.0, dropout=0.3)
RECOMPUTED = dict(ANCHORS, checkpoint_iters=True)
ARXIV = dict(hidden_channels=256, num_layers=3, norm='batch_norm')
SIZES = [3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
# Tokens of documents. Their mean is 287 (317 in 20News), that of squares 136,000.
TOKENS = [60, 80, 100, 120, 140, 160, 180, 205, 230, 260, 290, 330, 380, 470, 580, 1000]


def epoch_of(model: Any, data: Data, loss: Callable | None = None) -> Epoch:
    """A training step and an evaluation, by default with the joint loss."""
    trace = partial(model, data.x, data.edge_index, return_trace=True)
    loss = loss or (lambda fn: trace()[1].loss(fn))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def of(mask: Tensor) -> Tensor:
        return loss(lambda out: F.cross_entropy(out[mask], data.y[mask]))

    def epoch() -> None:
        model.train()
        optimizer.zero_grad()
        of(data.train_mask).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            of(data.val_mask)

    return epoch


def gcn_epoch(data: Data, **settings: Any) -> Epoch:
    """An epoch of PyG's GCN (without a graph: on the cosine kNN graph)."""
    settings = {'hidden_channels': 16, 'num_layers': 2, **settings, 'dropout': 0.5}
    settings |= {'out_channels': int(data.y.max()) + 1, 'cached': True}
    model = GCN(data.num_features, **settings)
    graph = knn_graph(data.x, 24) if data.edge_index is None else data.edge_index
    return epoch_of(model, data, lambda fn: fn(model(data.x, graph)))


def weights(model: IDGL) -> tuple[list[Tensor], Tensor, Tensor]:
    """The weights of a model, as the plain implementations take them."""
    raw, hidden = model.feature_learner, model.embedding_learner
    layers = [conv.lin.weight.t() for conv in model.backbone.convs]
    return layers, raw.metric.weight, hidden.metric.weight


def reference_epoch(model: IDGL, data: Data) -> Epoch:
    """An epoch of the literal algorithm, with dense matrices."""
    options = {'lam': model.initial_weight, 'eta': model.update_weight}
    options |= {'eps': model.feature_learner.epsilon, 'alpha': model.smoothness}
    options |= {'beta': model.connectivity, 'gamma': model.sparsity}
    options |= {'T': model.max_iters, 'fixed_iters': True, 'recover': False}
    with torch.no_grad():
        _, trace = model(data.x, data.edge_index, return_trace=True)
    initial = trace.initial.to_dense(max_entries=1 << 30)

    def loss(fn: Callable) -> Tensor:
        if isinstance(model, IDGLAnch):
            nodes = torch.randperm(data.num_nodes)
            options['anchors'] = nodes[: model.num_anchors]
        return idgl_reference(data.x, initial, *weights(model), **options).loss(fn)

    return epoch_of(model, data, loss)


def published(file: str, system: str, data: str) -> dict[str, Any]:
    """The settings of graphs; how models are trained is the same for all."""
    found = common.read_yaml(common.CONFIGS / file)[system][data]
    return {key: found[key] for key in SETTINGS & found.keys()}


def real(name: str, method: str, root: str) -> Epoch:
    """An epoch on real data with the paper's settings."""
    dataset, system = name.split('/')
    data = load(dataset, root)
    if method == 'gcn':
        return gcn_epoch(data)
    channels = (data.num_features, 16, 2, int(data.y.max()) + 1)
    settings = published('paper.yaml', system.removesuffix('-tiled'), dataset)
    settings |= {'dropout': 0.5, 'max_iters': 10, **FIXED}
    if system == 'idgl-tiled':  # a thresholded graph of all pairs: not in the paper
        settings |= {'epsilon': 0.1, 'heads': 1, 'max_iters': 2}
    model = (IDGLAnch if system == 'idgl-anch' else IDGL)(*channels, **settings)
    # Not an argument: earlier revisions, which are timed too, know no other.
    model.scale_regularizer = False
    return (reference_epoch if method == 'reference' else epoch_of)(model, data)


def made_up(n: int, edges: int, nonnegative: bool = False) -> Data:
    """Features around class centres, so that some pairs are similar, most are not."""
    torch.manual_seed(0)
    y = torch.randint(40, (n,))
    x = torch.randn(40, 128)[y] + 0.3 * torch.randn(n, 128)
    edge_index = to_undirected(torch.randint(n, (2, edges)), num_nodes=n)
    tenth = torch.arange(n) * 10 // n
    masks = {'train_mask': tenth == 0, 'val_mask': tenth == 1}
    return Data(x.relu_() if nonnegative else x, edge_index, y=y, **masks)


def large(cls: type[IDGL], method: str, n: int = 169_343, **settings: Any) -> Epoch:
    """An epoch with two refinements on made-up data: the size is that of ogbn-arxiv."""
    data = made_up(n, 1_166_243 if n == 169_343 else 7 * n, nonnegative=cls is IDGL)
    if method == 'gcn':
        return gcn_epoch(data, **ARXIV)
    settings = {'hidden_channels': 16, 'num_layers': 2, 'max_iters': 2, **settings}
    return epoch_of(cls(128, out_channels=40, **FIXED, **settings), data)


def documents(method: str, sizes: list[int]) -> Epoch:
    """Forward and backward of a made-up batch, with the paper's settings for 20News."""
    n = sum(sizes)
    # Words around the centres of topics, few of them frequent, and what an LSTM makes.
    vectors = torch.randn(20, 300).repeat(500, 1) + torch.randn(10_000, 300)
    graph_x = vectors[(10_000 ** torch.rand(n)).long() - 1]
    x = (torch.rand(n, 128) * 2.0 - 1.0).requires_grad_()
    y = torch.randint(20, (n,))
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    settings = published('documents.yaml', 'idgl', '20news') | {'max_iters': 3}
    model = IDGL(128, 128, 2, 20, graph_channels=300, tol=None, **settings)
    settings.pop('heads')

    def epoch() -> float:
        if method == 'idgl':
            _, run = model(x, batch=batch, graph_x=graph_x, return_trace=True)
            loss = run.loss(lambda out: F.cross_entropy(out, y))
        else:
            inputs, mask = to_dense_batch(x, batch)
            words, _ = to_dense_batch(graph_x, batch)
            run = padded_idgl(inputs, words, mask, *weights(model), **settings)
            loss = run.loss(lambda out: F.cross_entropy(out[mask], y))
        torch.autograd.grad(loss, [x, *model.parameters()])
        return loss.item()

    return epoch


def newsgroups(method: str, root: str, every: int) -> Epoch:
    """One in so many batches, in order of length, of the first epoch on 20News."""
    import documents  # not at the top: earlier revisions, timed too, have none

    from torch_geometric_idgl.loader import BucketSampler

    settings = documents.load_settings(documents.SYSTEMS[method], '20news')
    cut = (settings['split_seed'], settings['max_tokens'])
    train = documents.DATASETS['20news'](f'{root}/20news', 'train', *cut)
    vectors = documents.load_vectors(settings['vectors'], train.vocab, root).weight
    shape = (settings, vectors, '20news', train.num_classes)
    model = documents.make_model(method, *shape).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings['lr'])
    batches = [*BucketSampler(train, settings['batch_size'], shuffle=False)]
    chosen = batches[every // 2 :: every]

    def epoch() -> None:
        for batch in DataLoader(train, batch_sampler=chosen):
            optimizer.zero_grad()
            _, trace = model(batch, return_trace=True)
            trace.loss(partial(F.cross_entropy, target=batch.y)).backward()
            optimizer.step()

    return epoch


def knn(method: str, n: int, k: int = 20) -> Epoch:
    """The neighbours in the cosine kNN graph of made-up data."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    x = made_up(n, edges=1).x
    rows, cosine = F.normalize(x).numpy(), faiss.METRIC_INNER_PRODUCT
    if method == 'faiss_flat':
        return lambda: torch.tensor(faiss.knn(rows, rows, k, metric=cosine)[1])
    return lambda: knn_graph(x, k, approximate=method == 'approximate')[1].view(n, k)


# The rows of the results: their part, methods (ours first), and what makes an epoch.
REAL = ['cora/idgl', 'cora/idgl-anch', 'citeseer/idgl', 'wine/idgl', 'digits/idgl']
OURS, ALL = ['idgl'], ['idgl', 'gcn', 'reference']
CASES: dict[str, tuple[str, list[str], partial]] = {
    **{name: ('epochs', ALL, partial(real, name)) for name in REAL},
    'pubmed/idgl-anch': ('epochs', ALL, partial(real, 'pubmed/idgl-anch')),
    'pubmed/idgl': ('epochs', ALL[:2], partial(real, 'pubmed/idgl')),
    'pubmed/idgl-tiled': ('epochs', OURS, partial(real, 'pubmed/idgl-tiled')),
    'low-rank': ('scaling', OURS, partial(large, IDGL)),
    'anchor': ('scaling', OURS, partial(large, IDGLAnch, **ANCHORS)),
    'tiled': ('scaling', OURS, partial(large, IDGL, epsilon=0.6, backend='tiled')),
    'anchor-recomputed': ('scaling', OURS, partial(large, IDGLAnch, **RECOMPUTED)),
    'arxiv': ('arxiv', ALL[:2], partial(large, IDGLAnch, **ANCHORS, **ARXIV)),
    'documents': ('documents', ['idgl', 'padded'], partial(documents, sizes=TOKENS)),
    'newsgroups': ('newsgroups', OURS, partial(newsgroups, every=10)),
    'knn': ('knn', ['approximate', 'faiss_flat', 'exact'], partial(knn, n=100_000)),
}
PARTS = list(dict.fromkeys(part for part, *_ in CASES.values()))


def run(name: str, method: str, **options: Any) -> dict[str, Any]:
    """Median seconds of one to five epochs after one to warm up, in this process."""
    torch.manual_seed(0)
    start, times = peak_memory_mb(), []
    # What else runs on the machine changes the CPU time of one thread little.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    make = CASES[name][2]
    epoch = make(method=method, **options)
    while len(times) < 2 or (len(times) < 6 and sum(times) < 5.0):
        begin = clock()
        found = epoch()
        times.append(clock() - begin)
    result = {'seconds': median(times[1:]), 'peak_mb': peak_memory_mb()}
    result['used_mb'] = result['peak_mb'] - start
    if method == 'approximate':
        exact = make(method='exact', **options)()
        same = found.unsqueeze(2) == exact.unsqueeze(1)
        result['recall'] = same.any(2).float().mean().item()
    made = {'command': f'python benchmarks/speed.py --only {name}'}
    made |= {'versions': common.versions(), 'machine': common.machine()}
    return {**result, 'made': made}


def in_turns(name: str, args: argparse.Namespace, **options: Any) -> dict[str, dict]:
    """Methods, or two revisions of the first one, that take turns in new processes."""
    part, methods, _ = CASES[name]
    variants = ['before', 'after'] if args.before else methods
    if part in ('epochs', 'newsgroups'):
        options['root'] = args.root
    one = part in ('scaling', 'documents', 'knn')
    threads = (torch.set_num_threads, (1 if one else torch.get_num_threads(),))
    rows: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {key: [] for key in variants}
    for key in variants * args.repeats:
        method = methods[0] if args.before else key
        package = args.before.resolve() if key == 'before' else HERE.parent
        sys.path.insert(0, str(package))  # which the new process takes over
        with ProcessPoolExecutor(1, get_context('spawn'), *threads) as pool:
            rows[key] = pool.submit(run, name, method, **options).result()
        print(name, options, key, rows[key], flush=True)
        seconds[key].append(rows[key]['seconds'])
        rows[key] |= {'seconds': median(seconds[key]), 'all_seconds': seconds[key]}
    return rows


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the results."""
    part, (ours, *others), make = CASES[name]
    if part == 'scaling' and not args.before:
        sizes = SIZES[:3] if name == 'tiled' else SIZES[1:]  # quadratic in time
        points = [{'n': n, **in_turns(name, args, n=n)[ours]} for n in sizes]
        row = {'kind': name, 'points': points}
        row['time_exponent'] = exponent(points, 'seconds')
        return row | {'memory_exponent': exponent(points, 'used_mb')}
    found: dict[str, Any] = in_turns(name, args)
    if args.before:
        found['before']['revision'] = common.commit(args.before / HERE.name)
        found['after']['revision'] = common.COMMIT
        ratios = {'time_ratio': 'seconds', 'memory_ratio': 'peak_mb'}.items()
        return found | {r: found['after'][k] / found['before'][k] for r, k in ratios}
    seconds = {method: own['seconds'] for method, own in found.items()}
    times = {method: own['all_seconds'] for method, own in found.items()}
    row = {**make.keywords, **found[ours], 'seconds': seconds, 'all_seconds': times}
    for other in others:
        row[f'{other}_peak_mb'] = found[other]['peak_mb']
        if other in ('reference', 'padded', 'exact'):
            row['speedup'] = seconds[other] / seconds[ours]
    if 'gcn' in others:
        row['gcn_epochs'] = seconds['idgl'] / seconds['gcn']
    if part == 'epochs':
        row['data'], row['system'] = name.split('/')
    if part == 'newsgroups':
        row['epoch_minutes'] = seconds['idgl'] * row['every'] / 60
    if part == 'arxiv':
        own, gcn = ({**found[key], 'seconds': times[key]} for key in ('idgl', 'gcn'))
        row = {'idgl_anch': own, 'gcn': gcn, 'ratio': row['gcn_epochs']}
    return row | ({'seconds': [seconds['idgl']]} if name == 'pubmed/idgl-tiled' else {})


def plot(rows: list[dict], file: Path) -> None:
    """Time and memory against n, log-log."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout='constrained')
    for axis, key in zip(figure.subplots(1, 2), ('seconds', 'peak_mb'), strict=True):
        for row in rows:
            xs = [point['n'] for point in row['points']]
            axis.loglog(xs, [p[key] for p in row['points']], 'o-', label=row['kind'])
        axis.set(xlabel='nodes', ylabel=key.replace('_mb', ' MB'))
        axis.grid(True, which='both', alpha=0.3)
    axis.legend()
    figure.savefig(file, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--root', default='data', help='writable folder of the data')
    parser.add_argument('--source', help='read-only folder to fill ROOT from')
    parser.add_argument('--results', type=Path, default=common.RESULTS)
    parser.add_argument('--repeats', type=positive, default=3)
    parser.add_argument('--only', nargs='+', choices=[*PARTS, *CASES])
    parser.add_argument('--before', type=Path, help='a checkout to compare with')
    args = parser.parse_args(argv)
    stage(args)
    file = args.results / ('compare_revisions.json' if args.before else 'speed.json')
    only = args.only or (['epochs', 'arxiv'] if args.before else PARTS)
    for name, (part, *_) in CASES.items():
        if not {name, part} & {*only}:
            continue
        row, content = measure(name, args), common.read_json(file) or {}
        if args.before:
            content['cases'] = {**content.get('cases', {}), name: row}
        elif part in ('epochs', 'scaling'):
            old = content.get(part, [])
            rows = {r.get('kind') or f'{r["data"]}/{r["system"]}': r for r in old}
            content[part] = [*{**rows, name: row}.values()]
        else:
            content[part] = row
        common.write_json(file, content)
        if part == 'scaling' and not args.before:
            plot(content[part], file.with_suffix('.png'))


if __name__ == '__main__':
    main()
