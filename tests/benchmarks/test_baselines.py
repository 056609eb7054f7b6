import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from baselines import HGCN, diffuse, fit_classical, fit_lds, lds, make_gnn
from baselines.features import dropout, matmul
from baselines.hgcn import build_hierarchy, group_nodes
from baselines.lds import gcn, hypergradient, init_gcn, inner_step, sample
from scipy import sparse
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GATConv, GCNConv, SAGEConv
from torch_geometric.transforms import GDC
from torch_geometric.utils import to_undirected

from torch_geometric_idgl.training import fit


def two_communities(n=24, seed=0):
    """Two groups of nodes that differ in features and hardly share an edge."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, 6, generator=gen)
    x[:, 0] += 2.0 * y
    prob = torch.where(y[:, None] == y[None, :], 0.3, 0.02)
    edge_index = (torch.rand(n, n, generator=gen) < prob).triu(1).nonzero().t()
    edge_index = to_undirected(edge_index, num_nodes=n)
    split = torch.arange(n) // 2 % 3
    return Data(
        x=x,
        edge_index=edge_index,
        y=y,
        train_mask=split == 0,
        val_mask=split == 1,
        test_mask=split == 2,
    )


@pytest.mark.parametrize('sparse_x', [False, True])
@pytest.mark.parametrize(
    'system', ['gcn', 'gat', 'graphsage', 'appnp', 'gcn-gdc', 'gcn-knn', 'hgcn']
)
def test_baselines_learn(system, sparse_x):
    torch.manual_seed(0)
    data = two_communities()
    if sparse_x:
        data.x = data.x.relu().to_sparse_csr()
    if system == 'hgcn':
        model = HGCN(6, 8, 2, levels=2, dropout=0.0)
    else:
        model = make_gnn(system, 6, 2, hidden_channels=8, dropout=0.0)
    if system == 'gcn-gdc':
        data = diffuse(data, alpha=0.1, k=8)
    assert model(data.x, data.edge_index).shape == (24, 2)

    record = fit(model, data, max_epochs=30, progress=False, history=True)
    losses = [values['train_loss'] for values in record.history]
    assert losses[-1] < 0.7 * losses[0]
    assert record.test_score > 0.5


def layers_of_pyg(system):
    """Two layers of PyG, and what is between and after them."""
    if system == 'gat':
        return GATConv(6, 8, 4), GATConv(32, 2, 3, concat=False), F.elu
    conv = {
        'gcn': GCNConv,
        'gcn-gdc': partial(GCNConv, normalize=False),
        'graphsage': SAGEConv,
        'appnp': torch.nn.Linear,
    }[system]
    return conv(6, 8), conv(8, 2), F.relu


@pytest.mark.parametrize('system', ['gcn', 'gat', 'graphsage', 'appnp', 'gcn-gdc'])
def test_gnn_is_made_of_the_layers_of_pyg(system):
    torch.manual_seed(0)
    data = two_communities()
    if system == 'gcn-gdc':
        data = diffuse(data, alpha=0.1, k=8)
    kwargs = {'heads': 4, 'out_heads': 3} if system == 'gat' else {}
    model = make_gnn(system, 6, 2, hidden_channels=8, **kwargs).eval()
    first, second, act = layers_of_pyg(system)
    first.load_state_dict(model.convs[0].state_dict())
    second.load_state_dict(model.convs[1].state_dict())
    if system == 'appnp':
        expected = APPNP(10, 0.1)(second(act(first(data.x))), data.edge_index)
    else:
        expected = second(act(first(data.x, data.edge_index)), data.edge_index)
    out = model(data.x, data.edge_index)
    assert torch.allclose(out, expected, atol=1e-6)
    grads = torch.autograd.grad(out.square().sum(), model.parameters())
    weights = [*first.parameters(), *second.parameters()]
    expected = torch.autograd.grad(expected.square().sum(), weights)
    for grad, other in zip(grads, expected, strict=True):
        assert torch.allclose(grad, other, atol=1e-5)


def test_gnn_norms_and_drops():
    torch.manual_seed(0)
    data = two_communities()
    kwargs = {'num_layers': 3, 'batch_norm': True, 'input_dropout': 0.0}
    model = make_gnn('gcn', 6, 2, hidden_channels=8, dropout=0.0, **kwargs)
    out = model(data.x, data.edge_index)
    expected = model.convs[0](data.x, data.edge_index)
    for conv in model.convs[1:]:
        expected = torch.nn.BatchNorm1d(8)(expected).relu()
        expected = conv(expected, data.edge_index)
    assert torch.allclose(out, expected, atol=1e-5)
    model.dropout = 0.5
    assert not torch.allclose(model(data.x, data.edge_index), out)
    model.dropout, model.input_dropout = 0.0, 0.5
    assert not torch.allclose(model(data.x, data.edge_index), out)


def test_diffuse_is_gdc():
    data = two_communities(150)
    ppr = {'method': 'ppr', 'alpha': 0.05}
    top = {'method': 'topk', 'k': 7, 'dim': 0}
    gdc = GDC(1, 'sym', 'col', ppr, top)(data.clone())
    expected = torch.zeros(150, 150)
    expected[gdc.edge_index[1], gdc.edge_index[0]] = gdc.edge_attr
    actual = diffuse(data, alpha=0.05, k=7).edge_index.to_dense()
    assert torch.allclose(actual, expected, atol=1e-5)
    assert torch.allclose(actual.sum(1), torch.ones(150), atol=1e-5)


def test_dropout_of_sparse_features():
    torch.manual_seed(0)
    x = torch.eye(200).to_sparse_csr()
    out = dropout(x, 0.5).to_dense()
    assert 50 < int((out == 2.0).sum()) < 150
    assert int((out != 0).sum()) == int((out == 2.0).sum())
    assert torch.equal(dropout(x, 0.5, training=False).to_dense(), x.to_dense())


@pytest.mark.parametrize('system', ['gcn', 'gat', 'graphsage', 'appnp', 'hgcn'])
def test_sparse_features_are_features(system):
    torch.manual_seed(0)
    data = two_communities()
    data.x = data.x.relu()
    if system == 'hgcn':
        model = HGCN(6, 8, 2, levels=2)
    else:
        model = make_gnn(system, 6, 2, hidden_channels=8)
    model.eval()
    results = []
    for x in (data.x, data.x.to_sparse_csr()):
        out = model(x, data.edge_index)
        results.append([out, *torch.autograd.grad(out[:, 0].sum(), model.parameters())])
    for from_dense, from_sparse in zip(*results, strict=True):
        assert torch.allclose(from_dense, from_sparse, atol=1e-5)


def test_products_with_sparse_features_differentiate_twice():
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.double).relu().to_sparse_csr()
    weight = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    product = partial(matmul, dropout(x, 0.2))
    assert torch.allclose(matmul(x, weight), x.to_dense() @ weight)
    assert torch.autograd.gradcheck(product, weight)
    assert torch.autograd.gradgradcheck(lambda w: product(w).square(), weight)


# H-GCN


def adjacency(edges, n):
    row, col = np.array(edges).T
    adj = sparse.csr_matrix((np.ones(row.size), (row, col)), shape=(n, n))
    return (adj + adj.T).tocsr()


def test_group_nodes():
    # 1 and 2 have the same neighbours {0, 3}; 0 and 3 have {1, 2}; 4-5 is an edge whose
    # ends have different neighbours; 6 is isolated.
    adj = adjacency([(0, 1), (0, 2), (3, 1), (3, 2), (4, 5)], 7)
    group = group_nodes(adj, np.ones(7, dtype=int))
    assert group[1] == group[2]
    assert group[0] == group[3]
    assert group[4] == group[5]
    assert len({group[0], group[1], group[4], group[6]}) == 4
    assert sorted(set(group)) == list(range(4))


def test_group_nodes_prefers_similar_neighbours():
    # Node 0 is tied to 1 (weight 5) and to 2 (weight 1).
    adj = adjacency([(0, 1)] * 5 + [(0, 2), (2, 3), (1, 4), (2, 5), (4, 6)], 7)
    group = group_nodes(adj, np.ones(7, dtype=int))
    assert group[0] == group[1] != group[2]


def test_group_nodes_respects_weights():
    adj = adjacency([(0, 1)], 2)
    assert len(set(group_nodes(adj, np.array([25, 26])))) == 2
    assert len(set(group_nodes(adj, np.array([25, 25])))) == 1


def test_hierarchy():
    data = two_communities(40)
    hierarchy = build_hierarchy(data.edge_index, 40, levels=3)
    assert len(hierarchy) == 4
    for (adj, weight, group), (coarse, total, _) in itertools.pairwise(hierarchy):
        # Every node is in exactly one hyper-node, and every hyper-node has one.
        assert group.shape == weight.shape
        assert sorted(set(group)) == list(range(total.size))
        assert total.size < weight.size
        # Neither nodes nor edges are lost or invented.
        assert total.sum() == 40
        assert np.isclose(coarse.sum(), adj.sum())
        assert (coarse != coarse.T).nnz == 0
        i, j = 0, total.size - 1
        assert np.isclose(coarse[i, j], adj[group == i][:, group == j].sum())


def test_hierarchy_keeps_edges_once():
    edge_index = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 2]])
    adj, weight, _ = build_hierarchy(edge_index, 4, levels=1)[0]
    assert adj.toarray().tolist() == adjacency([(0, 1), (1, 2)], 4).toarray().tolist()
    assert weight.tolist() == [1] * 4


def test_hgcn_sees_farther_than_its_layers():
    # On a path, a GCN of as many layers on the finest graph does not connect the ends.
    n = 16
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    edge_index = to_undirected(path)
    torch.manual_seed(0)
    model = HGCN(3, 8, 2, levels=3, dropout=0.0).eval()
    x = torch.rand(n, 3, requires_grad=True)
    model(x, edge_index)[0].sum().backward()
    assert x.grad.abs().sum(1).nonzero().max() > 2 * 3 + 1


# LDS


def as_graph(adj):
    graph = adj.to_sparse_csr().requires_grad_()
    graph.factors = []
    return graph


def test_sampled_graphs():
    torch.manual_seed(0)
    theta = torch.rand(30, 30).triu(1)
    theta[0, 1], theta[0, 2] = 1.0, 0.0
    adj = torch.stack([graph.detach().to_dense() for graph in sample(theta, 300)])
    assert torch.equal(adj, adj.transpose(1, 2))
    assert float(adj.diagonal(dim1=1, dim2=2).sum()) == 0.0
    assert bool((adj[:, 0, 1] == 1).all()) and bool((adj[:, 0, 2] == 0).all())
    # Standard error of a frequency of 300 draws is at most 0.029.
    assert float((adj.mean(0).triu(1) - theta).abs().max()) < 0.15


def test_nothing_is_drawn_from_nothing():
    (graph,) = sample(torch.zeros(3, 3), 1)
    assert graph.values().numel() == 0


def as_state(params):
    return [
        (p.requires_grad_(), *torch.zeros(2, *p.shape, dtype=p.dtype)) for p in params
    ]


def test_lds_gcn_is_gcn():
    data = two_communities()
    first, second = GCNConv(6, 4), GCNConv(4, 2)
    params = [first.lin.weight.t(), first.bias, second.lin.weight.t(), second.bias]
    adj = torch.zeros(24, 24)
    adj[data.edge_index[0], data.edge_index[1]] = 1.0
    out = gcn([(p,) * 3 for p in params], data.x, as_graph(adj))
    expected = second(first(data.x, data.edge_index).relu(), data.edge_index)
    assert torch.allclose(out, expected, atol=1e-6)


def test_inner_step_is_adam():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.double))
    state = as_state([weight.detach().clone()])
    target = torch.randn(3, 2, dtype=torch.double)
    adam = torch.optim.Adam([weight], lr=0.1, eps=0.0)
    for step in range(4):
        adam.zero_grad()
        (weight - target).square().sum().backward()
        adam.step()
        loss = (state[0][0] - target).square().sum()
        state = inner_step(state, step + 1, loss, lr=0.1, eps=0.0)
    assert torch.allclose(state[0][0], weight)


@pytest.mark.parametrize('tau', [0, 1, 3])
def test_hypergradient_against_finite_differences(tau):
    torch.manual_seed(1)
    n, double = 8, torch.double
    x = torch.randn(n, 4, dtype=double)
    y = torch.randint(3, (n,))
    theta = torch.full((n, n), 0.4, dtype=double).triu(1)
    mats = [g.detach().to_dense().double() for g in sample(theta, tau + 1)]
    shapes = [(4, 5), (5,), (5, 3), (3,)]
    start = [0.5 * torch.randn(shape, dtype=double) for shape in shapes]

    def outer(mats):
        graphs = [as_graph(mat) for mat in mats]
        state = as_state([p.clone() for p in start])
        for step, graph in enumerate(graphs[:-1]):
            loss = F.cross_entropy(gcn(state, x, graph)[:4], y[:4])
            loss = loss + 0.01 * state[0][0].square().sum()
            state = inner_step(state, step + 1, loss, lr=0.05, eps=1e-4)
        return F.cross_entropy(gcn(state, x, graphs[-1])[4:], y[4:]), graphs

    grad = hypergradient(*outer(mats))
    assert not grad.requires_grad
    expected, step = torch.zeros(n, n, dtype=double), 1e-5
    for i in range(n):
        for j in range(i + 1, n):
            # A probability stands for one edge, in all sampled graphs.
            move = torch.zeros(n, n, dtype=double)
            move[i, j] = move[j, i] = step
            above, below = (outer([mat + s * move for mat in mats])[0] for s in (1, -1))
            expected[i, j] = (above - below).detach() / (2 * step)
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(grad, expected, atol=1e-7)


def test_lds_moves_probabilities_to_fit_the_dev_set():
    torch.manual_seed(0)
    data = two_communities(n=36)
    settings = {'max_windows': 6, 'max_restarts': 2, 'lr': 0.05, 'samples': 4}
    record = fit_lds(data, outer_lr=1.0, dropout=0.2, progress=False, **settings)
    assert record['test'] > 0.6
    assert 0 <= record['dev'] <= 1
    assert record['epochs'] % 5 == 0 and 10 <= record['epochs'] <= 60
    pairs = data.edge_index.size(1) / 2
    assert record['expected_edges'] != pytest.approx(pairs)

    record = fit_lds(data, outer_lr=0.0, progress=False, **settings)
    assert record['expected_edges'] == pytest.approx(pairs)


def test_outer_problem_lowers_its_loss():
    # A graph whose edges say nothing: following the hypergradient must find better.
    torch.manual_seed(0)
    data = two_communities(n=36)
    data.edge_index = torch.randint(36, (2, 60))
    theta = torch.zeros(36, 36)
    theta[data.edge_index[0], data.edge_index[1]] = 1.0
    theta = theta.maximum(theta.t()).triu(1)
    state = [(p.requires_grad_(), m, v) for p, m, v in init_gcn(data.x, 16, 2)]
    nodes, losses = data.val_mask, []
    for _ in range(80):
        graphs = sample(theta, 1)
        loss = F.cross_entropy(gcn(state, data.x, *graphs)[nodes], data.y[nodes])
        theta = (theta - 5.0 * hypergradient(loss, graphs)).clamp(0.0, 1.0)
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_lds_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    data = two_communities(n=36)
    kwargs = {'max_windows': 3, 'max_restarts': 4, 'patience': 9, 'samples': 2}
    kwargs |= {'outer_lr': 1.0, 'progress': False}
    torch.manual_seed(0)
    expected = fit_lds(data, **kwargs)

    file = tmp_path / 'lds.pt'
    starts = []

    def killed_in_the_third(*args):
        starts.append(args)
        if len(starts) == 3:
            raise KeyboardInterrupt
        return init_gcn(*args)

    monkeypatch.setattr(lds, 'init_gcn', killed_in_the_third)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        fit_lds(data, checkpoint=file, **kwargs)
    assert file.exists()
    torch.manual_seed(1)  # It has the random numbers of the stopped run all the same.
    record = fit_lds(data, checkpoint=file, **kwargs)
    assert len(starts) == 5
    assert not file.exists()
    del record['seconds'], expected['seconds']
    assert record == expected


# Without a graph


@pytest.mark.parametrize('name', ['logreg', 'rbf-svm'])
def test_classical(name):
    data = two_communities(n=60)
    kwargs = {'C': [0.01, 1.0]} | ({'gamma': [0.1]} if name == 'rbf-svm' else {})
    record = fit_classical(name, data, **kwargs)
    assert record['test'] > 0.6
    assert record['chosen']['C'] in kwargs['C']


def test_classical_chooses_on_dev():
    # Test labels may say anything without changing the choice.
    data = two_communities(n=60)
    kwargs = {'C': [0.001, 0.1, 10.0], 'gamma': [0.01, 0.1, 1.0]}
    chosen = fit_classical('rbf-svm', data, **kwargs)['chosen']
    data.y[data.test_mask] = 1 - data.y[data.test_mask]
    assert fit_classical('rbf-svm', data, **kwargs)['chosen'] == chosen
