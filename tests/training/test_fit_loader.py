import copy
import random
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset, SubsetRandomSampler, WeightedRandomSampler
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MaxAggregation

from tests.training.common import QUIET, Stopped, equal_records, make_data, stop
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.nn import IDGL
from torch_geometric_idgl.training import accuracy, fit, r2_score, splits
from torch_geometric_idgl.training.description import describe_run, differences


@dataclass
class ReadTrace:
    """The least that is asked of a trace."""

    outs: list[Tensor]
    reg: Tensor
    num_iters: Tensor

    def loss(self, fn):
        return sum(fn(out) for out in self.outs) / len(self.outs) + self.reg


class Documents(torch.nn.Module):
    """A module of one's own around IDGL, with a read-out."""

    def __init__(self, out_channels=2, dropout=0.3):
        super().__init__()
        self.idgl = IDGL(4, 8, 2, 8, k=2, max_iters=2, dropout=dropout)
        self.pool = MaxAggregation()
        self.lin = torch.nn.Linear(8, out_channels)
        self.seen = set()

    def forward(self, batch, max_iters=None, return_trace=False):
        self.seen.add(max_iters)
        _, trace = self.idgl(batch, max_iters=max_iters, return_trace=True)
        read = [self.lin(self.pool(out, batch.batch)) for out in trace.outs]
        if return_trace:
            return read[-1], ReadTrace(read, trace.reg, trace.num_iters)
        return read[-1]


class Plain(torch.nn.Module):
    """A module that learns no graph."""

    def __init__(self, out_channels=2, dropout=0.0):
        super().__init__()
        self.lin = torch.nn.Linear(4, out_channels)
        self.pool = MaxAggregation()
        self.dropout = dropout

    def forward(self, batch):
        x = F.dropout(batch.x, self.dropout, self.training)
        return self.lin(self.pool(x, batch.batch))


class TraceOnly(Plain):
    """A module with a trace whose iterations cannot be set."""

    def forward(self, batch, return_trace=False):
        out = super().forward(batch)
        trace = ReadTrace([out], out.new_zeros(()), out.new_ones(batch.num_graphs))
        return (out, trace) if return_trace else out


class Graphs(InMemoryDataset):
    def __init__(self, items, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(items)


class Noise:
    """A random transform."""

    def __call__(self, data):
        data.x = data.x + 0.1 * torch.randn_like(data.x) + 0.1 * random.random()
        return data


def make_items(size=22, seed=0):
    """Graphs of two classes, of three to six nodes."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for i in range(size):
        x = torch.rand(3 + i % 4, 4, generator=generator)
        x[0, i % 2] += 1.0
        items.append(Data(x=x, y=torch.tensor([i % 2])))
    return items


def make_loaders(**kwargs):
    kwargs = {'batch_size': 8, 'shuffle': True, **kwargs}
    train = DataLoader(make_items(22, 0), **kwargs)
    return train, DataLoader(make_items(14, 1), 4), DataLoader(make_items(10, 2), 4)


@torch.no_grad()
def outputs(model, loader):
    model.eval()
    pairs = [(model(batch), batch.y) for batch in loader]
    return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))


@pytest.mark.parametrize('make', [Documents, Plain, TraceOnly])
def test_fit_learns(make):
    seed_everything(0)
    model, states = make(), {}
    train, val, test = make_loaders()

    def keep(epoch, values):
        states[epoch] = copy.deepcopy(model.state_dict())

    kwargs = {'max_epochs': 30, 'patience': 6, 'history': True, **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        record = fit(model, train, val, test, lr=0.1, callback=keep, **kwargs)
    assert record.val_score > 0.7 and record.test_score > 0.7
    assert record.train_score is None

    losses = [values['val_loss'] for values in record.history]
    assert record.val_loss == min(losses)
    assert record.best_epoch == losses.index(min(losses))
    assert record.epochs in {30, record.best_epoch + 6 + 1}
    assert not any('test_score' in values for values in record.history)
    for key, value in states[record.best_epoch].items():
        assert torch.equal(value, model.state_dict()[key])
    assert record.val_score == accuracy(*outputs(model, val))
    assert record.test_score == accuracy(*outputs(model, test))

    if make is Documents:
        iterations = [values['iterations'] for values in record.history]
        assert 1 <= record.iterations <= 2
        assert record.iterations == pytest.approx(sum(iterations) / len(iterations))
    else:
        assert record.iterations == (None if make is Plain else 1.0)


def test_losses_are_means_over_items():
    seed_everything(0)
    model, (train, val, _) = Plain(), make_loaders()
    assert [batch.num_graphs for batch in train] == [8, 8, 6]
    losses = [
        float(F.cross_entropy(*outputs(model, loader))) for loader in (train, val)
    ]
    kwargs = {'lr': 0.0, 'max_epochs': 1, 'history': True, **QUIET}
    (values,) = fit(model, train, val, **kwargs).history
    assert [values['train_loss'], values['val_loss']] == pytest.approx(losses)


def test_val_loss_is_the_joint_loss():
    seed_everything(0)
    model, (train, _, _) = Documents(), make_loaders()
    val = DataLoader(make_items(14, 1), 14)
    record = fit(model, train, val, max_epochs=1, **QUIET)
    (batch,) = val
    with torch.no_grad():
        out, trace = model.eval()(batch, return_trace=True)
    assert len(trace.outs) == 3 and trace.reg != 0
    expected = trace.loss(lambda out: F.cross_entropy(out, batch.y))
    assert record.val_loss == pytest.approx(float(expected))
    assert record.val_loss != pytest.approx(float(F.cross_entropy(out, batch.y)))


def test_steps_are_those_of_a_plain_loop():
    seed_everything(0)
    model, (train, val, _) = Documents(), make_loaders()
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.05, weight_decay=0.1)
    state = torch.get_rng_state()
    fit(model, train, val, lr=0.05, weight_decay=0.1, max_epochs=1, **QUIET)
    torch.set_rng_state(state)
    other.train()
    for batch in train:
        optimizer.zero_grad()
        _, trace = other(batch, return_trace=True)
        trace.loss(lambda out, y=batch.y: F.cross_entropy(out, y)).backward()
        optimizer.step()
    for key, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


def test_scores_are_of_whole_splits():
    sizes = []

    def score(out, y):
        sizes.append((tuple(out.size()), tuple(y.size())))
        return r2_score(out, y)

    loaders = make_loaders()
    for loader in loaders:
        for item in loader.dataset:
            item.y = item.x.mean().view(1, 1)
    seed_everything(0)
    kwargs = {'loss_fn': F.mse_loss, 'score_fn': score, 'monitor': 'score', **QUIET}
    model = Plain(out_channels=1)
    record = fit(model, *loaders, max_epochs=3, history=True, **kwargs)
    # Test data comes once, at the end.
    assert sizes == [((14, 1),) * 2] * 3 + [((10, 1),) * 2]
    scores = [values['val_score'] for values in record.history]
    assert record.val_score == max(scores)
    assert record.test_score == pytest.approx(r2_score(*outputs(model, loaders[2])))


def test_first_phase():
    seed_everything(0)
    model, (train, val, _) = Documents(), make_loaders()
    kwargs = {'max_epochs': 4, 'history': True, **QUIET}
    record = fit(model, train, val, first_phase=2, **kwargs)
    iterations = [values['iterations'] for values in record.history]
    assert iterations[:2] == [0.0, 0.0] and min(iterations[2:]) >= 1
    assert record.best_epoch >= 2 and model.seen == {0, None}
    for other in [Plain(), TraceOnly()]:
        with pytest.raises(ValueError, match=r"'first_phase' to be 0 .*'max_iters'"):
            fit(other, train, val, first_phase=2, **kwargs)


def test_labels_of_nodes():
    # IDGL itself, which gives an output for each node.
    items = [Data(x=item.x, y=item.x[:, 0].gt(0.5).long()) for item in make_items()]
    seed_everything(0)
    model = IDGL(4, 8, 2, 2, k=2, max_iters=2)
    loader = DataLoader(items, 8, shuffle=True)
    record = fit(model, loader, DataLoader(items, 8), max_epochs=3, **QUIET)
    assert 1 <= record.iterations <= 2


def bucket(items):
    return {'batch_size': 1, 'batch_sampler': BucketSampler(items, 4, chunk_batches=2)}


def weighted(items):
    return {'sampler': WeightedRandomSampler(torch.arange(1.0, 23.0), 20)}


def own_generator(items):
    return {'generator': torch.Generator().manual_seed(3), 'shuffle': True}


def sampler_generator(items):
    generator = torch.Generator().manual_seed(4)
    return {'sampler': SubsetRandomSampler(range(5, 20), generator=generator)}


@pytest.mark.parametrize(
    'sampler',
    [
        lambda items: {'shuffle': True},
        bucket,
        weighted,
        own_generator,
        sampler_generator,
    ],
)
@pytest.mark.parametrize('make', [Documents, Plain])
def test_fit_resumes(make, sampler, tmp_path):
    kwargs = {'max_epochs': 7, 'patience': 3, 'history': True, 'lr': 0.1, **QUIET}

    def loaders():
        items = Graphs(make_items(), transform=Noise())
        train = DataLoader(items, **{'batch_size': 4, **sampler(make_items())})
        return train, *make_loaders()[1:]

    def run(model, **settings):
        return fit(model, *loaders(), **kwargs, **settings)

    seed_everything(0)
    model = make(dropout=0.3)
    record = run(model)
    assert record.epochs > 4

    def kill(epoch, values):
        if epoch == 3:
            raise Stopped

    path = tmp_path / 'run.pt'
    seed_everything(0)
    with pytest.raises(Stopped):
        run(make(dropout=0.3), checkpoint=path, callback=kill)
    assert torch.load(path, weights_only=True)['progress']['epoch'] == 4

    epochs = []
    seed_everything(77)
    resumed = make(dropout=0.3)
    again = run(
        resumed, checkpoint=path, callback=lambda epoch, _: epochs.append(epoch)
    )
    assert epochs == list(range(4, record.epochs))
    assert equal_records(again, record)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])
    assert list(tmp_path.iterdir()) == []


def test_fit_resumes_in_the_last_evaluation(tmp_path):
    class Breaking(list):
        def __iter__(self):
            if path.exists() and not again:
                raise Stopped
            return super().__iter__()

    path, again = tmp_path / 'run.pt', []
    train, val, test = make_loaders()
    batches = Breaking(test)
    kwargs = {'max_epochs': 2, 'checkpoint': path, **QUIET}
    seed_everything(0)
    with pytest.raises(Stopped):
        fit(Plain(), train, val, batches, **kwargs)
    assert path.exists()

    again.append(True)
    model, epochs = Plain(), []
    kwargs['callback'] = lambda epoch, values: epochs.append(epoch)
    record = fit(model, train, val, batches, **kwargs)
    assert record.epochs == 2 and epochs == []
    assert record.test_score == accuracy(*outputs(model, test))
    assert not path.exists()


def test_checkpoints_are_kept_every_epoch(tmp_path):
    path, found = tmp_path / 'run.pt', []

    def look(epoch, values):
        found.append(torch.load(path, weights_only=True)['progress']['epoch'])

    train, val, _ = make_loaders()
    fit(Plain(), train, val, max_epochs=3, checkpoint=path, callback=look, **QUIET)
    assert found == [1, 2, 3]


def subset(indices):
    return Subset(make_items(), indices)


def changed(index):
    items = make_items()
    items[index].x = items[index].x + 1
    return items


DATA = make_items()
GRAPHS = Graphs(DATA)
OTHER_LOADERS = [
    (DataLoader(DATA, 4), DataLoader(DATA, 8), 'batch_size. is 4 instead of 8'),
    (DataLoader(DATA, 4), DataLoader(DATA, 4, shuffle=True), 'SequentialSampler inst'),
    (DataLoader(DATA, 4), DataLoader(DATA, 4, drop_last=True), 'drop_last. is False'),
    (DataLoader(DATA, 4), DataLoader(DATA[:-1], 4), "'data.train.length' differs"),
    (DataLoader(DATA, 4), DataLoader(changed(0), 4), "'data.train.first' differs"),
    (DataLoader(DATA, 4), DataLoader(changed(-1), 4), "'data.train.last' differs"),
    (DataLoader(DATA, 4), list(DataLoader(DATA, 4)), "'loader.train' is .*DataLoader"),
    (
        DataLoader(GRAPHS, 4),
        DataLoader(Graphs(changed(7)), 4),
        "'data.train.stored' differs",
    ),
    (
        DataLoader(GRAPHS[[0, 2, 4]], 4),
        DataLoader(GRAPHS[[0, 3, 4]], 4),
        "'data.train.indices' differs",
    ),
    (
        DataLoader(subset([0, 2, 4]), 4),
        DataLoader(subset([0, 3, 4]), 4),
        "'data.train.indices' differs",
    ),
    (
        DataLoader(DATA, batch_sampler=BucketSampler(DATA, 4)),
        DataLoader(DATA, batch_sampler=BucketSampler(DATA, 4, chunk_batches=3)),
        "sampler.chunk_batches' is 50 instead of 3",
    ),
    (
        DataLoader(DATA, batch_sampler=BucketSampler(range(22), 4)),
        DataLoader(DATA, batch_sampler=BucketSampler(range(1, 23), 4)),
        "sampler.sizes' is",
    ),
    (
        DataLoader(DATA, 4, sampler=SubsetRandomSampler([1, 2])),
        DataLoader(DATA, 4, sampler=SubsetRandomSampler(np.array([1, 3]))),
        "sampler.sampler.indices' is",
    ),
    (
        DataLoader(DATA, 4, shuffle=True),
        DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
        "generator' is None",
    ),
]


@pytest.mark.parametrize(('here', 'there', 'match'), OTHER_LOADERS)
def test_fit_rejects_a_checkpoint_of_other_loaders(here, there, match, tmp_path):
    val = DataLoader(DATA, 4)
    kwargs = {'max_epochs': 2, 'checkpoint': tmp_path / 'run.pt', **QUIET}
    with pytest.raises(Stopped):
        fit(Plain(), here, val, callback=stop, **kwargs)
    with pytest.raises(ValueError, match=f'run.pt.*same run .*{match}.*Remove it'):
        fit(Plain(), there, val, **kwargs)
    with pytest.raises(ValueError, match=r"same run .*'loader.test' is None instead"):
        fit(Plain(), here, val, val, **kwargs)
    with pytest.raises(ValueError, match=r"same run .*'data.val.length' differs"):
        fit(Plain(), here, DataLoader(DATA[1:], 4), **kwargs)


def test_description_is_short_and_the_same_again():
    def describe():
        whole = Graphs(make_items(200))
        loaders = {
            'train': DataLoader(
                whole[:150], batch_sampler=BucketSampler(whole[:150], 4)
            ),
            'val': DataLoader(Subset(whole, torch.arange(150, 200)), 4),
            'test': (batch for batch in []),
        }
        return describe_run(Plain(), loaders)

    found = describe()
    assert differences(found, describe()) == ''
    assert found['data.train.stored'] == found['data.val.whole.stored']
    assert not any(' at 0x' in text for text in found.values())
    assert max(map(len, found.values())) < 1000


def test_fit_checkpoints_draw_no_random_numbers(tmp_path):
    records = []
    for path in [None, tmp_path / 'run.pt']:
        train, val, test = make_loaders()
        train = DataLoader(Graphs(make_items(), transform=Noise()), 4, shuffle=True)
        seed_everything(0)
        model = Documents()
        records.append(
            fit(model, train, val, test, max_epochs=2, checkpoint=path, **QUIET)
        )
    assert equal_records(*records)


def test_fit_progress(capfd):
    train, val, test = make_loaders()
    fit(Plain(), train, val, test, max_epochs=1, **QUIET)
    assert capfd.readouterr() == ('', '')
    fit(Documents(), train, val, test, max_epochs=2)
    out, err = capfd.readouterr()
    assert out == ''
    for text in ['Documents: 100%', '2/2', 'train:', '/3', 'dev:', '/4', 'test:']:
        assert text in err
    for name in ['train=', 'dev=', 'score=', 'iters=']:
        assert name in err


def test_one_graph_has_one_bar(capfd, monkeypatch):
    monkeypatch.setattr(splits, 'tqdm', None)
    model = IDGL(6, 8, 2, 3, max_iters=1)
    fit(model, make_data(), max_epochs=1)
    assert capfd.readouterr().err.count('\n') == 1


class Constant(torch.nn.Module):
    """What a collapsed model gives."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, batch):
        return self.bias.expand(batch.num_graphs, -1)


def test_fit_warns_of_collapsed_outputs():
    train, val, _ = make_loaders()
    match = "'Constant' have collapsed: the dev items' loss .* for all items"
    with pytest.warns(UserWarning, match=match) as caught:
        fit(Constant(), train, val, max_epochs=20, **QUIET)
    assert [warning.filename for warning in caught] == [__file__]


class NodesOnly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 2)

    def forward(self, batch):
        return self.lin(batch.x)


def test_fit_wrong_data():
    train, val, _ = make_loaders()
    items = train.dataset
    with pytest.raises(ValueError, match=r"'val_data' to be a loader.*\(got None\)"):
        fit(Plain(), train, **QUIET)
    with pytest.raises(ValueError, match=r"'val_data' and 'test_data' only if 'data'"):
        fit(Plain(), make_data(), val, **QUIET)
    for args, name, kind in [
        ((iter(train), val), 'data', 'Iter'),
        ((5, val), 'data', 'int'),
        ((train, make_data()), 'val_data', 'Data'),
        ((train, val, iter([])), 'test_data', 'list_iterator'),
    ]:
        match = rf"Expected '{name}' to be a loader .*\(got '.*{kind}'\)"
        with pytest.raises(TypeError, match=match):
            fit(Plain(), *args, **QUIET)
    # A data set, which has to be loaded first.
    for args, name in [((items, val), 'data'), ((train, Graphs(items)), 'val_data')]:
        match = rf"Expected '{name}' to yield batches of graphs.*\(got 'Data'\)"
        with pytest.raises(TypeError, match=match):
            fit(Plain(), *args, **QUIET)
    with pytest.raises(ValueError, match="'val_data' to yield a batch"):
        fit(Plain(), train, [], **QUIET)
    nothing = [Batch.from_data_list([Data(x=torch.rand(2, 4))])]
    with pytest.raises(ValueError, match="batches of 'data' to hold 'y'"):
        fit(Plain(), nothing, val, **QUIET)
    with pytest.raises(ValueError, match=r"8 rows of 'y' \(got shape \[\d+, 2\]\)"):
        fit(NodesOnly(), train, val, **QUIET)
    items[3].x = torch.full_like(items[3].x, torch.nan)
    with pytest.raises(FloatingPointError, match=r"'train_loss' nan in epoch 0"):
        fit(Plain(), train, val, **QUIET)
    with pytest.raises(FloatingPointError, match=r"'val_loss' nan in epoch 0"):
        fit(Plain(), val, train, **QUIET)
