"""Every operator beside the dense matrix it stands for.

A case makes an operator from leaf tensors, and the matrix from the same leaves by plain
loops over the graphs of the batch. All in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_geometric_idgl.graphs import (
    Affinity,
    ColumnScaled,
    DenseFactor,
    DenseGraph,
    InnerScores,
    LowRankGraph,
    PairScores,
    SelectedFactor,
    Signal,
    SparseGraph,
    TiledGraph,
    WeightedFactor,
    WeightedScores,
    sparsify,
)
from torch_geometric_idgl.nn import RBF
from torch_geometric_idgl.ops import Layout, SparseMatrix

CPU = torch.device('cpu')
SIZES = {'single': (5,), 'regular': (3, 3), 'ragged': (4, 0, 1, 3)}
ANCHORS = {'single': (3,), 'regular': (2, 2), 'ragged': (2, 0, 1, 2)}
NUM_FEATURES = 4


@dataclass
class Case:
    """An operator and its matrix, as functions of leaves."""

    leaves: tuple[Tensor, ...]
    make: Callable[..., Affinity]
    dense: Callable[..., Tensor]
    rows: Layout
    cols: Layout
    signal: Signal  # of the columns

    @property
    def square(self) -> bool:
        return self.rows == self.cols

    @property
    def symmetric(self) -> bool:
        return self.make(*self.leaves).symmetric


def uniform(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def layout(sizes) -> Layout:
    return Layout(sizes, CPU)


def bag_of_words(n, seed=5):
    """Features with zeros, none negative, no row empty and no two parallel."""
    x = uniform(n, NUM_FEATURES, seed=seed)
    x = x * (x > 0.6)
    x[:, :2] += uniform(n, 2, seed=seed + 1)
    return x


def blocks(rows: Layout, cols: Layout):
    """The rows and columns of each graph."""
    for g in range(rows.num_graphs):
        yield (
            slice(rows.ptr[g], rows.ptr[g + 1]),
            slice(cols.ptr[g], cols.ptr[g + 1]),
        )


def block_diagonal(scores: Tensor, rows: Layout, cols: Layout) -> Tensor:
    out = torch.zeros_like(scores)
    for i, j in blocks(rows, cols):
        mask = torch.zeros_like(scores)
        mask[i, j] = 1.0
        out = out + mask * scores
    return out


def anchor_index(rows: Layout, cols: Layout) -> Tensor:
    """The last nodes of every graph are its anchors."""
    index = [
        torch.arange(rows.ptr[g + 1] - cols.sizes[g], rows.ptr[g + 1])
        for g in range(rows.num_graphs)
    ]
    return torch.cat(index)


def make_signal(rows: Layout, sparse: bool) -> Signal:
    x = bag_of_words(rows.num_rows)
    return Signal(SparseMatrix.from_dense(x) if sparse else x, rows)


EPSILON = 0.45

# How an operator is made from similarities, and what it removes.
FORMS = {
    'dense': (0.0, None),
    'dense-eps': (EPSILON, None),
    'dense-top': (0.0, 2),
    'dense-both': (EPSILON, 2),
    'tiled': (0.0, None),
    'tiled-eps': (EPSILON, None),
    'tiled-top': (0.0, 2),
    'sparse': (0.0, None),
    'sparse-eps': (EPSILON, None),
    'sparse-top': (0.0, 2),
}


def from_scores(form: str, scores) -> Affinity:
    epsilon, top_k = FORMS[form]
    if form.startswith('tiled'):
        return TiledGraph(scores, epsilon, top_k)
    if form.startswith('sparse'):
        return SparseGraph.from_scores(scores, epsilon, top_k)
    value = sparsify(scores.dense(), epsilon, top_k)
    symmetric = scores.symmetric and top_k is None
    return DenseGraph(value, scores.rows, scores.cols, symmetric)


def plain_sparsify(form: str, scores: Tensor) -> Tensor:
    epsilon, top_k = FORMS[form]
    keep = scores > epsilon
    if top_k is not None:
        largest = torch.zeros_like(keep)
        for i, row in enumerate(scores.detach()):
            for j in row.argsort(descending=True)[:top_k]:
                largest[i, j] = True
        keep = keep & largest
    return torch.where(keep, scores, 0.0)


def inner_case(form, sizes, anchors=None, seed=0) -> Case:
    """Inner products of embeddings of any sign."""
    rows = layout(sizes)
    cols = rows if anchors is None else layout(anchors)
    leaves = [uniform(rows.num_rows, 3, seed=seed) * 1.5 - 0.5]
    if anchors is not None:
        leaves.append(uniform(cols.num_rows, 3, seed=seed + 50) * 1.5 - 0.5)

    def make(u, v=None):
        return from_scores(form, InnerScores(u, v, rows, cols))

    def dense(u, v=None):
        scores = u @ (u if v is None else v).t()
        return plain_sparsify(form, block_diagonal(scores, rows, cols))

    return Case(tuple(leaves), make, dense, rows, cols, _targets(rows, cols))


def pair_case(form, sizes, anchors=None, seed=0) -> Case:
    """A kernel that is no inner product, with parameters of its own."""
    rows = layout(sizes)
    cols = rows if anchors is None else layout(anchors)
    metric = _ScaledKernel()
    leaves = [uniform(rows.num_rows, 3, seed=seed)]
    if anchors is not None:
        leaves.append(uniform(cols.num_rows, 3, seed=seed + 50))

    def make(u, v=None):
        return from_scores(form, PairScores(metric, u, v, rows, cols, True))

    def dense(u, v=None):
        v = u if v is None else v
        scores = torch.exp(-2.0 * (u.unsqueeze(1) - v).square().sum(2))
        return plain_sparsify(form, block_diagonal(scores, rows, cols))

    return Case(tuple(leaves), make, dense, rows, cols, _targets(rows, cols))


class _ScaledKernel(RBF):
    def __init__(self):
        super().__init__(3, 3)
        self.double()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def pair(self, u, v):
        return super().pair(self.scale * u, self.scale * v)


def weighted_dense(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Eq. 1 and 2."""
    total = 0.0
    for w_p in w:
        a, b = w_p * x, w_p * y
        norms = a.square().sum(1).sqrt().unsqueeze(1) * b.square().sum(1).sqrt()
        total = total + (a @ b.t()) / norms
    return total / len(w)


def weighted_case(form, sizes, anchors=None, seed=0) -> Case:
    """Weighted cosines of sparse features."""
    rows = layout(sizes)
    cols = rows if anchors is None else layout(anchors)
    index = None if anchors is None else anchor_index(rows, cols)
    signal = make_signal(rows, sparse=True)
    x = signal.to_dense()
    leaves = (uniform(2, NUM_FEATURES, seed=seed) + 0.2,)

    def make(w):
        return from_scores(form, WeightedScores(WeightedFactor(signal, w), index, cols))

    def dense(w):
        scores = weighted_dense(x, x if index is None else x[index], w)
        return plain_sparsify(form, block_diagonal(scores, rows, cols))

    targets = signal if index is None else signal.rows(index, cols)
    return Case(leaves, make, dense, rows, cols, targets)


def low_rank_case(kind, sizes, anchors=None, seed=0) -> Case:
    """Factored forms, where nothing is removed."""
    rows = layout(sizes)
    cols = rows if anchors is None else layout(anchors)
    if kind == 'factor':
        leaves = [uniform(rows.num_rows, 3, seed=seed)]
        if anchors is not None:
            leaves.append(uniform(cols.num_rows, 3, seed=seed + 50))

        def make(u, v=None):
            right = None if v is None else DenseFactor(v, cols)
            return LowRankGraph(DenseFactor(u, rows), right)

        def dense(u, v=None):
            return block_diagonal(u @ (u if v is None else v).t(), rows, cols)

        return Case(tuple(leaves), make, dense, rows, cols, _targets(rows, cols))

    signal = make_signal(rows, sparse=kind == 'sparse-x')
    x = signal.to_dense()
    leaves = (uniform(2, NUM_FEATURES, seed=seed) + 0.2,)
    index = None if anchors is None else anchor_index(rows, cols)

    def make_weighted(w):
        factor = WeightedFactor(signal, w)
        right = None if index is None else SelectedFactor(factor, index, cols)
        return LowRankGraph(factor, right)

    def dense_weighted(w):
        scores = weighted_dense(x, x if index is None else x[index], w)
        return block_diagonal(scores, rows, cols)

    targets = signal if index is None else signal.rows(index, cols)
    return Case(leaves, make_weighted, dense_weighted, rows, cols, targets)


def scaled_case(sizes, anchors=None, seed=0) -> Case:
    """A dropout mask on the columns of another graph."""
    case = inner_case('dense-eps', sizes, anchors, seed)
    scale = uniform(case.cols.num_rows, seed=seed + 9)
    return Case(
        case.leaves,
        lambda *leaves: ColumnScaled(case.make(*leaves), scale),
        lambda *leaves: case.dense(*leaves) * scale,
        case.rows,
        case.cols,
        case.signal,
    )


def _targets(rows: Layout, cols: Layout) -> Signal:
    signal = make_signal(rows, sparse=False)
    return signal if rows is cols else signal.rows(anchor_index(rows, cols), cols)


BUILDERS: dict[str, Callable[..., Case]] = {}
for _form in FORMS:
    BUILDERS[f'{_form}/inner'] = lambda s, a=None, seed=0, f=_form: inner_case(
        f, s, a, seed
    )
for _form in ('dense-eps', 'tiled-eps', 'sparse-eps'):
    BUILDERS[f'{_form}/pair'] = lambda s, a=None, seed=0, f=_form: pair_case(
        f, s, a, seed
    )
    BUILDERS[f'{_form}/weighted'] = lambda s, a=None, seed=0, f=_form: weighted_case(
        f, s, a, seed
    )
for _kind in ('factor', 'dense-x', 'sparse-x'):
    BUILDERS[f'low_rank/{_kind}'] = lambda s, a=None, seed=0, k=_kind: low_rank_case(
        k, s, a, seed
    )
BUILDERS['column_scaled'] = scaled_case


def square_case(name: str, batch: str, seed: int = 0) -> Case:
    return BUILDERS[name](SIZES[batch], None, seed=seed)


def anchor_case(name: str, batch: str, seed: int = 0) -> Case:
    return BUILDERS[name](SIZES[batch], ANCHORS[batch], seed=seed)
