"""What a device would have to wait for: how often Python looks at numbers.

On a GPU every look stops Python until all work is done. CPU shortcuts are switched off,
so that a step here looks at numbers where a step there would.
"""

import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.graphs.cases import use_small_blocks
from tests.nn.common import joint_loss, make_graph
from torch_geometric_idgl.graphs import (
    DenseGraph,
    FeatureGraph,
    LowRankGraph,
    TiledGraph,
)
from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.ops import numeric

# What needs a number, or a size that depends on numbers, on the side of Python.
READS = {
    '_local_scalar_dense',
    'item',
    'equal',
    'is_nonzero',
    'nonzero',
    'nonzero_numpy',
    'masked_select',
    'unique',
    'unique_consecutive',
    'unique_dim',
    '_unique',
    '_unique2',
    'bincount',
    'repeat_interleave',
    '_coalesce',
    'argwhere',
}


# What brings tensors to the side of Python, which nothing is to be seen of below.
COPIES = {'tolist', 'cpu', 'numpy', '__array__'}


class Reads:
    """Counts them, by the places in the package where they happen."""

    def __init__(self):
        self.places = Counter()
        self.total = 0

    def add(self, name):
        frames = traceback.extract_stack()
        inside = [f for f in frames if 'torch_geometric_idgl' in Path(f.filename).parts]
        found = inside[-1] if inside else frames[0]
        place = f'{Path(found.filename).name}:{found.lineno} {found.name}'
        self.places[f'{name} at {place}'] += 1
        self.total += 1

    def __enter__(self):
        self.stack = ExitStack()
        self.stack.enter_context(OperatorReads(self))
        self.stack.enter_context(Copies(self))
        return self

    def __exit__(self, *error):
        self.stack.close()


class OperatorReads(TorchDispatchMode):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        known = name == 'repeat_interleave' and kwargs.get('output_size') is not None
        if not known and (name in READS or takes_mask(name, args)):
            self.reads.add(name)
        return func(*args, **kwargs)


class Copies(TorchFunctionMode):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        if name in COPIES:
            self.reads.add(name)
        return func(*args, **(kwargs or {}))


def takes_mask(name, args):
    """Indexing with a mask looks for the places of it."""
    if name != 'index':
        return False
    kinds = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in kinds for index in args[1])


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Shortcuts for CPUs are off in every module that takes them."""
    shortcut = numeric.reads_are_free
    for name, module in list(sys.modules.items()):
        if name.startswith('torch_geometric_idgl'):
            if getattr(module, 'reads_are_free', None) is shortcut:
                monkeypatch.setattr(module, 'reads_are_free', lambda device: False)


def test_reads_are_counted():
    x = torch.tensor([1.0, 0.0, 2.0])
    for look in [
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: x.unique(),
        lambda: torch.equal(x, x + 1),
        lambda: x.cpu(),
        lambda: x.numpy(),
        lambda: x.long().repeat_interleave(x.long()),
        lambda: x.long().bincount(minlength=3),
    ]:
        with Reads() as reads:
            look()
        assert reads.total >= 1
    with Reads() as reads:
        x.long().repeat_interleave(x.long(), output_size=3)
        (x.sum() * x[torch.tensor([0, 1])]).masked_fill(x[:2] > 0, 0.0)
    assert reads.total == 0


def bag_of_words(n, d):
    x = torch.rand(n, d, generator=torch.Generator().manual_seed(0))
    return x * (x > 0.9)


# What is computed, of which class the first learned graph is, and of how many tiles.
STEPS = {
    'low rank': (IDGL, (300, 300), {}, FeatureGraph),
    'low rank, sparse': (IDGL, (300, 300), {'sparse': True}, FeatureGraph),
    'tiles': (IDGL, (300, 12), {'epsilon': 0.3, 'backend': 'tiled'}, TiledGraph),
    'small': (IDGL, (60, 12), {}, DenseGraph),
    'largest': (IDGL, (300, 12), {'top_k': 3}, TiledGraph),
    'anchors': (IDGLAnch, (300, 12), {'epsilon': 0.3}, DenseGraph),
    'anchors, kept': (IDGLAnch, (2000, 12), {'epsilon': 0.3}, TiledGraph),
    'anchors, low rank': (IDGLAnch, (300, 12), {}, LowRankGraph),
    'anchors, sparse': (IDGLAnch, (300, 300), {}, FeatureGraph),
}


# One look to know the inputs; rows of anchors have as many entries as they have, which
# Python asks for where features of anchors are taken.
ONCE = {name: 1 for name in STEPS} | {'anchors, sparse': 4}


@pytest.mark.parametrize('options', [{}, {'sparsity': 0.1, 'connectivity': 0.1}])
@pytest.mark.parametrize('name', STEPS)
def test_reads_of_a_training_step(name, options, as_on_a_device, monkeypatch):
    """One for each refinement, which may be the last, and a few beforehand."""
    cls, (n, d), given, kind = STEPS[name]
    given = dict(given)
    x, edge_index = bag_of_words(n, d), make_graph(n)[1]
    x = x.to_sparse_csr() if given.pop('sparse', False) else x
    if name == 'tiles':
        use_small_blocks(monkeypatch, 1 << 12)
    torch.manual_seed(0)
    anchors = {} if cls is IDGL else {'num_anchors': 40}
    dropout = {'dropout': 0.5, 'feature_dropout': 0.2, 'graph_dropout': 0.2}
    model = cls(
        d, 8, 2, 3, cached=True, tol=1e-9, **dropout, **anchors, **given, **options
    )

    def step():
        model.zero_grad()
        loss, trace = joint_loss(model, x, edge_index)
        loss.backward()
        return trace

    trace = step()
    assert type(trace.first) is kind
    if name == 'tiles':
        assert len(trace.first.entries.tiles) > 3
    with Reads() as reads:
        trace = step()
    count = int(trace.num_iters)
    assert count > 1
    assert reads.total <= count + ONCE[name], (
        f'{count} refinements: {dict(reads.places)}'
    )


@pytest.mark.parametrize(('cls', 'once'), [(IDGL, 1), (IDGLAnch, 2)])
def test_reads_of_an_evaluation(cls, once, as_on_a_device):
    """One to know the inputs, and one for the seed of the anchors."""
    x, edge_index = bag_of_words(300, 12), make_graph(300)[1]
    model = cls(12, 8, 2, 3, cached=True, tol=None, max_iters=3).eval()
    with torch.no_grad():
        model(x, edge_index)
        with Reads() as reads:
            model(x, edge_index)
    assert reads.total <= once, dict(reads.places)
