r"""Documents as graphs of their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import LSTM, Embedding, Linear, Module
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Data
from torch_geometric.nn import MaxAggregation

from ..checks import check_at_least, check_batch, check_probability
from .idgl import IDGL

__all__ = ['DocumentGNN']


class DocumentGNN(Module):
    r"""The model for documents from the `"Iterative Deep Graph Learning for Graph
    Neural Networks: Better and Robust Node Embeddings"
    <https://arxiv.org/abs/2006.13009>`_ paper.

    A document is a graph, and a token of it is a node. Its first graph is learned from
    word vectors, while the GNN starts from what a bidirectional LSTM makes of them:

    .. math::
        \mathbf{X} = \mathrm{BiLSTM}(\mathbf{V}), \qquad
        \mathbf{H} = \mathrm{IDGL}(\mathbf{X}, \mathbf{V}), \qquad
        \mathbf{y} = \mathbf{W} \max_{i} \mathbf{h}_i + \mathbf{b}

    .. code-block:: python

        gnn = IDGL(128, 128, num_layers=2, graph_channels=vectors.size(1), k=950)
        model = DocumentGNN(vectors, 128, dataset.num_classes, gnn)
        out, trace = model(batch, return_trace=True)  # one row for each document
        loss = trace.loss(lambda out: F.cross_entropy(out, batch.y))

    Args:
        vectors (torch.Tensor): The vector of each word, of shape :obj:`[num_words, d]`;
            they are not trained, and have the default number type.
        hidden_channels (int): Size of the outputs of the LSTM, both directions
            together.
        out_channels (int): Size of the outputs.
        gnn (IDGL, optional): An :class:`IDGL` or :class:`IDGLAnch` model with
            :obj:`in_channels=hidden_channels` and :obj:`graph_channels=d`; another
            module with :obj:`out_channels` that is called as :obj:`gnn(x, batch=...,
            batch_size=..., graph_x=...)`; or :obj:`None`, for the LSTM alone.
            (default: :obj:`None`)
        dropout (float, optional): Dropout on word vectors and on outputs of the LSTM.
            All tokens of a document share a mask. (default: :obj:`0.5`)
        act (Callable, optional): A function of the outputs, such as
            :func:`torch.sigmoid` for ratings from zero to one. (default: :obj:`None`)
    """

    def __init__(
        self,
        vectors: Tensor,
        hidden_channels: int,
        out_channels: int,
        gnn: Module | None = None,
        dropout: float = 0.5,
        act: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if (
            not isinstance(vectors, Tensor)
            or vectors.dim() != 2
            or not vectors.is_floating_point()
        ):
            raise ValueError(
                f"Expected 'vectors' to be a floating-point matrix, a row for each "
                f'word (got {_kind(vectors)})'
            )
        check_at_least('hidden_channels', hidden_channels, 2, integer=True)
        if hidden_channels % 2:
            raise ValueError(
                f"Expected 'hidden_channels' to be even, half for each direction of "
                f'the LSTM (got {hidden_channels})'
            )
        check_at_least('out_channels', out_channels, 1, integer=True)
        check_probability('dropout', dropout)
        wanted = {'in_channels': hidden_channels, 'graph_channels': vectors.size(1)}
        for name, size in wanted.items() if isinstance(gnn, IDGL) else ():
            if getattr(gnn, name) != size:
                raise ValueError(
                    f"Expected '{name}' of 'gnn' to be {size} (got "
                    f'{getattr(gnn, name)})'
                )
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.dropout = dropout
        self.act = act
        own = vectors.detach().to(torch.get_default_dtype(), copy=True)
        self.embedding = Embedding.from_pretrained(own)
        self.lstm = LSTM(vectors.size(1), hidden_channels // 2)
        self.backward_lstm = LSTM(vectors.size(1), hidden_channels // 2)
        self.gnn = gnn
        self.readout = MaxAggregation()
        width = hidden_channels if gnn is None else gnn.out_channels
        self.lin = Linear(width, out_channels)  # type: ignore[arg-type]

    @property
    def learns_graph(self) -> bool:
        """Whether the GNN learns graphs, and has a trace of them."""
        forward = None if self.gnn is None else inspect.signature(self.gnn.forward)
        return forward is not None and 'return_trace' in forward.parameters

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module, the word vectors excepted."""
        self.lstm.reset_parameters()
        self.backward_lstm.reset_parameters()
        self.lin.reset_parameters()
        if self.gnn is not None:
            self.gnn.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        token: Tensor | Data,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        *,
        max_iters: int | None = None,
        return_trace: bool = False,
    ) -> Any:
        r"""Forward pass.

        Args:
            token (torch.Tensor or Data or Batch): The word of each token, of shape
                :obj:`[n]`; or a data object that holds :obj:`token` and :obj:`batch`.
            batch (torch.Tensor, optional): The document of each token, sorted. Tokens
                of a document are in their order. (default: :obj:`None`)
            batch_size (int, optional): The number of documents.
                (default: :obj:`None`)
            max_iters (int, optional): See :meth:`IDGL.forward`.
                (default: :obj:`None`)
            return_trace (bool, optional): Whether to return a
                :class:`~torch_geometric_idgl.nn.Trace` as well, whose outputs are those
                of documents. (default: :obj:`False`)

        Returns:
            The outputs, one row for each document and, if asked for, the trace.
        """
        if isinstance(token, Data):
            if batch is not None or batch_size is not None:
                raise ValueError(
                    "Expected a data object to hold 'batch' (got it as an argument "
                    'besides)'
                )
            data = token
            token, batch = data.get('token'), data.get('batch')
            batch_size = None if batch is None else getattr(data, 'num_graphs', None)
        self._check(token)
        if return_trace and not self.learns_graph:
            raise ValueError(
                "Expected 'return_trace=False' for a model whose 'gnn' learns no graph "
                '(got True)'
            )
        if batch is None:
            batch, batch_size = torch.zeros_like(token, dtype=torch.long), 1
        check_batch(batch, batch_size, token.numel())
        if batch_size is None:
            batch_size = int(batch[-1]) + 1 if batch.numel() else 1

        words = self._drop(self.embedding(token), batch, batch_size)
        x = self._drop(self._encode(words, batch), batch, batch_size)

        def head(h: Tensor) -> Tensor:
            out = self.lin(self.readout(h, batch, dim_size=batch_size))
            return out if self.act is None else self.act(out)

        if self.gnn is None:
            return head(x)
        options: dict[str, Any] = {
            'batch': batch,
            'batch_size': batch_size,
            'graph_x': words,
        }
        if not return_trace:
            if max_iters is not None:
                options['max_iters'] = max_iters
            return head(self.gnn(x, **options))
        _, trace = self.gnn(x, max_iters=max_iters, return_trace=True, **options)
        trace = trace.readout(head)
        return trace.out, trace

    def _encode(self, words: Tensor, batch: Tensor) -> Tensor:
        """What the LSTM makes of the words of each document, read in both directions.

        Reading every document from its own end, two LSTMs meet the padding after the
        last word, where it has no influence. PyTorch runs them three times as fast on
        CPUs as one in both directions on packed sequences, which gives the same.
        """
        if words.size(0) == 0:
            return words.new_zeros(0, self.hidden_channels)
        sizes = batch.unique_consecutive(return_counts=True)[1]
        documents = words.split(sizes.tolist())
        place = torch.arange(int(sizes.max()), device=sizes.device)
        known = place < sizes.unsqueeze(1)

        def read(lstm: Module, sequences: list[Tensor]) -> Tensor:
            return lstm(pad_sequence(sequences))[0].transpose(0, 1)[known]

        there = read(self.lstm, list(documents))
        back = read(self.backward_lstm, [own.flip(0) for own in documents])
        back = torch.cat([own.flip(0) for own in back.split(sizes.tolist())])
        return torch.cat([there, back], dim=1)

    def _drop(self, x: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """Dropout with one mask for all tokens of a document."""
        if not self.training or self.dropout == 0:
            return x
        mask = x.new_ones(batch_size, x.size(1))
        return x * torch.nn.functional.dropout(mask, self.dropout)[batch]

    def _check(self, token: Any) -> None:
        if (
            not isinstance(token, Tensor)
            or token.dim() != 1
            or token.dtype not in (torch.long, torch.int)
        ):
            raise ValueError(
                f"Expected 'token' to be a vector of the words' numbers, of type "
                f'torch.long (got {_kind(token)})'
            )
        if token.numel() == 0:
            return
        low, high = (int(bound) for bound in token.aminmax())
        if low < 0 or high >= self.embedding.num_embeddings:
            raise ValueError(
                f"Expected 'token' to hold words from 0 to "
                f'{self.embedding.num_embeddings - 1} (got {low} to {high})'
            )

    def __repr__(self) -> str:
        words, channels = self.embedding.weight.shape
        return (
            f'{self.__class__.__name__}({words}, {channels}, {self.hidden_channels}, '
            f'{self.out_channels}, gnn={self.gnn})'
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f'{value.dtype} of shape {list(value.shape)}'
    return type(value).__name__
