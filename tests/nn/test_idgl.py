"""The models as a user of PyG meets them."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN

from tests.nn.common import (
    BACKENDS,
    MODELS,
    all_finite,
    assert_close,
    assert_same,
    cross_entropy,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
    reference_of,
)
from torch_geometric_idgl.nn import IDGL, IDGLAnch, Metric, Trace


def anchored(cls):
    return {'num_anchors': 4, 'anchor_sampling': 'fixed'} if cls is IDGLAnch else {}


# In place of a GCN --------------------------------------------------------------------


@pytest.mark.parametrize('cls', [GCN, *MODELS])
def test_gcn_pipeline(cls, tmp_path):
    """A user's GCN pipeline, of which only the class changes."""
    torch.manual_seed(0)
    x, edge_index = make_graph(30)
    y = (x[:, 0] > x[:, 1]).long()
    data = Data(x=x, edge_index=edge_index, y=y, train_mask=torch.arange(30) % 2 == 0)
    model = cls(data.num_features, 16, 2, 2, dropout=0.2, act='relu', norm=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)

    losses = []
    for _ in range(30):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]

    model.eval()
    torch.manual_seed(1)  # anchors are drawn anew, evaluation included
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    assert out.shape == (30, 2)
    assert not out.requires_grad

    torch.save(model.state_dict(), tmp_path / 'model.pt')
    other = cls(data.num_features, 16, 2, 2, dropout=0.2)
    other.load_state_dict(torch.load(tmp_path / 'model.pt', weights_only=True))
    other.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(other(data.x, data.edge_index), out)

    edge_weight = torch.rand(data.num_edges)
    assert model(data.x, data.edge_index, edge_weight).shape == (30, 2)
    assert model(data.x, data.edge_index, edge_weight=edge_weight).shape == (30, 2)


@pytest.mark.parametrize('cls', MODELS)
def test_joint_loss_learns(cls):
    torch.manual_seed(0)
    x, edge_index = make_graph(30)
    y = (torch.arange(30) < 15).long()
    x[:15, 0] += 1.0
    model = cls(6, 16, 2, 2, dropout=0.2, feature_dropout=0.1, graph_dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for _ in range(40):
        model.train()
        optimizer.zero_grad()
        _, trace = model(x, edge_index, return_trace=True)
        loss = trace.loss(cross_entropy(y))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    for name, value in model.state_dict().items():  # both graph learners learn, too
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize('cls', MODELS)
def test_repr(cls):
    model = cls(1433, 16, num_layers=2, out_channels=7)
    assert str(model) == f'{cls.__name__}(1433, 7, num_layers=2)'
    assert str(cls(5, 16, 3)) == f'{cls.__name__}(5, 16, num_layers=3)'


def test_gcn_without_learned_graphs():
    """With lambda = 1 the model is PyG's GCN with the same weights."""
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGL, initial_weight=1.0).double().eval()
    gcn = GCN(6, 8, 2, 3, bias=False).double().eval()
    for mine, other in zip(model.backbone.convs, gcn.convs, strict=True):
        other.lin.weight.data.copy_(mine.lin.weight.data)
    edge_weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    assert_close(model(x, edge_index), gcn(x, edge_index), 1e-9)
    expected = gcn(x, edge_index, edge_weight)
    assert_close(model(x, edge_index, edge_weight), expected, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_reset_parameters(cls):
    model = make_model(cls, norm='batch_norm', metric='rbf', jk='lstm', backbone='gin')
    x, edge_index = make_graph()
    model(x, edge_index)
    torch.manual_seed(3)
    model.reset_parameters()
    first = copy.deepcopy(model.state_dict())
    model(x, edge_index)
    for p in model.parameters():
        p.data.add_(1.0)
    torch.manual_seed(3)
    model.reset_parameters()
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name]), name


@pytest.mark.parametrize('cls', MODELS)
def test_copies(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True).eval()
    out = model(x, edge_index)
    out.sum().backward()  # which leaves transposed matrices in the cache
    assert torch.equal(copy.deepcopy(model)(x, edge_index), out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x, edge_index), out)
    assert torch.equal(model(x, edge_index), out)


# Inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize('cls', MODELS)
def test_data_objects(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    expected = model(x, edge_index)
    data = Data(x=x, edge_index=edge_index)
    assert torch.equal(model(data), expected)
    out, trace = model(data, return_trace=True, max_iters=1)
    assert trace.num_iters.tolist() == [1]
    assert torch.equal(out, model(x, edge_index, max_iters=1))

    edge_weight = torch.rand(edge_index.size(1))
    weighted = Data(x=x, edge_index=edge_index, edge_weight=edge_weight)
    assert torch.equal(model(weighted), model(x, edge_index, edge_weight))
    assert torch.equal(model(Data(x=x)), model(x))

    adj_t = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(edge_index.size(1)), (10, 10)
    )
    assert_close(model(Data(x=x, adj_t=adj_t.coalesce())), expected)
    assert_close(model(Data(x=x, adj_t=adj_t.to_sparse_csr())), expected)


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('weighted', [False, True])
def test_forms_of_the_graph(cls, weighted):
    x, edge_index = make_graph(dtype=torch.float64)
    edge_index = edge_index[:, :-3]  # not symmetric: a wrong direction shows
    size = edge_index.size(1)
    value = torch.linspace(0.2, 1.0, size, dtype=torch.float64)
    weight = value if weighted else None
    value = value if weighted else torch.ones(size, dtype=torch.float64)
    model = make_model(cls).double().eval()
    expected = model(x, edge_index, weight)

    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    shuffled = model(x, edge_index[:, order], None if weight is None else weight[order])
    assert_close(shuffled, expected, 1e-9)
    assert_close(model(x, edge_index.int(), weight), expected, 1e-9)
    index = EdgeIndex(edge_index, sparse_size=(10, 10))
    assert_close(model(x, index, weight), expected, 1e-9)
    index, perm = index.sort_by('col')
    sorted_weight = None if weight is None else weight[perm]
    assert_close(model(x, index, sorted_weight), expected, 1e-9)

    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), value, (10, 10))
    for form in (adj_t, adj_t.coalesce(), adj_t.to_sparse_csr(), adj_t.to_sparse_csc()):
        assert_close(model(x, form), expected, 1e-9)
    if weighted:
        assert_close(model(x, edge_index, weight.view(-1, 1)), expected, 1e-9)
        assert_close(model(x, edge_index, weight.float()), expected, 1e-6)


@pytest.mark.sparse
@pytest.mark.parametrize('cls', MODELS)
def test_sparse_tensor(cls):
    torch_sparse = pytest.importorskip('torch_sparse')
    x, edge_index = make_graph(dtype=torch.float64)
    edge_index = edge_index[:, :-3]
    value = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    model = make_model(cls).double().eval()
    source, target = edge_index
    for weight in (None, value):
        adj_t = torch_sparse.SparseTensor(
            row=target, col=source, value=weight, sparse_sizes=(10, 10)
        )
        expected = model(x, edge_index, weight)
        assert_close(model(x, adj_t), expected, 1e-9)
        assert_close(model(Data(x=x, adj_t=adj_t)), expected, 1e-9)
    with pytest.raises(
        ValueError, match=r'Expected .* shape \[10, 10\].*got \[10, 11\]'
    ):
        wrong = torch_sparse.SparseTensor(row=target, col=source, sparse_sizes=(10, 11))
        model(x, wrong)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_sparse_features(cls, backend):
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(cls, backend=backend, k=3).double().eval()
    expected = loss_and_gradients(model, x, edge_index)
    coo = x.to_sparse_coo()
    for form in (coo, x.to_sparse_csr(), x.to_sparse_csc()):
        assert_same(loss_and_gradients(model, form, edge_index), expected, 1e-9)
    assert_close(model(coo), model(x), 1e-9)  # a kNN graph of sparse features


@pytest.mark.parametrize('cls', MODELS)
def test_large_bags_of_words_become_sparse(cls):
    """Conversion inside of the model changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 900, generator=generator, dtype=torch.float64)
    x = x * (x > 0.97)
    model = make_model(cls, 900, 8, 2, 3).double().eval()
    dense = make_model(cls, 900, 8, 2, 3, backend='dense').double().eval()
    _, edge_index = make_graph(80)
    learned = x.clone().requires_grad_()  # stays dense
    expected = loss_and_gradients(dense, learned, edge_index)
    assert_same(loss_and_gradients(model, x, edge_index), expected, 1e-8)


@pytest.mark.parametrize('cls', MODELS)
def test_non_contiguous_inputs(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    expected = model(x, edge_index)
    wide = torch.stack([x, x], dim=2)[..., 0]
    tall = x.t().contiguous().t()
    pairs = edge_index.t().contiguous().t()
    assert not (wide.is_contiguous() or tall.is_contiguous() or pairs.is_contiguous())
    for form in (wide, tall):
        assert_close(model(form, pairs), expected)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_inputs_are_not_modified(cls, backend):
    x, edge_index = make_graph()
    edge_weight = torch.rand(edge_index.size(1))
    batch = torch.tensor([0] * 10)
    anchors = torch.tensor([7, 2]) if cls is IDGLAnch else None
    given = [x, edge_index, edge_weight, batch] + ([] if anchors is None else [anchors])
    copies = [tensor.clone() for tensor in given]
    versions = [tensor._version for tensor in given]
    model = make_model(
        cls, backend=backend, dropout=0.5, feature_dropout=0.5, graph_dropout=0.5
    )
    loss_and_gradients(
        model, x, edge_index, edge_weight, batch=batch, anchor_index=anchors
    )
    model(x.to_sparse_csr(), edge_index)
    for tensor, copied, version in zip(given, copies, versions, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor._version == version

    data = Data(x=x, edge_index=edge_index)
    model(data)
    assert set(data.keys()) == {'x', 'edge_index'}


@pytest.mark.parametrize('cls', MODELS)
def test_edge_attributes_are_ignored(cls):
    x, edge_index = make_graph()
    model = make_model(cls).eval()
    edge_attr = torch.rand(edge_index.size(1), 4)
    assert torch.equal(model(x, edge_index, edge_attr=edge_attr), model(x, edge_index))
    data = Data(x=x, edge_index=edge_index, edge_attr=edge_attr)
    assert torch.equal(model(data), model(x, edge_index))


# Iteration ----------------------------------------------------------------------------


@pytest.mark.parametrize('cls', MODELS)
def test_number_of_iterations(cls):
    x, edge_index = make_graph()
    for options, given, expected in [
        ({'max_iters': 0}, {}, 0),
        ({'tol': None, 'max_iters': 3}, {}, 3),
        ({'tol': None, 'max_iters': 3}, {'max_iters': 1}, 1),
        ({'tol': None, 'max_iters': 3}, {'max_iters': 0}, 0),
        ({'tol': None, 'max_iters': 1}, {'max_iters': 4}, 4),
        ({'tol': 1e9}, {}, 1),  # at least one refinement
        ({'tol': 0.0, 'max_iters': 2}, {}, 2),
    ]:
        model = make_model(cls, **options).eval()
        out, trace = model(x, edge_index, return_trace=True, **given)
        assert trace.num_iters.tolist() == [expected]
        assert len(trace.outs) == len(trace.regs) == expected + 1
        wanted = 0 if model.tol is None else expected
        assert len(trace.deltas) == wanted
        assert torch.equal(out, trace.outs[-1])
        assert torch.equal(out, model(x, edge_index, **given))


@pytest.mark.parametrize('cls', MODELS)
def test_stopping(cls):
    x, edge_index = make_graph(dtype=torch.float64, negative=True)
    model = make_model(cls, tol=1e-3, update_weight=0.9, initial_weight=0.1)
    _, trace = model.double().eval()(x, edge_index, return_trace=True)
    deltas = [float(delta) for delta in trace.deltas]
    count = int(trace.num_iters)
    assert 1 < count < 10
    assert all(delta > 1e-3 for delta in deltas[:-1])
    assert deltas[-1] <= 1e-3


@pytest.mark.parametrize('cls', MODELS)
def test_trace(cls):
    x, edge_index = make_graph()
    model = make_model(cls, tol=None, max_iters=2).eval()
    out, trace = model(x, edge_index, return_trace=True)
    assert isinstance(trace, Trace)
    assert [o.shape for o in trace.outs] == [(10, 3)] * 3
    assert [r.shape for r in trace.regs] == [(1,)] * 3
    assert torch.equal(trace.out, out)
    assert trace.num_iters.dtype == torch.long
    width = 10 if cls is IDGL else 4
    assert trace.initial.shape == (10, 10)
    assert trace.first.shape == trace.learned.shape == (10, width)
    assert trace.mixed.shape == (10, 10)
    assert bool((trace.learned.to_dense() >= 0).all())

    fn = cross_entropy(labels(10))
    losses = [fn(o) for o in trace.outs]
    expected = losses[0] + (losses[1] + losses[2]) / 2
    assert_close(trace.prediction_loss(fn), expected)
    regs = [r.squeeze() for r in trace.regs]
    assert_close(trace.reg, regs[0] + (regs[1] + regs[2]) / 2)
    assert_close(trace.loss(fn), trace.prediction_loss(fn) + trace.reg)

    _, trace = model(x, edge_index, return_trace=True, max_iters=0)
    assert_close(trace.loss(fn), fn(trace.out) + trace.regs[0].squeeze())


@pytest.mark.parametrize('cls', MODELS)
def test_exported_edges_reproduce_the_prediction(cls):
    """The last mixed graph, as edges, in PyG's own GCN."""
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(cls).double().eval()
    out, trace = model(x, edge_index, return_trace=True)
    index, weight = trace.mixed.to_edges()
    gcn = GCN(6, 8, 2, 3, bias=False, normalize=False).double().eval()
    for mine, other in zip(model.backbone.convs, gcn.convs, strict=True):
        other.lin.weight.data.copy_(mine.lin.weight.data)
    assert_close(gcn(x, index, weight), out, 1e-9)
    with pytest.raises(ValueError, match='at most 3 edges'):
        trace.mixed.to_edges(max_edges=3)
    with pytest.raises(ValueError, match='at most 99 entries'):
        trace.mixed.to_dense(max_entries=99)


def test_no_state_is_kept_between_calls():
    x, edge_index = make_graph()
    for cls in MODELS:
        model = make_model(cls).eval()
        out = model(x, edge_index)
        model(*make_graph(17, seed=3))
        assert torch.equal(model(x, edge_index), out)


# Cache --------------------------------------------------------------------------------


@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('cls', MODELS)
def test_cached(cls, sparse):
    x, edge_index = make_graph(dtype=torch.float64)
    x = x.to_sparse_csr() if sparse else x
    options = {'dropout': 0.5, 'feature_dropout': 0.3, 'graph_dropout': 0.3}
    plain = make_model(cls, **options).double()
    cached = make_model(cls, cached=True, **options).double()
    for step in range(3):
        results = []
        for model in (plain, cached):
            torch.manual_seed(step)
            model.train(step < 2)
            results.append(loss_and_gradients(model, x, edge_index))
        assert_same(results[1], results[0], 1e-12)

    other, other_index = make_graph(11, dtype=torch.float64)
    with pytest.raises(ValueError, match=r'shape \[10, 6\] .got \[11, 6\].'):
        cached(other, other_index)
    cached.reset_parameters()
    assert cached(other, other_index).shape == (11, 3)


@pytest.mark.parametrize('cls', MODELS)
def test_cache_holds_for_the_graph_and_the_knn_graph(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True).eval()
    out = model(x, edge_index)
    assert torch.equal(model(x), out)  # as GCNConv: later graphs are not looked at
    model = make_model(cls, cached=True, k=3).eval()
    out = model(x)
    assert torch.equal(model(x), out)
    assert_close(out, make_model(cls, k=3).eval()(x))


@pytest.mark.parametrize('cls', MODELS)
def test_cache_sees_other_features(cls):
    x, edge_index = make_graph()
    other = torch.rand_like(x)
    plain, cached = (make_model(cls, cached=c, k=3).eval() for c in (False, True))
    for graph in [(edge_index,), ()]:
        cached._cache = None
        for features in (x, other, x):
            assert_close(cached(features, *graph), plain(features, *graph))
        changed = x.clone()
        cached(changed, *graph)
        changed[0] = 7.0
        assert_close(cached(changed, *graph), plain(changed, *graph))
    # The graph that was given stays, whatever comes later.
    cached._cache = None
    cached(x, edge_index)
    assert_close(cached(other), plain(other, edge_index))


@pytest.mark.parametrize('cls', MODELS)
def test_cache_and_gradients(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True)
    with torch.inference_mode():
        model.eval()(x, edge_index)
    model.train()(x, edge_index).sum().backward()

    features = x.clone().requires_grad_()
    model(features, edge_index).sum().backward()
    assert features.grad.abs().sum() > 0

    # Gradients reach learned edge weights in every step.
    model = make_model(cls, cached=True)
    weight = torch.rand(edge_index.size(1), requires_grad=True)
    for _ in range(2):
        weight.grad = None
        model(x, edge_index, weight).sum().backward()
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize('cls', MODELS)
def test_cache_and_number_types(cls):
    x, edge_index = make_graph()
    model = make_model(cls, cached=True).eval()
    model(x, edge_index)
    with pytest.raises(TypeError, match="'x' to be a 'torch"):
        model([1, 2], edge_index)
    model.double()
    assert model(x.double(), edge_index).dtype == torch.double
    with pytest.raises(TypeError, match=r'type torch.float64.*\(got torch.float32\)'):
        model(x, edge_index)


@pytest.mark.parametrize('cls', MODELS)
def test_mixed_precision_before_the_model(cls):
    x, edge_index = make_graph()
    encoder, model = torch.nn.Linear(6, 6), make_model(cls)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        h = encoder(x)
        assert h.dtype == torch.bfloat16
        out = model(h, edge_index)
    assert out.dtype == torch.float
    out.sum().backward()
    assert encoder.weight.grad.isfinite().all()


# Anchors ------------------------------------------------------------------------------


def drawn(model, x, edge_index):
    """The anchors of one forward pass, by what their columns are."""
    _, trace = model(x, edge_index, return_trace=True, max_iters=0)
    similar = model.feature_learner.metric(x)
    columns = trace.first.to_dense().t()
    return [
        min(range(x.size(0)), key=lambda j: (similar[:, j] - c).abs().max().item())
        for c in columns.unbind(0)
    ]


def test_anchor_sampling():
    x, edge_index = make_graph(20, dtype=torch.float64)

    def draws(mode, train, seeds=(1, 2, 3)):
        model = make_model(IDGLAnch, num_anchors=5, anchor_sampling=mode).double()
        model.train(train)
        out = []
        for seed in seeds:
            torch.manual_seed(seed)
            out.append(tuple(drawn(model, x, edge_index)))
        return out

    for train in (True, False):
        assert len(set(draws('resample', train))) == 3
        assert len(set(draws('fixed', train))) == 1
    assert len(set(draws('seeded', True))) == 3
    assert len(set(draws('seeded', False))) == 1
    assert draws('fixed', True)[0] == draws('fixed', False)[0]
    assert draws('resample', True) == draws('resample', True)
    for anchors in draws('resample', True):
        assert len(set(anchors)) == 5  # without replacement

    model = make_model(IDGLAnch, anchor_sampling='fixed', anchor_seed=5).double()
    other = make_model(IDGLAnch, anchor_sampling='fixed', anchor_seed=6).double()
    assert drawn(model, x, edge_index) != drawn(other, x, edge_index)


def test_seeded_anchors_leave_the_global_generator_alone():
    x, edge_index = make_graph(20)
    model = make_model(IDGLAnch, anchor_sampling='fixed').eval()
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    model(x, edge_index)
    assert torch.equal(torch.rand(1), expected)


def test_number_of_anchors():
    x, edge_index = make_graph(20)
    for options, expected in [
        ({'num_anchors': 7}, 7),
        ({'num_anchors': 200}, 20),
        ({'anchor_ratio': 0.5}, 10),
        ({'anchor_ratio': 0.01}, 1),
        ({'anchor_ratio': 1.0}, 20),
        ({}, 20),  # 1,000 by default
    ]:
        model = IDGLAnch(6, 8, 2, 3, **options)
        _, trace = model(x, edge_index, return_trace=True)
        assert trace.first.shape == (20, expected)


def test_anchor_index():
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGLAnch).double().eval()
    index = torch.tensor([8, 1, 3])
    assert drawn(model, x, edge_index) != [8, 1, 3]
    out, trace = model(x, edge_index, anchor_index=index, return_trace=True)
    run = reference_of(model, x, trace.initial.to_dense(), index)
    assert_close(out, run.outs[-1], 1e-9)
    assert_close(model(x, edge_index, anchor_index=index.int()), out, 1e-9)
    assert_close(model(x, edge_index, anchor_index=index.flip(0)), out, 1e-9)


def test_all_nodes_as_anchors_of_a_batch():
    graphs = [
        Data(x=x, edge_index=e) for x, e in (make_graph(5), make_graph(4, seed=1))
    ]
    model = IDGLAnch(6, 8, 2, 3).eval()
    out = model(Batch.from_data_list(graphs))
    single = torch.cat([model(data) for data in graphs])
    assert_close(out, single, 1e-4)


def test_defaults_of_the_paper():
    model, anchored = IDGL(6, 8, 2), IDGLAnch(6, 8, 2)
    assert isinstance(anchored, IDGL)
    assert (model.tol, model.sparsity) == (4e-5, 0.0)
    assert (anchored.tol, anchored.sparsity) == (8.5e-5, 0.1)
    assert anchored.num_anchors == 1000
    for m in (model, anchored):
        assert (m.initial_weight, m.update_weight, m.max_iters) == (0.8, 0.1, 10)
        assert (m.smoothness, m.connectivity, m.k) == (0.2, 0.0, 20)


# Options ------------------------------------------------------------------------------


class Distance(torch.nn.Module):
    """A user's metric."""

    symmetric = True

    def __init__(self, in_channels):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(in_channels))

    def forward(self, u, v):
        return torch.exp(-torch.cdist(u * self.scale, v * self.scale).square())


class Dot(Metric):
    """One that knows the factored form."""

    inner_product = True

    def embed(self, x):
        return x / 4

    def nonnegative(self, inputs_nonnegative):
        return inputs_nonnegative


@pytest.mark.parametrize('cls', MODELS)
def test_user_metrics(cls):
    x, edge_index = make_graph(dtype=torch.float64)
    u = x.unsqueeze(1)
    for metric, expected in [
        (Distance, torch.exp(-(u - x).square().sum(2))),
        (lambda channels: Distance(channels), torch.exp(-(u - x).square().sum(2))),
        (lambda channels: Dot(), x @ x.t() / 16),
        (Dot(), x @ x.t() / 16),
    ]:
        model = make_model(cls, metric=metric, tol=None, max_iters=2).double()
        result = loss_and_gradients(model, x, edge_index)
        assert all_finite(result)
        first = result[2].first.to_dense()
        if cls is IDGL:
            assert_close(first, expected, 1e-6)
        if metric is Distance:
            for name in ('feature_learner', 'embedding_learner'):
                grad = result[1][f'{name}.metric.module.scale']
                assert bool((grad != 0).any())
        for backend in ('dense', 'tiled', 'sparse'):
            other = make_model(
                cls, metric=metric, tol=None, max_iters=2, backend=backend
            )
            assert_same(loss_and_gradients(other.double(), x, edge_index), result, 1e-6)


@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'sparse'])
def test_what_a_user_metric_returns_is_not_modified(backend):
    class Known(torch.nn.Module):
        """Similarities that were computed before."""

        def __init__(self):
            super().__init__()
            table = torch.linspace(-1, 1, 100).view(10, 10)
            self.register_buffer('table', table.clone())

        def forward(self, u, v):
            return self.table

    x, edge_index = make_graph()
    model = make_model(IDGL, metric=Known(), epsilon=0.2, backend=backend).eval()
    out = model(x, edge_index)
    expected = torch.linspace(-1, 1, 100).view(10, 10)
    assert torch.equal(model.feature_learner.metric.module.table, expected)
    assert torch.equal(model(x, edge_index), out)


def test_metric_modules_are_copied():
    class Same(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, u, v):
            return self.scale * torch.tanh(u.sum(1, keepdim=True) * v.sum(1))

    given = Same()
    model = make_model(IDGL, metric=given)
    names = [n for n, _ in model.named_parameters() if 'scale' in n]
    assert len(names) == 2
    assert all(p is not given.scale for p in model.parameters())
    assert model(*make_graph()).shape == (10, 3)


@pytest.mark.parametrize('cls', MODELS)
def test_top_k(cls):
    x, edge_index = make_graph()
    model = make_model(cls, top_k=2).eval()
    _, trace = model(x, edge_index, return_trace=True)
    assert bool(((trace.learned.to_dense() > 0).sum(1) <= 2).all())
    assert bool(((trace.first.to_dense() > 0).sum(1) <= 2).all())


@pytest.mark.parametrize('cls', MODELS)
def test_dropouts_act_in_training_only(cls):
    x, edge_index = make_graph()
    quiet = make_model(cls).eval()
    expected = quiet(x, edge_index)
    for name in ('dropout', 'iter_dropout', 'feature_dropout', 'graph_dropout'):
        model = make_model(cls, **{name: 0.5})
        assert torch.equal(model.eval()(x, edge_index), expected)
        model.train()
        torch.manual_seed(0)
        first = model(x, edge_index, max_iters=1)
        assert not torch.equal(first, model(x, edge_index, max_iters=1)), name
    model = make_model(cls, dropout=0.5)
    assert model.iter_dropout == 0.5
    assert make_model(cls, dropout=0.5, iter_dropout=0.0).iter_dropout == 0.0


def test_graph_dropout_of_the_first_mixture():
    """Each entry of a row is dropped as if by itself: the mean stays."""
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGL, graph_dropout=0.25, initial_weight=1.0, max_iters=0)
    model.double().train()
    total = 0.0
    for seed in range(300):
        torch.manual_seed(seed)
        _, trace = model(x, edge_index, return_trace=True)
        total = total + trace.mixed.to_dense()
    initial = trace.initial.to_dense()
    assert_close(total / 300, initial, 0.15)
    kept = trace.mixed.to_dense() != 0
    assert_close(trace.mixed.to_dense()[kept], initial[kept] / 0.75, 1e-9)


# Compilation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    'cls,backend,compiler',
    [
        (IDGL, 'low_rank', 'aot_eager'),
        (IDGL, 'dense', 'aot_eager'),
        (IDGLAnch, 'low_rank', 'eager'),
    ],
)
def test_compile(cls, backend, compiler):
    """Without the stopping rule nothing depends on values."""
    if not torch._dynamo.is_dynamo_supported():
        pytest.skip('torch.compile does not support this platform or Python version')
    torch._dynamo.reset()
    x, edge_index = make_graph()
    options = {'tol': None, 'max_iters': 1, 'cached': True, 'backend': backend}
    model = make_model(cls, **options).eval()
    given = {} if cls is IDGL else {'anchor_index': torch.tensor([1, 5, 8])}
    out = model(x, edge_index, **given)
    expected = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=compiler)(x, edge_index, **given)
    grads = torch.autograd.grad(compiled.square().sum(), list(model.parameters()))
    assert_close(compiled, out)
    for grad, other in zip(grads, expected, strict=True):
        assert_close(grad, other, 1e-4)


@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
def test_autocast_changes_nothing(cls):
    torch.manual_seed(0)
    model = cls(8, 16, 2, 3).eval()
    x, edge_index = torch.rand(10, 8), torch.tensor([[0, 1, 2], [1, 2, 3]])
    anchors = None if cls is IDGL else torch.arange(5)
    expected = model(x, edge_index, anchor_index=anchors)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = model(x, edge_index, anchor_index=anchors)
    assert torch.equal(out, expected)


def test_data_and_arguments_together_are_refused():
    model = IDGL(8, 16, 2, 3)
    data = Data(x=torch.rand(4, 8), edge_index=torch.tensor([[0, 1], [1, 0]]))
    for name, value in [
        ('edge_index', data.edge_index),
        ('edge_weight', torch.ones(2)),
        ('batch', torch.zeros(4, dtype=torch.long)),
    ]:
        with pytest.raises(ValueError, match='data object'):
            model(data, **{name: value})


def test_numpy_numbers_are_numbers():
    model = IDGL(np.int64(8), 16, 2, 3, heads=np.int64(2), epsilon=np.float32(0.5))
    assert model(torch.rand(5, 8), tiny_graph()).shape == (5, 3)


def tiny_graph():
    return torch.tensor([[0, 1], [1, 0]])


def test_sparse_features_with_gradient_are_refused():
    x = torch.rand(4, 8).to_sparse_csr().requires_grad_()
    with pytest.raises(ValueError, match='requires_grad'):
        IDGL(8, 16, 2, 3)(x, tiny_graph())


def test_cached_with_gradient_to_features():
    model = IDGL(8, 16, 2, 3, cached=True)
    x = torch.rand(4, 8, requires_grad=True)
    for _ in range(2):
        model(x, tiny_graph()).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.sparse
@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
def test_neighbour_sampling(cls):
    pytest.importorskip('torch_sparse')
    torch.manual_seed(0)
    edge_index = torch.randint(40, (2, 200))
    data = Data(x=torch.rand(40, 8), edge_index=edge_index, y=torch.arange(40) % 3)
    model = cls(8, 16, 2, 3)
    loader = NeighborLoader(data, num_neighbors=[5, 5], batch_size=10)
    seen = 0
    for batch in loader:
        out, trace = model(batch, return_trace=True)
        assert out.shape == (batch.num_nodes, 3)
        seeds = slice(batch.batch_size)
        trace.loss(lambda o: F.cross_entropy(o[seeds], batch.y[seeds])).backward()  # noqa: B023
        seen += batch.batch_size
    assert seen == 40
    assert all(p.grad.isfinite().all() for p in model.parameters())
