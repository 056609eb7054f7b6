import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCN

from torch_geometric_idgl.graphs import AnchorGraph
from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.transforms import LearnGraph
from torch_geometric_idgl.transforms.learn_graph import _incoming_rank


def make_model(cls=IDGL, **kwargs):
    torch.manual_seed(0)
    if cls is IDGLAnch:
        kwargs = {'num_anchors': 4, 'anchor_sampling': 'fixed', **kwargs}
    kwargs = {'dropout': 0.5, 'max_iters': 2, 'tol': None, **kwargs}
    return cls(3, 8, num_layers=2, out_channels=2, **kwargs)


def make_graph(num_nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(num_nodes - 1)
    edge_index = torch.stack([row, row + 1])
    return Data(
        x=torch.rand(num_nodes, 3, generator=generator),
        edge_index=torch.cat([edge_index, edge_index.flip(0)], dim=1),
        y=torch.arange(num_nodes) % 2,
    )


def operator(model, data, kind):
    with torch.no_grad():
        _, trace = model.eval()(data, return_trace=True)
    graph = getattr(trace, kind)
    anchored = kind == 'learned' and isinstance(model, IDGLAnch)
    return AnchorGraph(graph) if anchored else graph


def dense(data):
    """The matrix A with `A @ x` the messages of this graph."""
    out = torch.zeros(data.num_nodes, data.num_nodes)
    source, target = data.edge_index
    return out.index_put((target, source), data.edge_weight, accumulate=True)


def test_learn_graph_repr():
    transform = LearnGraph(make_model())
    assert str(transform) == "LearnGraph(IDGL(3, 2, num_layers=2), kind='mixed')"


@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
@pytest.mark.parametrize('kind', ['mixed', 'learned'])
def test_learn_graph_is_the_operator(cls, kind):
    model, data = make_model(cls), make_graph(10, 0)
    expected = operator(model, data, kind)
    out = LearnGraph(model, kind=kind)(data)
    assert not out.edge_weight.requires_grad
    assert torch.allclose(dense(out), expected.to_dense(), atol=1e-6)
    x = torch.randn(10, 4)
    assert torch.allclose(dense(out) @ x, expected.matmul(x), atol=1e-5)
    assert torch.equal(out.y, data.y) and torch.equal(out.x, data.x)


def test_learn_graph_keeps_data_and_weights():
    model, data = make_model(norm='batch_norm').train(), make_graph(6, 0)
    data.edge_attr = torch.ones(data.num_edges, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    keys, edge_index = set(data.keys()), data.edge_index.clone()
    out = LearnGraph(model)(data)
    assert set(out.keys()) == {'x', 'y', 'edge_index', 'edge_weight'}
    assert set(data.keys()) == keys and torch.equal(data.edge_index, edge_index)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    # Evaluation mode: no dropout.
    assert torch.equal(LearnGraph(model)(data).edge_weight, out.edge_weight)


@pytest.mark.parametrize('fail', [False, True])
def test_learn_graph_never_touches_the_model(fail):
    model = make_model(norm='batch_norm', cached=True).train()
    model.dropout = 0.25
    next(m for m in model.modules() if m is not model).eval()  # As if frozen.
    tensors = {id(t) for t in [*model.parameters(), *model.buffers()]}
    modes = [module.training for module in model.modules()]
    runs = []

    def watch(running, args):
        runs.append(running)
        assert not any(module.training for module in running.modules())
        assert not running.cached
        shared = {id(t) for t in [*running.parameters(), *running.buffers()]}
        assert shared == tensors
        # Another thread would see the model as it was.
        assert model.cached
        assert [module.training for module in model.modules()] == modes
        if fail:
            raise RuntimeError('stop here')

    model.register_forward_pre_hook(watch)
    attributes = dict(vars(model))
    transform = LearnGraph(model)
    if fail:
        with pytest.raises(RuntimeError, match='stop here'):
            transform(make_graph(6, 0))
    else:
        transform(make_graph(6, 0))
    assert len(runs) == 1 and runs[0] is not model
    assert transform.model is model and vars(model) == attributes
    assert [module.training for module in model.modules()] == modes


def test_learn_graph_without_edges():
    model, data = make_model(k=3), make_graph(6, 0)
    del data.edge_index
    out = LearnGraph(model)(data)
    assert torch.allclose(dense(out), operator(model, data, 'mixed').to_dense())


def test_learn_graph_of_a_cached_model():
    first, second = make_graph(6, 0), make_graph(6, 1)
    model = make_model(cached=True).eval()
    out = model(first)
    transformed = LearnGraph(model)(second)
    assert torch.equal(dense(transformed), dense(LearnGraph(make_model())(second)))
    assert model.cached and torch.equal(model(first), out)


@pytest.mark.parametrize('cls', [IDGL, IDGLAnch])
@pytest.mark.parametrize('kind', ['mixed', 'learned'])
def test_learn_graph_batch(cls, kind):
    kwargs = {'num_anchors': 20} if cls is IDGLAnch else {}  # All nodes.
    transform = LearnGraph(make_model(cls, **kwargs), kind=kind)
    graphs = [make_graph(5, 0), make_graph(8, 1), make_graph(3, 2)]
    batch = Batch.from_data_list(graphs)
    out = transform(batch)
    assert torch.equal(out.batch[out.edge_index[0]], out.batch[out.edge_index[1]])
    for graph, part in zip(graphs, out.to_data_list(), strict=True):
        assert torch.equal(part.x, graph.x)
        assert torch.allclose(dense(part), dense(transform(graph)), atol=1e-5)
    for graph, part in zip(graphs, batch.to_data_list(), strict=True):
        assert torch.equal(part.edge_index, graph.edge_index)
        assert 'edge_weight' not in part


def test_learn_graph_min_weight():
    model, data = make_model(), make_graph(10, 0)
    full = dense(LearnGraph(model, kind='learned')(data))
    limit = float(full.median())
    out = LearnGraph(model, kind='learned', min_weight=limit)(data)
    assert torch.equal(dense(out), full * (full > limit))
    assert 0 < out.num_edges < int((full > 0).sum())


def test_learn_graph_top_k():
    model, data = make_model(), make_graph(10, 0)
    full = dense(LearnGraph(model)(data))
    out = LearnGraph(model, top_k=3)(data)
    assert out.edge_index[1].bincount().tolist() == [3] * 10
    value, index = full.topk(3, dim=1)
    assert torch.equal(dense(out), torch.zeros(10, 10).scatter(1, index, value))
    assert torch.equal(dense(LearnGraph(model, top_k=100)(data)), full)


def test_incoming_rank():
    target = torch.tensor([2, 0, 2, 2, 0, 4])
    weight = torch.tensor([0.1, 0.5, 0.3, 0.3, 0.7, 0.2])
    assert _incoming_rank(target, weight, 5).tolist() == [2, 1, 0, 1, 0, 0]


def test_learn_graph_max_edges():
    with pytest.raises(ValueError, match='50'):
        LearnGraph(make_model(), max_edges=50)(make_graph(10, 0))


def test_learn_graph_feeds_any_gnn():
    data = LearnGraph(make_model(), top_k=4)(make_graph(10, 0))
    model = GCN(3, 8, num_layers=2, out_channels=2)
    model(data.x, data.edge_index, data.edge_weight).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_learn_graph_errors():
    model = make_model()
    with pytest.raises(TypeError, match=r"'IDGL' or 'IDGLAnch' model \(got 'GCN'\)"):
        LearnGraph(GCN(3, 8, num_layers=2))
    with pytest.raises(ValueError, match=r"'mixed', 'learned' \(got 'first'\)"):
        LearnGraph(model, kind='first')
    with pytest.raises(ValueError, match=r"'top_k' to be at least 1 \(got 0\)"):
        LearnGraph(model, top_k=0)
    with pytest.raises(ValueError, match=r"'max_edges' to be at least 1 \(got 0\)"):
        LearnGraph(model, max_edges=0)
    with pytest.raises(TypeError, match=r"'top_k' to be an integer \(got 1.5\)"):
        LearnGraph(model, top_k=1.5)
    with pytest.raises(ValueError, match=r"'min_weight' .* at least 0 \(got -1.0\)"):
        LearnGraph(model, min_weight=-1.0)
    with pytest.raises(ValueError, match="'data' to hold 'x'"):
        LearnGraph(model)(Data(num_nodes=3))
