"""The numbers of the paper's authors' implementation, recorded in files."""

import ast
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.nn.common import assert_close, set_weights
from tests.reference import idgl_reference
from torch_geometric_idgl.nn import IDGL, IDGLAnch

FIXTURES = Path(__file__).parents[1] / 'fixtures'
BESIDE = Path(
    os.environ.get('IDGL_ORACLE', Path(__file__).parents[3] / 'shared/oracle')
)

FILES = {path.stem: path for path in sorted(BESIDE.glob('*.npz'))}
for name in ('cora400_idgl', 'cora400_idgl_anch'):
    FILES.setdefault(name, BESIDE / f'{name}.npz')
FILES.update({path.stem: path for path in sorted(FIXTURES.glob('*.npz'))})


class Oracle:
    def __init__(self, name):
        path = FILES[name]
        if not path.exists():
            pytest.skip(
                f"needs '{path}' (set IDGL_ORACLE to the directory that has it)"
            )
        with np.load(path) as data:
            self.numbers = {
                key: torch.from_numpy(np.asarray(value))
                for key, value in data.items()
                if key != 'hyper'
            }
            self.hyper = ast.literal_eval(str(data['hyper']))

    def __getattr__(self, key):
        return self.numbers[key]

    @property
    def anchors(self):
        return self.numbers.get('anchor_index')

    @property
    def weights(self):
        return [self.W1, self.W2], self.w_raw, self.w_hidden

    def loss(self, out):
        return F.cross_entropy(out[self.train_index], self.y[self.train_index])

    def model(self, backend='auto', tol=None):
        hyper = self.hyper
        anchored = self.anchors is not None
        model = (IDGLAnch if anchored else IDGL)(
            self.x.size(1),
            self.W1.size(1),
            2,
            self.W2.size(1),
            heads=hyper['heads'],
            epsilon=hyper['eps'],
            initial_weight=hyper['lam'],
            update_weight=hyper['eta'],
            tol=tol,
            max_iters=hyper['T'],
            smoothness=hyper['alpha'],
            connectivity=hyper['beta'],
            sparsity=hyper['gamma'],
            normalize=False,
            backend=backend,
            **({'scale_regularizer': False} if anchored else {}),
        )
        set_weights(model, *self.weights)
        return model.eval()

    def run(self, model, sparse=False):
        target, source = self.L0.nonzero(as_tuple=True)
        x = self.x.to_sparse_csr() if sparse else self.x
        edge_index = torch.stack([source, target])
        options = {} if self.anchors is None else {'anchor_index': self.anchors}
        weight = self.L0[target, source]
        _, trace = model(x, edge_index, weight, return_trace=True, **options)
        return trace

    def check_iterations(self, outs, regs):
        assert len(outs) == len(regs) == self.log_prob.size(0)
        for t, (out, reg) in enumerate(zip(outs, regs, strict=True)):
            assert_close(F.log_softmax(out, dim=-1), self.log_prob[t], 1e-4)
            assert float(self.loss(out)) == pytest.approx(float(self.nll[t]), rel=1e-4)
            assert float(reg) == pytest.approx(float(self.reg[t]), rel=1e-4)

    def check_deltas(self, deltas):
        for actual, expected in zip(deltas, self.delta[1:].tolist(), strict=False):
            if expected > 1e-8:  # below, nothing but rounding is left
                rel = 1e-4 if expected > 1e-5 else 1e-3
                assert float(actual) == pytest.approx(expected, rel=rel)
            else:
                assert float(actual) < 2e-8


def cases():
    for name in FILES:
        yield name, 'auto', False
        yield name, 'auto', True
        for backend in ('dense', 'tiled', 'sparse'):
            yield name, backend, False
        if 'cora' in name:  # no threshold, nothing negative
            yield name, 'low_rank', False


@pytest.mark.parametrize('name,backend,sparse', list(cases()))
def test_model_gives_the_oracle_numbers(name, backend, sparse):
    oracle = Oracle(name)

    # On past the stop:
    with torch.no_grad():
        trace = oracle.run(oracle.model(backend, tol=0.0), sparse)
    assert len(trace.deltas) >= int(oracle.num_iterations)
    oracle.check_deltas(trace.deltas)
    if len(trace.outs) == oracle.log_prob.size(0):
        oracle.check_iterations(trace.outs, trace.regs)
    for key in ('adj_sq_norm', 'affinity_sq_norm'):
        if key in oracle.numbers:
            expected = float(getattr(oracle, key)[0])
            assert float(trace.first.sq_norm()) == pytest.approx(expected, rel=1e-4)

    # Until the stop:
    model = oracle.model(backend, tol=oracle.hyper['delta'])
    trace = oracle.run(model, sparse)
    assert trace.num_iters.tolist() == [int(oracle.num_iterations)]
    if 'adj_first' in oracle.numbers:
        assert_close(trace.first.to_dense(), oracle.adj_first, 1e-4)
        assert_close(trace.learned.to_dense(), oracle.adj_last, 1e-4)
    loss = trace.loss(oracle.loss)
    assert float(loss.detach()) == pytest.approx(float(oracle.total_loss), rel=1e-4)
    loss.backward()
    first, second = model.backbone.convs
    assert_close(first.lin.weight.grad.t(), oracle.grad_W1, 1e-4)
    assert_close(second.lin.weight.grad.t(), oracle.grad_W2, 1e-4)
    assert_close(model.feature_learner.metric.weight.grad, oracle.grad_w_raw, 1e-4)
    assert_close(model.embedding_learner.metric.weight.grad, oracle.grad_w_hidden, 1e-4)


@pytest.mark.parametrize('name', list(FILES))
def test_reference_gives_the_oracle_numbers(name):
    oracle = Oracle(name)
    hyper = {key: oracle.hyper[key] for key in ('lam', 'eta', 'eps', 'delta', 'T')}
    hyper.update({key: oracle.hyper[key] for key in ('alpha', 'beta', 'gamma')})
    (w1, w2), w_raw, w_hidden = oracle.weights
    leaves = [w.clone().requires_grad_() for w in (w1, w2, w_raw, w_hidden)]
    args = (oracle.x, oracle.L0, leaves[:2], *leaves[2:])

    with torch.no_grad():
        run = idgl_reference(*args, **hyper, anchors=oracle.anchors, fixed_iters=True)
    oracle.check_iterations(run.outs, run.regs)
    oracle.check_deltas(run.deltas)

    run = idgl_reference(*args, **hyper, anchors=oracle.anchors)
    assert run.num_iters == int(oracle.num_iterations)
    loss = run.loss(oracle.loss)
    assert float(loss.detach()) == pytest.approx(float(oracle.total_loss), rel=1e-4)
    for grad, key in zip(
        torch.autograd.grad(loss, leaves),
        ('grad_W1', 'grad_W2', 'grad_w_raw', 'grad_w_hidden'),
        strict=True,
    ):
        assert_close(grad, getattr(oracle, key), 1e-4)
