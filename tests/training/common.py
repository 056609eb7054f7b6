import functools
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.training import accuracy, fit

QUIET = {'progress': False}


class Stopped(Exception):
    """What stands for the end of a process."""


def make_data(seed=0, num_nodes=30):
    """Three classes, in features and in edges."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % 3
    noise = torch.rand(num_nodes, 6, generator=generator)
    x = F.one_hot(y, 6) + 0.8 * noise
    row, col = torch.randint(num_nodes, (2, 8 * num_nodes), generator=generator)
    edge_index = torch.stack([row, col])[:, (y[row] == y[col]) & (row < col)]
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    part = torch.randperm(num_nodes, generator=generator) % 3
    data = Data(x=x, edge_index=edge_index, y=y)
    data.train_mask, data.val_mask, data.test_mask = part == 0, part == 1, part == 2
    return data


def make_gcn(data=None):
    return GCN(6, 16, num_layers=2, out_channels=3, dropout=0.5, norm='batch_norm')


def make_idgl(data=None, **kwargs):
    kwargs = {'dropout': 0.5, 'max_iters': 3, **kwargs}
    return IDGL(6, 16, num_layers=2, out_channels=3, **kwargs)


def make_anch(data=None, **kwargs):
    kwargs = {'dropout': 0.5, 'max_iters': 3, 'num_anchors': 9, **kwargs}
    return IDGLAnch(6, 16, num_layers=2, out_channels=3, **kwargs)


def equal_records(first, second):
    first, second = ({**asdict(r), 'seconds': 0} for r in (first, second))
    return first == second


def stop(epoch, values):
    """Ends a run after its first epoch."""
    raise Stopped


def long_run(**kwargs):
    """A run whose parts would look different in another process if addresses or the
    order of a set counted.
    """
    seed_everything(0)
    model = make_idgl()
    model.tags = {'one', 'two', 'three'}
    model.hook = lambda out: out
    loss = functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0]))
    kwargs = {'max_epochs': 7, 'checkpoint_every': 2, 'history': True, **kwargs}
    score = lambda out, y: accuracy(out, y)  # noqa: E731
    return fit(model, make_data(), loss_fn=loss, score_fn=score, **QUIET, **kwargs)
