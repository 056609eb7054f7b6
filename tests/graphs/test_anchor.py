"""Eq. 5 to 7: graphs recovered from a node-anchor affinity."""

import pytest
import torch

from tests.graphs.cases import ANCHORS, SIZES, anchor_case, blocks, uniform
from torch_geometric_idgl.graphs import AnchorGraph, DenseGraph, Signal
from torch_geometric_idgl.ops import Layout

NAMES = ['dense/inner', 'tiled/inner', 'sparse/inner', 'low_rank/factor']
NAMES += [
    'low_rank/dense-x',
    'low_rank/sparse-x',
    'dense-eps/weighted',
    'column_scaled',
]


def recovered(case, r):
    """The matrices A, B and B-hat of the paper, of each graph."""
    for i, j in blocks(case.rows, case.cols):
        block = r[i, j]
        delta = torch.diag(1.0 / block.sum(1).clamp(min=1e-12))
        lam = torch.diag(1.0 / block.sum(0).clamp(min=1e-12))
        a = delta @ block @ lam @ block.t()
        b = lam @ block.t() @ delta @ block
        yield a, b, block.t() @ delta @ block


@pytest.mark.parametrize('batch', list(SIZES))
@pytest.mark.parametrize('name', ['low_rank/factor', 'dense-eps/weighted'])
def test_eq_5_6_7(name, batch):
    case = anchor_case(name, batch)
    r = case.dense(*case.leaves)
    graph = AnchorGraph(case.make(*case.leaves))
    f = uniform(case.rows.num_rows, 2, seed=1)
    a, b, b_hat = zip(*recovered(case, r), strict=True)
    dense = torch.block_diag(*a)

    n = case.rows.num_rows
    assert graph.shape == (n, n)
    assert str(graph) == f'AnchorGraph({n}, {n})'
    torch.testing.assert_close(graph.to_dense(), dense)
    torch.testing.assert_close(graph.matmul(f), dense @ f)  # MP12(F, R) = A F
    torch.testing.assert_close(graph.mp2(graph.mp1(f)), graph.matmul(f))
    assert graph.mp1(f).shape == (case.cols.num_rows, 2)
    torch.testing.assert_close(graph.row_sum(), torch.ones(n, dtype=torch.float64))

    rows = graph.anchor_graph(normalize=True)
    for g, size in enumerate(ANCHORS[batch]):
        torch.testing.assert_close(rows[g, :size, :size], b[g])
        ones = torch.ones(size, dtype=torch.float64)
        torch.testing.assert_close(rows[g].sum(1)[:size], ones)
        torch.testing.assert_close(graph.anchor_graph()[g, :size, :size], b_hat[g])
        torch.testing.assert_close(b_hat[g], b_hat[g].t())


@pytest.mark.parametrize('batch', list(SIZES))
@pytest.mark.parametrize('name', NAMES)
def test_regularised_quantities_are_those_of_b_hat(name, batch):
    case = anchor_case(name, batch)
    leaves = [leaf.clone().abs().requires_grad_() for leaf in case.leaves]
    r = case.dense(*leaves)
    x = case.signal.to_dense()
    norms, energies, degrees = [], [], []
    pieces = zip(recovered(case, r), blocks(case.rows, case.cols), strict=True)
    for (_, _, b), (_, j) in pieces:
        norms.append(b.square().sum())
        degrees.append(b.sum(1))
        laplacian = torch.diag(b.sum(1)) - b
        energies.append(torch.trace(x[j].t() @ laplacian @ x[j]))
    for ask, expected in [
        (lambda graph: graph.sq_norm(), torch.stack(norms)),
        (lambda graph: graph.degree(), torch.cat(degrees)),
        (lambda graph: graph.dirichlet_energy(case.signal), torch.stack(energies)),
    ]:
        actual = ask(AnchorGraph(case.make(*leaves)))
        torch.testing.assert_close(actual, expected)
        cotangent = uniform(*expected.shape, seed=2)
        grads = torch.autograd.grad((actual * cotangent).sum(), leaves)
        wanted = torch.autograd.grad(
            (expected * cotangent).sum(), leaves, retain_graph=True
        )
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)


def test_wide_and_narrow_features_give_the_same_energy():
    """The trace goes through anchors or through features, whichever are fewer."""
    layout, anchors = (
        Layout((6,), torch.device('cpu')),
        Layout((3,), torch.device('cpu')),
    )
    value = uniform(1, 6, 3, seed=0)
    for width in (1, 2, 3, 4, 9):
        x = uniform(3, width, seed=width)
        graph = AnchorGraph(DenseGraph(value, layout, anchors))
        (b,) = graph.anchor_graph()
        laplacian = torch.diag(b.sum(1)) - b
        torch.testing.assert_close(
            graph.dirichlet_energy(Signal(x, anchors)),
            torch.trace(x.t() @ laplacian @ x).unsqueeze(0),
        )


def test_nodes_and_anchors_without_affinity_stay_finite():
    value = torch.tensor([[[0.5, 0.0], [0.0, 0.0], [0.25, 0.0]]], requires_grad=True)
    cpu = torch.device('cpu')
    graph = AnchorGraph(DenseGraph(value, Layout((3,), cpu), Layout((2,), cpu)))
    f = torch.eye(3)
    out = graph.matmul(f)
    assert out[1].tolist() == [0.0, 0.0, 0.0]
    signal = Signal(torch.rand(2, 4), Layout((2,), cpu))
    total = out.sum() + graph.sq_norm().sum() + graph.dirichlet_energy(signal).sum()
    total.backward()
    assert bool(torch.isfinite(value.grad).all())
