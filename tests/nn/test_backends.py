"""All ways to compute a learned graph give the same values and gradients."""

import gc
import warnings

import pytest
import torch

from tests.nn.common import (
    MODELS,
    assert_close,
    assert_same,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.graphs import (
    LowRankGraph,
    Signal,
    SparseGraph,
    TiledGraph,
)
from torch_geometric_idgl.nn import (
    IDGL,
    RBF,
    Anchors,
    Attention,
    GraphLearner,
    IDGLAnch,
    WeightedCosine,
)
from torch_geometric_idgl.nn import graph_learner as module
from torch_geometric_idgl.ops import Layout, to_features

EXACT = ['auto', 'dense', 'tiled', 'sparse']
REGULARIZED = {'smoothness': 0.3, 'connectivity': 0.2, 'sparsity': 0.4}


def run(cls, backend, sparse=False, train=False, negative=False, seed=11, **options):
    x, edge_index = make_graph(12, dtype=torch.float64, negative=negative)
    model = make_model(cls, backend=backend, **{**REGULARIZED, **options})
    model = model.double().train(train)
    torch.manual_seed(seed)
    return loss_and_gradients(model, x.to_sparse_csr() if sparse else x, edge_index)


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'epsilon': 0.3},
        {'epsilon': 0.9},
        {'top_k': 3},
        {'epsilon': 0.3, 'top_k': 2},
        {'metric': 'cosine'},
        {'metric': 'rbf', 'epsilon': 0.5},
        {'metric': 'attention'},
        {'negative': True},
    ],
    ids=str,
)
def test_backends_agree(cls, options, sparse):
    expected = run(cls, 'dense', **options)
    backends = list(EXACT)
    removes = {'epsilon', 'top_k', 'negative'} & options.keys()
    if not removes:
        backends.append('low_rank')
    for backend in backends:
        assert_same(run(cls, backend, sparse, **options), expected, 1e-9)


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('epsilon', [0.0, 0.3])
def test_backends_agree_in_training(cls, epsilon, sparse):
    """The same seed drops the same entries, whatever computes the graph."""
    options = {
        'epsilon': epsilon,
        'dropout': 0.5,
        'iter_dropout': 0.2,
        'feature_dropout': 0.3,
        'graph_dropout': 0.4,
        'tol': None,
        'max_iters': 2,
        'train': True,
        'sparse': sparse,
    }
    expected = run(cls, 'dense', **options)
    for backend in EXACT + (['low_rank'] if epsilon == 0.0 else []):
        assert_same(run(cls, backend, **options), expected, 1e-9)


def test_dropout_depends_on_the_seed():
    options = {'graph_dropout': 0.5, 'train': True, 'tol': None, 'max_iters': 1}
    for cls in MODELS:
        first, second = (run(cls, 'dense', seed=s, **options)[0] for s in (1, 2))
        assert float(first) != float(second)


@pytest.mark.parametrize('cls', MODELS)
def test_blocks_of_features_and_lists_of_pairs_agree(cls, monkeypatch):
    """The terms of sparse features that are too many to be listed."""
    expected = run(cls, 'low_rank', sparse=True)
    monkeypatch.setattr(Signal, 'pairs', None)
    assert_same(run(cls, 'low_rank', sparse=True), expected, 1e-9)


def learner(metric=None, x=None, layout=None, index=None, **options):
    torch.manual_seed(0)
    metric = metric or WeightedCosine(x.size(1), heads=2).to(x.dtype)
    signal = Signal(to_features(x), layout or Layout((x.size(0),), x.device))
    anchors = None
    if index is not None:
        anchors = Anchors(index, Layout((index.numel(),), x.device))
    return GraphLearner(metric, **options)(signal, anchors=anchors)


def test_repr():
    text = str(GraphLearner(WeightedCosine(5, heads=2), 0.1, 3))
    assert text == 'GraphLearner(WeightedCosine(5, heads=2), epsilon=0.1, top_k=3)'


def choice(metric=None, x=None, index=None, **options):
    metric = metric or WeightedCosine(x.size(1), heads=2)
    layout = Layout((x.size(0),), x.device)
    anchors = None
    if index is not None:
        anchors = Anchors(index, Layout((index.numel(),), x.device))
    signal = Signal(to_features(x), layout)
    learner = GraphLearner(metric, **options)
    return learner.choose_backend(signal, layout, anchors, signal.nonnegative)


def test_auto_picks_what_is_exact_and_cheap(monkeypatch):
    x, _ = make_graph(12)
    index = torch.tensor([0, 5])
    for anchors in (None, index):
        assert choice(x=x, index=anchors) == 'low_rank'
        assert choice(x=x - 0.5, index=anchors) == 'dense'
        assert choice(x=x, index=anchors, epsilon=0.2) == 'dense'
        assert choice(RBF(6), x=x, index=anchors) == 'dense'
        assert choice(Attention(6), x=x - 0.5, index=anchors) == 'low_rank'
    assert choice(x=x, top_k=2) == 'dense'

    # As if the graphs were large:
    monkeypatch.setattr(module, '_DENSE_NODE_ENTRIES', 10)
    monkeypatch.setattr(module, '_DENSE_ANCHOR_ENTRIES', 10)
    assert choice(x=x - 0.5) == 'tiled'
    assert choice(x=x, index=index, epsilon=0.2) == 'tiled'
    monkeypatch.setattr(module, '_SPARSE_DENSITY', 0.3)
    assert choice(x=x, top_k=1) == 'sparse'
    assert choice(x=x - 0.5, epsilon=0.99) == 'sparse'
    assert choice(x=x, epsilon=0.01) == 'tiled'


def test_the_learned_operator_is_of_the_chosen_kind():
    x, _ = make_graph(12)
    assert isinstance(learner(x=x, backend='low_rank'), LowRankGraph)
    assert isinstance(learner(x=x, backend='tiled'), TiledGraph)
    assert isinstance(learner(x=x, backend='sparse'), SparseGraph)


def test_quadratic_cost_is_announced(monkeypatch):
    monkeypatch.setattr(module, '_DENSE_NODE_ENTRIES', 10)
    monkeypatch.setattr(module, '_LARGE_GRAPH', 12)
    x, _ = make_graph(12)
    with pytest.warns(UserWarning, match='all pairs of 12 nodes'):
        learner(x=x, epsilon=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learner(x=x)  # linear
        learner(x=x, epsilon=0.2, index=torch.tensor([0, 1]))


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse', 'low_rank'])
@pytest.mark.parametrize('anchors', [False, True])
def test_learner_on_plain_tensors(backend, anchors):
    x, _ = make_graph(9, dtype=torch.float64)
    metric = WeightedCosine(6, heads=2).double()
    model = GraphLearner(metric, backend=backend)
    chosen, expected = None, metric(x)
    if anchors:
        index = torch.tensor([2, 4])
        chosen = Anchors(index, Layout((2,), x.device))
        expected = metric(x, x[index])
    graph = model(x, anchors=chosen)
    assert_close(graph.to_dense(), expected, 1e-9)


def test_low_rank_refuses_what_it_cannot_do():
    x, _ = make_graph(9)
    for message, given, options in [
        ('inner product', x, {'metric': RBF(6)}),
        ('epsilon=0', x, {'epsilon': 0.1}),
        ('top_k=None', x, {'top_k': 2}),
        ('without negative entries', x - 0.5, {}),
    ]:
        with pytest.raises(ValueError, match=f'Expected.*{message}.*got'):
            learner(x=given, backend='low_rank', **options)


@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
def test_no_garbage(cls, backend):
    """Nothing waits for Python's garbage collector, least of all large tensors."""
    x, edge_index = torch.rand(20, 6), torch.randint(20, (2, 50))
    settings = {'epsilon': 0.1, 'sparsity': 0.1, 'graph_dropout': 0.5}
    model = cls(6, 4, 2, 3, backend=backend, **settings)

    def step():
        _, trace = model(x, edge_index, return_trace=True)
        trace.loss(lambda out: out.square().mean()).backward()

    step()
    gc.collect()
    gc.disable()
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()
