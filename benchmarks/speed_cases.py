r"""One case of the speed benchmark, to be run in a fresh process.

    python benchmarks/speed_cases.py '{"job": "large", "kind": "anchor", "n": 10000,
        "edges": 70000, "repeats": 1}'

An epoch is a training step (forward, backward, Adam) and an evaluation of the dev loss,
with all ten refinements; two of them on made-up data. Of a batch of documents it is
forward and backward alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, MaxAggregation
from torch_geometric.utils import coalesce, to_dense_batch

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.ops import knn_graph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / 'tests'))

from common import CONFIGS, TABLES, peak_memory_mb, read_yaml
from padded_documents import padded_idgl
from reference import idgl_reference

Epoch = Callable[[], Any]

# What the paper's tables say of the graphs; how they are trained is the same for all.
GRAPH_SETTINGS = {'initial_weight', 'update_weight', 'smoothness', 'connectivity'}
GRAPH_SETTINGS |= {'sparsity', 'epsilon', 'heads', 'k', 'num_anchors'}
# Thresholded graphs of all pairs of Pubmed, which the paper could not run.
TILED = {'epsilon': 0.1, 'heads': 1, 'max_iters': 2}
# A tolerance that is never met: the stopping criterion is computed all the same.
FIXED: dict[str, Any] = {'tol': 1e-30, 'cached': True}
LARGE = {**FIXED, 'max_iters': 2}
ARXIV = {**LARGE, 'epsilon': 0.9, 'heads': 1, 'num_anchors': 300, 'sparsity': 0.0}
ARXIV['dropout'] = 0.3
REFINEMENTS = 10
SLOW = ('reference', 'padded')  # what this package is compared with


# Data -------------------------------------------------------------------------------


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


def made_up_documents(sizes: list[int], words: int = 10_000, topics: int = 20) -> Data:
    """Documents of so many tokens: word vectors around the centres of topics (few words
    are frequent), and random numbers in place of what an LSTM makes of them.
    """
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(topics, 300, generator=generator).repeat(words // topics, 1)
    vectors += torch.randn(vectors.shape, generator=generator)
    frequency = 1.0 / torch.arange(1, vectors.size(0) + 1)
    n = sum(sizes)
    token = torch.multinomial(frequency, n, replacement=True, generator=generator)
    return Data(
        x=torch.rand(n, 128, generator=generator) * 2.0 - 1.0,
        graph_x=vectors[token],
        y=torch.randint(topics, (len(sizes),), generator=generator),
        batch=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
    )


# Systems: each gives a function that runs one epoch -----------------------------------


def epoch_of(
    loss: Callable[[Callable[[Tensor], Tensor]], Tensor],
    parameters: list[Tensor],
    module: torch.nn.Module,
    data: Data,
) -> Epoch:
    """A training step and an evaluation; `loss` turns that of an output into the whole
    one.
    """
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)

    def of(mask: Tensor) -> Tensor:
        index = mask.nonzero()[:, 0]
        return loss(lambda out: F.cross_entropy(out[index], data.y[index]))

    def epoch() -> None:
        module.train()
        optimizer.zero_grad()
        of(data.train_mask).backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            of(data.val_mask)

    return epoch


def make_model(name: str, system: str, data: Data, **changes) -> IDGL:
    """IDGL or IDGL-Anch with the paper's settings and a fixed number of refinements."""
    cls = IDGLAnch if system == 'idgl-anch' else IDGL
    published = read_yaml(CONFIGS / 'paper.yaml')[system]
    published = {**published['default'], **published[name]}
    settings = {**FIXED, 'dropout': 0.5, 'max_iters': REFINEMENTS}
    settings |= {key: published[key] for key in GRAPH_SETTINGS & published.keys()}
    channels = (data.num_features, 16, 2, int(data.y.max()) + 1)
    model = cls(*channels, **{**settings, **changes})
    # Not an argument: earlier revisions, which this times too, know no other.
    model.scale_regularizer = False
    return model


def model_epoch(model: IDGL, data: Data) -> Epoch:
    """An epoch with the joint loss over all iterations."""

    def loss(fn: Callable[[Tensor], Tensor]) -> Tensor:
        return model(data.x, data.edge_index, return_trace=True)[1].loss(fn)

    return epoch_of(loss, list(model.parameters()), model, data)


def reference_epoch(name: str, system: str, data: Data) -> Epoch:
    """The literal algorithm with dense matrices, heads stacked."""
    model = make_model(name, system, data, max_iters=0)
    with torch.no_grad():
        _, trace = model.eval()(data.x, data.edge_index, return_trace=True)
    initial = trace.initial.to_dense(max_entries=1 << 30)
    weights = [conv.lin.weight.t().detach().clone() for conv in model.backbone.convs]
    learners = (model.feature_learner, model.embedding_learner)
    heads = [learner.metric.weight.detach().clone() for learner in learners]
    parameters = [tensor.requires_grad_() for tensor in [*weights, *heads]]
    settings = {'lam': model.initial_weight, 'eta': model.update_weight}
    settings |= {'eps': model.feature_learner.epsilon, 'alpha': model.smoothness}
    settings |= {'beta': model.connectivity, 'gamma': model.sparsity, 'T': REFINEMENTS}

    def loss(fn: Callable[[Tensor], Tensor]) -> Tensor:
        anchors = None
        if system == 'idgl-anch':
            anchors = torch.randperm(data.num_nodes)[: model.num_anchors]
        options = {**settings, 'fixed_iters': True, 'recover': False}
        options['anchors'] = anchors
        return idgl_reference(data.x, initial, weights, *heads, **options).loss(fn)

    return epoch_of(loss, parameters, model, data)


def gcn_epoch(data: Data, **settings) -> Epoch:
    """PyG's GCN on the same data (without a graph: on the cosine kNN graph)."""
    settings = {'hidden_channels': 16, 'num_layers': 2, **settings}
    classes = int(data.y.max()) + 1
    channels = {'in_channels': data.num_features, 'out_channels': classes}
    model = GCN(**channels, dropout=0.5, cached=True, **settings)
    graph = knn_graph(data.x, 24) if data.edge_index is None else data.edge_index
    parameters = list(model.parameters())
    return epoch_of(lambda fn: fn(model(data.x, graph)), parameters, model, data)


def large_epoch(kind: str, n: int, edges: int = 574) -> Epoch:
    """IDGL or IDGL-Anch on made-up data of a given size."""
    if kind == 'small':  # the shape of WebKB's graphs
        generator = torch.Generator().manual_seed(0)
        x = (torch.rand(n, 1703, generator=generator) < 0.05).float()
        edge_index = torch.randint(n, (2, edges), generator=generator)
        y = torch.randint(5, (n,), generator=generator)
        data = masked(Data(x=x, edge_index=edge_index, y=y))
        return model_epoch(IDGL(1703, 16, 2, 5, dropout=0.5, **FIXED), data)
    data = made_up(n, edges, nonnegative=kind in ('low-rank', 'tiled'))
    if kind == 'arxiv-gcn':
        return gcn_epoch(data, hidden_channels=256, num_layers=3, norm='batch_norm')
    if kind == 'arxiv-idgl':
        model: IDGL = IDGLAnch(128, 256, 3, 40, norm='batch_norm', **ARXIV)
    elif kind == 'anchor':
        model = IDGLAnch(128, 16, 2, 40, **ARXIV)
    elif kind == 'anchor-recomputed':
        model = IDGLAnch(128, 16, 2, 40, **ARXIV, checkpoint_iters=True)
    else:
        extra = {'epsilon': 0.6, 'backend': 'tiled'} if kind == 'tiled' else {}
        model = IDGL(128, 16, 2, 40, **LARGE, **extra)
    return model_epoch(model, data)


def documents_epoch(system: str, data: Data, max_iters: int) -> Epoch:
    """Forward and backward of a batch of documents, with the paper's settings and
    read-out for 20News and the same weights for all systems; gives the loss.
    """
    torch.manual_seed(0)
    published = read_yaml(CONFIGS / 'documents.yaml')['idgl']['20news']
    settings = {key: published[key] for key in GRAPH_SETTINGS & published.keys()}
    options = {'graph_channels': 300, 'tol': None, 'max_iters': max_iters}
    gnn, lin = IDGL(128, 128, 2, 128, **settings, **options), Linear(128, 20)
    x = data.x.clone().requires_grad_()  # an LSTM has made it
    size = data.y.numel()

    def this_package() -> Tensor:
        batch = {'batch': data.batch, 'batch_size': size, 'graph_x': data.graph_x}
        _, trace = gnn(x, **batch, return_trace=True)
        pool = MaxAggregation()
        trace = trace.readout(lambda h: lin(pool(h, data.batch, dim_size=size)))
        return trace.loss(lambda out: F.cross_entropy(out, data.y))

    def padded() -> Tensor:
        inputs, mask = to_dense_batch(x, data.batch, batch_size=size)
        run = padded_idgl(
            inputs,
            to_dense_batch(data.graph_x, data.batch, batch_size=size)[0],
            mask,
            [conv.lin.weight.t() for conv in gnn.backbone.convs],
            gnn.feature_learner.metric.weight,
            gnn.embedding_learner.metric.weight,
            max_iters=max_iters,
            **{key: value for key, value in settings.items() if key != 'heads'},
        )

        def predict(out: Tensor) -> Tensor:
            out = out.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(1)
            return F.cross_entropy(lin(out), data.y)

        return run.loss(predict)

    def epoch() -> Tensor:
        for parameter in [x, *gnn.parameters(), *lin.parameters()]:
            parameter.grad = None
        loss = this_package() if system == 'idgl' else padded()
        loss.backward()
        return loss.detach()

    return epoch


def newsgroups_epoch(root: str, every: int) -> tuple[Epoch, dict[str, int]]:
    """One in so many batches of a training epoch on 20News, in order of their length,
    with the paper's settings; and how many documents and tokens that are.
    """
    import documents  # not at the top: earlier revisions, timed too, have none

    from torch_geometric_idgl.loader import BucketSampler

    system = documents.find_system('idgl')
    settings = documents.load_settings(system, '20news')
    folder = Path(root) / '20news'
    cut = (settings['split_seed'], settings['max_tokens'])
    train = documents.DATASETS['20news'](str(folder), 'train', *cut)
    vectors = documents.load_vectors(settings['vectors'], train.vocab, root).weight
    shape = (settings, vectors, '20news', train.num_classes)
    model = documents.make_model('idgl', *shape).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings['lr'])
    sampler = BucketSampler(train, settings['batch_size'], shuffle=False)
    chosen = [*sampler][every // 2 :: every]
    loader = DataLoader(train, batch_sampler=chosen)

    def epoch() -> None:
        for batch in loader:
            optimizer.zero_grad()
            _, trace = model(batch, return_trace=True)
            trace.loss(partial(F.cross_entropy, target=batch.y)).backward()
            optimizer.step()

    tokens = sampler.sizes[list(itertools.chain(*chosen))]
    counts = {'documents': len(tokens), 'tokens': int(tokens.sum())}
    return epoch, {**counts, 'all_documents': len(train)}


def knn_searches(n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    """Ways to the cosine kNN graph of made-up data: the neighbours, `[n, k]`."""
    import faiss

    x = made_up(n, 1, nonnegative=False).x

    def flat() -> Tensor:
        """The exact search of faiss, whatever it makes of ties."""
        rows = F.normalize(x).numpy()
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        return torch.from_numpy(index.search(rows, k)[1])

    return {
        'exact': lambda: knn_graph(x, k)[1].view(n, k),
        'approximate': lambda: knn_graph(x, k, approximate=True)[1].view(n, k),
        'faiss_flat': flat,
    }


def recall(found: Tensor, exact: Tensor) -> float:
    """The share of exact neighbours that are found."""
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return sum(len({*a} & {*b}) for a, b in pairs) / exact.numel()


# Measuring ----------------------------------------------------------------------------


def timed(epoch: Epoch, repeats: int) -> list[float]:
    """Seconds of each repeat. With one thread they are those of the CPU: what others do
    on the machine changes them little.
    """
    one = torch.get_num_threads() == 1
    clock = time.process_time if one else time.perf_counter
    times = [clock()]
    for _ in range(repeats):
        epoch()
        times.append(clock())
    return [after - before for before, after in itertools.pairwise(times)]


def in_turns(epochs: dict[str, Epoch], repeats: int, often: int = 5) -> dict[str, list]:
    """Interleaved repeats, after one epoch each to warm up; several of what is fast for
    each one of what is slow, has nothing to cache, and is not warmed up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for name, epoch in epochs.items():
        timed(epoch, int(name not in SLOW))
    for _ in range(repeats):
        for name, epoch in epochs.items():
            seconds[name] += timed(epoch, 1 if name in SLOW else often)
    return seconds


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One case in this process."""
    torch.manual_seed(0)
    job, repeats, before = case['job'], case.get('repeats', 1), peak_memory_mb()
    about = {'threads': torch.get_num_threads()}
    if job in ('time', 'memory', 'evaluate'):
        name, system = case['data'], case['system']
        data = load(name, case['root'])
        if name in TABLES:
            data.edge_index = None
    elif job.startswith('documents'):
        data, few = made_up_documents(case['sizes']), case['refinements']
    if job == 'time':
        epochs = {'idgl': model_epoch(make_model(name, system, data), data)}
        epochs['gcn'] = gcn_epoch(data)
        if case['reference']:
            epochs['reference'] = reference_epoch(name, system, data)
        return {'seconds': in_turns(epochs, repeats), **about}
    if job == 'documents':
        documents_epoch('padded', made_up_documents([5, 9]), few)()  # to warm up
        epochs = {
            'idgl': documents_epoch('idgl', data, few),
            'idgl_ten': documents_epoch('idgl', data, REFINEMENTS),
            'padded': documents_epoch('padded', data, few),
        }
        return {'seconds': in_turns(epochs, repeats), **about}
    if job == 'knn':
        import faiss

        for search in knn_searches(256, case['k']).values():
            search()  # to warm up
        searches, found = knn_searches(case['n'], case['k']), {}
        seconds: dict[str, list[float]] = {name: [] for name in searches}
        for _ in range(repeats):
            for name, search in searches.items():
                start = time.process_time()
                found[name] = search()
                seconds[name].append(time.process_time() - start)
        share = recall(found['approximate'], found['exact'])
        about |= {'recall': share, 'faiss': faiss.__version__}
        return {'seconds': seconds, **about}
    if job == 'newsgroups':
        epoch, counts = newsgroups_epoch(case['root'], case['every'])
        about |= counts
    elif job == 'documents-memory':
        epoch = documents_epoch(case['system'], data, few)
    elif job == 'large':
        epoch = large_epoch(case['kind'], case['n'], case.get('edges', 574))
    elif job == 'evaluate':
        model = make_model(name, system, data).eval()
        epoch = torch.no_grad()(lambda: model(data.x, data.edge_index))
    elif case['reference']:
        epoch = reference_epoch(name, system, data)
    elif system == 'idgl-tiled':
        epoch = model_epoch(make_model(name, 'idgl', data, **TILED), data)
    else:
        epoch = model_epoch(make_model(name, system, data), data)
    seconds = timed(epoch, repeats)
    peak = {'peak_mb': peak_memory_mb(), 'start_mb': before}
    return {'seconds': seconds, **peak, **about}


if __name__ == '__main__':
    print(json.dumps(run_case(json.loads(sys.argv[1]))))
