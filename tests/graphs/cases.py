"""Every operator beside the dense matrix it stands for.

A case makes an operator from leaf tensors, and the matrix from the same leaves by plain
loops over the graphs of the batch. All in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from torch_geometric_idgl.graphs import (
    Affinity,
    DenseGraph,
    FeatureGraph,
    InnerScores,
    LowRankGraph,
    PairScores,
    RepeatedScores,
    Scores,
    SparseGraph,
    TiledGraph,
    WeightedScores,
    anchor,
    base,
    low_rank,
    tiled,
)
from torch_geometric_idgl.nn import RBF
from torch_geometric_idgl.ops import Features, Nodes, SparseMatrix, numeric
from torch_geometric_idgl.ops import features as features_module
from torch_geometric_idgl.ops import sparse as sparse_module

CPU = torch.device('cpu')
# 'uneven': most of a padded matrix would be padding.
SIZES = {
    'single': (9,),
    'regular': (5, 5),
    'ragged': (6, 0, 1, 4),
    'uneven': (7, 1, *[0] * 9, 1),
}
ANCHORS = {
    'single': (4,),
    'regular': (2, 2),
    'ragged': (3, 0, 1, 2),
    'uneven': (5, 1, *[0] * 9, 1),
}
NUM_FEATURES = 4
EPSILON = 0.45


@dataclass
class Case:
    """An operator and its matrix, as functions of leaves."""

    leaves: tuple[Tensor, ...]
    make: Callable[..., Affinity]
    dense: Callable[..., Tensor]
    rows: Nodes
    cols: Nodes
    features: Features  # of the columns
    parameters: tuple[Tensor, ...] = ()  # further tensors that get gradients

    @property
    def square(self) -> bool:
        return self.rows == self.cols

    def fresh_leaves(self) -> list[Tensor]:
        return [leaf.clone().requires_grad_() for leaf in self.leaves]

    def blocks(self):
        """The rows and columns of each graph."""
        for g in range(self.rows.num_graphs):
            yield (
                slice(self.rows.ptr[g], self.rows.ptr[g + 1]),
                slice(self.cols.ptr[g], self.cols.ptr[g + 1]),
            )

    def graph_sums(self, entries: Tensor) -> Tensor:
        return torch.stack([entries[i, j].sum() for i, j in self.blocks()])


def uniform(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def make_nodes(sizes) -> Nodes:
    return Nodes(sizes, CPU)


def bag_of_words(n, seed=5):
    """Features with zeros, none negative, no row empty and no two parallel."""
    x = uniform(n, NUM_FEATURES, seed=seed)
    x = x * (x > 0.6)
    x[:, :2] += uniform(n, 2, seed=seed + 1)
    return x


def make_features(nodes: Nodes, sparse: bool) -> Features:
    x = bag_of_words(nodes.num_rows)
    return Features(SparseMatrix.from_dense(x) if sparse else x, nodes)


def block_diagonal(similarities: Tensor, rows: Nodes, cols: Nodes) -> Tensor:
    same = rows.batch.unsqueeze(1) == cols.batch
    return torch.where(same, similarities, 0.0)


def anchor_index(rows: Nodes, cols: Nodes) -> Tensor:
    """The last nodes of every graph are its anchors."""
    index = [
        torch.arange(rows.ptr[g + 1] - cols.sizes[g], rows.ptr[g + 1])
        for g in range(rows.num_graphs)
    ]
    return torch.cat(index)


# Sparsified forms: operator, threshold and largest entries ---------------------------

FORMS = {
    'dense-eps': (EPSILON, None),
    'dense-both': (EPSILON, 2),
    'tiled': (0.0, None),
    'tiled-eps': (EPSILON, None),
    'tiled-top': (0.0, 2),
    'kept-eps': (EPSILON, None),
    'kept-both': (EPSILON, 2),
    'sparse-eps': (EPSILON, None),
    'sparse-top': (0.0, 2),
}


def from_scores(form: str, scores: Scores) -> Affinity:
    kind = form.split('-')[0]
    if kind in ('tiled', 'kept'):
        return TiledGraph(scores, keep=kind == 'kept')
    if kind == 'sparse':
        return SparseGraph.from_scores(scores)
    return DenseGraph(scores.dense(), scores.rows, scores.cols, scores.symmetric)


def plain_sparsify(form: str, similarities: Tensor) -> Tensor:
    epsilon, top_k = FORMS[form]
    keep = similarities > epsilon
    if top_k is not None:
        largest = torch.zeros_like(keep)
        for i, row in enumerate(similarities.detach()):
            largest[i, row.argsort(descending=True)[:top_k]] = True
        keep = keep & largest
    return torch.where(keep, similarities, 0.0)


def embeddings(rows, cols, seed, low=0.0):
    """One set of vectors for all pairs of nodes, another one for anchors."""
    leaves = [uniform(rows.num_rows, 3, seed=seed) * (1.0 - low) + low]
    if cols is not rows:
        other = uniform(cols.num_rows, 3, seed=seed + 50)
        leaves.append(other * (1.0 - low) + low)
    return tuple(leaves)


def targets(rows: Nodes, cols: Nodes) -> Features:
    features = make_features(rows, sparse=False)
    if rows is cols:
        return features
    return features.rows(anchor_index(rows, cols), cols)


def inner_case(form, rows, cols, seed=0) -> Case:
    """Inner products of embeddings of any sign."""

    def make(u, v=None):
        return from_scores(form, InnerScores(u, v, rows, cols, *FORMS[form]))

    def dense(u, v=None):
        similarities = u @ (u if v is None else v).t()
        return plain_sparsify(form, block_diagonal(similarities, rows, cols))

    leaves = embeddings(rows, cols, seed, low=-0.5)
    return Case(leaves, make, dense, rows, cols, targets(rows, cols))


def repeated_case(form, rows, cols, seed=0) -> Case:
    """Inner products of four vectors, each of several nodes."""
    kind = torch.arange(rows.num_rows) % 4
    col_kind = None if cols is rows else kind[anchor_index(rows, cols)]

    def make(u):
        made = RepeatedScores(u, kind, col_kind, rows, cols, *FORMS[form])
        return from_scores(form, made)

    def dense(u):
        similarities = u[kind] @ u[kind if col_kind is None else col_kind].t()
        return plain_sparsify(form, block_diagonal(similarities, rows, cols))

    leaves = (uniform(4, 3, seed=seed) * 1.5 - 0.5,)
    return Case(leaves, make, dense, rows, cols, targets(rows, cols))


class ScaledKernel(RBF):
    def __init__(self):
        super().__init__(3, 3)
        self.double()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def pair(self, u, v):
        return super().pair(self.scale * u, self.scale * v)


def pair_case(form, rows, cols, seed=0) -> Case:
    """A kernel that is no inner product, with a parameter of its own."""
    metric = ScaledKernel()

    def make(u, v=None):
        made = PairScores(metric, u, v, rows, cols, True, *FORMS[form])
        return from_scores(form, made)

    def dense(u, v=None):
        gap = u.unsqueeze(1) - (u if v is None else v)
        gap = metric.scale.square() * gap.square().sum(2)
        similarities = block_diagonal(torch.exp(-0.5 * gap), rows, cols)
        return plain_sparsify(form, similarities)

    leaves, features = embeddings(rows, cols, seed), targets(rows, cols)
    return Case(leaves, make, dense, rows, cols, features, (metric.scale,))


def weighted_dense(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Eq. 1 and 2."""
    total = 0.0
    for w_p in w:
        a, b = w_p * x, w_p * y
        norms = a.square().sum(1).sqrt().unsqueeze(1) * b.square().sum(1).sqrt()
        total = total + (a @ b.t()) / norms
    return total / len(w)


def weighted_case(form, rows, cols, seed=0) -> Case:
    """Weighted cosines of sparse features."""
    index = None if cols is rows else anchor_index(rows, cols)
    features = make_features(rows, sparse=True)
    x = features.to_dense()

    def make(w):
        made = WeightedScores(features, w, index, cols, *FORMS[form])
        return from_scores(form, made)

    def dense(w):
        similarities = weighted_dense(x, x if index is None else x[index], w)
        return plain_sparsify(form, block_diagonal(similarities, rows, cols))

    leaves = (uniform(2, NUM_FEATURES, seed=seed) + 0.2,)
    chosen = features if index is None else features.rows(index, cols)
    return Case(leaves, make, dense, rows, cols, chosen)


def low_rank_case(rows, cols, seed=0) -> Case:
    """Factors of a graph of which nothing is removed."""

    def make(u, v=None):
        return LowRankGraph(u, v, rows, cols)

    def dense(u, v=None):
        return block_diagonal(u @ (u if v is None else v).t(), rows, cols)

    leaves = embeddings(rows, cols, seed)
    return Case(leaves, make, dense, rows, cols, targets(rows, cols))


def feature_case(kind, rows, cols, seed=0) -> Case:
    """Implicit weighted cosines of features, which may want gradients themselves."""
    index = None if cols is rows else anchor_index(rows, cols)
    anchors = () if index is None else (index, cols)
    features = make_features(rows, sparse=kind == 'sparse')
    x = features.to_dense()
    w = uniform(2, NUM_FEATURES, seed=seed) + 0.2

    def make(w, x=None):
        return FeatureGraph(features if x is None else Features(x, rows), w, *anchors)

    def dense(w, own=None):
        own = x if own is None else own
        similarities = weighted_dense(own, own if index is None else own[index], w)
        return block_diagonal(similarities, rows, cols)

    leaves = (w, x) if kind == 'learned' else (w,)
    chosen = features if index is None else features.rows(index, cols)
    return Case(leaves, make, dense, rows, cols, chosen)


BUILDERS: dict[str, Callable[..., Case]] = {}
for _form in FORMS:
    BUILDERS[f'{_form}/inner'] = partial(inner_case, _form)
for _form in ('dense-eps', 'tiled-eps', 'kept-eps', 'sparse-eps'):
    BUILDERS[f'{_form}/pair'] = partial(pair_case, _form)
    BUILDERS[f'{_form}/weighted'] = partial(weighted_case, _form)
    BUILDERS[f'{_form}/repeated'] = partial(repeated_case, _form)
BUILDERS['low_rank'] = low_rank_case
for _kind in ('dense', 'sparse', 'learned'):
    BUILDERS[f'feature/{_kind}'] = partial(feature_case, _kind)

# One of each class, to compare with all the others, nodes and anchors:
MAIN = ['dense-eps/inner', 'tiled-eps/inner', 'sparse-eps/inner', 'low_rank']


def make_case(name: str, batch: str, anchored: bool = False, seed: int = 0) -> Case:
    rows = make_nodes(SIZES[batch])
    cols = make_nodes(ANCHORS[batch]) if anchored else rows
    return BUILDERS[name](rows, cols, seed=seed)


def parametrize(names_and_batches):
    """Over cases, of node-node graphs and of node-anchor affinities."""
    params = [(name, batch, False) for name, batch in names_and_batches]
    params += [(name, batch, True) for name, batch in names_and_batches]
    return pytest.mark.parametrize(
        'given',
        [
            pytest.param(p, id=f'{p[0]}-{p[1]}-{"anchors" if p[2] else "nodes"}')
            for p in params
        ],
    )


def with_ones(message: Tensor | int) -> Tensor:
    """What learned graphs are multiplied with: a message, if any, and ones."""
    if isinstance(message, int):
        return torch.ones(message, 1, dtype=torch.float64)
    return torch.cat([message, message.new_ones(message.size(0), 1)], dim=1)


# Blocks and tables --------------------------------------------------------------------


def use_small_blocks(monkeypatch, entries=2):
    """Blocks of one or two rows or columns, so that tiny graphs need several."""
    modules = (anchor, tiled, low_rank, numeric, features_module, sparse_module)
    for module in modules:
        monkeypatch.setattr(module, 'block_entries', lambda device: entries)
    monkeypatch.setattr(base, '_COLUMN_BLOCK', 2)


def use_no_tables(monkeypatch):
    """Neither Gram matrices nor lists of pairs of features are affordable."""
    monkeypatch.setattr(features_module, '_MAX_GRAM', 0)
    monkeypatch.setattr(features_module, '_MAX_PAIRS', -1)


def assert_grads_close(actual, expected, leaves, note=''):
    """Gradients of two numbers are the same; both may be asked again."""
    options = {'retain_graph': True, 'allow_unused': True}
    grads = torch.autograd.grad(actual, leaves, **options)
    wanted = torch.autograd.grad(expected, leaves, **options)
    for leaf, grad, other in zip(leaves, grads, wanted, strict=True):
        zero = torch.zeros_like(leaf)
        grad, other = (zero if g is None else g for g in (grad, other))
        torch.testing.assert_close(grad, other, msg=lambda m: f'gradient {note}: {m}')
