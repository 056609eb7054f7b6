"""Fitting a model with early stopping."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data
from tqdm import tqdm

from ..checks import check_at_least
from .checkpoint import (
    check_writable,
    fixed_rng,
    load_checkpoint,
    locked,
    save_checkpoint,
)
from .description import describe_run
from .splits import LoaderSplits, MaskSplits, Rows, call_by_parts

__all__ = ['FitRecord', 'accuracy', 'fit', 'r2_score']

_SAME_LOSS = 0.003  # relative; what is learned makes a larger difference
_SHORT_RUN = 20  # epochs in which outputs may still be those of small initial weights


@dataclass
class FitRecord:
    r"""What came out of :meth:`fit`; scores are those of the restored weights.

    Args:
        best_epoch (int): The epoch (from zero) of the restored weights.
        epochs (int): The number of epochs trained.
        seconds (float): The time it took, that of interrupted runs included.
        train_score (float, optional): The score on the training nodes; none with
            loaders, where it would take one more pass.
        val_score (float): The score on the dev split.
        test_score (float, optional): The score on the test split, if there is one.
        val_loss (float): The loss on the dev split.
        iterations (float, optional): The number of refinements of an IDGL model in
            evaluation, averaged over the epochs (after the first phase).
        history (list, optional): The values of every epoch, if asked for.
    """

    best_epoch: int
    epochs: int
    seconds: float
    train_score: float | None
    val_score: float
    test_score: float | None
    val_loss: float
    iterations: float | None = None
    history: list[dict[str, Any]] | None = None


@dataclass
class _Progress:
    # All that changes from epoch to epoch beside the model and the optimizer.
    epoch: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None
    best_state: dict[str, Tensor] | None = None
    best_out: Tensor | None = None  # of the split that tells whether it has collapsed
    best_y: Tensor | None = None
    num_evals: int = 0
    iterations: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    generators: list[Tensor] = field(default_factory=list)  # states of the loaders' own


def accuracy(out: Tensor, y: Tensor) -> float:
    """Returns the fraction of rows of :obj:`out` that are largest at :obj:`y`, of shape
    :obj:`[n]` or :obj:`[n, 1]`.
    """
    pred = out.argmax(dim=-1)
    if y.size() not in {pred.size(), (*pred.size(), 1)}:
        shape = list(pred.size())
        raise ValueError(
            f"Expected 'y' to be of shape {shape} or {[*shape, 1]}, a label for each "
            f"row of 'out' (got {list(y.size())})"
        )
    return float((pred == y.view_as(pred)).to(torch.double).mean())


def r2_score(out: Tensor, y: Tensor) -> float:
    r"""Returns the coefficient of determination,
    :math:`1 - \sum (y - \mathrm{out})^2 / \sum (y - \bar{y})^2`, of outputs and labels
    of the same shape :obj:`[n]` or :obj:`[n, c]`; of several columns, the mean.

    It is at most one, and zero for the mean of the labels. For labels that are all the
    same it is one if the outputs are exactly these, and zero otherwise.
    """
    if out.size() != y.size() or out.dim() not in {1, 2} or out.numel() == 0:
        raise ValueError(
            f"Expected 'out' and 'y' to be of the same shape [n] or [n, c] (got "
            f'{list(out.size())} and {list(y.size())})'
        )
    constant = (y == y[:1]).all(dim=0)
    out, y = out.to(torch.double), y.to(torch.double)
    error = (y - out).square().sum(dim=0)
    total = (y - y.mean(dim=0)).square().sum(dim=0)
    exact = (error == 0).to(torch.double)
    return float(torch.where(constant, exact, 1 - error / total).mean())


def fit(
    model: torch.nn.Module,
    data: Data | Iterable[Data],
    val_data: Iterable[Data] | None = None,
    test_data: Iterable[Data] | None = None,
    *,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    max_epochs: int = 10_000,
    patience: int = 100,
    first_phase: int = 0,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    score_fn: Callable[[Tensor, Tensor], float] = accuracy,
    monitor: str = 'loss',
    progress: bool = True,
    desc: str | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    history: bool = False,
    callback: Callable[[int, dict[str, Any]], None] | None = None,
) -> FitRecord:
    r"""Trains a model with early stopping, on the nodes of :obj:`data.train_mask` or on
    the batches of a loader.

    IDGL models are trained on the joint loss of Algorithm 1, and stopped early on the
    same loss of the dev split: that of all iterations, regularisers included. Any other
    module is called as :obj:`model(x, edge_index)`, or
    :obj:`model(x, edge_index, edge_weight)` if there are weights, and trained on
    :obj:`loss_fn`. One evaluation per epoch gives dev and test scores. At the end, the
    weights of the best epoch are restored, and a warning is given if their outputs are
    nearly the same for all nodes.

    A module whose :obj:`forward` takes :obj:`return_trace` is trained on the joint loss
    of its trace, as IDGL is. If it takes :obj:`edge_index`, it is called with features,
    edges and weights, else with the data object.

    With loaders, for data sets of many graphs, the outputs for a batch have a row for
    each row of :obj:`batch.y`:

    * A module whose :obj:`forward` takes :obj:`return_trace`, such as one's own around
      IDGL, is called as :obj:`out, trace = model(batch, return_trace=True)`, and with
      :obj:`max_iters` if it takes that (unless :obj:`model.learns_graph` is
      :obj:`False`). Its loss is
      :obj:`trace.loss(lambda out: loss_fn(out, batch.y))`, and :obj:`trace.num_iters`
      holds the number of refinements of each graph. Any other module is called as
      :obj:`model(batch)`.
    * Batches are moved to the device of the model.
    * The loss of an epoch is the mean over its rows, :obj:`loss_fn` being the mean over
      those of a batch. Scores are those of all outputs of a split at once. There is no
      training score: outputs seen in training are those of changing weights.
    * Test data is evaluated once, at the end, with the restored weights.

    Batches may be of nodes of one large graph too, such as those of
    :class:`~torch_geometric_idgl.loader.AnchorLoader`: the loss is that of their seeds,
    the first :obj:`batch.batch_size` nodes, as far as they are in :obj:`train_mask`,
    :obj:`val_mask` or :obj:`test_mask`, if there is one. Batches without any are left
    out. Modules that learn no graph are called as with a single graph.

    .. code-block:: python

        train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
        val_loader = DataLoader(val_set, batch_size=16)
        record = fit(model, train_loader, val_loader, checkpoint='run.pt')

    Args:
        model (torch.nn.Module): The model, changed in place.
        data (torch_geometric.data.Data or DataLoader): The graph, with
            :obj:`train_mask`, :obj:`val_mask` and optionally :obj:`test_mask`, where
            IDGL models do without :obj:`edge_index`; or a loader that yields a
            :class:`~torch_geometric.data.Batch` of graphs at a time, or a batch of
            nodes.
        val_data (DataLoader, optional): The loader of the dev split, needed if
            :obj:`data` is a loader. (default: :obj:`None`)
        test_data (DataLoader, optional): The loader of the test split.
            (default: :obj:`None`)
        lr (float, optional): The learning rate of Adam. (default: :obj:`0.01`)
        weight_decay (float, optional): The weight decay of Adam.
            (default: :obj:`5e-4`)
        max_epochs (int, optional): The largest number of epochs.
            (default: :obj:`10_000`)
        patience (int, optional): The number of epochs without improvement after which
            to stop. (default: :obj:`100`)
        first_phase (int, optional): The number of epochs at the start in which an IDGL
            model does not iterate (:obj:`max_iters=0`). The best epoch is one after
            them. (default: :obj:`0`)
        loss_fn (callable, optional): The loss of outputs and labels.
            (default: :meth:`torch.nn.functional.cross_entropy`)
        score_fn (callable, optional): The score of outputs and labels, the larger
            the better. (default: :meth:`accuracy`)
        monitor (str, optional): What to stop on, the dev :obj:`"loss"` or
            :obj:`"score"`. (default: :obj:`"loss"`)
        progress (bool, optional): If set to :obj:`False`, no progress bar is shown. Its
            end is where patience ends, and moves on with every improvement. A second
            one shows the batches of loaders. (default: :obj:`True`)
        desc (str, optional): What the progress bar is for; the class of the model if
            not given. (default: :obj:`None`)
        checkpoint (str, optional): A file to save the run in, and to continue from if
            it exists; one of another model, other settings or other data raises an
            error, and so does one that another run is using. Only :obj:`max_epochs`
            may be another. It is removed at the end. (default: :obj:`None`)
        checkpoint_every (int, optional): The number of epochs between two savings. If
            not given, 50 for a graph, and 1 for loaders. (default: :obj:`None`)
        history (bool, optional): If set to :obj:`True`, the record holds the values of
            every epoch. (default: :obj:`False`)
        callback (callable, optional): Called as :obj:`callback(epoch, values)` after
            each epoch with its losses, scores and iterations. (default: :obj:`None`)

    Returns:
        FitRecord: The scores and the course of the training.
    """
    _check_arguments(monitor, max_epochs, patience, first_phase, checkpoint_every)
    options, by_parts = _trace_options(model)
    if first_phase > 0 and 'max_iters' not in options:
        raise ValueError(
            f"Expected 'first_phase' to be 0 for a model without iterations, whose "
            f"'forward' does not take 'max_iters' (got {first_phase} for "
            f"'{type(model).__name__}')"
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    device = next(model.parameters()).device
    splits: MaskSplits | LoaderSplits
    if isinstance(data, Data):
        if val_data is not None or test_data is not None:
            raise ValueError(
                "Expected 'val_data' and 'test_data' only if 'data' is a loader (got "
                "a 'Data', whose splits are its masks)"
            )
        splits = MaskSplits(data, needs_graph=by_parts or not options)
    else:
        splits = LoaderSplits(data, val_data, test_data, device, progress)
    every = checkpoint_every or splits.checkpoint_every
    passes = _Passes(model, splits, options, by_parts, loss_fn, score_fn)
    path = None if checkpoint is None else Path(checkpoint)
    state, run = _Progress(), {}

    def better(values: dict[str, Any], than: dict[str, Any]) -> bool:
        if monitor == 'loss':
            return values['val_loss'] < than['val_loss']
        return values['val_score'] > than['val_score']

    def end() -> int:
        # Where training stops if nothing improves any more.
        best = first_phase if state.best is None else state.best['epoch']
        return min(max_epochs, best + patience + 1)

    with contextlib.ExitStack() as stack:
        if path is not None:
            check_writable(path)
            stack.enter_context(locked(path))
            with fixed_rng():  # items of a data set may be random
                run = describe_run(
                    model,
                    splits.data,
                    lr=lr,
                    weight_decay=weight_decay,
                    patience=patience,
                    first_phase=first_phase,
                    loss_fn=loss_fn,
                    score_fn=score_fn,
                    monitor=monitor,
                    history=history,
                )
            if path.exists():
                state = _Progress(**load_checkpoint(path, model, optimizer, run))
                for generator, saved in zip(
                    splits.generators(), state.generators, strict=True
                ):
                    generator.set_state(saved)
        bar = stack.enter_context(
            tqdm(
                desc=type(model).__name__ if desc is None else desc,
                total=end(),
                initial=state.epoch,
                disable=not progress,
            )
        )
        while state.epoch < end():
            epoch, start = state.epoch, time.perf_counter()
            max_iters = 0 if epoch < first_phase else None
            train_loss = passes.train(optimizer, epoch, max_iters)
            outs, scores = passes.evaluate('val', max_iters)
            values = {'epoch': epoch, 'train_loss': train_loss, **scores}
            _check_finite(values, 'val_loss')
            if monitor == 'score' and math.isnan(values['val_score']):
                raise FloatingPointError(
                    f"Expected a score to stop on (got 'val_score' nan in epoch "
                    f'{epoch})'
                )

            if epoch >= first_phase:
                state.num_evals += 1
                state.iterations += values.get('iterations', 0.0)
                if state.best is None or better(values, state.best):
                    state.best = values
                    state.best_state = copy.deepcopy(model.state_dict())
                    state.best_out, state.best_y = outs[splits.compared]
            if history:
                state.history.append(values)
            state.epoch += 1
            state.seconds += time.perf_counter() - start

            if not bar.disable:
                bar.total = end()
                bar.set_postfix(_postfix(values), refresh=False)
            bar.update()
            if path is not None and state.epoch % every == 0:
                state.generators = [g.get_state() for g in splits.generators()]
                save_checkpoint(path, model, optimizer, run, vars(state))
            if callback is not None:
                callback(epoch, values)

        # One epoch at least has come after the first phase.
        assert state.best is not None and state.best_state is not None
        model.load_state_dict(state.best_state)
        test_score = state.best.get('test_score')
        if test_data is not None:
            start = time.perf_counter()
            test_score = passes.evaluate('test', None)[1]['test_score']
            state.seconds += time.perf_counter() - start
        if path is not None:
            path.unlink(missing_ok=True)

    out, y = state.best_out, state.best_y
    if state.epoch >= _SHORT_RUN and out is not None and y is not None:
        if _collapsed(out.to(device), y.to(device), loss_fn):
            warnings.warn(_what_helps(model, splits, bool(options)), stacklevel=2)
    return FitRecord(
        best_epoch=state.best['epoch'],
        epochs=state.epoch,
        seconds=state.seconds,
        train_score=state.best.get('train_score'),
        val_score=state.best['val_score'],
        test_score=test_score,
        val_loss=state.best['val_loss'],
        iterations=state.iterations / state.num_evals if options else None,
        history=state.history if history else None,
    )


def _trace_options(model: torch.nn.Module) -> tuple[set[str], bool]:
    # What a model that learns graphs takes beside the data (nothing for any other), and
    # whether it takes a graph by its parts.
    from torch_geometric_idgl.nn import IDGL

    names = {'return_trace', 'max_iters'}
    model = getattr(model, '_orig_mod', model)  # of 'torch.compile'
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    if isinstance(model, IDGL):
        return names, False
    parameters = inspect.signature(model.forward).parameters.keys()
    taken = names & parameters
    learns = getattr(model, 'learns_graph', True)  # a 'DocumentGNN' may not
    if not learns or 'return_trace' not in taken:
        return set(), True
    return taken, 'edge_index' in parameters


@dataclass
class _Passes:
    # Passes of a model over the batches of a split.
    model: torch.nn.Module
    splits: MaskSplits | LoaderSplits
    options: set[str]
    by_parts: bool
    loss_fn: Callable
    score_fn: Callable

    def train(
        self, optimizer: torch.optim.Optimizer, epoch: int, max_iters: int | None
    ) -> float:
        # One step per batch; returns the mean loss.
        self.model.train()
        mean = _Mean()
        for data, rows in self.splits.batches('train'):
            optimizer.zero_grad()
            _, loss, _ = self._forward(data, rows, 'train', max_iters)
            mean.add(float(loss.detach()), _num_rows(data, rows['train']))
            _check_finite({'epoch': epoch, 'train_loss': mean.value}, 'train_loss')
            loss.backward()
            optimizer.step()
        return mean.value

    @torch.no_grad()
    def evaluate(
        self, split: str, max_iters: int | None
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float]]:
        # Outputs and labels of all splits that the batches hold; loss and scores.
        self.model.eval()
        mean = _Mean()
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        counts = []
        for data, rows in self.splits.batches(split):
            out, loss, num_iters = self._forward(data, rows, split, max_iters)
            for key, index in rows.items():
                seen.setdefault(key, []).append((out[index], data.y[index]))
            mean.add(float(loss), _num_rows(data, rows[split]))
            if num_iters is not None:
                counts.append(num_iters.flatten())
        values = {f'{split}_loss': mean.value}
        outs = {}
        for key, pairs in seen.items():
            out, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            outs[key] = out, y
            values[f'{key}_score'] = float(self.score_fn(out, y))
        if counts:
            values['iterations'] = float(torch.cat(counts).to(torch.float).mean())
        return outs, values

    def _forward(
        self, data: Data, rows: Rows, split: str, max_iters: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Outputs for the whole batch, loss of a split, and numbers of refinements.
        index = rows[split]
        y = data.y[index]
        if not self.options:
            out = self.splits.call(self.model, data)
            _check_rows(out, data)
            return out, self.loss_fn(out[index], y), None
        given = {'return_trace': True, 'max_iters': max_iters}
        given = {key: given[key] for key in self.options}
        if self.by_parts and not isinstance(data, Batch):
            out, trace = call_by_parts(self.model, data, **given)
        else:
            out, trace = self.model(data, **given)
        _check_rows(out, data)
        loss = trace.loss(lambda out: self.loss_fn(out[index], y))
        return out, loss, trace.num_iters


def _num_rows(data: Data, index: Tensor | slice) -> int:
    return data.y.size(0) if isinstance(index, slice) else index.numel()


@dataclass
class _Mean:
    # A running mean, which is exactly the first value after one.
    value: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        self.weight += weight
        self.value += (value - self.value) * (weight / self.weight)


@torch.no_grad()
def _collapsed(out: Tensor, y: Tensor, loss_fn: Callable) -> bool:
    # Whether the mean output does as well for each row, though labels differ.
    if bool((y == y[:1]).all()):
        return False
    loss = float(loss_fn(out, y))
    constant = float(loss_fn(out.mean(dim=0, keepdim=True).expand_as(out), y))
    return abs(loss - constant) < _SAME_LOSS * abs(constant)


def _what_helps(
    model: torch.nn.Module, splits: MaskSplits | LoaderSplits, is_idgl: bool
) -> str:
    helps = ["a smaller 'lr' or 'weight_decay'"]
    if is_idgl:
        helps.insert(0, "a smaller 'smoothness' or 'sparsity'")
    if is_idgl and hasattr(model, 'num_anchors') and not model.scale_regularizer:
        helps.insert(0, "'scale_regularizer=True', more anchors ('num_anchors')")
    kind = 'training' if splits.compared == 'train' else 'dev'
    return (
        f"The outputs of '{type(model).__name__}' have collapsed: the {kind} "
        f"{splits.items}' loss is that of the same output for all {splits.items}. What "
        f'may help: {", ".join(helps)}'
    )


def _postfix(values: dict[str, Any]) -> dict[str, str]:
    names = {'train_loss': 'train', 'val_loss': 'dev', 'val_score': 'score'}
    out = {name: f'{values[key]:.4f}' for key, name in names.items()}
    if 'iterations' in values:
        out['iters'] = f'{values["iterations"]:.1f}'
    return out


def _check_arguments(
    monitor: str,
    max_epochs: int,
    patience: int,
    first_phase: int,
    checkpoint_every: int | None,
) -> None:
    if monitor not in {'loss', 'score'}:
        raise ValueError(
            f"Expected 'monitor' to be one of 'loss', 'score' (got {monitor!r})"
        )
    check_at_least('max_epochs', max_epochs, 1, integer=True)
    check_at_least('patience', patience, 1, integer=True)
    check_at_least('first_phase', first_phase, 0, integer=True)
    if checkpoint_every is not None:
        check_at_least('checkpoint_every', checkpoint_every, 1, integer=True)
    if first_phase >= max_epochs:
        raise ValueError(
            f"Expected 'max_epochs' to be larger than 'first_phase', in which no "
            f'weights are selected (got {max_epochs} and {first_phase})'
        )


def _check_rows(out: Tensor, data: Data) -> None:
    if out.size(0) != data.y.size(0):
        raise ValueError(
            f'Expected the model to give an output for each of the {data.y.size(0)} '
            f"rows of 'y' (got shape {list(out.size())})"
        )


def _check_finite(values: dict[str, Any], key: str) -> None:
    if not math.isfinite(values[key]):
        raise FloatingPointError(
            f"Expected a finite loss (got '{key}' {values[key]} in epoch "
            f'{values["epoch"]})'
        )
