"""Documents: graphs of their tokens, behind an LSTM."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from tests.nn.common import (
    MODELS,
    all_finite,
    assert_close,
    gradients,
    make_model,
)
from torch_geometric_idgl import IDGL, DocumentGNN, IDGLAnch
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.training import fit, r2_score

WORDS, CHANNELS, HIDDEN, CLASSES = 30, 5, 6, 3
OPTIONS = {
    'graph_channels': CHANNELS,
    'epsilon': 0.2,
    'initial_weight': 0.3,
    'update_weight': 0.8,
    'smoothness': 0.2,
    'connectivity': 0.1,
    'sparsity': 0.3,
    'tol': 5e-3,
    'max_iters': 6,
    'k': 4,
}


def make_vectors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, CHANNELS, generator=generator)


def make_document_model(cls=IDGL, out_channels=CLASSES, seed=0, **kwargs):
    options = {key: kwargs.pop(key) for key in ('dropout', 'act') if key in kwargs}
    gnn = None
    if cls is not None:
        gnn = make_model(cls, HIDDEN, 8, 2, 7, seed=seed, **{**OPTIONS, **kwargs})
    torch.manual_seed(seed + 1)
    return DocumentGNN(make_vectors(), HIDDEN, out_channels, gnn, **options)


def make_documents(sizes=(3, 9, 1, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Data(
            token=torch.randint(WORDS, (n,), generator=generator),
            y=torch.tensor([i % CLASSES]),
            num_nodes=n,
        )
        for i, n in enumerate(sizes)
    ]


class Keep(torch.nn.Module):
    """A GNN that keeps what it is given, and does nothing."""

    out_channels = HIDDEN

    def forward(self, x, batch, batch_size, graph_x):
        self.x, self.batch, self.graph_x = x, batch, graph_x
        return x


def test_document_gnn():
    model = make_document_model().eval()
    assert str(model) == 'DocumentGNN(30, 5, 6, 3, gnn=IDGL(6, 7, num_layers=2))'
    assert str(make_document_model(None)) == 'DocumentGNN(30, 5, 6, 3, gnn=None)'
    documents = make_documents()
    batch = Batch.from_data_list(documents)
    out = model(batch)
    assert out.shape == (4, CLASSES)
    assert torch.equal(model(batch.token, batch.batch), out)
    assert torch.equal(model(batch.token, batch.batch, batch_size=4), out)
    assert torch.equal(model(batch.token.int(), batch.batch), out)
    assert torch.equal(model(Data(token=batch.token, batch=batch.batch)), out)
    with_trace, trace = model(batch, return_trace=True)
    assert_close(with_trace, out)
    assert trace.out is with_trace and trace.num_iters.shape == (4,)

    one = model(documents[1])
    assert one.shape == (1, CLASSES)
    assert torch.equal(model(documents[1].token), one)
    _, trace = model(documents[1], max_iters=0, return_trace=True)
    assert len(trace.outs) == 1
    assert_close(model(documents[1], max_iters=0), trace.out)


def test_the_lstm_is_a_bidirectional_one():
    """On packed sequences, with the same weights: values and gradients."""
    gnn = Keep()
    model = DocumentGNN(make_vectors(), HIDDEN, CLASSES, gnn).double().eval()
    lstm = torch.nn.LSTM(CHANNELS, HIDDEN // 2, bidirectional=True, batch_first=True)
    lstm = lstm.double()
    names = [name for name, _ in model.lstm.named_parameters()]
    with torch.no_grad():
        for name in names:
            getattr(lstm, name).copy_(getattr(model.lstm, name))
            getattr(lstm, f'{name}_reverse').copy_(getattr(model.backward_lstm, name))

    batch = Batch.from_data_list(make_documents((4, 11, 1, 7, 2)))
    sizes = batch.ptr.diff()
    model(batch)
    words = model.embedding(batch.token)
    assert torch.equal(gnn.graph_x, words)
    assert torch.equal(gnn.batch, batch.batch)
    padded = pad_sequence(words.split(sizes.tolist()), batch_first=True)
    packed = pack_padded_sequence(padded, sizes, batch_first=True, enforce_sorted=False)
    read, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    known = torch.arange(11) < sizes.unsqueeze(1)
    expected = read[known]
    assert_close(gnn.x, expected, 1e-12)

    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64)
    for out in (gnn.x, expected):
        (out.flatten() * weight).sum().backward()
    for name in names:
        for mine, other in [
            (model.lstm, getattr(lstm, name)),
            (model.backward_lstm, getattr(lstm, f'{name}_reverse')),
        ]:
            assert_close(getattr(mine, name).grad, other.grad, 1e-12)


# Small documents are refined together, those of more than 128 tokens one by one.
@pytest.mark.parametrize('sizes', [(3, 9, 1, 30), (140, 2, 131, 17, 5)], ids=str)
@pytest.mark.parametrize('cls', MODELS)
def test_a_batch_is_its_documents_one_by_one(cls, sizes):
    model = make_document_model(cls).double().eval()
    documents = make_documents(sizes)
    loss, outs, counts = 0.0, [], []
    for data in documents:
        out, trace = model(data, return_trace=True)
        loss = loss + trace.loss(lambda out: F.cross_entropy(out, data.y))  # noqa: B023
        outs.append(trace.outs)
        counts.append(int(trace.num_iters))
    loss = loss / len(documents)
    loss.backward()
    expected = gradients(model)
    assert len(set(counts)) > 1  # they do stop at different iterations

    model.zero_grad()
    batch = Batch.from_data_list(documents)
    _, trace = model(batch, return_trace=True)
    assert trace.num_iters.tolist() == counts
    for t, out in enumerate(trace.outs):
        own = [given[min(t, len(given) - 1)] for given in outs]
        assert_close(out, torch.cat(own), 1e-9)
    together = trace.loss(lambda out: F.cross_entropy(out, batch.y))
    assert_close(together, loss, 1e-9)
    together.backward()
    for name, grad in gradients(model).items():
        assert_close(grad, expected[name], 1e-8)
    assert_close(model(batch), trace.out, 1e-9)


def test_the_readout_is_the_maximum_of_the_own_nodes():
    gnn = Keep()
    model = DocumentGNN(make_vectors(), HIDDEN, CLASSES, gnn).eval()
    batch = Batch.from_data_list(make_documents())
    out = model(batch)
    own = gnn.x.split(batch.ptr.diff().tolist())
    largest = torch.stack([x.max(dim=0).values for x in own])
    assert bool((largest < 0).any())  # padding by zeros would show
    assert_close(out, model.lin(largest))


def test_dropout_masks_are_those_of_documents():
    gnn = Keep()
    model = DocumentGNN(make_vectors(), HIDDEN, CLASSES, gnn, dropout=0.5)
    batch = Batch.from_data_list(make_documents((20, 30, 10)))
    torch.manual_seed(0)
    model(batch)
    words = model.embedding(batch.token)
    masks = []
    for g in range(3):
        own = batch.batch == g
        dropped = gnn.graph_x[own] == 0
        assert torch.equal(dropped, dropped[:1].expand_as(dropped))
        assert_close(gnn.graph_x[own], torch.where(dropped, 0.0, 2 * words[own]))
        hidden = gnn.x[own] == 0
        assert torch.equal(hidden, hidden[:1].expand_as(hidden))
        masks.append(torch.cat([dropped[0], hidden[0]]))
    masks = torch.stack(masks)
    assert bool(masks.any()) and not bool(masks.all())
    assert not torch.equal(masks[0], masks[1])  # each document has its own

    model.eval()(batch)
    assert torch.equal(gnn.graph_x, words)
    model.train().dropout = 0.0
    model(batch)
    assert torch.equal(gnn.graph_x, words)


@pytest.mark.parametrize('cls', [*MODELS, None])
def test_word_vectors_are_frozen(cls):
    model = make_document_model(cls).train()
    vectors = make_vectors()
    model(Batch.from_data_list(make_documents())).square().sum().backward()
    assert model.embedding.weight.grad is None
    assert not model.embedding.weight.requires_grad
    assert torch.equal(model.embedding.weight, vectors)
    for module in (model.lstm, model.backward_lstm, model.lin):
        assert all(float(p.grad.abs().max()) > 0 for p in module.parameters())


def test_regression():
    model = make_document_model(out_channels=1, act=torch.sigmoid)
    plain = make_document_model(out_channels=1)
    batch = Batch.from_data_list(make_documents())
    out, trace = model.eval()(batch, return_trace=True)
    assert out.shape == (4, 1)
    assert_close(out, plain.eval()(batch).sigmoid())
    y = torch.linspace(0, 1, 4).view(4, 1)
    trace.loss(lambda out: F.mse_loss(out, y)).backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_the_lstm_alone():
    model = make_document_model(None).eval()
    batch = Batch.from_data_list(make_documents())
    gnn = Keep()
    other = DocumentGNN(make_vectors(), HIDDEN, CLASSES, gnn).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), other(batch))
    assert not model.learns_graph and not other.learns_graph
    assert make_document_model().learns_graph
    for alone in (model, other):
        with pytest.raises(ValueError, match=r"'return_trace=False'.*learns no graph"):
            alone(batch, return_trace=True)


@pytest.mark.parametrize('cls', [*MODELS, None])
def test_reset_parameters(cls):
    model = make_document_model(cls)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    model.reset_parameters()
    first = copy.deepcopy(model.state_dict())
    assert torch.equal(first['embedding.weight'], before['embedding.weight'])
    for name in ('lstm.weight_ih_l0', 'backward_lstm.weight_hh_l0', 'lin.weight'):
        assert not torch.equal(first[name], before[name])
    if cls is not None:
        name = 'gnn.feature_learner.metric.weight'
        assert not torch.equal(first[name], before[name])
    torch.manual_seed(5)
    model.reset_parameters()
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name])


@pytest.mark.parametrize('cls', [*MODELS, None])
def test_state_dict(cls):
    batch = Batch.from_data_list(make_documents())
    model = make_document_model(cls).eval()
    vectors = make_vectors(seed=1)
    gnn = None if cls is None else make_model(cls, HIDDEN, 8, 2, 7, seed=9, **OPTIONS)
    other = DocumentGNN(vectors, HIDDEN, CLASSES, gnn).eval()
    assert not torch.allclose(other(batch), model(batch))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch), model(batch))
    assert torch.equal(vectors, make_vectors(seed=1))  # the caller's stay as they are


@pytest.mark.parametrize('cls', [*MODELS, None])
def test_empty_documents(cls):
    model = make_document_model(cls).double().eval()
    token = torch.cat([data.token for data in make_documents((3, 9))])
    where = torch.tensor([0] * 3 + [1] * 9)
    expected = model(token, where)
    batch = torch.tensor([1] * 3 + [3] * 9)
    out = model(token, batch, batch_size=5)
    assert out.shape == (5, CLASSES)
    assert_close(out[[1, 3]], expected, 1e-9)
    assert torch.equal(out[[0, 2, 4]], model.lin.bias.expand(3, -1))
    none = model(token[:0], batch[:0], batch_size=2)
    assert torch.equal(none, model.lin.bias.expand(2, -1))
    assert torch.equal(model(token[:0]), model.lin.bias.expand(1, -1))
    if cls is None:
        return
    _, trace = model(token, batch, batch_size=5, return_trace=True)
    loss = trace.loss(lambda out: F.cross_entropy(out, torch.arange(5) % 3))
    loss.backward()
    assert all_finite((loss, gradients(model), trace))


def test_errors():
    vectors = make_vectors()
    for kwargs, error, match in [
        ({'hidden_channels': 5}, ValueError, r"'hidden_channels' to be even.*got 5"),
        ({'hidden_channels': 0}, ValueError, r"'hidden_channels' to be at least 2"),
        ({'out_channels': 0}, ValueError, r"'out_channels' to be at least 1"),
        ({'dropout': 1.0}, ValueError, r"'dropout' to be in \[0, 1\)"),
        ({'vectors': vectors[0]}, ValueError, r"'vectors' to be .*shape \[5\]"),
        ({'vectors': vectors.long()}, ValueError, r"'vectors' to be .*torch.int64"),
        ({'vectors': vectors.tolist()}, ValueError, r"'vectors' to be .*got list"),
        (
            {'gnn': IDGL(8, 8, 2, graph_channels=CHANNELS)},
            ValueError,
            r"'in_channels' of 'gnn' to be 6 .got 8",
        ),
        (
            {'gnn': IDGLAnch(HIDDEN, 8, 2, graph_channels=4)},
            ValueError,
            r"'graph_channels' of 'gnn' to be 5 .got 4",
        ),
        (
            {'gnn': IDGL(HIDDEN, 8, 2)},
            ValueError,
            r"'graph_channels' of 'gnn' to be 5 .got None",
        ),
    ]:
        default = {'vectors': vectors, 'hidden_channels': HIDDEN, 'out_channels': 3}
        with pytest.raises(error, match=match):
            DocumentGNN(**{**default, **kwargs})

    model = make_document_model()
    token = torch.tensor([1, 2, 3])
    for args, error, match in [
        ((torch.tensor([1, WORDS]),), ValueError, r'from 0 to 29 .got 1 to 30'),
        ((torch.tensor([-1, 2]),), ValueError, r'from 0 to 29 .got -1 to 2'),
        ((token.float(),), ValueError, r"'token' to be .*torch.float32"),
        ((token > 1,), ValueError, r"'token' to be .*torch.bool"),
        ((token.view(3, 1),), ValueError, r"'token' to be .*shape \[3, 1\]"),
        (([1, 2],), ValueError, r"'token' to be .*got list"),
        ((Data(x=torch.rand(3, 2)),), ValueError, r"'token' to be .*got NoneType"),
        ((Data(token=token), token), ValueError, r"hold 'batch' .got it as an arg"),
        ((token, torch.tensor([1, 0, 0])), ValueError, r"'batch' to be sorted"),
        ((token, torch.tensor([0, 1])), ValueError, r"'batch' to be of shape \[3\]"),
        ((token, torch.tensor([0, 1, 2]), 2), ValueError, r'below batch_size=2'),
    ]:
        with pytest.raises(error, match=match):
            model(*args)


def make_task(size, seed):
    """The first half of the words speaks for one class, the second for the other."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i in range(size):
        n = int(torch.randint(2, 12, (1,), generator=generator))
        token = torch.randint(WORDS // 2, (n,), generator=generator)
        token = token + i % 2 * (WORDS // 2)
        documents.append(Data(token=token, y=torch.tensor([i % 2]), num_nodes=n))
    return documents


def make_loaders():
    train, val = make_task(24, 0), make_task(12, 1)
    sampler = BucketSampler(train, batch_size=6)
    return DataLoader(train, batch_sampler=sampler), DataLoader(val, batch_size=6)


@pytest.mark.parametrize('cls', [*MODELS, None])
def test_fit(cls):
    model = make_document_model(cls, out_channels=2, dropout=0.2, max_iters=2)
    torch.manual_seed(0)
    record = fit(
        model, *make_loaders(), max_epochs=12, lr=0.02, progress=False, history=True
    )
    losses = [values['train_loss'] for values in record.history]
    assert losses[-1] < 0.7 * losses[0]
    assert record.val_score >= 0.9
    assert (record.iterations is None) == (cls is None)


def test_fit_regression():
    torch.manual_seed(0)
    weights = {'smoothness': 0.0, 'connectivity': 0.0, 'sparsity': 0.0}
    model = make_document_model(
        out_channels=1, dropout=0.0, max_iters=1, act=torch.sigmoid, **weights
    )
    loaders = make_loaders()
    for loader in loaders:
        for data in loader.dataset:
            data.y = data.y.float().view(1, 1)
    record = fit(
        model,
        *loaders,
        max_epochs=25,
        lr=0.02,
        first_phase=2,
        loss_fn=F.mse_loss,
        score_fn=r2_score,
        progress=False,
    )
    assert record.val_score > 0.5


@pytest.mark.parametrize('dtype', [torch.double, torch.half])
def test_vectors_of_another_number_type(dtype):
    model = DocumentGNN(make_vectors().to(dtype), 8, 3)
    assert model.embedding.weight.dtype == torch.float
    batch = Batch.from_data_list(make_documents())
    assert model(batch).shape == (4, 3)
