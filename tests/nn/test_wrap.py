"""IDGL around GNNs of one's own: the same as IDGL, the same as explicit matrices."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, Dropout, Linear, Module, ModuleList, ReLU
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    APPNP,
    GCN,
    GIN,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,
    SGConv,
    TAGConv,
)
from torch_geometric.utils import dropout_edge

from tests.nn.common import (
    all_finite,
    assert_close,
    assert_same,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl import IDGL, IDGLAnch, to_idgl
from torch_geometric_idgl.nn.wrap import SparseInput
from torch_geometric_idgl.ops.sparse import SparseMatrix
from torch_geometric_idgl.training import fit

N = 10
OPTIONS = {'tol': None, 'max_iters': 2, 'connectivity': 0.1, 'sparsity': 0.1}
KINDS = [{}, {'num_anchors': 4, 'anchor_sampling': 'fixed'}]
IDS = ['IDGL', 'IDGLAnch']


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Net(Module):
    """Two convolutions, as in many a script."""

    def __init__(self, conv1=None, conv2=None, dropout=0.0):
        super().__init__()
        self.conv1 = conv1 or GCNConv(6, 8)
        self.conv2 = conv2 or GCNConv(8, 3)
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


class OfData(Net):
    def forward(self, data):
        x = self.conv1(data.x, data.edge_index, data.edge_weight).relu()
        return self.conv2(x, data.edge_index)


class Weighted(Net):
    def forward(self, x, edge_index, edge_weight=None):
        x = self.conv1(x, edge_index, edge_weight).relu()
        return self.conv2(x, edge_index, edge_weight=edge_weight)


class OtherNames(Net):
    def forward(self, adj_t, features, edge_weight):
        return super().forward(features, adj_t)


class Positions(Net):
    def forward(self, features, graph):
        return super().forward(features, graph)


class Nested(Module):
    """Blocks in a list, and one block within another."""

    def __init__(self):
        super().__init__()
        self.blocks = ModuleList([pyg.Sequential('x, edge_index', self.layers())])
        self.last = GCNConv(8, 3)

    @staticmethod
    def layers():
        return [(GCNConv(6, 8), 'x, edge_index -> x'), ReLU(inplace=True)]

    def forward(self, x, edge_index):
        for block in self.blocks:
            x = block(x, edge_index)
        return self.last(x, edge_index)


class Residual(Module):
    """One convolution, used twice."""

    def __init__(self):
        super().__init__()
        self.lin1 = Linear(6, 8)
        self.conv = GCNConv(8, 8)
        self.lin2 = Linear(8, 3)

    def forward(self, x, edge_index):
        x = self.lin1(x).relu()
        x = x + self.conv(x, edge_index).relu()
        x = x + self.conv(x, edge_index)
        return self.lin2(x)


def wrap(module, **kwargs):
    return to_idgl(module, 6, **{**OPTIONS, **kwargs})


def run(module, train=False, **kwargs):
    """The model around a module, its input, outputs and last mixed graph."""
    x, edge_index = make_graph(N, dtype=torch.float64, negative=True)
    model = wrap(module.double(), **kwargs).train(train)
    out, trace = model(x, edge_index, return_trace=True)
    return model, x, out, trace.mixed.to_dense()


def with_weights_of(model, wrapped, renamed=lambda name: name):
    """Loads the weights of an IDGL model into a wrapped one; the inverse of names."""
    state = {}
    for name, value in model.state_dict().items():
        if name.startswith('backbone.'):
            name = 'backbone.module.' + renamed(name.removeprefix('backbone.'))
        state[name] = value
    shapes = {name: value.shape for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict({k: v.reshape(shapes[k]) for k, v in state.items()})

    def original(grads):
        shape = {name: p.shape for name, p in model.named_parameters()}
        names = dict(zip(state, model.state_dict(), strict=True))
        return {names[k]: g.reshape(shape[names[k]]) for k, g in grads.items()}

    return original


def compare(expressed, module, renamed=lambda name: name, negative=False, **kwargs):
    """A wrapped module gives what IDGL gives with the same weights."""
    for kind, cls in zip(KINDS, (IDGL, IDGLAnch), strict=True):
        x, edge_index = make_graph(N, dtype=torch.float64, negative=negative)
        model = make_model(cls, 6, **expressed, **OPTIONS, **kind).double()
        with torch.no_grad():
            for value in model.parameters():  # zero biases would hide mistakes
                value.add_(0.1 * torch.randn_like(value))
        wrapped = wrap(module, **kind, **kwargs).double()
        assert isinstance(wrapped, cls)
        original = with_weights_of(model, wrapped, renamed)
        expected = loss_and_gradients(model, x, edge_index)
        loss, grads, trace = loss_and_gradients(wrapped, x, edge_index)
        assert_same((loss, original(grads), trace), expected, 1e-9)
        # Attention to layers does not depend on its bias, which has no gradient.
        own = (grad for name, grad in grads.items() if not name.endswith('att.bias'))
        assert all(bool(grad.any()) for grad in own)


# The same as IDGL -------------------------------------------------------------------


SIZES = {'hidden_channels': 8, 'out_channels': 3}


@pytest.mark.parametrize('num_layers', [2, 3])
@pytest.mark.parametrize('negative', [False, True])
def test_gcn_is_idgl(num_layers, negative):
    sizes = {**SIZES, 'num_layers': num_layers}
    compare({**sizes, 'bias': True}, GCN(6, **sizes), negative=negative)


@pytest.mark.parametrize(
    'module', [Net(), OfData(), Weighted(), OtherNames(), Positions()]
)
def test_own_network_is_idgl(module):
    def renamed(name):
        return name.replace('convs.0', 'conv1').replace('convs.1', 'conv2')

    compare({**SIZES, 'num_layers': 2, 'bias': True}, module, renamed)


def test_nested_network_is_idgl():
    def renamed(name):
        name = name.replace('convs.0', 'blocks.0.module_0')
        return name.replace('convs.1', 'last')

    compare({**SIZES, 'num_layers': 2, 'bias': True}, Nested(), renamed)


def test_sage_is_idgl():
    sizes = {**SIZES, 'num_layers': 2}
    compare({**sizes, 'bias': True, 'backbone': 'sage'}, GraphSAGE(6, **sizes))


def test_gin_is_idgl():
    def mlp(i, o):
        return torch.nn.Sequential(Linear(i, o), ReLU(), Linear(o, o))

    module = Net(GINConv(mlp(6, 8), train_eps=True), GINConv(mlp(8, 3), train_eps=True))

    def renamed(name):
        name = name.replace('convs.0', 'conv1').replace('convs.1', 'conv2')
        return name.replace('lin_1', 'nn.0').replace('lin_2', 'nn.2')

    compare(
        {**SIZES, 'num_layers': 2, 'bias': True, 'backbone': 'gin'}, module, renamed
    )


def test_appnp_is_idgl():
    """Each layer of IDGL is a linear map and a propagation: Z enters the former."""

    class Predictions(Module):
        def __init__(self):
            super().__init__()
            self.lins = ModuleList([Linear(6, 8), Linear(8, 3)])
            self.propagate = APPNP(K=10, alpha=0.1)

        def forward(self, x, edge_index):
            x = self.propagate(self.lins[0](x), edge_index).relu()
            return self.propagate(self.lins[1](x), edge_index)

    def renamed(name):
        return name.replace('convs.0.lin', 'lins.0').replace('convs.1.lin', 'lins.1')

    expressed = {**SIZES, 'num_layers': 2, 'bias': True, 'backbone': 'appnp'}
    compare(expressed, Predictions(), renamed, embedding='lins.1')


@pytest.mark.parametrize('jk', ['cat', 'max', 'lstm'])
def test_jumping_knowledge_is_idgl(jk):
    sizes = {**SIZES, 'num_layers': 2, 'jk': jk}
    compare({**sizes, 'bias': True}, GCN(6, **sizes), embedding='lin')


@pytest.mark.parametrize('norm', ['BatchNorm', 'GraphNorm'])
def test_norm_is_idgl(norm):
    sizes = {**SIZES, 'num_layers': 3, 'norm': norm}
    compare({**sizes, 'bias': True}, GCN(6, **sizes), negative=True)


# The same as explicit matrices ------------------------------------------------------


def gin(i, o, first=Linear):
    return GINConv(torch.nn.Sequential(first(i, o), ReLU(), Linear(o, o)), eps=0.3)


def dense_gcn(conv, a, x):
    return a @ conv.lin(x) + conv.bias


def dense_sage(conv, a, x):
    out = conv.lin_l(a @ (conv.lin(x).relu() if conv.project else x))
    out = out + conv.lin_r(x) if conv.root_weight else out
    return F.normalize(out, dim=-1) if conv.normalize else out


def dense_graph_conv(conv, a, x):
    return conv.lin_rel(a @ x) + conv.lin_root(x)


def dense_gin(conv, a, x):
    return conv.nn((1 + conv.eps) * x + a @ x)


def dense_tag(conv, a, x):
    powers = [x]
    for _ in range(conv.K):
        powers.append(a @ powers[-1])
    return sum(lin(h) for lin, h in zip(conv.lins, powers, strict=True)) + conv.bias


def dense_sg(conv, a, x):
    return conv.lin(torch.linalg.matrix_power(a, conv.K) @ x)


def dense_appnp(conv, a, x):
    z = x
    for _ in range(conv.K):
        z = (1 - conv.alpha) * (a @ z) + conv.alpha * x
    return z


CONVS = {
    'gcn': (GCNConv, dense_gcn),
    'gcn_options': (
        lambda i, o: GCNConv(i, o, improved=True, add_self_loops=False, cached=True),
        dense_gcn,
    ),
    'gcn_lazy': (lambda i, o: GCNConv(-1, o), dense_gcn),
    'sage': (SAGEConv, dense_sage),
    'sage_options': (
        lambda i, o: SAGEConv(i, o, 'sum', normalize=True, project=True),
        dense_sage,
    ),
    'sage_rootless': (lambda i, o: SAGEConv(i, o, root_weight=False), dense_sage),
    'sage_lazy': (lambda i, o: SAGEConv((-1, -1), o), dense_sage),
    'graph_conv': (GraphConv, dense_graph_conv),
    'graph_conv_mean': (lambda i, o: GraphConv(i, o, aggr='mean'), dense_graph_conv),
    'gin': (gin, dense_gin),
    'gin_mlp': (lambda i, o: GINConv(pyg.MLP([i, o, o], norm=None)), dense_gin),
    'tag': (TAGConv, dense_tag),
    'sg': (lambda i, o: SGConv(i, o, K=2, cached=True), dense_sg),
}


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
@pytest.mark.parametrize('name', CONVS)
@pytest.mark.parametrize('hidden', [4, 9])  # narrower and wider than the input
def test_convolutions(name, kind, hidden):
    """On the operator, in whichever order is cheaper."""
    make, dense = CONVS[name]
    torch.manual_seed(0)
    net = Net(make(6, hidden), make(hidden, 3))
    model, x, out, a = run(net, **kind)
    own = model.backbone.module
    expected = dense(own.conv2, a, dense(own.conv1, a, x).relu())
    assert_close(out, expected, 1e-9)
    assert model.backbone.embedding_channels == hidden
    assert all_finite(loss_and_gradients(model, x, make_graph(N)[1]))


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
def test_appnp(kind):
    class Predictions(Module):
        def __init__(self):
            super().__init__()
            self.lin = Linear(6, 3)
            self.propagate = APPNP(K=3, alpha=0.2, cached=True)

        def forward(self, x, edge_index):
            return self.propagate(self.lin(x), edge_index)

    model, x, out, a = run(Predictions(), **kind)
    own = model.backbone.module
    assert_close(out, dense_appnp(own.propagate, a, own.lin(x)), 1e-9)


class OwnConv(MessagePassing):
    def __init__(self, i, o):
        super().__init__(aggr='add')
        self.lin = Linear(i, o)

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return edge_weight.unsqueeze(1) * x_j


class GCNSubclass(GCNConv):
    def forward(self, x, edge_index, edge_weight=None):
        return 2 * super().forward(x, edge_index, edge_weight)


EDGES = {
    'own': (OwnConv, lambda conv, a, x: a @ conv.lin(x)),
    'subclass': (GCNSubclass, lambda conv, a, x: 2 * dense_gcn(conv, a, x)),
    'leconv': (
        pyg.LEConv,
        lambda conv, a, x: (
            a @ conv.lin1(x) - a.sum(1, keepdim=True) * conv.lin2(x) + conv.lin3(x)
        ),
    ),
}


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
@pytest.mark.parametrize('name', EDGES)
def test_other_convolutions_run_on_exported_edges(name, kind):
    make, dense = EDGES[name]
    model, x, out, a = run(Weighted(make(6, 8), make(8, 3)), **kind)
    own = model.backbone.module
    expected = dense(own.conv2, a, dense(own.conv1, a, x).relu())
    assert_close(out, expected, 1e-9)
    assert all_finite(loss_and_gradients(model, x, make_graph(N)[1]))


def test_convolution_with_two_inputs_runs_on_exported_edges():
    class Deep(Module):
        def __init__(self):
            super().__init__()
            self.lin = Linear(6, 3)
            args = {'alpha': 0.1, 'theta': 0.5, 'cached': True}
            self.convs = ModuleList(
                pyg.GCN2Conv(3, layer=i, **args) for i in range(1, 4)
            )

        def forward(self, x, edge_index):
            x = x_0 = self.lin(x).relu()
            for conv in self.convs:
                x = conv(x, x_0, edge_index).relu()
            return x

    model, x, out, a = run(Deep())
    assert model.num_layers == 3
    h = h_0 = model.backbone.module.lin(x).relu()
    for conv in model.backbone.module.convs:
        mixed = 0.9 * a @ h + 0.1 * h_0
        h = ((1 - conv.beta) * mixed + conv.beta * mixed @ conv.weight1).relu()
    assert_close(out, h, 1e-9)


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('kind', KINDS, ids=IDS)
def test_backends_are_equal(backend, kind):
    x, edge_index = make_graph(N, dtype=torch.float64, negative=True)
    results = []
    for name in ('auto', backend):
        torch.manual_seed(0)
        model = wrap(Net(), epsilon=0.1, backend=name, **kind).double()
        results.append(loss_and_gradients(model, x, edge_index))
    assert_same(*results, 1e-9)


# Embeddings -------------------------------------------------------------------------


def embeddings(model, x, edge_index):
    """What the learner of embeddings is given, in the last iteration."""
    seen = []
    with model.embedding_learner.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    ):
        model(x, edge_index)
    return seen[-1]


def test_embeddings_enter_the_last_convolution():
    module = Residual().double()
    model, x, _, _ = run(module)
    assert (model.num_layers, model.backbone.embedding) == (2, 'conv')
    z = embeddings(model, x, make_graph(N)[1])
    assert z.shape == (N, 8) and model.out_channels == 3
    # One iteration less, and the residual that enters the second use of it.
    _, trace = model(x, make_graph(N)[1], max_iters=1, return_trace=True)
    a, own = trace.mixed.to_dense(), model.backbone.module
    h = own.lin1(x).relu()
    assert_close(z, h + (a @ own.conv.lin(h) + own.conv.bias).relu(), 1e-9)


@pytest.mark.parametrize(
    ('module', 'name'),
    [(SGConv(6, 3), ''), (GCNConv(6, 3), ''), (GCN(6, 3, 1), 'convs.0')],
)
def test_embeddings_leave_a_single_convolution(module, name):
    model, x, _, _ = run(module)
    assert model.backbone.embedding == name and model.backbone.after
    z = embeddings(model, x, make_graph(N)[1])
    assert_close(z, model(x, make_graph(N)[1], max_iters=1), 1e-9)


def test_embeddings_leave_parallel_convolutions():
    """What enters them does not depend on the graph."""

    class Parallel(Net):
        def forward(self, x, edge_index):
            return self.conv1(x, edge_index) + self.conv2(x, edge_index)

    model, *_ = run(Parallel(GCNConv(6, 3), GCNConv(6, 3)))
    assert (model.backbone.embedding, model.backbone.after) == ('conv2', True)


def test_named_embedding():
    model, x, _, _ = run(Residual(), embedding='lin2')
    z = embeddings(model, x, make_graph(N)[1])
    out = model(x, make_graph(N)[1], max_iters=1)
    assert_close(model.backbone.module.lin2(z), out, 1e-9)
    # A linear map within a convolution, which may otherwise be moved before products.
    net = Net(gin(6, 4), gin(4, 3))
    model, x, _, _ = run(net, embedding='conv2.nn.0')
    own = model.backbone.module
    z = embeddings(model, x, make_graph(N)[1])
    assert_close(own.conv2.nn(z), model(x, make_graph(N)[1], max_iters=1), 1e-9)


@pytest.mark.parametrize('activation', ['relu', 'tanh', 'changing'])
@pytest.mark.parametrize('kind', KINDS, ids=IDS)
def test_signs_are_measured(activation, kind):
    """A graph has a low rank only if no similarity is negative."""

    class Signs(Net):
        calls = 0

        def forward(self, x, edge_index):
            self.calls += 1
            x = self.conv1(x, edge_index)
            until = {'relu': 10, 'tanh': 0, 'changing': 2}[activation]
            return self.conv2(x.relu() if self.calls <= until else x.tanh(), edge_index)

    x, edge_index = make_graph(300, dtype=torch.float64)
    traces = []
    for backend in ('auto', 'dense'):
        torch.manual_seed(0)
        model = wrap(Signs(), backend=backend, max_iters=4, **kind).double()
        model.backbone.module.calls = 0
        traces.append(model(x, edge_index, return_trace=True)[1])
    low_rank = [type(t.learned).__name__ == 'LowRankGraph' for t in traces]
    assert low_rank == [activation == 'relu', False]
    for out, expected in zip(*(t.outs for t in traces), strict=True):
        assert_close(out, expected, 1e-9)


def test_low_rank_of_negative_embeddings_is_refused():
    class Signs(Net):
        def forward(self, x, edge_index):
            return self.conv2(self.conv1(x, edge_index).tanh(), edge_index)

    x, edge_index = make_graph(N)
    model = wrap(Signs(), backend='low_rank')
    with pytest.raises(ValueError, match='negative'):
        model(x, edge_index)


# Modules ----------------------------------------------------------------------------


def test_module_is_copied():
    torch.manual_seed(0)
    module = Net(GCNConv(6, 8, cached=True), SAGEConv(8, 3)).eval()
    x, edge_index = make_graph(N)
    before = module(x, edge_index)
    kept = copy.deepcopy(module.state_dict())
    model = wrap(module)
    assert not any(part.training for part in model.modules())
    loss_and_gradients(model.train(), x, edge_index)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert [type(conv) for conv in module.children()] == [GCNConv, SAGEConv]
    assert not module.training and not module.conv1._forward_pre_hooks
    assert all(torch.equal(kept[k], v) for k, v in module.state_dict().items())
    assert torch.equal(module(x, edge_index), before)


def test_names_of_weights_stay():
    module = GCN(6, 8, num_layers=3, out_channels=3, norm='BatchNorm')
    inner = wrap(module).backbone.module
    assert all(isinstance(conv, GCNConv) for conv in inner.convs)
    assert inner.state_dict().keys() == module.state_dict().keys()
    inner.load_state_dict(module.state_dict())


def test_conversion_leaves_no_traces():
    """Neither statistics, nor modes, nor random numbers change."""
    module = pyg.Sequential(
        'x, edge_index',
        [
            (GCNConv(6, 8), 'x, edge_index -> x'),
            BatchNorm1d(8),
            Dropout(0.5),
            (GCNConv(8, 3), 'x, edge_index -> x'),
        ],
    )
    module.module_1.eval()
    state = torch.get_rng_state()
    model = wrap(module, metric='cosine')  # which has no weights to draw
    assert torch.equal(state, torch.get_rng_state())
    inner = model.backbone.module
    assert inner.training and not inner.module_1.training
    assert int(inner.module_1.num_batches_tracked) == 0
    assert all(p.grad is None for p in model.parameters())


def test_dropout_in_training_only():
    x, edge_index = make_graph(N)
    model = wrap(Net(dropout=0.5))
    assert not torch.equal(model(x, edge_index), model(x, edge_index))
    model.eval()
    assert torch.equal(model(x, edge_index), model(x, edge_index))


def test_dtype_and_mode_of_the_module():
    model = wrap(Net().double().eval())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not any(part.training for part in model.modules())


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
@pytest.mark.parametrize('make', [Net, lambda: Weighted(OwnConv(6, 8), OwnConv(8, 3))])
def test_saving(make, kind, tmp_path):
    x, edge_index = make_graph(N)
    model = wrap(make(), **kind).eval()
    expected = model(x, edge_index)
    assert torch.equal(copy.deepcopy(model)(x, edge_index), expected)
    torch.save(model, tmp_path / 'model.pt')
    loaded = torch.load(tmp_path / 'model.pt', weights_only=False)
    assert torch.equal(loaded(x, edge_index), expected)
    other = wrap(make(), **kind).eval()
    assert not torch.equal(other(x, edge_index), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, edge_index), expected)


def test_reset_parameters():
    model = wrap(Nested())
    before = {k: v.clone() for k, v in model.state_dict().items() if 'weight' in k}
    model.reset_parameters()
    assert not any(torch.equal(model.state_dict()[k], v) for k, v in before.items())


class First(Net):
    """Something else before the first convolution."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x, edge_index):
        return super().forward(self.step(x), edge_index)


def changed(x):
    x = F.dropout(x, 0.0) + 0.0
    x.add_(1.0)
    return x


STEPS = {
    'nothing': lambda x: x,
    'dropout': lambda x: F.dropout(x, 0.5, training=False),
    'shape': lambda x: x.reshape(x.shape).to(x.device, x.dtype)[:, : x.size(1)],
    'product': lambda x: x @ torch.eye(6, dtype=x.dtype),
    'batch_norm': BatchNorm1d(6, affine=False),
    'sum': lambda x: 1.0 - x * x.sum(1, keepdim=True).clamp(min=0.1),
    'cat': lambda x: torch.cat([x, x], dim=1)[:, 3:9],
    'changed': changed,
}


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
@pytest.mark.parametrize('step', STEPS)
def test_sparse_features(step, kind):
    """Are dense to all modules, whatever they do with them."""
    x, edge_index = make_graph(N, dtype=torch.float64)
    model = wrap(First(STEPS[step]), **kind).double()
    expected = loss_and_gradients(model, x, edge_index)
    assert_same(
        loss_and_gradients(model, x.to_sparse_csr(), edge_index), expected, 1e-9
    )


def test_dropout_of_sparse_features():
    """Entries are kept or not by themselves, zeros stay, and the mean is the same."""
    torch.manual_seed(0)
    dense = (torch.rand(300, 40) < 0.5).float()
    x = SparseInput.of(SparseMatrix.from_dense(dense))
    assert F.dropout(x, 0.25, training=False) is x and Dropout(0.25).eval()(x) is x
    dropped = Dropout(0.25)(x)
    assert isinstance(dropped, SparseInput) and dropped.shape == (300, 40)
    assert not torch.equal(dropped.dense, F.dropout(x, 0.25).dense)
    assert set((dropped.dense * 3).unique().tolist()) == {0.0, 4.0}
    assert not bool(dropped.dense[dense == 0].any())
    kept = (dropped.dense > 0)[dense == 1].float()
    assert abs(float(kept.mean()) - 0.75) < 0.03
    # A dropped matrix is one's own to change.
    weight = torch.rand(2, 40)
    expected = F.linear(2 * dropped.dense, weight)
    assert_close(F.linear(dropped, weight), expected / 2)
    dropped.mul_(2)
    assert_close(F.linear(dropped, weight), expected)


def test_sparse_features_stay_sparse():
    """Where a module begins with dropout and a convolution."""

    class Watching(Net):
        def forward(self, x, edge_index):
            made.append(x)
            x = F.dropout(x, 0.5, self.training)
            made.append(x)
            return super().forward(x, edge_index)

    made = []
    model = to_idgl(Watching(GCNConv(6, 4), GCNConv(4, 3)), 6, max_iters=1)
    made.clear()
    x, edge_index = make_graph(N)
    loss_and_gradients(model, x.to_sparse_csr(), edge_index)
    assert len(made) == 4 and all(isinstance(x, SparseInput) for x in made)
    assert not any(x.is_made for x in made)


class PerGraph(Net):
    """What depends on the graph of each node."""

    def __init__(self):
        super().__init__()
        self.norm = pyg.GraphNorm(8)

    def forward(self, x, edge_index, batch=None, batch_size=None):
        x = self.norm(self.conv1(x, edge_index), batch, batch_size).relu()
        return self.conv2(x, edge_index)


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
@pytest.mark.parametrize('make', [PerGraph, OfData])
def test_batch_is_its_graphs_one_by_one(make, kind):
    graphs = []
    for seed, n in enumerate((7, 4, 9)):
        x, edge_index = make_graph(n, seed=seed, dtype=torch.float64, negative=True)
        graphs.append(Data(x=x, edge_index=edge_index))
    options = {'tol': 1e-3, 'max_iters': 6, 'initial_weight': 0.3, 'update_weight': 0.8}
    if kind:  # all nodes: those that are drawn would depend on the batch
        kind = {'num_anchors': 9, 'anchor_sampling': 'fixed'}
    torch.manual_seed(0)
    model = wrap(make(), **{**options, **kind}).double()
    out, trace = model(Batch.from_data_list(graphs), return_trace=True)
    single = [model(data, return_trace=True) for data in graphs]
    assert_close(out, torch.cat([own for own, _ in single]), 1e-9)
    counts = [int(own.num_iters) for _, own in single]
    assert trace.num_iters.tolist() == counts and len(set(counts)) > 1


def test_regulariser_of_anchors():
    x, edge_index = make_graph(N)
    net, kind = Net(), {'sparsity': 1.0, 'smoothness': 0.0, **KINDS[1]}
    regs = []
    for options in ({}, {'scale_regularizer': False}):
        torch.manual_seed(0)
        model = to_idgl(net, 6, max_iters=0, **kind, **options)
        regs.append(model(x, edge_index, return_trace=True)[1].reg)
    assert_close((N / 4) ** 2 * regs[0], regs[1])


def test_anchors_by_ratio():
    model = wrap(Net(), anchor_ratio=0.5)
    assert isinstance(model, IDGLAnch) and model.anchor_ratio == 0.5


@pytest.mark.parametrize('kind', KINDS, ids=IDS)
def test_fit(kind, tmp_path):
    x, edge_index = make_graph(30)
    data = Data(x=x, edge_index=edge_index, y=labels(30))
    part = torch.arange(30) // 3 % 3
    data.train_mask, data.val_mask, data.test_mask = part == 0, part == 1, part == 2
    model = wrap(Net(dropout=0.2), **kind)
    before = {k: v.clone() for k, v in model.state_dict().items() if 'seed' not in k}
    saved = {'progress': False, 'checkpoint': tmp_path / 'run.pt'}
    record = fit(model, data, max_epochs=3, **saved)
    assert 0 <= record.test_score <= 1
    assert not any(torch.equal(model.state_dict()[k], v) for k, v in before.items())


# Refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('conv', 'reason'),
    [
        (GATConv(6, 8), r"GATConv at 'conv1', whose 'forward' takes no 'edge_weight'"),
        (SAGEConv(6, 8, aggr='max'), r"SAGEConv at 'conv1', whose aggr='max'"),
        (SAGEConv(6, 8, aggr=['mean', 'max']), 'SAGEConv.*is no weighted sum'),
        (GraphConv(6, 8, aggr='max'), "GraphConv.*aggr='max' is no weighted sum"),
        (GCNConv(6, 8, flow='target_to_source'), 'against the direction'),
        (APPNP(K=2, alpha=0.1, dropout=0.5), "APPNP.*drops out edges.*'graph_dropout'"),
        (pyg.ChebConv(6, 8, K=2), 'ChebConv.*always normalises'),
        (pyg.MixHopConv(6, 8), 'MixHopConv.*always normalises'),
    ],
)
def test_convolutions_that_are_refused(conv, reason):
    with pytest.raises(ValueError, match=reason):
        wrap(Net(conv))


def test_all_refused_convolutions_are_named():
    with pytest.raises(ValueError, match=r"'conv1'.*; GATConv at 'conv2'"):
        wrap(Net(GATConv(6, 8), GATConv(8, 3)))


def test_modules_without_convolutions_are_refused():
    with pytest.raises(ValueError, match=r'graph convolutions.*got none'):
        wrap(torch.nn.Sequential(Linear(6, 3)))
    with pytest.raises(TypeError, match=r"'module' to be a 'torch\.nn\.Module'"):
        wrap(GCNConv)

    class Idle(Net):
        def forward(self, x, edge_index):
            return x

    with pytest.raises(ValueError, match='runs none'):
        wrap(Idle())


USES = {
    r"use of '\.size'": lambda x, edge_index: x[: edge_index.size(1)],
    'use as a sequence': lambda x, edge_index: next(iter(edge_index)),
    'use of an index': lambda x, edge_index: edge_index[0],
    r"use of '\.new_ones'|use of '\.size'": lambda x, edge_index: dropout_edge(
        edge_index, training=False
    ),
    "use in 'cat'": lambda x, edge_index: torch.cat([edge_index, edge_index]),
    "'x' as it is": lambda x, edge_index: x.mul_(2),
}


@pytest.mark.parametrize('reason', USES)
def test_modules_that_look_at_edges_are_refused(reason):
    class Looking(Net):
        def forward(self, x, edge_index):
            USES[reason](x, edge_index)
            return super().forward(x, edge_index)

    with pytest.raises(ValueError, match=f'(?s)run on features.*{reason}'):
        wrap(Looking())


CALLS = {
    'one matrix of node features': lambda conv, x, edge_index: conv((x, x), edge_index),
    'for each of 2 nodes': lambda conv, x, edge_index: conv(x[:1], edge_index),
    "no 'edge_weight'": lambda conv, x, edge_index: conv(x, edge_index, x.new_ones(4)),
    'that the module was called with': lambda conv, x, edge_index: conv(
        x, torch.zeros(2, 4, dtype=torch.long)
    ),
}


@pytest.mark.parametrize('reason', CALLS)
@pytest.mark.parametrize('conv', [GCNConv, GraphConv, GCNSubclass])
def test_calls_that_are_refused(reason, conv):
    class Calling(Net):
        def forward(self, x, edge_index):
            return CALLS[reason](self.conv1, x, edge_index)

    with pytest.raises(ValueError, match=reason):
        wrap(Calling(conv(6, 3)))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r'features of shape \[num_nodes, 5\].*shapes'):
        to_idgl(Net(), 5)
    with pytest.raises(ValueError, match="'in_channels' to be at least 1"):
        to_idgl(Net(), 0)


def test_other_outputs_are_refused():
    class Pooled(Net):
        def forward(self, x, edge_index, batch):
            return pyg.global_mean_pool(super().forward(x, edge_index), batch)

    with pytest.raises(ValueError, match=r'row of outputs.*\[1, 3\] for 2 nodes'):
        wrap(Pooled())

    class Both(Net):
        def forward(self, x, edge_index):
            return x, super().forward(x, edge_index)

    with pytest.raises(ValueError, match=r'one tensor.*got tuple'):
        wrap(Both())


def test_other_arguments_are_refused():
    class More(Net):
        def forward(self, x, edge_index, edge_type):
            return super().forward(x, edge_index)

    with pytest.raises(ValueError, match=r"\['edge_type'\] besides"):
        wrap(More())

    class Less(Net):
        def forward(self):
            return None

    with pytest.raises(ValueError, match=r"take node features and 'edge_index'"):
        wrap(Less())


@pytest.mark.parametrize('name', ['dropout', 'iter_dropout', 'num_layers', 'backbone'])
def test_arguments_of_the_gnn_are_refused(name):
    with pytest.raises(TypeError, match=f"layers and dropout of its own.*'{name}'"):
        wrap(Net(), **{name: 1})


def test_wrong_embeddings_are_refused():
    with pytest.raises(ValueError, match=r"one of \['conv1'.*got 'conv3'"):
        wrap(Net(), embedding='conv3')
    with pytest.raises(ValueError, match=r"depends on the graph.*got 'conv1'"):
        wrap(Net(), embedding='conv1')
    with pytest.raises(ValueError, match=r"that runs.*'conv2.aggr_module'"):
        wrap(Net(), embedding='conv2.aggr_module')
    with pytest.raises(ValueError, match="list at 'jk'"):
        wrap(GCN(6, 8, 2, 3, jk='cat'), embedding='jk')


def test_embedding_that_does_not_always_run():
    class Sometimes(Net):
        def forward(self, x, edge_index):
            x = self.conv1(x, edge_index)
            return x if self.training else self.conv2(x, edge_index)

    model = wrap(Sometimes(GCNConv(6, 3), GCNConv(3, 3)))
    x, edge_index = make_graph(N)
    assert model.eval()(x, edge_index).shape == (N, 3)
    with pytest.raises(RuntimeError, match="run 'conv2' in every pass"):
        model.train()(x, edge_index)


def test_gin_of_pyg():
    """Its network is no plain sequence."""
    model, x, out, a = run(GIN(6, 4, num_layers=2, out_channels=3))
    first, second = model.backbone.module.convs
    assert_close(out, dense_gin(second, a, dense_gin(first, a, x).relu()), 1e-9)


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_same_model_whatever_the_mode(mode):
    gnn = pyg.GCN(6, 8, num_layers=2, out_channels=3)
    expected = to_idgl(gnn, 6).backbone
    with mode():
        backbone = to_idgl(gnn, 6).backbone
    assert backbone.after == expected.after is False
    assert backbone.embedding_channels == expected.embedding_channels == 8
    assert backbone.embedding == expected.embedding
    assert not any(p.is_inference() for p in backbone.parameters())
