import functools

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

from tests.training.common import QUIET, Stopped, make_anch, make_data, make_idgl, stop
from torch_geometric_idgl.training import accuracy, fit
from torch_geometric_idgl.training.description import describe_run, differences


def scaled_loss(out, y, scale=1.0):
    return scale * F.cross_entropy(out, y)


class Scorer:
    def __init__(self, digits):
        self.digits = digits

    def __call__(self, out, y):
        return round(accuracy(out, y), self.digits)

    def score(self, out, y):
        return self(out, y)


class Net(torch.nn.Module):
    """A model of somebody else."""

    def __init__(self, act=torch.tanh, **kwargs):
        super().__init__()
        self.lin = torch.nn.Linear(6, 3)
        self.act = act
        self.cache = None
        self._calls = 0
        for name, value in kwargs.items():
            setattr(self, name, value)

    def forward(self, x, *graph):
        self._calls += 1
        self.cache = x
        return self.act(self.lin(x))


def changed(**kwargs):
    data = make_data()
    for key, value in kwargs.items():
        data[key] = value
    return data


def cross_entropy(**kwargs):
    return torch.nn.CrossEntropyLoss(**kwargs)


# What one run has, what the other has, and what the error says.
OTHER_MODELS = [
    (make_idgl, {}, {'epsilon': 0.1}, 'feature_learner.epsilon'),
    (make_anch, {}, {'epsilon': 0.1}, 'embedding_learner.epsilon'),
    (make_idgl, {}, {'top_k': 5}, "top_k' is None instead of 5"),
    (make_idgl, {}, {'act': 'elu'}, 'ReLU instead of .*ELU'),
    (make_idgl, {'act': torch.tanh}, {'act': torch.sigmoid}, 'tanh instead of'),
    (make_idgl, {}, {'act_first': True}, "act_first' is False instead of True"),
    (make_idgl, {}, {'norm': 'pair_norm'}, 'PairNorm'),
    (make_idgl, {}, {'smoothness': 5.0}, "'model.smoothness' is 0.2 instead of 5"),
    (make_anch, {}, {'num_anchors': 7}, "'model.num_anchors' is 9 instead of 7"),
    (Net, {'size': (1, 2)}, {'size': (1, 3)}, r'\(1, 2\) instead of \(1, 3\)'),
    (Net, {'tool': Scorer(1)}, {'tool': Scorer(2)}, r'\(digits=1\) instead of'),
    (Net, {'dtype': torch.half}, {'dtype': torch.float}, 'float16 instead of'),
]
OTHER_SETTINGS = [
    ({}, {'lr': 0.5}, "'lr' is 0.01 instead of 0.5"),
    ({}, {'loss_fn': scaled_loss}, "'loss_fn' is .*cross_entropy instead of .*scaled_"),
    (
        {'loss_fn': functools.partial(scaled_loss, scale=2)},
        {'loss_fn': functools.partial(scaled_loss, scale=3)},
        "'loss_fn' is .*scaled_loss",
    ),
    (
        {'loss_fn': lambda out, y: scaled_loss(out, y, 2)},
        {'loss_fn': lambda out, y: scaled_loss(out, y, 3)},
        "'loss_fn' is .*<lambda>",
    ),
    (
        {'loss_fn': cross_entropy()},
        {'loss_fn': cross_entropy(label_smoothing=0.1)},
        "'loss_fn.label_smoothing' is 0 instead of 0.1",
    ),
    (
        {'loss_fn': cross_entropy(weight=torch.ones(3))},
        {'loss_fn': cross_entropy(weight=torch.arange(3.0))},
        "'loss_fn.weight' is",
    ),
    ({}, {'score_fn': Scorer(2)}, "'score_fn' is .*accuracy instead of .*Scorer"),
    ({'score_fn': Scorer(1).score}, {'score_fn': Scorer(2).score}, r'digits=1\) inst'),
]
BASE = make_data()
OTHER_DATA = [
    ({'x': BASE.x + 1e-6}, "the features 'data.x' differ"),
    ({'x': BASE.x.to_sparse()}, "the features 'data.x' differ"),
    ({'edge_index': BASE.edge_index.flip(1)}, "the edges 'data.edge_index' differ"),
    ({'edge_weight': torch.ones(BASE.num_edges)}, 'the edge weights .* differ'),
    ({'adj_t': torch.eye(30).to_sparse()}, "the edges 'data.adj_t' differ"),
    ({'y': BASE.y.roll(1)}, "the labels 'data.y' differ"),
    ({'train_mask': BASE.test_mask}, "'data.train_mask' differs"),
]


def check_rejected(path, first, second, match):
    """Starts a run, and another one of the same file."""
    kwargs = {'max_epochs': 2, 'checkpoint': path, 'checkpoint_every': 1, **QUIET}
    (model, data, settings), other = first, second
    with pytest.raises(Stopped):
        fit(model, data, callback=stop, **kwargs, **settings)
    model, data, settings = other
    with pytest.raises(ValueError, match=f'run.pt.*same run .*{match}.*Remove it'):
        fit(model, data, **kwargs, **settings)


@pytest.mark.parametrize(('make', 'here', 'there', 'match'), OTHER_MODELS)
def test_fit_rejects_a_checkpoint_of_another_model(make, here, there, match, tmp_path):
    first, second = (make(**here), BASE, {}), (make(**there), BASE, {})
    check_rejected(tmp_path / 'run.pt', first, second, match)


@pytest.mark.parametrize(('here', 'there', 'match'), OTHER_SETTINGS)
def test_fit_rejects_a_checkpoint_of_other_settings(here, there, match, tmp_path):
    check_rejected(
        tmp_path / 'run.pt', (Net(), BASE, here), (Net(), BASE, there), match
    )


@pytest.mark.parametrize(('entries', 'match'), OTHER_DATA)
def test_fit_rejects_a_checkpoint_of_other_data(entries, match, tmp_path):
    first, second = (make_idgl(), BASE, {}), (make_idgl(), changed(**entries), {})
    check_rejected(tmp_path / 'run.pt', first, second, match)


def test_description_of_the_same_run():
    model, data = Net(scale=1, rate=float('nan')), make_data()
    expected = describe_run(model, data, lr=1)
    model(data.x)
    with torch.no_grad():
        model.lin.weight.zero_()
    model.eval()
    assert describe_run(model, make_data(), lr=1.0) == expected
    other = Net(scale=1.0, rate=float('nan'))
    assert describe_run(other, make_data(), lr=1.0) == expected
    assert all(type(text) is str for text in expected.values())
    assert not any(' at 0x' in text for text in expected.values())


def test_description_of_models_and_losses_in_detail():
    def describe(model, **settings):
        return describe_run(model, BASE, **settings)

    # As many parameters of the same names and shapes, but one is another model.
    gat = GAT(6, 8, num_layers=2, out_channels=3)
    other = GAT(6, 8, num_layers=2, out_channels=3, negative_slope=0.3)
    text = differences(describe(gat), describe(other))
    assert "'model.convs.0.negative_slope' is 0.3 instead of 0.2" in text
    before = describe(gat)
    gat.convs[0].lin.weight.requires_grad_(False)
    assert '(frozen)' in differences(describe(gat), before)

    lazy = GCN(-1, 8, num_layers=2, out_channels=3)
    assert describe(lazy)['model.convs.0.lin.weight'] == 'not initialized'

    # Of a model that has nothing in common, only some differences are listed.
    text = differences(describe(gat), describe(make_idgl()))
    assert text.startswith("'model' is torch_geometric_idgl") and text.endswith(' more')
    assert len(text) < 1000


@pytest.mark.parametrize(
    'make',
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x[:0],
        lambda x: x.t(),
        lambda x: x[0, 0],
        lambda x: EdgeIndex(x[:2].gt(1).long(), sparse_size=(9, 9)),
    ],
)
def test_description_of_any_tensor(make):
    x = BASE.x

    def describe(value):
        return describe_run(Net(), Data(x=value))['data.x']

    value = make(x)
    assert describe(value) == describe(make(x.clone()))
    if value.numel() > 0:
        assert describe(value) != describe(make(2 - x))


@pytest.mark.sparse
def test_description_of_a_sparse_tensor():
    torch_sparse = pytest.importorskip('torch_sparse')

    def describe(value):
        adj_t = torch_sparse.SparseTensor.from_dense(value * torch.eye(3))
        return describe_run(Net(), Data(adj_t=adj_t))['data.adj_t']

    assert describe(1.0) == describe(1.0) != describe(2.0)
