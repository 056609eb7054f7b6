r"""One case of the speed benchmark, to be run in a fresh process.

    python benchmarks/speed_cases.py '{"job": "large", "kind": "anchor", "n": 10000,
        "edges": 70000, "repeats": 1}'

An epoch is a training step (forward, backward, Adam) and an evaluation of the dev loss,
with all ten refinements; two of them on made-up data. Of a batch of documents it is
forward and backward alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MaxAggregation
from torch_geometric.utils import coalesce, to_dense_batch, to_undirected

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.ops import knn_graph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / 'tests'))

from common import CONFIGS, peak_memory_mb, read_yaml
from padded_documents import padded_idgl
from reference import idgl_reference

# Shapes and shares of non-zero features, for data of the same size where the real files
# are absent.
SHAPES = {
    'cora': (2708, 5278, 1433, 7, 0.0127),
    'citeseer': (3327, 4552, 3703, 6, 0.0085),
    'pubmed': (19717, 44324, 500, 3, 0.1002),
}
# What the paper's tables say of the graphs; how they are trained is the same for all.
GRAPH_SETTINGS = {
    'initial_weight',
    'update_weight',
    'smoothness',
    'connectivity',
    'sparsity',
    'epsilon',
    'heads',
    'k',
    'num_anchors',
}
# Thresholded graphs of all pairs of Pubmed, which the paper could not run.
TILED = {'epsilon': 0.1, 'heads': 1, 'max_iters': 2}
REFINEMENTS = 10
SLOW = ('reference', 'padded')  # what this package is compared with
# The paper's settings for 20News.
DOCUMENTS = {
    'heads': 12,
    'k': 950,
    'epsilon': 0.3,
    'initial_weight': 0.1,
    'update_weight': 0.4,
    'smoothness': 0.5,
    'connectivity': 0.01,
    'sparsity': 0.3,
}


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
    published = read_yaml(CONFIGS / 'paper.yaml')[system]
    published = {**published['default'], **published[name]}
    # A tolerance that is never met: the stopping criterion is computed all the same.
    settings = {'dropout': 0.5, 'tol': 1e-30, 'max_iters': REFINEMENTS, 'cached': True}
    settings |= {key: published[key] for key in GRAPH_SETTINGS & published.keys()}
    settings |= changes
    channels = (data.num_features, 16, 2, int(data.y.max()) + 1)
    model = cls(*channels, **settings)
    # Not an argument: earlier revisions, which this times too, know no other.
    model.scale_regularizer = False
    return model


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
    elif kind == 'small':  # the shape of WebKB's graphs
        generator = torch.Generator().manual_seed(0)
        x = (torch.rand(183, 1703, generator=generator) < 0.05).float()
        edge_index = torch.randint(183, (2, 574), generator=generator)
        y = torch.randint(5, (183,), generator=generator)
        data = masked(Data(x=x, edge_index=edge_index, y=y))
        model = IDGL(1703, 16, 2, 5, dropout=0.5, tol=1e-30, cached=True)
    elif kind == 'anchor':
        data = made_up(n, case['edges'], nonnegative=False)
        model = IDGLAnch(128, 16, 2, 40, **{**ARXIV, 'norm': None})
    else:
        data = made_up(n, case['edges'], nonnegative=True)
        extra = {'epsilon': 0.6, 'backend': 'tiled'} if kind == 'tiled' else {}
        model = IDGL(128, 16, 2, 40, tol=1e-30, max_iters=2, cached=True, **extra)
    return model_epoch(model, data, data.edge_index)


def documents_epoch(system: str, data: Data, max_iters: int) -> Callable[[], Tensor]:
    """Forward and backward of a batch of documents, with the read-out of the paper and
    the same weights for all systems; gives the loss.
    """
    torch.manual_seed(0)
    settings = {**DOCUMENTS, 'graph_channels': 300, 'tol': None}
    gnn = IDGL(128, 128, 2, 128, max_iters=max_iters, **settings)
    lin = Linear(128, 20)
    x = data.x.clone().requires_grad_()  # an LSTM has made it
    size = data.y.numel()
    parameters = [x, *gnn.parameters(), *lin.parameters()]

    def this_package() -> Tensor:
        _, trace = gnn(
            x,
            batch=data.batch,
            batch_size=size,
            graph_x=data.graph_x,
            return_trace=True,
        )
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
            **{key: value for key, value in DOCUMENTS.items() if key != 'heads'},
        )

        def predict(out: Tensor) -> Tensor:
            out = out.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(1)
            return F.cross_entropy(lin(out), data.y)

        return run.loss(predict)

    forward = {'idgl': this_package, 'padded': padded}[system]

    def epoch() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = forward()
        loss.backward()
        return loss.detach()

    return epoch


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


def best_clock() -> Callable[[], float]:
    """With one thread, the time of the CPU is that of the clock on an idle machine. On
    a busy one, the clock would tell against what takes longer.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def timed(
    epochs: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Interleaved repeats, after one epoch each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for name, epoch in epochs.items():
        if name not in SLOW:  # nothing to cache, and minutes long
            epoch()
    for _ in range(repeats):
        for name, epoch in epochs.items():
            # Several epochs of what is fast for each one of what is slow.
            count = 1 if name in SLOW else 5
            for _ in range(count):
                start = clock()
                epoch()
                seconds[name].append(clock() - start)
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
    if case['job'] == 'documents':
        data, few = made_up_documents(case['sizes']), case['refinements']
        documents_epoch('padded', made_up_documents([5, 9]), few)()  # to warm up
        epochs = {
            'idgl': documents_epoch('idgl', data, few),
            'idgl_ten': documents_epoch('idgl', data, REFINEMENTS),
            'padded': documents_epoch('padded', data, few),
        }
        seconds = timed(epochs, case['repeats'], best_clock())
        return {'seconds': seconds, 'threads': torch.get_num_threads()}
    if case['job'] == 'knn':
        import faiss

        for search in knn_searches(256, case['k']).values():
            search()  # to warm up
        seconds, found = {}, {}
        for _ in range(case['repeats']):
            for name, search in knn_searches(case['n'], case['k']).items():
                start = time.process_time()
                found[name] = search()
                seconds.setdefault(name, []).append(time.process_time() - start)
        return {
            'seconds': seconds,
            'recall': recall(found['approximate'], found['exact']),
            'threads': torch.get_num_threads(),
            'faiss': faiss.__version__,
        }
    before = peak_memory_mb()
    if case['job'] == 'memory':
        data = get_data(case['data'], case['root'])
        if case['system'] == 'idgl-tiled':
            model = make_model(case['data'], 'idgl', data, **TILED)
            epoch = model_epoch(model, data, data.edge_index)
        else:
            make = reference_epoch if case['reference'] else idgl_epoch
            epoch = make(case['data'], case['system'], data)
    elif case['job'] == 'documents-memory':
        data = made_up_documents(case['sizes'])
        epoch = documents_epoch(case['system'], data, case['refinements'])
    elif case['job'] == 'evaluate':
        data = get_data(case['data'], case['root'])
        model = make_model(case['data'], case['system'], data).eval()
        epoch = torch.no_grad()(lambda: model(data.x, data.edge_index))
    else:
        epoch = large_epoch(case)
    seconds, clock = [], best_clock()
    for _ in range(case.get('repeats', 1)):
        start = clock()
        epoch()
        seconds.append(clock() - start)
    return {'seconds': seconds, 'peak_mb': peak_memory_mb(), 'start_mb': before}


if __name__ == '__main__':
    print(json.dumps(run_case(json.loads(sys.argv[1]))))
