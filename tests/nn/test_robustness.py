"""Degenerate graphs: no NaN or infinity, forwards or backwards."""

import itertools
import warnings

import pytest
import torch
from torch_geometric.data import Batch, Data

from tests.nn.common import (
    BACKENDS,
    MODELS,
    all_finite,
    assert_close,
    joint_loss,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.graphs import GraphOperator
from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.transforms import LearnGraph

REGULARIZED = {'smoothness': 0.2, 'connectivity': 0.1, 'sparsity': 0.1}
NONE = torch.zeros(2, 0, dtype=torch.long)


def ones(n):
    return torch.ones(n, 6)


def cases():
    x, edge_index = make_graph(8)
    zero_row = x.clone()
    zero_row[[2, 5]] = 0.0
    yield 'plain', (x, edge_index), {}
    yield 'isolated nodes', (x, edge_index[:, (edge_index < 5).all(0)]), {}
    yield (
        'isolated nodes, no self-loops',
        (x, edge_index[:, :2]),
        {'add_self_loops': False},
    )
    yield 'no edges', (x, NONE), {}
    yield 'no edges, no self-loops', (x, NONE), {'add_self_loops': False}
    yield (
        'nothing but the initial graph',
        (x, NONE),
        {
            'add_self_loops': False,
            'initial_weight': 1.0,
        },
    )
    yield 'rows emptied', (x - 0.5, edge_index), {'epsilon': 0.999}
    yield 'everything emptied', (x, edge_index), {'epsilon': 1.5}
    yield (
        'everything emptied, nothing given',
        (x, NONE),
        {
            'epsilon': 1.5,
            'add_self_loops': False,
        },
    )
    yield 'zero features', (torch.zeros(8, 6), edge_index), {}
    yield 'zero features, kNN', (torch.zeros(8, 6), None), {}
    yield 'zero rows', (zero_row, edge_index), {}
    yield 'zero rows, kNN', (zero_row, None), {'k': 3}
    yield 'equal features', (ones(8), edge_index), {}
    yield 'opposite features', (torch.cat([ones(4), -ones(4)]), edge_index), {}
    yield 'duplicate edges', (x, torch.cat([edge_index, edge_index], dim=1)), {}
    yield 'self-loops', (x, torch.arange(8).expand(2, 8)), {}
    yield (
        'zero weights',
        (x, edge_index, torch.zeros(edge_index.size(1))),
        {'add_self_loops': False},
    )
    yield 'one node', (x[:1], NONE), {}
    yield 'one node, kNN', (x[:1], None), {}
    yield 'one zero node', (torch.zeros(1, 6), NONE), {}
    yield 'k above n', (x, None), {'k': 50}
    yield 'huge features', (1e10 * x, edge_index), {}
    yield 'tiny features', (1e-10 * x, edge_index), {}
    yield 'double precision', (x.double(), edge_index), {}


CASES = {name: (args, options) for name, args, options in cases()}


@pytest.mark.parametrize('name', list(CASES))
def test_finite(name):
    args, options = CASES[name]
    n = args[0].size(0)
    for cls, backend, train in itertools.product(MODELS, BACKENDS, (False, True)):
        if backend == 'low_rank':
            if options.get('epsilon') or bool((args[0] < 0).any()):
                continue
        model = make_model(
            cls,
            backend=backend,
            max_iters=2,
            dropout=0.5,
            feature_dropout=0.5,
            graph_dropout=0.5,
            **{**REGULARIZED, **options},
        )
        model = model.to(args[0].dtype).train(train)
        result = loss_and_gradients(model, *args)
        assert all_finite(result), (cls, backend, train)
        assert result[2].out.shape == (n, 3)
        assert result[2].out.dtype == args[0].dtype
        for delta in result[2].deltas:
            assert bool(torch.isfinite(delta).all())
        assert bool(torch.isfinite(result[2].mixed.to_dense()).all())


@pytest.mark.parametrize('name', list(CASES))
def test_backends_agree_on_degenerate_graphs(name):
    for cls in MODELS:
        check_backends_agree(cls, *CASES[name])


def check_backends_agree(cls, args, options):
    args = tuple(
        a.double() if i != 1 and a is not None else a for i, a in enumerate(args)
    )
    outs = []
    for backend in ('dense', 'tiled', 'sparse', 'auto'):
        options = {**REGULARIZED, **options, 'tol': None, 'max_iters': 1}
        model = make_model(cls, backend=backend, **options).double().eval()
        loss, _, trace = loss_and_gradients(model, *args)
        outs.append((loss, trace.out))
    for loss, out in outs[1:]:
        assert_close(loss, outs[0][0], 1e-8)
        assert_close(out, outs[0][1], 1e-7)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_batches_with_degenerate_graphs(cls, backend):
    x, edge_index = make_graph(6)
    graphs = [
        Data(x=x, edge_index=edge_index),
        Data(x=x[:1], edge_index=NONE),
        Data(x=torch.zeros(3, 6), edge_index=NONE),
        Data(x=x[:0], edge_index=NONE),
        Data(x=x[:2], edge_index=torch.tensor([[0, 0], [1, 1]])),
    ]
    batch = Batch.from_data_list(graphs)
    for train in (False, True):
        options = {'dropout': 0.5, 'graph_dropout': 0.5, 'feature_dropout': 0.5}
        model = make_model(cls, backend=backend, **REGULARIZED, **options).train(train)
        result = loss_and_gradients(model, batch)
        assert all_finite(result)
        assert result[2].num_iters.shape == (5,)
        assert result[2].out.shape == (12, 3)
        assert all_finite(loss_and_gradients(model, batch.x, batch=batch.batch))


@pytest.mark.parametrize('cls', MODELS)
def test_graphs_without_nodes_are_exported(cls):
    x = torch.ones(0, 6)
    for kind in ('mixed', 'learned'):
        data = LearnGraph(make_model(cls), kind=kind)(Data(x=x))
        assert data.edge_index.shape == (2, 0) and data.edge_weight.shape == (0,)


@pytest.mark.parametrize('cls', MODELS)
def test_half_precision_is_finite(cls):
    x, edge_index = make_graph()
    x[0] = 0.0
    model = make_model(cls, connectivity=0.1, sparsity=0.1).half()
    loss, _ = joint_loss(model, x.half(), edge_index)
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('cls', MODELS)
def test_no_nodes_at_all(cls):
    out = make_model(cls)(torch.zeros(0, 6), NONE)
    assert out.shape == (0, 3)


def test_more_anchors_than_nodes():
    x, edge_index = make_graph(7)
    for anchors in (7, 8, 200):
        model = make_model(IDGLAnch, num_anchors=anchors).eval()
        result = loss_and_gradients(model, x, edge_index)
        assert all_finite(result)
        assert result[2].first.shape == (7, 7)


@pytest.mark.parametrize('cls', MODELS)
def test_duplicate_edges_add_up(cls):
    x, edge_index = make_graph(8, dtype=torch.float64)
    model = make_model(cls).double().eval()
    twice = torch.cat([edge_index, edge_index], dim=1)
    weight = torch.full((edge_index.size(1),), 2.0, dtype=torch.float64)
    assert_close(model(x, twice), model(x, edge_index, weight), 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_duplicate_edges_in_the_initial_graph(cls):
    x, edge_index = make_graph(8, dtype=torch.float64)
    model = make_model(cls, normalize=False).double().eval()
    twice = torch.cat([edge_index, edge_index], dim=1)
    _, trace = model(x, twice, return_trace=True)
    dense = trace.initial.to_dense()
    assert float(dense.max()) == 2.0
    _, weight = trace.initial.to_edges()
    assert float(weight.sum()) == float(dense.sum())
    total = dense.square().sum()
    assert float(trace.initial.sq_norm()) == pytest.approx(float(total))


@pytest.mark.parametrize('cls', MODELS)
def test_constant_graphs_stop_at_once(cls):
    """Equal embeddings from the start: one refinement, and nothing left to change."""
    x, edge_index = torch.ones(6, 6), make_graph(6)[1]
    model = make_model(cls).eval()
    _, trace = model(x, edge_index, return_trace=True)
    assert int(trace.num_iters) <= 2
    assert float(trace.deltas[-1]) <= model.tol


class Fixed(torch.nn.Module):
    """A metric without parameters."""

    def forward(self, x, y):
        return torch.exp(-torch.cdist(x, y))


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('case', ['fixed', 'frozen', 'frozen sparse'])
def test_metrics_with_nothing_to_learn(case, backend):
    x, edge_index = make_graph(30)
    metric = Fixed() if case == 'fixed' else 'weighted_cosine'
    options = {'metric': metric, 'epsilon': 0.4, 'backend': backend, 'max_iters': 2}
    model = make_model(IDGL, **options)
    model.feature_learner.requires_grad_(False)
    x = x.to_sparse_csr() if case == 'frozen sparse' else x
    loss, _ = joint_loss(model, x, edge_index)
    loss.backward()
    assert model.backbone.convs[0].lin.weight.grad.abs().sum() > 0


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
def test_weights_of_exactly_zero(cls, sparse):
    x, edge_index = make_graph(12)
    model = make_model(cls, sparsity=0.1)
    x = x.to_sparse_csr() if sparse else x
    with torch.no_grad():
        model.feature_learner.metric.weight[0, 0] = 0.0
    loss, _ = joint_loss(model, x, edge_index)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('loops', [False, True])
def test_nodes_without_incoming_weight(loops):
    x, edge_index = make_graph(8)
    weight = torch.rand(edge_index.size(1))
    weight[edge_index[1] == 3] = 0.0
    weight.requires_grad_()
    model = make_model(IDGL, add_self_loops=loops)
    loss, _ = joint_loss(model, x, edge_index, weight)
    loss.backward()
    assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0


def test_bfloat16_of_large_dense_features():
    x = torch.rand(300, 5).bfloat16()
    for tol in (0.03, 0.1, 0.3):
        model = IDGL(5, 8, 2, 3, tol=tol).bfloat16()
        assert model(x).isfinite().all()


@pytest.mark.parametrize('options', [{'max_iters': 0}, {'update_weight': 0.0}, {}])
def test_outputs_may_be_changed_in_place(options):
    x, edge_index = make_graph()
    model = make_model(IDGL, **options)
    expected = model(x, edge_index).relu()
    out = model(x, edge_index)
    out.relu_()
    assert torch.equal(out, expected)
    out.sum().backward()


def test_the_trace_does_not_keep_every_graph():
    x, edge_index = make_graph(20)
    model = make_model(IDGLAnch, epsilon=0.1, tol=0.0, max_iters=3)
    _, trace = model(x, edge_index, return_trace=True)
    assert len(trace.changes) == len(trace.deltas) == 3
    for change in trace.changes:
        assert not any(isinstance(part, GraphOperator) for part in change)


def mixed_magnitudes(x, size):
    """Rows of the given size beside usual ones."""
    return x * torch.where(torch.arange(len(x)) % 2 == 0, size, 1.0).unsqueeze(1)


@pytest.mark.parametrize('layout', ['dense', 'sparse', 'learned'])
@pytest.mark.parametrize('cls', MODELS)
def test_large_features_are_finite_or_refused(cls, layout):
    x, edge_index = make_graph(12)
    sizes = (1e7, 1e14, 1e16, 1e18)
    forms = [form for s in sizes for form in (s * x, mixed_magnitudes(x, s))]
    for given in forms:
        given = given.to_sparse_csr() if layout == 'sparse' else given
        if layout == 'learned':
            given.requires_grad_()
        for backend, epsilon in [('low_rank', 0), ('dense', 0.1), ('tiled', 0.1)]:
            options = {'smoothness': 0.0, 'sparsity': 0.1}
            model = make_model(cls, backend=backend, epsilon=epsilon, **options)
            try:
                result = loss_and_gradients(model, given, edge_index)
            except ValueError as error:
                assert "Expected 'x'" in str(error)
                continue
            grads = {**result[1]}
            if layout == 'learned':
                grads['x'] = given.grad
                given.grad = None
            bad = [name for name, grad in grads.items() if not grad.isfinite().all()]
            assert not bad, (backend, bad)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_traces_can_be_saved(cls, backend, tmp_path):
    x, edge_index = make_graph(12)
    for sparse, metric in [
        (False, 'weighted_cosine'),
        (True, 'cosine'),
        (False, 'rbf'),
    ]:
        if backend == 'low_rank' and metric == 'rbf':
            continue
        epsilon = 0.0 if backend == 'low_rank' else 0.2
        model = make_model(cls, backend=backend, epsilon=epsilon, metric=metric)
        given = x.to_sparse_csr() if sparse else x
        _, trace = model(given, edge_index, return_trace=True)
        torch.save(trace, tmp_path / 'trace.pt')
        loaded = torch.load(tmp_path / 'trace.pt', weights_only=False)
        for name in ('first', 'learned', 'mixed', 'initial'):
            graph, other = getattr(loaded, name), getattr(trace, name)
            assert_close(graph.to_dense(), other.to_dense())
            assert torch.equal(graph.to_edges()[0], other.to_edges()[0])
        assert torch.equal(loaded.out, trace.out)
        assert torch.equal(loaded.num_iters, trace.num_iters)
        for delta, other in zip(loaded.deltas, trace.deltas, strict=True):
            assert_close(delta, other)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_graphs_of_a_trace_are_those_of_the_pass(cls, backend):
    """What happens to features or weights afterwards does not change them."""
    x, edge_index = make_graph(12)
    for convert in ('clone', 'to_sparse_csr', 'to_sparse_coo'):
        given = getattr(x, convert)()
        model = make_model(cls, backend=backend).eval()
        _, trace = model(given, edge_index, return_trace=True)
        expected = make_model(cls, backend=backend).eval()(
            given, edge_index, return_trace=True
        )[1]
        expected = [
            expected.first.to_dense().clone(),
            expected.mixed.to_dense().clone(),
        ]
        (given if convert == 'clone' else given.values()).fill_(7.0)
        assert_close(trace.first.to_dense(), expected[0])
        assert_close(trace.mixed.to_dense(), expected[1])


@pytest.mark.parametrize('cls', MODELS)
def test_no_warning_of_torch_reaches_the_user(cls):
    generator = torch.Generator().manual_seed(0)
    large = torch.rand(80, 900, generator=generator)  # made sparse inside of the model
    large = large * (large > 0.97)
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        forms = [
            large,
            large.to_sparse_coo(),
            large.to_sparse_csr(),
            large.to_sparse_csc(),
        ]
        adjacency = torch.eye(80).to_sparse_csr()
    torch.set_warn_always(True)  # PyTorch says most things only once otherwise.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            for x in forms:
                for backend in BACKENDS:
                    model = make_model(cls, 900, 8, 2, 3, backend=backend, max_iters=2)
                    loss_and_gradients(model, x)
                loss_and_gradients(model, x, adjacency)
                batch = torch.arange(4).repeat_interleave(20)
                loss_and_gradients(model, x, batch=batch)
    finally:
        torch.set_warn_always(always)
