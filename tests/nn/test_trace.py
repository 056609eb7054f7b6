"""What a trace offers: read-outs of graph-level tasks, smoothed predictions."""

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_max_pool

from tests.nn.common import MODELS, assert_close, gradients, make_graph, make_model

# Graphs stop at different iterations with these:
OPTIONS = {
    'tol': 2e-2,
    'max_iters': 6,
    'initial_weight': 0.3,
    'update_weight': 0.8,
    'connectivity': 0.1,
    'sparsity': 0.3,
}
SIZES = (7, 4, 131, 9, 1)  # the third is refined by itself


def make_graphs():
    graphs = []
    for i, n in enumerate(SIZES):
        x, edge_index = make_graph(n, seed=i, dtype=torch.float64, negative=True)
        graphs.append(Data(x=x, edge_index=edge_index, y=torch.tensor([i % 2])))
    return graphs


def make_parts(cls):
    model = make_model(cls, **OPTIONS).double().eval()
    torch.manual_seed(1)
    return torch.nn.ModuleDict({'idgl': model, 'head': torch.nn.Linear(3, 2).double()})


def graph_trace(parts, batch, head=None):
    """The trace of the nodes, and that of the graphs."""
    head = head or (lambda h: parts['head'](global_max_pool(h, batch.batch)))
    _, trace = parts['idgl'](batch, return_trace=True)
    return trace, trace.readout(head)


@pytest.mark.parametrize('weights', [None, torch.tensor([0.3, 1.7]).double()])
@pytest.mark.parametrize('cls', MODELS)
def test_readout_is_one_by_one(cls, weights):
    parts, graphs = make_parts(cls), make_graphs()
    own, counts, regs = [], [], []
    for data in graphs:
        _, trace = graph_trace(parts, Batch.from_data_list([data]))
        assert [out.shape for out in trace.outs] == [(1, 2)] * len(trace.outs)
        own.append(trace.outs)
        counts.append(int(trace.num_iters))
        regs.append(trace.reg)
    assert len(set(counts)) > 1  # they do stop at different iterations
    y = torch.cat([data.y for data in graphs])

    def total(out, y):
        return F.cross_entropy(out, y, weights, reduction='sum')

    # Algorithm 1, graph by graph.
    loss = 0.0
    for outs, count, data, reg in zip(own, counts, graphs, regs, strict=True):
        losses = [total(out, data.y) for out in outs]
        mean = sum(losses[1:]) / count if count else 0.0
        loss = loss + losses[0] + mean + reg
    loss.backward()
    expected = gradients(parts)

    parts.zero_grad()
    batch = Batch.from_data_list(graphs)
    nodes, trace = graph_trace(parts, batch)
    assert trace.num_iters.tolist() == counts
    for t, out in enumerate(trace.outs):
        assert_close(out, torch.cat([o[min(t, len(o) - 1)] for o in own]), 1e-9)
    joint = trace.loss(lambda out: total(out, y) / 5) * 5
    assert_close(joint, loss, 1e-9)
    joint.backward()
    for name, grad in gradients(parts).items():
        assert_close(grad, expected[name], 1e-8)

    # The trace of the nodes stays what it is.
    assert nodes.out.shape == (sum(SIZES), 3) and not nodes.of_graphs
    assert nodes.num_iters is trace.num_iters and nodes.learned is trace.learned
    assert torch.equal(nodes.reg, trace.reg)


@pytest.mark.parametrize('cls', MODELS)
def test_readout_of_one_number_for_each_graph(cls):
    """Of any shape: rows of graphs never mix."""
    parts, graphs = make_parts(cls), make_graphs()
    batch = Batch.from_data_list(graphs)
    y = torch.linspace(0, 1, len(SIZES)).double()

    def pool(h):
        return global_max_pool(h, batch.batch)[:, :1]

    _, column = graph_trace(parts, batch, pool)
    _, vector = graph_trace(parts, batch, lambda h: pool(h).squeeze(1))
    _, cube = graph_trace(parts, batch, lambda h: pool(h).unsqueeze(2))
    expected = column.loss(lambda out: F.mse_loss(out, y.view(-1, 1)))
    assert column.num_iters.unique().numel() > 1
    assert_close(vector.loss(lambda out: F.mse_loss(out, y)), expected, 1e-12)
    shape = (-1, 1, 1)
    assert_close(cube.loss(lambda out: F.mse_loss(out, y.view(shape))), expected, 1e-12)


def test_readout_with_empty_graphs():
    x, edge_index = make_graph(6, dtype=torch.float64)
    model = make_model(**OPTIONS).double().eval()
    batch = torch.ones(6, dtype=torch.long)
    _, trace = model(x, edge_index, batch=batch, batch_size=3, return_trace=True)
    trace_of_graphs = trace.readout(lambda h: global_max_pool(h, batch, 3))
    assert trace_of_graphs.out.shape == (3, 3)
    loss = trace_of_graphs.loss(lambda out: out.square().sum())
    _, alone = model(x, edge_index, return_trace=True)
    alone = alone.readout(lambda h: h.max(dim=0, keepdim=True).values)
    fn = torch.Tensor.square
    assert_close(
        loss, alone.prediction_loss(lambda out: fn(out).sum()) + alone.reg / 3, 1e-9
    )
    with pytest.raises(ValueError, match=r'each of the 3 graphs .got shape \[2, 3\]'):
        trace.readout(lambda h: global_max_pool(h, batch))
    with pytest.raises(ValueError, match=r'each of the 3 graphs .got shape \[6, 3\]'):
        trace.readout(lambda h: h)


@pytest.mark.parametrize('cls', MODELS)
def test_graphs_of_all_iterations(cls):
    parts, graphs = make_parts(cls), make_graphs()
    batch = Batch.from_data_list(graphs)
    _, trace = parts['idgl'](batch, return_trace=True)
    assert len(trace.graphs) == 1 + int(trace.num_iters.max()) == len(trace.outs)
    assert_close(trace.graphs[0].to_dense(), trace.first.to_dense())
    assert_close(trace.graphs[-1].to_dense(), trace.learned.to_dense())
    for t, graph in enumerate(trace.graphs):
        _, until = parts['idgl'](batch, return_trace=True, max_iters=t)
        assert_close(graph.to_dense(), until.learned.to_dense())


def smoothed(a, probs, alpha, steps):
    """The sum that the iteration is, from powers of a matrix."""
    powers = [probs]
    for _ in range(steps):
        powers.append(alpha * a @ powers[-1])
    return powers[-1] + (1 - alpha) * sum(powers[:-1])


@pytest.mark.parametrize('cls', MODELS)
def test_smooth(cls):
    x, edge_index = make_graph(12, dtype=torch.float64)
    model = make_model(cls, **OPTIONS).double().eval()
    out, trace = model(x, edge_index, return_trace=True)
    probs, a = out.softmax(-1).detach(), trace.mixed.to_dense().detach()
    assert_close(trace.smooth(0.7, 3), smoothed(a, probs, 0.7, 3), 1e-9)
    assert not trace.smooth(0.7, 3).requires_grad
    assert trace.smooth(0.7, 0).equal(probs)
    assert_close(trace.smooth(0.0, 4), probs, 1e-9)
    onehot = torch.eye(3, dtype=torch.float64)[probs.argmax(-1)]
    assert_close(trace.smooth(1.0, 2, onehot), a @ a @ onehot, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_smooth_of_a_batch_is_one_by_one(cls):
    model, graphs = make_parts(cls)['idgl'], make_graphs()
    _, trace = model(Batch.from_data_list(graphs), return_trace=True)
    own = [model(data, return_trace=True)[1].smooth(0.9, 4) for data in graphs]
    assert trace.num_iters.unique().numel() > 1
    assert_close(trace.smooth(0.9, 4), torch.cat(own), 1e-9)


def test_smooth_errors():
    parts, graphs = make_parts(MODELS[0]), make_graphs()
    trace, of_graphs = graph_trace(parts, Batch.from_data_list(graphs))
    with pytest.raises(ValueError, match=r"'alpha' to be in \[0, 1\] \(got 1.5\)"):
        trace.smooth(1.5)
    with pytest.raises(ValueError, match=r"'steps' to be at least 0 \(got -1\)"):
        trace.smooth(0.5, -1)
    with pytest.raises(ValueError, match=r"'probs' to be of shape .152, num_cl.*3"):
        trace.smooth(probs=torch.zeros(3))
    with pytest.raises(ValueError, match="got that of 'readout'"):
        of_graphs.smooth()


def test_smooth_of_one_output_wants_probabilities():
    x, edge_index = make_graph()
    model = MODELS[0](6, 8, 2, 1).eval()
    out, trace = model(x, edge_index, return_trace=True)
    with pytest.raises(ValueError, match=r"'probs' for a model with one output"):
        trace.smooth()
    assert trace.smooth(probs=out.sigmoid()).shape == out.shape


def test_smooth_takes_labels():
    x, edge_index = make_graph(n=8)
    model = make_model().eval()
    _, trace = model(x, edge_index, return_trace=True)
    labels = F.one_hot(torch.arange(8) % 3)
    expected = trace.smooth(probs=labels.float())
    for probs in (labels, labels.bool(), labels.double()):
        torch.testing.assert_close(trace.smooth(probs=probs), expected)
    with pytest.raises(TypeError, match=r"Expected 'probs' .*got 'list'"):
        trace.smooth(probs=labels.tolist())


class Bandwidth(torch.nn.Module):
    """A similarity with a parameter of its own."""

    def __init__(self, in_channels):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, a, b):
        return (-self.scale * torch.cdist(a, b)).exp()


@pytest.mark.parametrize('n', [20, 300])
def test_trace_stays_when_the_model_is_trained_on(n):
    x, edge_index = make_graph(n=n)
    model = make_model(metric=Bandwidth, epsilon=0.1, max_iters=1)
    for training in (True, False):
        _, trace = model.train(training)(x, edge_index, return_trace=True)
        graphs = [trace.first, trace.learned, *trace.graphs]
        before = [graph.to_dense().detach().clone() for graph in graphs]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for graph, dense in zip(graphs, before, strict=True):
            torch.testing.assert_close(graph.to_dense(), dense)
