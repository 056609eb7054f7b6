"""IDGL-Anch on large graphs: inference in bounded memory, and batches of nodes."""

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import ClusterData, ClusterLoader, NeighborLoader
from torch_geometric.nn import GCN, GCNConv

from tests.nn.common import (
    assert_close,
    assert_same,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
)
from torch_geometric_idgl.graphs import TiledGraph
from torch_geometric_idgl.loader import AnchorLoader, PartitionLoader
from torch_geometric_idgl.nn import IDGL, IDGLAnch, to_idgl

# Inference ---------------------------------------------------------------------------

OPTIONS = [
    {},
    {'epsilon': 0.3},
    {'top_k': 2},
    {'metric': 'cosine', 'epsilon': 0.2},
    {'metric': 'rbf'},
    {'metric': 'attention'},
    {'backend': 'sparse', 'epsilon': 0.3},
    {'backbone': 'sage'},
    {'backbone': 'gin'},
    {'backbone': 'appnp'},
    {'backbone': GCNConv},
    {'bias': True, 'norm': 'batch_norm'},
    {'norm': 'graph_norm', 'act': 'tanh'},
    {'jk': 'cat'},
    {'tol': None, 'max_iters': 2},
    {'max_iters': 0},
    {'normalize': False, 'add_self_loops': False},
]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_inference_is_evaluation(options):
    x, edge_index = make_graph(13, dtype=torch.float64)
    weight = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    model = make_model(IDGLAnch, **options).double().eval()
    for graph in [(edge_index,), (edge_index, weight)]:
        expected = model(x, *graph)
        for batch_size in [1, 4, 100]:
            out = model.inference(x, *graph, batch_size=batch_size)
            assert_close(out, expected, 1e-10)
            assert not out.requires_grad
    model, x = model.float(), x.float()
    assert_close(model.inference(x, edge_index), model(x, edge_index), 1e-6)


def test_inference_takes_what_forward_takes():
    x, edge_index = make_graph(13, dtype=torch.float64)
    other = make_graph(13, 4, seed=1, dtype=torch.float64)[0]
    model = make_model(IDGLAnch, graph_channels=4, k=3).double().eval()
    anchors = torch.tensor([11, 2, 5])
    options = {'graph_x': other, 'anchor_index': anchors, 'max_iters': 1}
    expected = model(x, edge_index, **options)
    adjacency = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(edge_index.size(1)), (13, 13)
    )
    for form in (edge_index, adjacency):
        out = model.inference(x, form, batch_size=4, **options)
        assert_close(out, expected, 1e-10)
    sparse = x.to_sparse_csr()
    out = model.inference(sparse, edge_index, batch_size=4, **options)
    assert_close(out, expected, 1e-10)
    # Without a graph, on that of the nearest neighbours.
    out = model.inference(x, batch_size=4, **options)
    assert_close(out, model(x, **options), 1e-10)


def test_inference_takes_data():
    x, edge_index = make_graph(13, dtype=torch.float64)
    other = make_graph(13, 4, seed=1, dtype=torch.float64)[0]
    model = make_model(IDGLAnch, graph_channels=4).double().eval()
    weight = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index, edge_weight=weight, graph_x=other)
    data.anchor_index = torch.tensor([11, 2, 5])
    assert_close(model.inference(data, batch_size=4), model(data), 1e-10)
    with pytest.raises(ValueError, match='as arguments besides'):
        model.inference(data, edge_index)
    with pytest.raises(ValueError, match=r'one whole graph .got a batch of graphs'):
        model.inference(Batch.from_data_list([data, data]))


def test_inference_of_a_wrapped_gnn():
    x, edge_index = make_graph(13, dtype=torch.float64)
    module = GCN(6, 8, num_layers=2, out_channels=3).double()
    model = to_idgl(module, in_channels=6, num_anchors=4).eval()
    out = model.inference(x, edge_index, batch_size=4)
    assert_close(out, model(x, edge_index), 1e-10)


def test_inference_never_makes_more_than_a_block(monkeypatch):
    """Neither embeddings nor affinities, of raw features or of others."""
    x, edge_index = make_graph(50, dtype=torch.float64)
    model = make_model(IDGLAnch, epsilon=0.1).double().eval()
    expected = model(x, edge_index)
    embedded, graphs = [], []
    for learner in (model.feature_learner, model.embedding_learner):
        embed = learner.metric.embed

        def watched(x, embed=embed):
            embedded.append(x.size(0))
            return embed(x)

        monkeypatch.setattr(learner.metric, 'embed', watched)
        learner.register_forward_hook(lambda *args: graphs.append(args[-1]))
    assert_close(model.inference(x, edge_index, batch_size=7), expected, 1e-10)
    assert max(embedded) == 7 and embedded.count(7) >= 7
    assert len(graphs) > 1
    for graph in graphs:
        assert isinstance(graph, TiledGraph) and not graph.entries._kept
        assert [t.bottom - t.top for t in graph.entries.tiles] == [7] * 7 + [1]


def test_inference_errors():
    x, edge_index = make_graph(13)
    model = make_model(IDGLAnch)
    with pytest.raises(
        RuntimeError, match=r"Expected .* evaluation .*'model.eval\(\)'"
    ):
        model.inference(x, edge_index)
    model.eval()
    with pytest.raises(ValueError, match=r"'batch_size' to be .*at least 1 .got 0"):
        model.inference(x, edge_index, batch_size=0)
    with pytest.raises(ValueError, match="'x' to have 6 features"):
        model.inference(x[:, :5], edge_index)
    with pytest.raises(TypeError, match="'edge_index' to be a tensor"):
        model.inference(x, edge_index.tolist())
    with pytest.raises(ValueError, match="'edge_index' beside 'edge_weight'"):
        model.inference(x, edge_weight=torch.ones(52))


# Anchors of a data object ------------------------------------------------------------


def test_anchors_of_a_data_object():
    x, edge_index = make_graph(13)
    index = torch.tensor([11, 2, 5])
    data = Data(x=x, edge_index=edge_index, anchor_index=index)
    model = make_model(IDGLAnch).eval()
    expected = model(x, edge_index, anchor_index=index)
    assert torch.equal(model(data), expected)
    assert not torch.allclose(model(x, edge_index), expected)
    # Those of a call come first. A model without anchors needs none.
    other = model(x, edge_index, anchor_index=index[:1])
    assert torch.equal(model(data, anchor_index=index[:1]), other)
    idgl = make_model(IDGL).eval()
    assert torch.equal(idgl(data), idgl(x, edge_index))


def test_drawn_anchors():
    x, edge_index = make_graph(13)
    model = make_model(IDGLAnch, anchor_sampling='seeded')
    index = model.draw_anchors(13)
    assert index.unique().numel() == 4 and int(index.max()) < 13
    others = [model.draw_anchors(13).tolist() for _ in range(4)]
    assert others != [index.tolist()] * 4
    model.eval()
    index = model.draw_anchors(13)
    assert torch.equal(model.draw_anchors(13), index)
    out = model(x, edge_index, anchor_index=index)
    assert torch.equal(out, model(x, edge_index))


# Batches of nodes --------------------------------------------------------------------


def whole_batches(data):
    """Loaders with one batch, which is the whole graph, in several orders of nodes."""
    yield PartitionLoader(data, 1)
    yield PartitionLoader(data, 4, batch_size=4, shuffle=True)

    class Clusters(ClusterData):  # METIS is part of few installations
        def _metis(self, edge_index, num_nodes):
            return torch.arange(num_nodes) % 4

    pytest.importorskip('pandas')  # PyG takes nodes apart with it
    yield ClusterLoader(Clusters(data, 4, log=False), batch_size=4, shuffle=True)


def check_whole_batch(loader, data, mode):
    model = make_model(IDGLAnch, anchor_sampling='seeded', connectivity=0.1).double()
    model.train(mode == 'train')
    anchors = model.draw_anchors(13)
    y = labels(13)
    expected = loss_and_gradients(
        model, data.x, data.edge_index, data.edge_weight, anchor_index=anchors, y=y
    )
    (batch,) = AnchorLoader(loader, data, anchors)
    assert batch.num_nodes == batch.batch_size == 13
    found = loss_and_gradients(model, batch, y=y[batch.n_id])
    trace = found[2]
    back = batch.n_id.argsort()
    trace.outs = [out[back] for out in trace.outs]
    assert_same(found, expected, 1e-11)


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_a_batch_of_all_nodes_is_the_whole_graph(mode):
    x, edge_index = make_graph(13, dtype=torch.float64)
    weight = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index, edge_weight=weight)
    for loader in whole_batches(data):
        check_whole_batch(loader, data, mode)


@pytest.mark.sparse
def test_a_sample_of_all_nodes_is_the_whole_graph():
    pytest.importorskip('torch_sparse')
    x, edge_index = make_graph(13, dtype=torch.float64)
    weight = torch.linspace(0.2, 1.0, edge_index.size(1), dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index, edge_weight=weight)
    loader = NeighborLoader(data, [-1], batch_size=13, shuffle=True)
    check_whole_batch(loader, data, 'train')


def test_a_seed_sees_the_same_anchors_in_any_batch():
    """Its affinities of raw features are those of the whole graph."""
    x, edge_index = make_graph(20, dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index)
    model = make_model(IDGLAnch, anchor_sampling='seeded', epsilon=0.2).double().eval()
    whole = model(data, return_trace=True)[1].first.to_dense()
    seen = []
    for batch in AnchorLoader(PartitionLoader(data, 5), data, model.draw_anchors):
        assert batch.num_nodes > batch.batch_size == 4
        first = model(batch, return_trace=True)[1].first.to_dense()
        assert_close(first, whole[batch.n_id], 1e-12)
        seen += batch.n_id[:4].tolist()
    assert sorted(seen) == list(range(20))
