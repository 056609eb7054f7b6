"""What cannot be right fails at once, and the message says what was expected."""

import itertools
import math

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from tests.nn.common import MODELS, make_graph, make_model
from torch_geometric_idgl.nn import IDGL, GraphLearner, IDGLAnch
from torch_geometric_idgl.nn.inputs import sample_anchors
from torch_geometric_idgl.ops import Nodes

X, EDGE_INDEX = make_graph(10, 6)
NUM_EDGES = EDGE_INDEX.size(1)


def with_entry(value):
    x = X.clone()
    x[3, 2] = value
    return x


def edges(*pairs):
    return torch.tensor(pairs).t().contiguous()


INPUTS = {
    # name: (arguments, error, message)
    'x 1-D': ({'x': X[0]}, ValueError, r"'x' .* two-dimensional .got 1 dim"),
    'x 3-D': ({'x': X.unsqueeze(0)}, ValueError, r"'x' .* two-dimensional .got 3 dim"),
    'x integer': (
        {'x': X.long()},
        TypeError,
        r"'x' .* floating-point .got torch.int64",
    ),
    'x boolean': ({'x': X > 0}, TypeError, r"'x' .* floating-point .got torch.bool"),
    'x list': ({'x': X.tolist()}, TypeError, r"'x' .* 'torch.Tensor'.* .got 'list'"),
    'x None': ({'x': None}, TypeError, r"'x' .* .got 'NoneType'"),
    'x hetero': ({'x': HeteroData()}, TypeError, r"'x' .* .got 'HeteroData'"),
    'x NaN': ({'x': with_entry(math.nan)}, ValueError, r"'x' .* finite .got 1 NaN"),
    'x Inf': ({'x': with_entry(math.inf)}, ValueError, r"'x' .* finite .got 1 NaN"),
    'x -Inf': ({'x': with_entry(-math.inf)}, ValueError, r"'x' .* finite .got 1 NaN"),
    'x sparse NaN': (
        {'x': with_entry(math.nan).to_sparse_coo()},
        ValueError,
        r"'x' .* finite .got 1 NaN",
    ),
    'x sparse Inf': (
        {'x': with_entry(math.inf).to_sparse_csr()},
        ValueError,
        r"'x' .* finite .got 1 NaN",
    ),
    'x too large': (
        {'x': 1e20 * X},
        ValueError,
        r"'x' .*got .*\d\.\de\+\d+",
    ),
    'x double': ({'x': X.double()}, TypeError, r"'x' .*float32.* .got torch.float64"),
    'in_channels': ({'x': X[:, :5]}, ValueError, r"'x' .* 6 features.*got 5"),
    'edge_index 1-D': (
        {'edge_index': EDGE_INDEX[0]},
        ValueError,
        r"'edge_index' .* \[2, num_edges\] .got \[40\]",
    ),
    'edge_index 3 rows': (
        {'edge_index': torch.zeros(3, 5, dtype=torch.long)},
        ValueError,
        r"'edge_index' .* \[2, num_edges\] .got \[3, 5\]",
    ),
    'edge_index transposed': (
        {'edge_index': EDGE_INDEX.t()},
        ValueError,
        r"'edge_index' .* \[2, num_edges\] .got \[40, 2\]",
    ),
    'edge_index float': (
        {'edge_index': EDGE_INDEX.float()},
        TypeError,
        r"'edge_index' .* torch.long .got torch.float32",
    ),
    'edge_index list': (
        {'edge_index': EDGE_INDEX.tolist()},
        TypeError,
        r"'edge_index' .* tensor .*got 'list'",
    ),
    'edge_index too large': (
        {'edge_index': edges([0, 1], [2, 10])},
        ValueError,
        r"'edge_index' .* 0 to 9.* .got 0 to 10",
    ),
    'edge_index negative': (
        {'edge_index': edges([0, 1], [2, -1])},
        ValueError,
        r"'edge_index' .* 0 to 9.* .got -1 to 2",
    ),
    'adjacency too small': (
        {'edge_index': torch.eye(9).to_sparse_coo()},
        ValueError,
        r'\[10, 10\].*got \[9, 9\]',
    ),
    'adjacency with weights': (
        {'edge_index': torch.eye(10).to_sparse_coo(), 'edge_weight': torch.ones(10)},
        ValueError,
        r"sparse adjacency .* values .got 'edge_weight'",
    ),
    'adjacency negative': (
        {'edge_index': (-torch.eye(10)).to_sparse_csr()},
        ValueError,
        r"'edge_weight' .* not negative .got .*-1",
    ),
    'weights too few': (
        {'edge_weight': torch.ones(7)},
        ValueError,
        r"'edge_weight' .* \[40\].* .got \[7\]",
    ),
    'weights 2-D': (
        {'edge_weight': torch.ones(NUM_EDGES, 2)},
        ValueError,
        r"'edge_weight' .* \[40\].* .got \[40, 2\]",
    ),
    'weights negative': (
        {'edge_weight': torch.linspace(-0.5, 1, NUM_EDGES)},
        ValueError,
        r"'edge_weight' .* not negative .got .*-0.5",
    ),
    'weights NaN': (
        {'edge_weight': torch.full((NUM_EDGES,), math.nan)},
        ValueError,
        r"'edge_weight' .* finite",
    ),
    'weights Inf': (
        {'edge_weight': torch.full((NUM_EDGES,), math.inf)},
        ValueError,
        r"'edge_weight' .* finite",
    ),
    'weights integer': (
        {'edge_weight': torch.ones(NUM_EDGES, dtype=torch.long)},
        TypeError,
        r"'edge_weight' .* floating-point .got torch.int64",
    ),
    'weights list': (
        {'edge_weight': [1.0] * NUM_EDGES},
        TypeError,
        r"'edge_weight' .* floating-point .got list",
    ),
    'weights without edges': (
        {'edge_index': None, 'edge_weight': torch.ones(4)},
        ValueError,
        r"'edge_index' .*got none",
    ),
    'batch unsorted': (
        {'batch': torch.tensor([0, 1] * 5)},
        ValueError,
        r"'batch' .* sorted .got an unsorted",
    ),
    'batch too short': (
        {'batch': torch.zeros(9, dtype=torch.long)},
        ValueError,
        r"'batch' .* \[10\].* .got \[9\]",
    ),
    'batch 2-D': (
        {'batch': torch.zeros(10, 1, dtype=torch.long)},
        ValueError,
        r"'batch' .* \[10\].* .got \[10, 1\]",
    ),
    'batch float': (
        {'batch': torch.zeros(10)},
        TypeError,
        r"'batch' .* torch.long .got torch.float32",
    ),
    'batch list': ({'batch': [0] * 10}, TypeError, r"'batch' .* tensor .* .got list"),
    'batch negative': (
        {'batch': torch.tensor([-1] + [0] * 9)},
        ValueError,
        r"'batch' .* 0 or above .got -1",
    ),
    'batch size': (
        {'batch': torch.tensor([0] * 9 + [3]), 'batch_size': 2},
        ValueError,
        r"'batch' .* batch_size=2 .got 3",
    ),
    'batch size text': (
        {'batch': torch.zeros(10, dtype=torch.long), 'batch_size': 'a'},
        TypeError,
        r"'batch_size' .* integer .got 'a'",
    ),
    'edges between graphs': (
        {'batch': torch.tensor([0] * 5 + [1] * 5)},
        ValueError,
        r"within the graphs of 'batch' .got \d+ between",
    ),
    'max_iters negative': (
        {'max_iters': -1},
        ValueError,
        r"'max_iters' .* at least 0 .got -1",
    ),
    'max_iters float': ({'max_iters': 1.5}, TypeError, r"'max_iters' .* integer"),
}


@pytest.mark.parametrize('name', list(INPUTS))
def test_bad_input(name):
    given, error, message = INPUTS[name]
    for cls in MODELS:
        with pytest.raises(error, match=f'Expected.*{message}'):
            make_model(cls)(**{'x': X, 'edge_index': EDGE_INDEX, **given})


@pytest.mark.parametrize(
    'name,values,error,message',
    [
        ('initial_weight', [-0.1, 1.1, math.nan], ValueError, r'in \[0, 1\] .got'),
        ('update_weight', [-0.1, 1.1, math.inf], ValueError, r'in \[0, 1\] .got'),
        ('initial_weight', ['0.5', None, True], TypeError, r'a number .got'),
        ('epsilon', [-0.1, math.nan], ValueError, r'at least 0 .got'),
        ('tol', [-1e-5, math.nan], ValueError, r'at least 0 .got'),
        ('smoothness', [-0.1], ValueError, r'at least 0 .got -0.1'),
        ('smoothness', [math.inf], ValueError, r'finite and at least 0 .got inf'),
        ('connectivity', [-0.1], ValueError, r'at least 0 .got -0.1'),
        ('sparsity', [-0.1], ValueError, r'at least 0 .got -0.1'),
        ('sparsity', ['much'], TypeError, r'a number .got'),
        ('max_iters', [-1], ValueError, r'at least 0 .got -1'),
        ('max_iters', [1.5, '3'], TypeError, r'an integer .got'),
        ('heads', [0, -1], ValueError, r'at least 1 .got'),
        ('heads', [2.0, True], TypeError, r'an integer .got'),
        ('k', [0, -5], ValueError, r'at least 1 .got'),
        ('top_k', [0], ValueError, r'at least 1 .got 0'),
        ('dropout', [-0.1, 1.0, 1.5], ValueError, r'in \[0, 1[\])] .got'),
        ('iter_dropout', [-0.1, 1.0], ValueError, r'in \[0, 1[\])] .got'),
        ('feature_dropout', [-0.1, 1.0], ValueError, r'in \[0, 1[\])] .got'),
        ('graph_dropout', [-0.1, 1.0], ValueError, r'in \[0, 1[\])] .got'),
    ],
)
def test_bad_hyper_parameters(name, values, error, message):
    for cls, value in itertools.product(MODELS, values):
        with pytest.raises(error, match=f"Expected '{name}' to be {message}"):
            make_model(cls, **{name: value})


@pytest.mark.parametrize('cls', MODELS)
def test_bad_sizes(cls):
    for name, args in [
        ('in_channels', (0, 8, 2)),
        ('hidden_channels', (6, 0, 2)),
        ('num_layers', (6, 8, 0)),
        ('out_channels', (6, 8, 2, 0)),
    ]:
        with pytest.raises(ValueError, match=f"'{name}' to be at least 1 .got 0"):
            cls(*args)
    with pytest.raises(TypeError, match="'hidden_channels' to be an integer"):
        cls(6, 8.5, 2)


@pytest.mark.parametrize('cls', MODELS)
def test_unknown_names_list_the_known(cls):
    for name, known in [
        ('metric', ['attention', 'cosine', 'rbf', 'weighted_cosine']),
        ('backbone', ['appnp', 'gcn', 'gin', 'sage']),
        ('backend', ['auto', 'dense', 'low_rank', 'sparse', 'tiled']),
    ]:
        with pytest.raises(ValueError, match=f"Expected '{name}' .*got 'nope'") as info:
            make_model(cls, **{name: 'nope'})
        assert all(f"'{word}'" in str(info.value) for word in known)
    with pytest.raises(TypeError, match=r"'metric' .*got 'int'"):
        make_model(cls, metric=3)
    with pytest.raises(TypeError, match=r"'metric' .* 'torch.nn.Module' .got 'float'"):
        make_model(cls, metric=lambda channels: 1.0)
    with pytest.raises((TypeError, ValueError), match=r'[Jj]umping|jk'):
        make_model(cls, jk='nope')
    with pytest.raises(ValueError, match=r'nope'):
        make_model(cls, act='nope')


def test_bad_anchors():
    with pytest.raises(ValueError, match=r"'num_anchors' .* at least 1 .got 0"):
        make_model(IDGLAnch, num_anchors=0)
    with pytest.raises(TypeError, match=r"'num_anchors' .* integer .got 2.5"):
        make_model(IDGLAnch, num_anchors=2.5)
    for ratio in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"'anchor_ratio' .* \(0, 1\] .got"):
            make_model(IDGLAnch, anchor_ratio=ratio)
    with pytest.raises(
        ValueError, match=r"\['seeded', 'resample', 'fixed'\] .got 'no'"
    ):
        make_model(IDGLAnch, anchor_sampling='no')

    model = make_model(IDGLAnch)
    for index, message in [
        (torch.tensor([0, 10]), r'0 to 9 .got 0 to 10'),
        (torch.tensor([-1, 2]), r'0 to 9 .got -1 to 2'),
        (torch.tensor([[0, 1]]), r'one-dimensional .* .got shape \[1, 2\]'),
        (torch.tensor([0.0, 1.0]), r'index tensor .*got .*torch.float32'),
        (torch.zeros(0, dtype=torch.long), r'at least one node .*got none of graph 0'),
    ]:
        with pytest.raises(ValueError, match=f"Expected 'anchor_index' .*{message}"):
            model(X, EDGE_INDEX, anchor_index=index)
    with pytest.raises(ValueError, match="no 'anchor_index' for IDGL"):
        make_model(IDGL)(X, EDGE_INDEX, anchor_index=torch.tensor([0]))

    batch = torch.tensor([0] * 4 + [1] * 6)
    with pytest.raises(ValueError, match=r'got none of graph 1'):
        model(X, batch=batch, anchor_index=torch.tensor([0, 1]))


@pytest.mark.parametrize('cls', MODELS)
def test_bad_data(cls):
    model = make_model(cls)
    with pytest.raises(ValueError, match=r"'data' .* 'x' .got none"):
        model(Data(edge_index=EDGE_INDEX, num_nodes=10))
    with pytest.raises(ValueError, match=r'data object .*got them as arguments'):
        model(Data(x=X), EDGE_INDEX)


def test_low_rank_needs_no_threshold():
    with pytest.raises(ValueError, match=r"epsilon=0 .*'low_rank' .got epsilon=0.1"):
        IDGL(6, 8, 2, backend='low_rank', epsilon=0.1)
    with pytest.raises(ValueError, match=r'top_k=None .*got .*top_k=3'):
        IDGL(6, 8, 2, backend='low_rank', top_k=3)
    with pytest.raises(ValueError, match=r'without negative entries'):
        make_model(IDGL, backend='low_rank')(X - 0.5, EDGE_INDEX)
    with pytest.raises(ValueError, match=r'inner product'):
        make_model(IDGL, backend='low_rank', metric='rbf')(X, EDGE_INDEX)


def test_sample_anchors():
    nodes = Nodes((5, 0, 2), torch.device('cpu'))
    anchors = sample_anchors(nodes, 3, None)
    assert anchors.nodes.sizes == (3, 0, 2)
    first, last = anchors.index[:3], anchors.index[3:]
    assert len(set(first.tolist())) == 3 and int(first.max()) < 5
    assert sorted(last.tolist()) == [5, 6]
    assert sample_anchors(nodes, None, 0.5).nodes.sizes == (3, 0, 1)
    draws = [sample_anchors(nodes, 3, None, seed=1).index for _ in range(2)]
    assert torch.equal(*draws)
    # The anchors of a graph do not depend on the others of its batch.
    alone = sample_anchors(Nodes((2,), nodes.device), 3, None, seed=1)
    assert torch.equal(alone.index + 5, draws[0][3:])


def test_bad_types_of_anchors():
    with pytest.raises(TypeError, match=r"'anchor_index' .* tensor .got 'list'"):
        make_model(IDGLAnch)(X, EDGE_INDEX, anchor_index=[0, 1])
    with pytest.raises(TypeError, match=r"'anchor_seed' .* integer .got 'a'"):
        make_model(IDGLAnch, anchor_seed='a')


def test_bad_learner():
    for options, error, message in [
        ({'metric': 'nope'}, ValueError, r"'metric' .*got 'nope'"),
        ({'metric': 3}, TypeError, r"'metric' .*got 'int'"),
        ({'backend': 'nope'}, ValueError, r"'backend' .*got 'nope'"),
        ({'heads': 0}, ValueError, r"'heads' .* at least 1"),
        ({'epsilon': -1}, ValueError, r"'epsilon' .* at least 0"),
        ({'top_k': 1.5}, TypeError, r"'top_k' .* integer"),
        ({'in_channels': 0}, ValueError, r"'in_channels' .* at least 1"),
    ]:
        with pytest.raises(error, match=f'Expected {message}'):
            GraphLearner(**{'in_channels': 6, **options})
    learner = GraphLearner(6, epsilon=0.5)
    for given, error, message in [
        ({'x': X[:, :5]}, ValueError, r"'x' to have 6 features, .*got 5"),
        ({'x': X[0]}, ValueError, r"'x' to be two-dimensional"),
        ({'x': X.double()}, TypeError, r"'x' .*torch.float32.*got torch.float64"),
        ({'x': X * torch.nan}, ValueError, r"'x' to be finite"),
        ({'x': [1.0]}, TypeError, r"'x' .*got 'list'"),
        ({'x': X, 'anchors': [0, 1]}, TypeError, r"'anchors' .*got 'list'"),
        ({'x': X, 'backend': 'spase'}, ValueError, r"'backend' .*got 'spase'"),
        ({'x': X, 'backend': 'low_rank'}, ValueError, r'epsilon=0 .*got epsilon=0.5'),
    ]:
        with pytest.raises(error, match=f'Expected {message}'):
            learner(**given)
    sparse, dense = learner(X.to_sparse()), learner(X)
    torch.testing.assert_close(sparse.to_dense(), dense.to_dense())


def test_whole_numbers_in_a_sparse_adjacency():
    model = make_model(IDGL).eval()
    dense = torch.zeros(10, 10)
    dense[EDGE_INDEX[1], EDGE_INDEX[0]] = 1.0
    expected = model(X, dense.to_sparse_csr())
    for dtype in (torch.long, torch.bool):
        assert torch.equal(model(X, dense.to(dtype).to_sparse_coo()), expected)


@pytest.mark.parametrize('name', ['act', 'norm'])
def test_bad_modules(name):
    for value in (3, 1.5, object()):
        with pytest.raises(TypeError, match=f"Expected '{name}' to be .*got"):
            make_model(IDGL, **{name: value})


@pytest.mark.parametrize('cls', MODELS)
def test_hybrid_features(cls):
    """Sparse rows with dense entries."""
    with pytest.raises(ValueError, match=r"'x' .*(hybrid|dense dimension)"):
        make_model(cls)(X.to_sparse(1), EDGE_INDEX)


def test_bad_seeds():
    for seed in (2**63, 2**64):
        with pytest.raises(ValueError, match=rf"'anchor_seed' .*got {seed}"):
            make_model(IDGLAnch, anchor_seed=seed)
    with pytest.raises(ValueError, match=r"'anchor_seed' .* at least 0 .got -1"):
        make_model(IDGLAnch, anchor_seed=-1)
