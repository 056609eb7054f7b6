"""All ways to compute a learned graph give the same values and gradients."""

import gc
import itertools
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
    DenseGraph,
    FeatureGraph,
    InnerScores,
    LowRankGraph,
    RepeatedScores,
    SparseGraph,
    TiledGraph,
    WeightedScores,
)
from torch_geometric_idgl.nn import IDGL, GraphLearner, IDGLAnch, WeightedCosine
from torch_geometric_idgl.nn import graph_learner as module
from torch_geometric_idgl.nn.inputs import Anchors, given_anchors
from torch_geometric_idgl.ops import Features, Nodes, features

EXACT = ['auto', 'dense', 'tiled', 'sparse']
REGULARIZED = {'smoothness': 0.3, 'connectivity': 0.2, 'sparsity': 0.4}


def run(cls, backend, sparse=False, train=False, negative=False, seed=11, **options):
    x, edge_index = make_graph(12, dtype=torch.float64, negative=negative)
    model = make_model(cls, backend=backend, **{**REGULARIZED, **options})
    model = model.double().train(train)
    torch.manual_seed(seed)
    return loss_and_gradients(model, x.to_sparse_csr() if sparse else x, edge_index)


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
def test_backends_agree(cls, options):
    expected = run(cls, 'dense', **options)
    backends = list(EXACT)
    removes = {'epsilon', 'top_k', 'negative'} & options.keys()
    if not removes:
        backends.append('low_rank')
    for backend, sparse in itertools.product(backends, (False, True)):
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
    monkeypatch.setattr(features, '_MAX_PAIRS', -1)
    assert_same(run(cls, 'low_rank', sparse=True), expected, 1e-9)


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('cls', MODELS)
def test_equal_rows_are_compared_once(cls, backend, monkeypatch):
    """As those of words that a document has several times."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    x = words[torch.randint(20, (70,), generator=generator)]
    model = make_model(cls, epsilon=0.2, backend=backend, k=5).double().eval()
    nodes = Nodes((70,), x.device)
    index = torch.arange(0, 70, 2) if cls is IDGLAnch else None
    found = []
    for few in (10, 1000):
        monkeypatch.setattr(module, '_FEW', few)
        found.append(loss_and_gradients(model, x, anchor_index=index))
        kind = RepeatedScores if few == 10 else InnerScores
        scores = model.feature_learner.scores(Features(x, nodes), nodes, None)
        assert type(scores) is kind
    assert_same(*found, 1e-9)


# The learner --------------------------------------------------------------------------


def features_of(x, nodes=None):
    return Features.from_tensor(x, nodes or Nodes((x.size(0),), x.device))


def test_repr():
    text = str(GraphLearner(5, heads=2, epsilon=0.1, top_k=3))
    assert text == 'GraphLearner(WeightedCosine(5, heads=2), epsilon=0.1, top_k=3)'


def choice(x, index=None, **options):
    features = features_of(x)
    learner = GraphLearner(x.size(1), heads=2, **options)
    anchors = None if index is None else given_anchors(features.nodes, index)
    return learner.choose_backend(
        features, features.nodes, anchors, features.range[0] >= 0
    )


def test_auto_picks_what_is_exact_and_cheap(monkeypatch):
    x, _ = make_graph(12)
    index = torch.tensor([0, 5])
    assert choice(x) == 'dense'  # quicker than its factors, as it is small
    assert choice(x, index) == 'low_rank'
    assert choice(x.to_sparse_csr(), index) == 'low_rank'
    for given in (None, index):
        assert choice(x - 0.5, given) == 'dense'
        assert choice(x, given, epsilon=0.2) == 'dense'
        assert choice(x, given, metric='rbf') == 'dense'
    assert choice(x, top_k=2) == 'dense'

    # As if the graphs were large:
    monkeypatch.setattr(module, '_SMALL', 10)
    assert choice(x) == 'low_rank'
    assert choice(x - 0.5, metric='attention') == 'low_rank'
    assert choice(x - 0.5) == 'dense'
    monkeypatch.setattr(module, '_DENSE_NODE_ENTRIES', 10)
    monkeypatch.setattr(module, '_DENSE_ANCHOR_ENTRIES', 10)
    assert choice(x) == choice(x, index) == 'low_rank'
    assert choice(x.to_sparse_csr(), index) == 'low_rank'
    assert choice(x - 0.5) == 'tiled'
    assert choice(x, index, epsilon=0.2) == 'tiled'
    monkeypatch.setattr(module, '_SPARSE_DENSITY', 0.3)
    assert choice(x, top_k=1) == 'sparse'
    assert choice(x - 0.5, epsilon=0.99) == 'sparse'
    assert choice(x, epsilon=0.01) == 'tiled'
    # Finding survivors takes looks at numbers, which are not free everywhere.
    monkeypatch.setattr(module, 'reads_are_free', lambda device: False)
    assert choice(x, top_k=1) == 'tiled'


def test_the_learned_operator_is_of_the_chosen_kind(monkeypatch):
    x, _ = make_graph(12)
    batch, index = Nodes((6, 6), x.device), torch.tensor([0, 7])
    for backend, given, nodes, anchors, kind in [
        ('low_rank', x, None, None, LowRankGraph),
        ('low_rank', x, None, index, LowRankGraph),
        ('low_rank', features_of(x), None, None, FeatureGraph),
        ('low_rank', features_of(1e7 * x), None, None, LowRankGraph),
        ('low_rank', features_of(x), None, index, LowRankGraph),
        ('low_rank', features_of(x.to_sparse_csr()), None, index, FeatureGraph),
        ('tiled', x, None, None, TiledGraph),
        ('sparse', x, None, None, SparseGraph),
        ('dense', x, None, None, DenseGraph),
        ('dense', x, batch, None, DenseGraph),
        ('dense', x, None, index, DenseGraph),
        ('dense', x, batch, index, DenseGraph),
    ]:
        graph = GraphLearner(6, backend=backend)(given, nodes, anchors)
        assert type(graph) is kind
    monkeypatch.setattr(module, '_SMALL', 10)  # as if it were large
    kept, passing = (GraphLearner(6, backend=b)(x) for b in ('dense', 'tiled'))
    assert kept.entries.keep and not passing.entries.keep
    for given, kind in [(x, InnerScores), (x.to_sparse_csr(), WeightedScores)]:
        graph = GraphLearner(6, backend='tiled')(features_of(given))
        assert type(graph.scores) is kind
    graph = GraphLearner(6, backend='tiled')(features_of((1e7 * x).to_sparse_csr()))
    assert type(graph.scores) is InnerScores  # whose gradient does not overflow


def test_quadratic_cost_is_announced(monkeypatch):
    monkeypatch.setattr(module, '_SMALL', 10)
    monkeypatch.setattr(module, '_DENSE_NODE_ENTRIES', 10)
    monkeypatch.setattr(module, '_LARGE_GRAPH', 12)
    x, _ = make_graph(12)
    with pytest.warns(UserWarning, match='all pairs of 12 nodes'):
        GraphLearner(6, epsilon=0.2)(x)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        GraphLearner(6)(x)  # linear
        GraphLearner(6, epsilon=0.2)(x, anchors=torch.tensor([0, 1]))


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse', 'low_rank'])
@pytest.mark.parametrize('metric', ['weighted_cosine', 'cosine', 'attention', 'rbf'])
def test_learner_on_plain_tensors(metric, backend):
    """Names of metrics, nodes and anchors, one graph and several, mixed precision."""
    if (metric, backend) == ('rbf', 'low_rank'):
        with pytest.raises(ValueError, match='inner product'):
            GraphLearner(6, metric, backend=backend)
        return
    x, _ = make_graph(9, dtype=torch.float64)
    learner = GraphLearner(6, metric, heads=2, backend=backend).double()
    expected, index = learner.metric(x), torch.tensor([2, 4])
    assert_close(learner(x).to_dense(), expected, 1e-9)
    assert_close(learner(features_of(x)).to_dense(), expected, 1e-9)
    for anchors in (index, Anchors(index, Nodes((2,), x.device))):
        found = learner(x, anchors=anchors).to_dense()
        assert_close(found, expected[:, index], 1e-9)
    blocks = torch.block_diag(expected[:4, :4], expected[4:, 4:])
    assert_close(learner(x, Nodes((4, 5), x.device)).to_dense(), blocks, 1e-9)

    learner, x = learner.float(), x.float()
    exact = learner(x).to_dense()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        graph = learner(x)
        assert graph.dtype == torch.float
    assert torch.equal(graph.to_dense(), exact)
    if metric != 'cosine':
        graph.to_dense().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in learner.parameters())


def test_low_rank_refuses_what_it_cannot_do():
    x, _ = make_graph(9)
    for message, given, options in [
        ('inner product', x, {'metric': 'rbf'}),
        ('epsilon=0', x, {'epsilon': 0.1}),
        ('top_k=None', x, {'top_k': 2}),
        ('without negative entries', x - 0.5, {}),
    ]:
        with pytest.raises(ValueError, match=f'Expected.*{message}.*got'):
            GraphLearner(6, backend='low_rank', **options)(given)
    assert GraphLearner(6)(x[:0]).shape == (0, 0)


def test_parameters_are_reset():
    learner = GraphLearner(6)
    assert isinstance(learner.metric, WeightedCosine)
    before = learner.metric.weight.clone()
    learner.reset_parameters()
    assert not torch.equal(learner.metric.weight, before)


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
