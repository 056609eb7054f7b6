"""The models as a user of PyG meets them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from tests.nn.common import (
    MODELS,
    assert_close,
    cross_entropy,
    gradients,
    joint_loss,
    labels,
    make_graph,
    make_model,
)
from torch_geometric_idgl.nn import IDGL, IDGLAnch, Trace


class Bilinear(torch.nn.Linear):
    """A user's metric that can be reset."""

    def __init__(self, in_channels):
        super().__init__(in_channels, in_channels, bias=False)

    def forward(self, u, v):
        return (super().forward(u) @ v.t()).sigmoid()


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
    for name, value in model.named_parameters():  # both graph learners learn, too
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


@pytest.mark.parametrize('backbone', ['gcn', 'sage', 'gin', 'appnp'])
@pytest.mark.parametrize('metric', ['rbf', Bilinear])
def test_reset_parameters(backbone, metric):
    options = {'norm': 'batch_norm', 'jk': 'lstm', 'bias': True}
    model = make_model(IDGL, metric=metric, backbone=backbone, **options)
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
        assert_close(out, model(x, edge_index, **given))


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


# Compilation and precision ------------------------------------------------------------


@pytest.mark.parametrize(
    'cls,backend,compiler',
    [
        (IDGL, 'low_rank', 'aot_eager'),
        (IDGL, 'dense', 'eager'),
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
    model = cls(8, 16, 2, 3, connectivity=0.1, sparsity=0.1).eval()
    x, edge_index = torch.rand(10, 8), torch.tensor([[0, 1, 2], [1, 2, 3]])
    anchors = None if cls is IDGL else torch.arange(5)
    expected, trace = joint_loss(model, x, edge_index, anchor_index=anchors)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = model(x, edge_index, anchor_index=anchors)
        loss, _ = joint_loss(model, x, edge_index, anchor_index=anchors)
    assert torch.equal(out, trace.out)
    assert torch.equal(loss, expected) and loss.dtype == torch.float
    parameters = list(model.parameters())
    for grad, other in zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        assert torch.equal(grad, other)


@pytest.mark.parametrize('cls', MODELS)
def test_autocast_of_layers_around_a_model(cls):
    """These are in bfloat16; losses and directions of gradients stay close."""
    torch.manual_seed(0)
    x, edge_index = make_graph(60, 12)
    encoder, head = torch.nn.Linear(12, 16), torch.nn.Linear(16, 3)
    options = {'tol': None, 'max_iters': 3, 'connectivity': 0.1, 'sparsity': 0.1}
    model = make_model(cls, 16, 16, 2, 16, **options)
    modules = torch.nn.ModuleList([encoder, model, head])

    def run(mixed):
        modules.zero_grad()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=mixed):
            h = encoder(x).relu()
            out, trace = model(h, edge_index, return_trace=True)
            fn = cross_entropy(labels(60))
            loss = trace.loss(lambda out: fn(head(out)))
            around = {h.dtype, head(out).dtype}
        assert around == {torch.bfloat16 if mixed else torch.float}
        assert loss.dtype == trace.reg.dtype == torch.float
        loss.backward()
        return loss.detach(), trace.reg.detach(), gradients(modules)

    loss, reg, grads = run(False)
    mixed_loss, mixed_reg, mixed_grads = run(True)
    assert not torch.equal(mixed_loss, loss)
    assert_close(mixed_loss, loss, 0.01)
    assert_close(mixed_reg, reg, 0.01)
    for name, grad in grads.items():
        other = mixed_grads[name]
        assert other.dtype == torch.float
        assert F.cosine_similarity(other.flatten(), grad.flatten(), dim=0) > 0.99, name
