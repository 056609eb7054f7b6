"""The models against the plain Algorithm 1, for random hyper-parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.func import functional_call

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    cross_entropy,
    gradients,
    joint_loss,
    labels,
    loss_and_gradients,
    make_graph,
    make_model,
    reference_of,
    weights_of,
)
from torch_geometric_idgl.nn import IDGL, IDGLAnch

BACKENDS = ['dense', 'low_rank', 'tiled', 'sparse']  # 'auto' is one of them
unit = st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0])
weight = st.sampled_from([0.0, 0.2, 1.0])


@st.composite
def problems(draw):
    n, d = draw(st.integers(2, 12)), draw(st.integers(1, 6))
    negative = draw(st.booleans())
    epsilon = draw(st.sampled_from([0.0, 0.2, 0.6]))
    backends = ['auto', 'dense', 'tiled', 'sparse']
    if not negative and epsilon == 0.0:
        backends.append('low_rank')
    sampling = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)
    return {
        'shape': (d, draw(st.integers(1, 5)), draw(st.integers(1, 3)), 3),
        'seed': draw(st.integers(0, 1000)),
        'graph': {'n': n, 'd': d, 'negative': negative},
        'anchors': torch.tensor(draw(sampling)),
        'scaled': draw(st.booleans()),
        'options': {
            'heads': draw(st.integers(1, 3)),
            'epsilon': epsilon,
            'initial_weight': draw(unit),
            'update_weight': draw(unit),
            'smoothness': draw(weight),
            'connectivity': draw(weight),
            'sparsity': draw(weight),
            'tol': draw(st.sampled_from([None, 1e-3, 0.3])),
            'max_iters': draw(st.integers(0, 4)),
            'backend': draw(st.sampled_from(backends)),
        },
    }


def compare(cls, problem, dtype, tol):
    x, edge_index = make_graph(
        **problem['graph'], seed=problem['seed'] + 1, dtype=torch.float64
    )
    x = x.to(dtype)
    options = dict(problem['options'])
    if cls is IDGLAnch:
        options['scale_regularizer'] = problem['scaled']
    model = make_model(cls, *problem['shape'], seed=problem['seed'], **options)
    model = model.to(dtype).eval()
    anchors = problem['anchors'] if cls is IDGLAnch else None
    y = labels(x.size(0))
    _, trace = model(x, edge_index, return_trace=True, anchor_index=anchors)
    run = reference_of(model, x, trace.initial.to_dense(), anchors)

    assert trace.num_iters.tolist() == [run.num_iters]
    for out, expected in zip(trace.outs, run.outs, strict=True):
        assert_close(out, expected, tol)
    for reg, expected in zip(trace.regs, run.regs, strict=True):
        torch.testing.assert_close(reg, expected.view(1), rtol=tol, atol=tol)
    for delta, expected in zip(trace.deltas, run.deltas, strict=False):
        torch.testing.assert_close(
            delta, expected.detach().view(1), rtol=100 * tol, atol=tol
        )
    assert_close(trace.first.to_dense(), run.learned[0], tol)
    assert_close(trace.learned.to_dense(), run.learned[-1], tol)
    assert_close(trace.mixed.to_dense(), run.mixed[-1], tol)

    loss, expected = trace.loss(cross_entropy(y)), run.loss(cross_entropy(y))
    assert_close(loss, expected, tol)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    # A gradient may vanish (a cosine of numbers), and then only rounding is left of it.
    scale = max(float(g.abs().max()) for g in wanted if g is not None)
    for p, grad, other in zip(parameters, grads, wanted, strict=True):
        zero = torch.zeros_like(p)
        grad, other = (zero if g is None else g for g in (grad, other))
        assert float((grad - other).abs().max()) <= 10 * tol * max(scale, 1e-2)


@pytest.mark.parametrize('cls', MODELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems())
def test_double_precision(cls, problem):
    compare(cls, problem, torch.float64, 1e-9)


@pytest.mark.parametrize('cls', MODELS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=problems())
def test_single_precision(cls, problem):
    problem['options']['tol'] = None  # near the tolerance, rounding decides
    compare(cls, problem, torch.float32, 1e-4)


@pytest.mark.parametrize(
    'backend,epsilon',
    [
        ('low_rank', 0.0),
        ('dense', 0.3),
        ('tiled', 0.0),
        ('tiled', 0.3),
        ('sparse', 0.3),
    ],
)
@pytest.mark.parametrize('cls', MODELS)
def test_gradcheck_of_the_whole_loss(cls, backend, epsilon):
    x, edge_index = make_graph(6, 3, dtype=torch.float64, seed=3)
    options = {'smoothness': 0.3, 'connectivity': 0.2, 'sparsity': 0.4}
    model = make_model(
        cls,
        *(3, 4, 2, 2),
        heads=2,
        epsilon=epsilon,
        backend=backend,
        tol=None,
        max_iters=2,
        initial_weight=0.4,
        update_weight=0.6,
        **options,
    )
    model = model.double().eval()
    names = [name for name, _ in model.named_parameters()]
    fn = cross_entropy(labels(6, 2))

    def loss(*parameters):
        given = dict(zip(names, parameters, strict=True))
        _, trace = functional_call(
            model, given, (x, edge_index), {'return_trace': True}
        )
        return trace.loss(fn)

    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert gradcheck(loss, parameters, fast_mode=True)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_gradients_reach_features_and_edge_weights(cls, backend):
    """For models whose features (or graphs) are learned by other modules."""
    x, edge_index = make_graph(8, 4, dtype=torch.float64)
    x = x + 0.1
    model = make_model(
        cls,
        *(4, 5, 2, 3),
        backend=backend,
        tol=None,
        max_iters=2,
        sparsity=0.3,
        connectivity=0.2,
        normalize=False,
    )
    model = model.double().eval()
    anchors = torch.tensor([0, 3, 6]) if cls is IDGLAnch else None
    value = torch.linspace(0.1, 1.0, edge_index.size(1), dtype=torch.float64)
    leaves = x.requires_grad_(), value.requires_grad_()
    fn = cross_entropy(labels(8))
    _, trace = model(x, edge_index, value, return_trace=True, anchor_index=anchors)
    grads = torch.autograd.grad(trace.loss(fn), leaves)

    initial = torch.zeros(8, 8, dtype=torch.float64)
    index = (edge_index[1], edge_index[0])
    initial = initial.index_put(index, value, accumulate=True)
    run = reference_of(model, x, initial, anchors)
    wanted = torch.autograd.grad(run.loss(fn), leaves)
    for grad, other in zip(grads, wanted, strict=True):
        assert_close(grad, other, 1e-8)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_partial_and_repeated_gradients(cls, backend):
    """As multi-task methods need them: some parameters first, losses one by one."""
    x, edge_index = make_graph(8, dtype=torch.float64)
    model = make_model(cls, backend=backend, tol=None, max_iters=2).double().eval()
    expected = loss_and_gradients(model, x, edge_index)[1]

    for subset in ([-1], [0], [2]):
        model.zero_grad()
        loss, trace = joint_loss(model, x, edge_index)
        chosen = [list(model.parameters())[i] for i in subset]
        torch.autograd.grad(loss, chosen, retain_graph=True, allow_unused=True)
        loss.backward()
        for name, grad in gradients(model).items():
            assert_close(grad, expected[name], 1e-9)

    model.zero_grad()
    loss, trace = joint_loss(model, x, edge_index)
    fn = cross_entropy(labels(8))
    trace.reg.backward(retain_graph=True)
    trace.prediction_loss(fn).backward(retain_graph=True)
    loss.backward()
    for name, grad in gradients(model).items():
        assert_close(grad, 2 * expected[name], 1e-9)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('cls', MODELS)
def test_second_derivatives_are_right_or_refused(cls, backend):
    x, edge_index = make_graph(6, dtype=torch.float64)
    model = make_model(cls, backend=backend, tol=None, max_iters=1).double().eval()
    anchors = torch.tensor([0, 3]) if cls is IDGLAnch else None
    parameters = list(model.parameters())
    fn = cross_entropy(labels(6))

    def penalty(loss):
        model.zero_grad()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        return gradients(model).values()

    def penalty_of_inputs(loss):
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        return torch.autograd.grad(total, parameters)

    for derive in (penalty, penalty_of_inputs):
        _, trace = model(x, edge_index, return_trace=True, anchor_index=anchors)
        run = reference_of(model, x, trace.initial.to_dense(), anchors)
        wanted = derive(run.loss(fn))
        try:
            grads = derive(trace.loss(fn))
        except RuntimeError:
            continue
        for grad, other in zip(grads, wanted, strict=True):
            assert_close(grad, other, 1e-6)


@pytest.mark.parametrize('cls', MODELS)
def test_permutation_equivariance(cls):
    x, edge_index = make_graph(9, dtype=torch.float64)
    torch.manual_seed(2)
    perm = torch.randperm(9)
    place = torch.empty_like(perm)
    place[perm] = torch.arange(9)
    anchors = torch.tensor([0, 2, 7]) if cls is IDGLAnch else None
    moved = None if anchors is None else place[anchors]
    model = make_model(cls).double().eval()
    y = labels(9)
    before = loss_and_gradients(model, x, edge_index, anchor_index=anchors, y=y)
    after = loss_and_gradients(
        model, x[perm], place[edge_index], anchor_index=moved, y=y[perm]
    )
    assert_close(after[2].out, before[2].out[perm], 1e-9)
    assert_close(after[0], before[0], 1e-9)
    assert torch.equal(after[2].num_iters, before[2].num_iters)
    for name, grad in before[1].items():
        assert_close(after[1][name], grad, 1e-8)


@pytest.mark.parametrize('cls', MODELS)
def test_permutation_equivariance_of_the_knn_graph(cls):
    x, _ = make_graph(9, dtype=torch.float64, negative=True)
    perm = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    place = torch.argsort(perm)
    anchors = torch.tensor([0, 2, 7]) if cls is IDGLAnch else None
    moved = None if anchors is None else place[anchors]
    model = make_model(cls, k=3).double().eval()
    out = model(x, anchor_index=anchors)
    assert_close(model(x[perm], anchor_index=moved), out[perm], 1e-9)


@pytest.mark.parametrize('cls', MODELS)
def test_inductive(cls):
    """Nothing depends on the number of nodes."""
    model = make_model(cls).eval()
    small, large = make_graph(7), make_graph(23, seed=1)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert not {7, 23} & {size for shape in shapes.values() for size in shape}
    assert model(*small).shape == (7, 3)
    assert model(*large).shape == (23, 3)
    result = loss_and_gradients(model, *large)
    assert all_finite(result)
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == shapes

    other = make_model(cls, seed=5).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*large), model(*large))


def test_same_weights_serve_both_models():
    """Every parameter of IDGL-Anch is one of IDGL, and all nodes may be anchors."""
    model, anchored = make_model(IDGL), make_model(IDGLAnch, seed=3)
    state = {**model.state_dict(), 'anchor_seed': anchored.anchor_seed}
    anchored.load_state_dict(state)
    for mine, other in zip(weights_of(model)[0], weights_of(anchored)[0], strict=True):
        assert torch.equal(mine, other)
    assert gradients(model).keys() == gradients(anchored).keys()
