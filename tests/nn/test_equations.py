"""The mixtures of the paper (Eq. 3 and 9) and its own numbers."""

import pytest
import torch

from tests.nn.common import MODELS, make_graph, make_model, reference_of
from torch_geometric_idgl.nn import IDGL, IDGLAnch

N = 10
ANCHORS = torch.tensor([1, 4, 5, 8])


def normalized(edge_index, n, self_loops=True):
    """D^-1/2 (A + I) D^-1/2, with A_ij an edge from j to i."""
    a = torch.zeros(n, n, dtype=torch.float64)
    for source, target in edge_index.t().tolist():
        a[target, source] += 1.0
    if self_loops:
        a = a + torch.eye(n, dtype=torch.float64)
    scale = a.sum(1).rsqrt().nan_to_num(0, 0, 0)
    return scale.unsqueeze(1) * a * scale


def run(cls, **kwargs):
    x, edge_index = make_graph(N, dtype=torch.float64)
    model = make_model(cls, 6, 8, 2, 3, **kwargs).double().eval()
    options = {'anchor_index': ANCHORS} if cls is IDGLAnch else {}
    out, trace = model(x, edge_index, return_trace=True, **options)
    return model, x, edge_index, out, trace


def test_number_of_parameters_is_the_papers():
    model = IDGL(1433, 16, 2, 7)
    assert sum(p.numel() for p in model.parameters()) == 28_836
    model = IDGLAnch(1433, 16, 2, 7)
    assert sum(p.numel() for p in model.parameters()) == 28_836


@pytest.mark.parametrize('cls', MODELS)
def test_initial_graph(cls):
    _, _, edge_index, _, trace = run(cls)
    torch.testing.assert_close(trace.initial.to_dense(), normalized(edge_index, N))
    _, _, edge_index, _, trace = run(cls, add_self_loops=False)
    expected = normalized(edge_index, N, self_loops=False)
    torch.testing.assert_close(trace.initial.to_dense(), expected)
    _, _, edge_index, _, trace = run(cls, normalize=False)
    assert set(trace.initial.to_dense().unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize('cls', MODELS)
@pytest.mark.parametrize('lam,eta', [(0.8, 0.1), (0.0, 1.0), (1.0, 0.5), (0.3, 0.0)])
def test_mixture(cls, lam, eta):
    """Eq. 3, and Eq. 9 with A recovered from R by Eq. 5."""
    options = {'initial_weight': lam, 'update_weight': eta, 'max_iters': 2}
    model, x, edge_index, out, trace = run(cls, tol=None, **options)

    def f(r):
        if cls is IDGL:
            return r / r.sum(1, keepdim=True)
        r_rows, r_cols = torch.diag(1 / r.sum(1)), torch.diag(1 / r.sum(0))
        return r_rows @ r @ r_cols @ r.t()

    learned = eta * f(trace.learned.to_dense()) + (1 - eta) * f(trace.first.to_dense())
    expected = lam * normalized(edge_index, N) + (1 - lam) * learned
    torch.testing.assert_close(trace.mixed.to_dense(), expected)
    if lam < 1:
        rows = (1 - lam) * learned.sum(1)
        torch.testing.assert_close(rows, torch.full_like(rows, 1 - lam))

    first, second = (conv.lin.weight.t() for conv in model.backbone.convs)
    z = torch.relu(expected @ x @ first)  # Eq. 4
    torch.testing.assert_close(out, expected @ z @ second)
    anchors = ANCHORS if cls is IDGLAnch else None
    reference = reference_of(model, x, normalized(edge_index, N), anchors)
    torch.testing.assert_close(reference.mixed[-1], expected)


@pytest.mark.parametrize('cls', MODELS)
def test_without_iteration_the_mixture_is_of_the_first_graph(cls):
    _, _, edge_index, _, trace = run(cls, max_iters=0, initial_weight=0.25)
    assert trace.learned is trace.first
    r = trace.first.to_dense()
    f = r / r.sum(1, keepdim=True)
    if cls is IDGLAnch:
        f = f @ (r / r.sum(0)).t()
    expected = 0.25 * normalized(edge_index, N) + 0.75 * f
    torch.testing.assert_close(trace.mixed.to_dense(), expected)


def test_knn_graph_where_none_is_given():
    x, _ = make_graph(N, dtype=torch.float64)
    model = make_model(IDGL, 6, 8, 2, 3, k=3).double().eval()
    _, trace = model(x, return_trace=True)
    cosines = torch.nn.functional.cosine_similarity(x.unsqueeze(1), x.unsqueeze(0), 2)
    a = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        a[i, cosines[i].topk(3).indices] = 1.0
        assert a[i, i] == 1.0
    torch.testing.assert_close(trace.initial.to_dense(), a.t() / 3)
