"""Layers and options of the GNN, against explicit matrices and against PyG."""

import itertools

import pytest
import torch
from torch_geometric.nn import (
    GCN,
    ChebConv,
    GATConv,
    GCNConv,
    GraphConv,
    LEConv,
    SAGEConv,
    SGConv,
    SSGConv,
)

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    assert_same,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.nn import IDGL, OperatorConv
from torch_geometric_idgl.nn.backbone import (
    APPNPLayer,
    EdgeLayer,
    GCNLayer,
    GINLayer,
    SAGELayer,
)

N = 10


def run(cls=IDGL, *args, train=False, negative=False, **kwargs):
    x, edge_index = make_graph(N, dtype=torch.float64, negative=negative)
    kwargs = {'tol': None, 'max_iters': 2, **kwargs}
    model = make_model(cls, *args, **kwargs).double().train(train)
    out, trace = model(x, edge_index, return_trace=True)
    return model, x, out, trace


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('backbone', ['gcn', 'sage', 'gin', 'appnp'])
def test_named_layers(cls, backbone):
    """The output is that of the layers on the last mixed graph."""
    for bias in (False, True):
        check_named_layers(cls, backbone, bias)


def check_named_layers(cls, backbone, bias):
    model, x, out, trace = run(cls, backbone=backbone, bias=bias)
    a = trace.mixed.to_dense()

    def layer(conv, h):
        if backbone == 'gcn':
            value = a @ conv.lin(h)
            return value if conv.bias is None else value + conv.bias
        if backbone == 'sage':
            return conv.lin_l(a @ h) + conv.lin_r(h)
        if backbone == 'gin':
            return conv.lin_2(conv.lin_1((1 + conv.eps) * h + a @ h).relu())
        z = projected = conv.lin(h)
        for _ in range(10):
            z = 0.9 * a @ z + 0.1 * projected
        return z

    first, second = model.backbone.convs
    assert_close(out, layer(second, layer(first, x).relu()), 1e-9)
    names = {n.split('.')[-1] for n, _ in model.backbone.named_parameters()}
    assert ('bias' in names) == bias
    result = loss_and_gradients(model, x, make_graph(N)[1])
    assert all_finite(result)


def test_layers_on_operators():
    _, x, _, trace = run()
    a = trace.mixed.to_dense()
    torch.manual_seed(0)
    for layer, expected in [
        (GCNLayer(6, 4), lambda m: a @ m.lin(x)),
        (SAGELayer(6, 4), lambda m: a @ m.lin_l(x) + m.lin_r(x)),
        (GINLayer(6, 4), lambda m: m.lin_2(m.lin_1(x + a @ x).relu())),
        (APPNPLayer(6, 4, steps=1), lambda m: 0.9 * a @ m.lin(x) + 0.1 * m.lin(x)),
    ]:
        layer = layer.double()
        assert isinstance(layer, OperatorConv)
        assert_close(layer(x, trace.mixed), expected(layer), 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_pyg_convolution_on_exported_edges(cls):
    model, x, out, trace = run(cls, backbone=lambda i, o: GraphConv(i, o, bias=False))
    assert all(isinstance(conv, EdgeLayer) for conv in model.backbone.convs)
    a = trace.mixed.to_dense()
    h = x
    for i, layer in enumerate(model.backbone.convs):
        h = layer.conv.lin_rel(a @ h) + layer.conv.lin_root(h)
        h = h.relu() if i == 0 else h
    assert_close(out, h, 1e-9)
    assert all_finite(loss_and_gradients(model, x, make_graph(N)[1]))


@pytest.mark.parametrize('cls', MODELS)
def test_pyg_gcn_conv_is_the_gcn_layer(cls):
    """PyG's own layer on the edges of the operator, with gradients."""
    x, edge_index = make_graph(N, dtype=torch.float64)
    options = {'tol': None, 'max_iters': 2, 'connectivity': 0.1, 'sparsity': 0.1}
    plain = make_model(cls, **options).double()

    def conv(i, o):
        return GCNConv(i, o, bias=False)  # told not to normalise once more

    other = make_model(cls, backbone=conv, **options).double()
    assert not any(layer.conv.normalize for layer in other.backbone.convs)
    state = {
        key.replace('.lin.', '.conv.lin.') if 'convs' in key else key: value
        for key, value in plain.state_dict().items()
    }
    other.load_state_dict(state)
    expected = loss_and_gradients(plain, x, edge_index)
    loss, grads, trace = loss_and_gradients(other, x, edge_index)
    grads = {key.replace('.conv.lin.', '.lin.'): grad for key, grad in grads.items()}
    assert_same((loss, grads, trace), expected, 1e-9)
    sparse = loss_and_gradients(other, x.to_sparse_csr(), edge_index)
    assert_close(sparse[0], expected[0], 1e-9)


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('num_layers', [1, 2, 3])
def test_num_layers(cls, num_layers):
    model, x, out, trace = run(cls, 6, 8, num_layers, 3)
    assert len(model.backbone.convs) == num_layers
    assert out.shape == (N, 3)
    a, h = trace.mixed.to_dense(), x
    for i, conv in enumerate(model.backbone.convs):
        h = a @ conv.lin(h)
        h = h.relu() if i < num_layers - 1 else h
    assert_close(out, h, 1e-9)
    width = 3 if num_layers == 1 else 8
    assert model.embedding_learner.metric.in_channels == width


@pytest.mark.parametrize('cls', MODELS)
def test_out_channels_default_to_hidden(cls):
    model, _, out, _ = run(cls, 6, 8, 2)
    assert model.out_channels == 8
    assert out.shape == (N, 8)


@pytest.mark.parametrize('num_layers', [1, 2, 3])
@pytest.mark.parametrize('jk', [None, 'last', 'cat', 'max', 'lstm'])
def test_same_as_pyg_on_the_given_graph(num_layers, jk):
    """With lambda = 1, every option of PyG's GCN means what it means there."""
    for norm, act_first in itertools.product([None, 'batch_norm'], [False, True]):
        check_same_as_pyg(num_layers, jk, norm, act_first)


def check_same_as_pyg(num_layers, jk, norm, act_first):
    x, edge_index = make_graph(N, dtype=torch.float64)
    options = {'jk': jk, 'norm': norm, 'act_first': act_first, 'act': 'elu'}
    model = make_model(IDGL, 6, 8, num_layers, 3, initial_weight=1.0, **options)
    gcn = GCN(6, 8, num_layers, 3, bias=False, **options).double()
    model = model.double()
    state = model.backbone.state_dict()
    gcn.load_state_dict({k: v for k, v in state.items()}, strict=False)
    for mine, other in zip(model.backbone.convs, gcn.convs, strict=True):
        other.lin.weight.data.copy_(mine.lin.weight.data)
    model(x, edge_index, max_iters=0)  # training mode moves running statistics once
    gcn(x, edge_index)
    model.eval()
    gcn.eval()
    assert_close(model(x, edge_index, max_iters=0), gcn(x, edge_index), 1e-9)


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('jk', ['last', 'cat', 'max', 'lstm'])
def test_jumping_knowledge(cls, jk):
    model, x, out, _ = run(cls, 6, 8, 3, 4, jk=jk)
    assert out.shape == (N, 4)
    width = 24 if jk == 'cat' else 8
    assert model.embedding_learner.metric.in_channels == width
    assert all_finite(loss_and_gradients(model, x, make_graph(N)[1]))


@pytest.mark.parametrize(
    'options',
    [
        {'norm': 'batch_norm'},
        {'norm': 'batch_norm', 'act_first': True},
        {'norm': 'batch_norm', 'act_first': True, 'jk': 'last', 'num_layers': 1},
        {'norm': 'batch_norm', 'act_first': True, 'jk': 'max'},
        {'norm': 'layer_norm'},
        {'norm': 'graph_norm'},
        {'norm': torch.nn.LayerNorm(8), 'act_first': True},
        {'act': 'elu'},
        {'act': 'tanh', 'jk': 'cat'},
        {'act': 'leaky_relu', 'act_kwargs': {'negative_slope': 0.3}},
        {'act': torch.nn.Sigmoid()},
        {'act': torch.nn.Tanh()},
        {'act': 'prelu', 'num_layers': 1},
        {'act': None},
        {'act': None, 'num_layers': 1},
        {'jk': 'lstm'},
        {'backbone': 'gin', 'act': 'softplus'},
    ],
    ids=str,
)
def test_auto_is_exact_for_every_option(options):
    """Embeddings may be negative then, and the threshold at zero removes entries."""
    for cls in MODELS:
        check_exact(cls, dict(options))


def check_exact(cls, options):
    num_layers = options.pop('num_layers', 2)
    x, edge_index = make_graph(N, dtype=torch.float64)
    results = []
    for backend in ('auto', 'dense'):
        model = make_model(
            cls, 6, 8, num_layers, 3, backend=backend, tol=None, max_iters=2, **options
        )
        model = model.double().train()
        results.append(loss_and_gradients(model, x, edge_index))
        assert bool((results[-1][2].learned.to_dense() >= 0).all())
    assert_same(results[0], results[1], 1e-8)


@pytest.mark.parametrize('num_layers', [1, 2, 3])
@pytest.mark.parametrize('act', ['relu', 'leaky_relu'])
def test_inplace_activation(act, num_layers):
    """What an activation writes over is nobody else's."""
    x, edge_index = make_graph(N)
    outs = []
    for inplace in (False, True):
        options = {'act': act, 'act_kwargs': {'inplace': inplace}}
        model = make_model(IDGL, 6, 8, num_layers, 3, tol=None, max_iters=2, **options)
        model.initial_weight, model.update_weight = 0.3, 0.5
        outs.append(loss_and_gradients(model, x, edge_index))
    assert_same(outs[1], outs[0])


class Squash(torch.nn.Module):
    """A norm whose backward pass needs its output."""

    def __init__(self, channels):
        super().__init__()

    def forward(self, x):
        return torch.tanh(x)


def test_outputs_of_norms_stay_as_they_are():
    x, edge_index = make_graph(N)
    model = make_model(IDGL, norm=Squash(8)).train()
    loss_and_gradients(model, x, edge_index)  # no error: nothing was overwritten
    for name in ('layer_norm', 'batch_norm'):
        model = make_model(IDGL, norm=name).eval()
        seen = []
        model.backbone.norms[0].register_forward_hook(
            lambda module, args, out: seen.append(out)  # noqa: B023
        )
        model(x, edge_index)
        assert bool((seen[0] < 0).any())


def test_norm_uses_every_iteration():
    """Batch norm sees the embeddings of all iterations in training."""
    model, *_ = run(norm='batch_norm', train=True)
    assert int(model.backbone.norms[0].module.num_batches_tracked) == 3


def test_user_layer_on_operators():
    class Twice(OperatorConv):
        def __init__(self, i, o):
            super().__init__()
            self.lin = torch.nn.Linear(i, o, bias=False)

        def project(self, x):
            return self.lin(x)

        def propagate(self, projected, graph):
            return graph.matmul(graph.matmul(projected))

    model, x, out, trace = run(backbone=Twice)
    a = trace.mixed.to_dense()
    first, second = model.backbone.convs
    z = (a @ a @ first.lin(x)).relu()
    assert_close(out, a @ a @ second.lin(z), 1e-9)


class Overwriting(OperatorConv):
    """Writes over what it has multiplied, as sparing layers do."""

    def __init__(self, i, o):
        super().__init__()
        self.lin = torch.nn.Linear(i, o, bias=False)

    def project(self, x):
        return self.lin(x)

    def propagate(self, projected, graph):
        h = projected.detach().clone()
        for _ in range(3):
            h.copy_(graph.matmul(h))
        return h


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('backend', ['auto', 'dense', 'tiled', 'low_rank'])
@torch.no_grad()
def test_layer_that_changes_its_message(cls, backend):
    """Products depend on values, not on which tensor holds them."""
    model, x, out, trace = run(cls, backbone=Overwriting, backend=backend)
    a = trace.mixed.to_dense()
    cubed = a @ a @ a
    first, second = model.backbone.convs
    z = (cubed @ first.lin(x)).relu()
    assert_close(out, cubed @ second.lin(z), 1e-9)
    assert_close(model(x, make_graph(N)[1]), out, 1e-9)


def test_layer_with_parts():
    """Message and end of a layer of one product, as the documentation shows it."""

    class Layer(OperatorConv):
        def __init__(self, i, o):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(i, o))
            self.bias = torch.nn.Parameter(torch.zeros(o))

        def project(self, x):
            return x.matmul(self.weight)

        def finish(self, aggregated, projected):
            return aggregated + self.bias

    model, x, out, trace = run(backbone=Layer)
    first, second = model.backbone.convs
    expected = first(x, trace.mixed).relu()
    expected = second(expected, trace.mixed)
    a = trace.mixed.to_dense()
    assert_close(out, a @ ((a @ x @ first.weight).relu() @ second.weight), 1e-9)
    assert_close(out, expected, 1e-9)
    for part in ('project', 'finish'):
        given = () if part == 'project' else (x,)
        with pytest.raises(NotImplementedError):
            getattr(OperatorConv(), part)(x, *given)


@pytest.mark.parametrize('conv', [SGConv, SSGConv, ChebConv])
def test_convolutions_that_always_normalise_are_refused(conv):
    def make(i, o):
        return conv(i, o, **({'K': 2} if conv is ChebConv else {'alpha': 0.1}))

    make = make if conv is not SGConv else conv
    with pytest.raises(ValueError, match=rf'{conv.__name__}.*normalis'):
        IDGL(6, 8, 2, 3, backbone=make)


def test_convolutions_without_normalisation_are_left_alone():
    model, *_ = run(backbone=LEConv)
    assert all(isinstance(layer.conv, LEConv) for layer in model.backbone.convs)
    model.reset_parameters()


@pytest.mark.parametrize(
    'options', [{'aggr': 'mean'}, {'aggr': 'max'}, {'flow': 'target_to_source'}]
)
def test_convolutions_that_do_not_sum_are_refused(options):
    with pytest.raises(ValueError, match=r'aggr|flow'):
        IDGL(6, 8, 2, 3, backbone=lambda i, o: GraphConv(i, o, **options))


def test_bad_backbones():
    with pytest.raises(TypeError, match=r"'backbone' .*got 'GCNConv'"):
        IDGL(6, 8, 2, 3, backbone=GCNConv(6, 8))
    names = r"\['appnp', 'gcn', 'gin', 'sage'\]"
    with pytest.raises(ValueError, match=rf"'backbone' .* {names} \(got 'gat'\)"):
        IDGL(6, 8, 2, backbone='gat')
    with pytest.raises(TypeError, match=r"'backbone' .* function .*got 'int'"):
        IDGL(6, 8, 2, backbone=3)
    with pytest.raises(TypeError, match=r"'OperatorConv' or a PyG.*got 'Linear'"):
        IDGL(6, 8, 2, backbone=torch.nn.Linear)
    for conv in (GATConv, SAGEConv):
        with pytest.raises(ValueError, match=r"'edge_weight' \(got .*Conv"):
            IDGL(6, 8, 2, backbone=conv)
    assert issubclass(GCNLayer, OperatorConv) and issubclass(SAGELayer, OperatorConv)
