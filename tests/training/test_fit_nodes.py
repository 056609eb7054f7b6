"""Training on batches of the nodes of a large graph."""

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.nn import GCN

from tests.training.common import QUIET, Stopped, equal_records, make_data
from torch_geometric_idgl.loader import AnchorLoader, PartitionLoader
from torch_geometric_idgl.nn import IDGLAnch
from torch_geometric_idgl.training import accuracy, fit


def make_model(data, **kwargs):
    seed_everything(0)
    options = {'num_anchors': 5, 'anchor_sampling': 'fixed', 'max_iters': 2, **kwargs}
    classes = int(data.y.max()) + 1
    return IDGLAnch(data.x.size(1), 8, 2, classes, **options)


def make_loaders(data, model, parts, **kwargs):
    loaders = [PartitionLoader(data, parts, **kwargs), PartitionLoader(data, parts)]
    return [AnchorLoader(loader, data, model.draw_anchors) for loader in loaders]


def test_one_batch_is_the_whole_graph():
    data = make_data()
    kwargs = {'max_epochs': 4, 'history': True, **QUIET}
    model = make_model(data)
    expected = fit(model, data, **kwargs)
    other = make_model(data)
    train, val = make_loaders(data, other, 1)
    record = fit(other, train, val, val, **kwargs)
    for now, then in zip(record.history, expected.history, strict=True):
        for key in ('train_loss', 'val_loss', 'val_score', 'iterations'):
            assert now[key] == pytest.approx(then[key], rel=1e-4)
    assert record.test_score == pytest.approx(expected.test_score)


def test_only_seeds_of_the_split_count():
    data = make_data()
    seed_everything(0)
    model = GCN(data.x.size(1), 8, 1, int(data.y.max()) + 1)
    nodes = data.subgraph(data.train_mask)
    loss = F.cross_entropy(model(nodes.x, nodes.edge_index), nodes.y)
    # All training nodes are in one part: batches of the other have nothing to train.
    train = PartitionLoader(data, (~data.train_mask).long())
    val = PartitionLoader(data, 1)
    record = fit(model, train, val, max_epochs=1, history=True, **QUIET)
    assert record.history[0]['train_loss'] == pytest.approx(float(loss))
    out = model(data.x, data.edge_index)[data.val_mask]
    assert record.val_score == pytest.approx(accuracy(out, data.y[data.val_mask]))
    data.train_mask = torch.zeros_like(data.train_mask)
    loader = PartitionLoader(data, 2)
    with pytest.raises(ValueError, match=r"'data' to yield a batch with nodes of its"):
        fit(model, loader, loader, max_epochs=1, **QUIET)


def test_fit_resumes(tmp_path):
    data, path = make_data(), tmp_path / 'run.pt'

    def run(seed, parts=3, **kwargs):
        model = make_model(data, anchor_sampling='seeded', dropout=0.3)
        loaders = make_loaders(data, model, parts, batch_size=2, shuffle=True)
        seed_everything(seed)
        return fit(model, *loaders, max_epochs=5, history=True, **kwargs, **QUIET)

    def kill(epoch, values):
        if epoch == 2:
            raise Stopped

    record = run(1)
    with pytest.raises(Stopped):
        run(1, checkpoint=path, callback=kill)
    with pytest.raises(ValueError, match=r"'data.train.part' differs"):
        run(1, parts=4, checkpoint=path)
    assert equal_records(run(2, checkpoint=path), record)
