"""How anchors are chosen."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from tests.nn.common import (
    assert_close,
    make_graph,
    make_model,
    reference_of,
)
from torch_geometric_idgl.nn import IDGL, IDGLAnch
from torch_geometric_idgl.nn.inputs import sample_anchors
from torch_geometric_idgl.ops import Nodes


def drawn(model, x, edge_index):
    """The anchors of one forward pass, by what their columns are."""
    _, trace = model(x, edge_index, return_trace=True, max_iters=0)
    similar = model.feature_learner.metric(x)
    columns = trace.first.to_dense().t()
    return [
        min(range(x.size(0)), key=lambda j: (similar[:, j] - c).abs().max().item())
        for c in columns.unbind(0)
    ]


def test_anchor_sampling():
    x, edge_index = make_graph(20, dtype=torch.float64)

    def draws(mode, train, seeds=(1, 2, 3)):
        model = make_model(IDGLAnch, num_anchors=5, anchor_sampling=mode).double()
        model.train(train)
        out = []
        for seed in seeds:
            torch.manual_seed(seed)
            out.append(tuple(drawn(model, x, edge_index)))
        return out

    for train in (True, False):
        assert len(set(draws('resample', train))) == 3
        assert len(set(draws('fixed', train))) == 1
    assert len(set(draws('seeded', True))) == 3
    assert len(set(draws('seeded', False))) == 1
    assert draws('fixed', True)[0] == draws('fixed', False)[0]
    assert draws('resample', True) == draws('resample', True)
    for anchors in draws('resample', True):
        assert len(set(anchors)) == 5  # without replacement

    model = make_model(IDGLAnch, anchor_sampling='fixed', anchor_seed=5).double()
    other = make_model(IDGLAnch, anchor_sampling='fixed', anchor_seed=6).double()
    assert drawn(model, x, edge_index) != drawn(other, x, edge_index)


def test_seeded_anchors_leave_the_global_generator_alone():
    x, edge_index = make_graph(20)
    model = make_model(IDGLAnch, anchor_sampling='fixed').eval()
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    model(x, edge_index)
    assert torch.equal(torch.rand(1), expected)


def test_number_of_anchors():
    x, edge_index = make_graph(20)
    for options, expected in [
        ({'num_anchors': 7}, 7),
        ({'num_anchors': 200}, 20),
        ({'anchor_ratio': 0.5}, 10),
        ({'anchor_ratio': 0.01}, 1),
        ({'anchor_ratio': 1.0}, 20),
        ({}, 20),  # 300 by default
    ]:
        model = IDGLAnch(6, 8, 2, 3, **options)
        _, trace = model(x, edge_index, return_trace=True)
        assert trace.first.shape == (20, expected)


def test_anchor_index():
    x, edge_index = make_graph(dtype=torch.float64)
    model = make_model(IDGLAnch).double().eval()
    index = torch.tensor([8, 1, 3])
    assert drawn(model, x, edge_index) != [8, 1, 3]
    out, trace = model(x, edge_index, anchor_index=index, return_trace=True)
    run = reference_of(model, x, trace.initial.to_dense(), index)
    assert_close(out, run.outs[-1], 1e-9)
    assert_close(model(x, edge_index, anchor_index=index.int()), out, 1e-9)
    assert_close(model(x, edge_index, anchor_index=index.flip(0)), out, 1e-9)


def test_scaled_regulariser():
    """It changes the regulariser alone, and with all nodes as anchors not even that."""
    x, edge_index = make_graph(20, dtype=torch.float64)
    options = {'smoothness': 0.3, 'connectivity': 0.2, 'sparsity': 0.4}

    def traces(index):
        for scaled in (True, False):
            model = make_model(IDGLAnch, scale_regularizer=scaled, **options).double()
            yield model(x, edge_index, anchor_index=index, return_trace=True)[1]

    scaled, plain = traces(torch.tensor([2, 3, 7, 11, 19]))
    assert torch.equal(scaled.out, plain.out)
    assert 3.0 * scaled.reg < plain.reg
    scaled, plain = traces(torch.arange(20))
    for reg, other in zip(scaled.regs, plain.regs, strict=True):
        assert_close(reg, other, 1e-9)


def test_all_nodes_as_anchors_of_a_batch():
    graphs = [
        Data(x=x, edge_index=e) for x, e in (make_graph(5), make_graph(4, seed=1))
    ]
    model = IDGLAnch(6, 8, 2, 3).eval()
    out = model(Batch.from_data_list(graphs))
    single = torch.cat([model(data) for data in graphs])
    assert_close(out, single, 1e-4)


def test_defaults():
    """Those of the paper for Cora, but for fewer anchors and their regulariser."""
    model, anchored = IDGL(6, 8, 2), IDGLAnch(6, 8, 2)
    assert isinstance(anchored, IDGL)
    assert (model.tol, model.sparsity) == (4e-5, 0.0)
    assert (anchored.tol, anchored.sparsity) == (8.5e-5, 0.1)
    assert anchored.num_anchors == 300 and anchored.scale_regularizer
    for m in (model, anchored):
        assert (m.initial_weight, m.update_weight, m.max_iters) == (0.8, 0.1, 10)
        assert (m.smoothness, m.connectivity, m.k) == (0.2, 0.0, 20)


@pytest.mark.parametrize('ratio, size, count', [(0.07, 100, 7), (0.14, 50, 7)])
@pytest.mark.parametrize('extra', [0, 1])
def test_shares_are_rounded_up_but_not_for_rounding_errors(ratio, size, count, extra):
    nodes = Nodes((size + extra,), torch.device('cpu'))
    assert sample_anchors(nodes, None, ratio).index.numel() == count + extra


def predictions(model, x, edge_index, count=3):
    with torch.no_grad():
        return [model(x, edge_index) for _ in range(count)]


def test_evaluation_is_repeatable_by_default(tmp_path):
    """Also of a model that is loaded into one with another seed."""
    x, edge_index = make_graph(30)
    model = IDGLAnch(6, 8, 2, 3, num_anchors=5, anchor_seed=3)
    assert (
        len({tuple(o.flatten().tolist()) for o in predictions(model, x, edge_index)})
        > 1
    )
    first, *others = predictions(model.eval(), x, edge_index)
    assert all(torch.equal(first, other) for other in others)

    torch.save(model.state_dict(), tmp_path / 'model.pt')
    loaded = IDGLAnch(6, 8, 2, 3, num_anchors=5, anchor_seed=4).eval()
    assert not torch.equal(loaded(x, edge_index), first)
    loaded.load_state_dict(torch.load(tmp_path / 'model.pt', weights_only=True))
    assert torch.equal(loaded(x, edge_index), first)
    assert int(loaded.anchor_seed) == 3

    again = IDGLAnch(6, 8, 2, 3, num_anchors=5, anchor_sampling='resample')
    again.load_state_dict(model.state_dict())
    outs = predictions(again.eval(), x, edge_index)
    assert not torch.equal(outs[0], outs[1])


def test_seed_keeps_its_type():
    """Casting a model casts floating-point numbers only."""
    x, edge_index = make_graph(30)
    for seed in (0, 2**40 + 1, 2**63 - 1):
        model = IDGLAnch(6, 8, 2, 3, num_anchors=5, anchor_seed=seed).half().double()
        assert int(model.anchor_seed) == seed
        assert model.eval()(x.double(), edge_index).isfinite().all()
