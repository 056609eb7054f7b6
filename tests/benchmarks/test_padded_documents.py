import torch
from torch_geometric.utils import to_dense_batch

from tests.padded_documents import padded_idgl
from torch_geometric_idgl import IDGL

SETTINGS = {
    'k': 4,  # the first document has fewer tokens, the others have more
    'epsilon': 0.3,
    'initial_weight': 0.1,
    'update_weight': 0.4,
    'smoothness': 0.5,
    'connectivity': 0.01,
    'sparsity': 0.3,
    'max_iters': 3,
}
BATCH = torch.tensor([0] * 3 + [1] * 9 + [2] * 6)


def make(seed=0):
    torch.manual_seed(seed)
    options = {'graph_channels': 5, 'heads': 3, 'tol': None, **SETTINGS}
    model = IDGL(4, 6, 2, 7, **options).double()
    x = torch.randn(18, 4, dtype=torch.double, requires_grad=True)
    return model, x, torch.randn(18, 5, dtype=torch.double)


def run_padded(model, x, graph_x, filler):
    x, mask = to_dense_batch(x, BATCH, fill_value=filler)
    graph_x, _ = to_dense_batch(graph_x, BATCH, fill_value=filler)
    weights = [conv.lin.weight.t() for conv in model.backbone.convs]
    learners = (model.feature_learner, model.embedding_learner)
    heads = [learner.metric.weight for learner in learners]
    return padded_idgl(x, graph_x, mask, weights, *heads, **SETTINGS), mask


def test_padded_documents_are_those_of_the_package():
    model, x, graph_x = make()
    parameters = [x, *model.parameters()]
    assert len(parameters) == 5  # two layers, two learners
    target = torch.randn(18, 7, dtype=torch.double)
    _, trace = model(x, batch=BATCH, graph_x=graph_x, return_trace=True)
    loss = trace.loss(lambda out: (out * target).mean())
    grads = torch.autograd.grad(loss, parameters)
    assert all(grad.abs().max() > 1e-4 for grad in grads)

    for filler in (0.0, 7.0):  # What padding holds has no influence.
        run, mask = run_padded(model, x, graph_x, filler)
        assert len(run.outs) == len(run.regs) == 4
        for out, reg, own, own_reg in zip(
            run.outs, run.regs, trace.outs, trace.regs, strict=True
        ):
            torch.testing.assert_close(out[mask], own)
            torch.testing.assert_close(reg, own_reg)
        padded_loss = run.loss(lambda out, mask=mask: (out[mask] * target).mean())
        torch.testing.assert_close(padded_loss, loss)
        padded_grads = torch.autograd.grad(padded_loss, parameters)
        torch.testing.assert_close(padded_grads, grads)
