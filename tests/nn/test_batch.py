"""A batch is its graphs, one by one: graphs never mix, and each stops by itself."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch, Data

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    cross_entropy,
    gradients,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.graphs import CompleteGraph
from torch_geometric_idgl.nn import IDGL, GraphLearner, IDGLAnch
from torch_geometric_idgl.ops import Features, Nodes

SIZES = (7, 4, 9, 1)
# Graphs of different sizes stop at different iterations with these:
OPTIONS = {
    'tol': 2e-2,
    'max_iters': 6,
    'initial_weight': 0.3,
    'update_weight': 0.8,
    'connectivity': 0.1,
    'sparsity': 0.3,
}


def make_graphs(sizes=SIZES, negative=True):
    graphs = []
    for seed, n in enumerate(sizes):
        x, edge_index = make_graph(n, seed=seed, dtype=torch.float64, negative=negative)
        graphs.append(Data(x=x, edge_index=edge_index, y=labels(n)))
    return graphs


def anchors_of(graphs):
    """Some nodes of every graph: inside the graphs, and inside the batch."""
    single = [torch.arange(0, data.num_nodes, 2) for data in graphs]
    start = 0
    whole = []
    for data, index in zip(graphs, single, strict=True):
        whole.append(index + start)
        start += data.num_nodes
    return single, torch.cat(whole)


def one_by_one(model, graphs, single):
    """The joint loss of a batch from runs on its graphs, with gradients."""
    model.zero_grad()
    total_nodes = sum(data.num_nodes for data in graphs)
    loss, traces = 0.0, []
    for data, index in zip(graphs, single, strict=True):
        index = index if isinstance(model, IDGLAnch) else None
        _, trace = model(data, anchor_index=index, return_trace=True)
        prediction = trace.prediction_loss(cross_entropy(data.y))
        loss = loss + prediction * data.num_nodes / total_nodes
        loss = loss + trace.reg / len(graphs)
        traces.append(trace)
    loss.backward()
    return loss.detach(), gradients(model), traces


def check_batch(model, graphs, tol=1e-9):
    single, whole = anchors_of(graphs)
    loss, grads, traces = one_by_one(model, graphs, single)
    batch = Batch.from_data_list(graphs)
    index = whole if isinstance(model, IDGLAnch) else None
    together = loss_and_gradients(model, batch, anchor_index=index, y=batch.y)
    trace = together[2]

    counts = [int(t.num_iters) for t in traces]
    assert trace.num_iters.tolist() == counts
    assert len(trace.outs) == max(counts) + 1
    for g, own in enumerate(traces):
        nodes = batch.batch == g
        for t, out in enumerate(trace.outs):  # a stopped graph keeps its outputs
            assert_close(out[nodes], own.outs[min(t, counts[g])], tol)
            reg = own.regs[min(t, counts[g])]
            torch.testing.assert_close(trace.regs[t][g : g + 1], reg)
        for t, delta in enumerate(trace.deltas):
            if t < counts[g]:
                torch.testing.assert_close(delta[g : g + 1], own.deltas[t])
            else:
                assert bool(delta[g].isnan())
    assert_close(together[0], loss, tol)
    for name, grad in grads.items():
        assert_close(together[1][name], grad, 10 * tol)
    return counts


@pytest.mark.parametrize('backend', ['dense', 'tiled', 'sparse'])
@pytest.mark.parametrize('epsilon', [0.0, 0.4])
@pytest.mark.parametrize('cls', MODELS)
def test_batch_is_one_by_one(cls, epsilon, backend):
    model = make_model(cls, epsilon=epsilon, backend=backend, **OPTIONS).double().eval()
    counts = check_batch(model, make_graphs())
    assert len(set(counts)) > 1  # they do stop at different iterations


@pytest.mark.parametrize('backend', ['auto', 'low_rank'])
@pytest.mark.parametrize('cls', MODELS)
def test_factored_batch_is_one_by_one(cls, backend):
    model = make_model(cls, backend=backend, **{**OPTIONS, 'tol': 1e-6})
    counts = check_batch(model.double().eval(), make_graphs(negative=False))
    assert len(set(counts)) > 1


@pytest.mark.parametrize(
    'options',
    [
        {'backbone': 'sage'},
        {'backbone': 'gin'},
        {'backbone': 'appnp'},
        {'metric': 'rbf'},
        {'metric': 'attention'},
        {'top_k': 3},
        {'jk': 'cat'},
        {'norm': 'layer_norm', 'norm_kwargs': {'mode': 'node'}},
        {'norm': 'graph_norm'},
        {'max_iters': 0},
        {'tol': None},
    ],
    ids=str,
)
def test_options(options):
    for cls in MODELS:
        model = make_model(cls, **{**OPTIONS, **options}).double().eval()
        check_batch(model, make_graphs())


@pytest.mark.parametrize('cls', MODELS)
def test_graphs_of_the_same_size(cls):
    model = make_model(cls, **OPTIONS).double().eval()
    check_batch(model, make_graphs((6, 6, 6)))


# Graphs of all sizes: small ones are refined together, large ones one by one.
RAGGED = (24, *[2] * 5, 130, 1, 17, 3, 150)


@pytest.mark.parametrize('epsilon', [0.0, 0.2])
@pytest.mark.parametrize('cls', MODELS)
def test_very_different_sizes(cls, epsilon):
    graphs = make_graphs(RAGGED, negative=False)
    check_batch(make_model(cls, epsilon=epsilon, **OPTIONS).double().eval(), graphs)


@pytest.mark.parametrize('cls', MODELS)
def test_graphs_that_have_stopped_are_not_computed(cls, monkeypatch):
    """The work on a batch of large graphs is that on each of them."""
    graphs = make_graphs((130, 140, 150))
    model = make_model(cls, **{**OPTIONS, 'tol': 0.0}).double().eval()
    _, trace = model(Batch.from_data_list(graphs), return_trace=True)
    model.tol = float(trace.deltas[1].median())  # one stops there, one does not
    learned = []
    forward = GraphLearner.forward

    def spy(self, x, nodes, *args):
        learned.append((nodes or x.nodes).sizes)
        return forward(self, x, nodes, *args)

    monkeypatch.setattr(GraphLearner, 'forward', spy)
    _, trace = model(Batch.from_data_list(graphs), return_trace=True)
    counts = trace.num_iters.tolist()
    assert len(set(counts)) > 1
    sizes = zip((130, 140, 150), counts, strict=True)
    assert learned == [(size,) for size, count in sizes for _ in range(count + 1)]


@pytest.mark.parametrize('cls', MODELS)
def test_the_operators_of_a_batch(cls):
    """What a trace holds is block-diagonal, in the order of the nodes."""
    graphs = make_graphs((3, 131, 20))
    model = make_model(cls, epsilon=0.1, **OPTIONS).double().eval()
    single, whole = anchors_of(graphs)
    index = whole if cls is IDGLAnch else None
    batch = Batch.from_data_list(graphs)
    _, trace = model(batch, anchor_index=index, return_trace=True)
    for name in ('initial', 'first', 'learned', 'mixed'):
        blocks, norms = [], []
        for data, own in zip(graphs, single, strict=True):
            own = own if cls is IDGLAnch else None
            graph = getattr(model(data, anchor_index=own, return_trace=True)[1], name)
            blocks.append(graph.to_dense())
            norms.append(blocks[-1].square().sum())
        expected = torch.block_diag(*blocks)
        graph = getattr(trace, name)
        assert_close(graph.to_dense(), expected, 1e-9)
        x = torch.rand(expected.size(1), 2, dtype=torch.float64)
        assert_close(graph.matmul(x), expected @ x, 1e-9)
        (source, target), weight = graph.to_edges(min_weight=0.01)
        assert_close(weight, expected[target, source])
        assert weight.numel() == int((expected > 0.01).sum())
        with pytest.raises(ValueError, match='at most 5 edges'):
            graph.to_edges(max_edges=5)
        if name in ('first', 'learned'):
            y = torch.rand(expected.size(0), 2, dtype=torch.float64)
            assert_close(graph.t_matmul(y), expected.t() @ y, 1e-9)
            assert_close(graph.sq_norm(), torch.stack(norms), 1e-9)


def test_norms_over_the_batch_are_kept():
    """A batch whose nodes are normalised together is refined together."""
    graphs = make_graphs((130, 5))
    model = make_model(IDGL, norm='batch_norm', tol=None, max_iters=1).double()
    _, trace = model(Batch.from_data_list(graphs), return_trace=True)
    assert trace.first.shape == (135, 135) and not trace.parts
    embedded = trace.mixed.matmul(
        Batch.from_data_list(graphs).x @ model.backbone.convs[0].lin.weight.t()
    )
    normed = model.backbone.norms[0](embedded).relu()
    expected = trace.mixed.matmul(normed @ model.backbone.convs[1].lin.weight.t())
    assert_close(trace.out, expected, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_complete_graphs_have_no_edges(cls):
    """With as many neighbours as nodes, the kNN graph is the mean."""
    graphs = make_graphs((130, 7))
    for data in graphs:
        data.edge_index = None
    model = make_model(cls, k=200, **OPTIONS).double().eval()
    check_batch(model, graphs)
    _, trace = model(graphs[0], return_trace=True)
    assert isinstance(trace.initial, CompleteGraph)
    assert_close(trace.initial.to_dense(), torch.full((130, 130), 1 / 130).double())
    model = make_model(cls, k=200, graph_dropout=0.5, **OPTIONS).double().train()
    _, trace = model(graphs[0], return_trace=True)
    assert all_finite((trace.out, {}, trace))


def test_padding_counts_for_the_choice_of_the_operator():
    sizes = (600, *[2] * 100)
    nodes = Nodes(sizes, torch.device('cpu'))
    learner = GraphLearner(4, 'cosine', epsilon=0.01)
    x = torch.rand(nodes.num_rows, 4)
    one = Nodes((600,), x.device)
    assert learner.choose_backend(x[:600], one, None, True) == 'dense'
    assert learner.choose_backend(x, nodes, None, True) == 'tiled'
    assert not Features(x, Nodes((4000, *[1] * 10), x.device)).keeps_gram


@pytest.mark.parametrize('cls', MODELS)
def test_knn_graphs_of_a_batch(cls):
    graphs = make_graphs()
    for data in graphs:
        data.edge_index = None
    model = make_model(cls, k=3, **OPTIONS).double().eval()
    check_batch(model, graphs)


@pytest.mark.parametrize('cls', MODELS)
def test_single_graph_as_a_batch(cls):
    (data,) = make_graphs((8,))
    model = make_model(cls, **OPTIONS).double().eval()
    out = model(data.x, data.edge_index)
    zeros = torch.zeros(8, dtype=torch.long)
    assert torch.equal(model(data.x, data.edge_index, batch=zeros), out)
    assert torch.equal(model(Batch.from_data_list([data])), out)


@pytest.mark.parametrize('backend', ['auto', 'tiled'])
@pytest.mark.parametrize('cls', MODELS)
def test_empty_graphs_change_nothing(cls, backend):
    graphs = make_graphs((5, 3), negative=False)
    whole = Batch.from_data_list(graphs)
    x, edge_index = whole.x, whole.edge_index
    options = {**OPTIONS, 'tol': 1e-6, 'backend': backend}
    model = make_model(cls, **options).double().eval()
    index = anchors_of(graphs)[1] if cls is IDGLAnch else None
    expected = model(x, edge_index, batch=whole.batch, anchor_index=index)
    for shift, size in [((0, 2), 3), ((0, 1), 4), ((1, 2), 3), ((2, 3), 4)]:
        batch = torch.tensor(shift)[whole.batch]
        result = loss_and_gradients(
            model, x, edge_index, batch=batch, batch_size=size, anchor_index=index
        )
        trace = result[2]
        assert_close(trace.out, expected, 1e-9)
        assert trace.num_iters.numel() == size
        assert all_finite(result)


@pytest.mark.parametrize('cls', MODELS)
def test_as_many_nodes_as_graphs(cls):
    """Two empty graphs and two of two nodes: four rows of nodes, four of graphs."""
    graphs = make_graphs((2, 2))
    graphs[1].x = graphs[1].x.abs() + 0.2
    model = make_model(cls, **{**OPTIONS, 'tol': 1e-4}).double().eval()
    single, whole = anchors_of(graphs)
    batch = torch.tensor([2, 2, 3, 3])
    data = Batch.from_data_list(graphs)
    index = whole if cls is IDGLAnch else None
    _, trace = model(
        data.x,
        data.edge_index,
        batch=batch,
        batch_size=4,
        anchor_index=index,
        return_trace=True,
    )
    traces = one_by_one(model, graphs, single)[2]
    counts = [int(own.num_iters) for own in traces]
    assert trace.num_iters.tolist()[2:] == counts
    for g, own in enumerate(traces):
        torch.testing.assert_close(trace.regs[-1][g + 2 : g + 3], own.regs[-1])


@pytest.mark.parametrize('cls', MODELS)
def test_training_mode(cls):
    """With all kinds of dropout, for one-node and larger graphs."""
    options = {'dropout': 0.5, 'feature_dropout': 0.3, 'graph_dropout': 0.5}
    model = make_model(cls, **OPTIONS, **options).double().train()
    batch = Batch.from_data_list(make_graphs())
    assert all_finite(loss_and_gradients(model, batch, y=batch.y))


def test_weighted_edges_in_a_batch():
    graphs = make_graphs((5, 3))
    for data in graphs:
        data.edge_weight = torch.linspace(0.1, 1, data.num_edges, dtype=torch.float64)
    model = make_model(IDGL, **OPTIONS).double().eval()
    check_batch(model, graphs)


def test_sampled_anchors_stay_in_their_graphs():
    graphs = make_graphs((5, 3, 4))
    model = make_model(IDGLAnch, num_anchors=2, tol=None, max_iters=1).double().eval()
    _, trace = model(Batch.from_data_list(graphs), return_trace=True)
    assert trace.first.shape == (12, 6)
    assert trace.first.cols.sizes == (2, 2, 2)
    dense = trace.mixed.to_dense()
    assert dense[:5, 5:].eq(0).all() and dense[5:8, 8:].eq(0).all()


@pytest.mark.parametrize('backend', ['auto', 'tiled'])
@pytest.mark.parametrize('cls', MODELS)
def test_gaps_in_the_batch_cost_nothing(cls, backend, monkeypatch):
    """Thousands of empty graphs take part in nothing, and get their zeros."""
    total, places = 20_001, torch.tensor([3, 777, 20_000])
    graphs = make_graphs((5, 3, 4))
    whole = Batch.from_data_list(graphs)
    model = make_model(cls, backend=backend, **{**OPTIONS, 'tol': None, 'max_iters': 2})
    model = model.double().eval()
    index = anchors_of(graphs)[1] if cls is IDGLAnch else None
    expected = loss_and_gradients(model, whole, anchor_index=index)[2]

    made = []
    original = Nodes.__init__

    def spy(self, sizes, device):
        original(self, sizes, device)
        made.append(self.num_graphs)

    monkeypatch.setattr(Nodes, '__init__', spy)
    with Largest() as largest:
        _, trace = model(
            whole.x,
            whole.edge_index,
            batch=places[whole.batch],
            batch_size=total,
            anchor_index=index,
            return_trace=True,
        )
        trace.loss(lambda out: out.square().mean()).backward()
    # Only lists of sizes speak of all graphs.
    assert set(made) == {3, total}
    assert largest.numel <= 2 * total  # regularisers of two refinements

    assert_close(trace.out, expected.out, 1e-9)
    assert trace.num_iters.shape == (total,)
    assert trace.num_iters[places].tolist() == [2, 2, 2]
    assert int(trace.num_iters.sum()) == 6
    for reg, other in zip(trace.regs, expected.regs, strict=True):
        assert reg.shape == (total,)
        assert_close(reg[places], other, 1e-9)
        assert int(reg.count_nonzero()) == int(other.count_nonzero())
    for refined in trace.refined:
        assert refined.shape == (total,) and int(refined.sum()) == 3
    assert trace.deltas == []


@pytest.mark.parametrize('cls', MODELS)
def test_changes_of_graphs_beside_empty_ones(cls):
    graphs = make_graphs((5, 3, 4))
    whole = Batch.from_data_list(graphs)
    places = torch.tensor([1, 4, 5])
    model = make_model(cls, **OPTIONS).double().eval()
    index = anchors_of(graphs)[1] if cls is IDGLAnch else None
    expected = loss_and_gradients(model, whole, anchor_index=index)[2]
    batch = places[whole.batch]
    options = {'batch': batch, 'batch_size': 7, 'anchor_index': index}
    _, trace = model(whole.x, whole.edge_index, return_trace=True, **options)
    assert len(trace.deltas) == len(expected.deltas) > 0
    for delta, other in zip(trace.deltas, expected.deltas, strict=True):
        assert delta.shape == (7,)
        torch.testing.assert_close(delta[places], other, equal_nan=True)
    # The joint loss averages over all graphs, empty ones count as zero.
    fn = cross_entropy(labels(12))
    assert_close(trace.prediction_loss(fn), expected.prediction_loss(fn), 1e-9)
    assert_close(7 * trace.reg, 3 * expected.reg, 1e-9)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                self.numel = max(self.numel, item.numel())
        return out
