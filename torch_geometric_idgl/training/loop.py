"""Fitting a model with early stopping."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from ..checks import check_at_least
from .checkpoint import check_writable, load_checkpoint, locked, save_checkpoint
from .description import describe_run

__all__ = ['FitRecord', 'accuracy', 'fit']

_SPLITS = ['train', 'val', 'test']
_SAME_LOSS = 0.003  # relative; what is learned makes a larger difference
_SHORT_RUN = 20  # epochs in which outputs may still be those of small initial weights


@dataclass
class FitRecord:
    r"""What came out of :meth:`fit`; scores are those of the restored weights.

    Args:
        best_epoch (int): The epoch (from zero) of the restored weights.
        epochs (int): The number of epochs trained.
        seconds (float): The time it took, that of interrupted runs included.
        train_score (float): The score on the training nodes.
        val_score (float): The score on the dev nodes.
        test_score (float, optional): The score on the test nodes, if there are any.
        val_loss (float): The loss on the dev nodes.
        iterations (float, optional): The number of refinements of an IDGL model in
            evaluation, averaged over the epochs (after the first phase).
        history (list, optional): The values of every epoch, if asked for.
    """

    best_epoch: int
    epochs: int
    seconds: float
    train_score: float
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
    best_out: Tensor | None = None  # of the training nodes
    num_evals: int = 0
    iterations: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


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


def fit(
    model: torch.nn.Module,
    data: Data,
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
    checkpoint_every: int = 50,
    history: bool = False,
    callback: Callable[[int, dict[str, Any]], None] | None = None,
) -> FitRecord:
    r"""Trains a model on the nodes of :obj:`data.train_mask` with early stopping.

    IDGL models are trained on the joint loss of Algorithm 1, and stopped early on the
    same loss of the dev nodes: that of all iterations, regularisers included. Any other
    module is called as :obj:`model(x, edge_index)`, or
    :obj:`model(x, edge_index, edge_weight)` if there are weights, and trained on
    :obj:`loss_fn`. One evaluation per epoch gives dev and test scores. At the end, the
    weights of the best epoch are restored, and a warning is given if their outputs are
    nearly the same for all nodes.

    Args:
        model (torch.nn.Module): The model, changed in place.
        data (torch_geometric.data.Data): The graph, with :obj:`train_mask`,
            :obj:`val_mask` and optionally :obj:`test_mask`. IDGL models do without
            :obj:`edge_index`.
        lr (float, optional): The learning rate of Adam. (default: :obj:`0.01`)
        weight_decay (float, optional): The weight decay of Adam.
            (default: :obj:`5e-4`)
        max_epochs (int, optional): The largest number of epochs.
            (default: :obj:`10_000`)
        patience (int, optional): The number of epochs without improvement after which
            to stop. (default: :obj:`100`)
        first_phase (int, optional): The number of epochs at the start in which an IDGL
            model does not iterate. The best epoch is one after them.
            (default: :obj:`0`)
        loss_fn (callable, optional): The loss of outputs and labels.
            (default: :meth:`torch.nn.functional.cross_entropy`)
        score_fn (callable, optional): The score of outputs and labels, the larger
            the better. (default: :meth:`accuracy`)
        monitor (str, optional): What to stop on, the dev :obj:`"loss"` or
            :obj:`"score"`. (default: :obj:`"loss"`)
        progress (bool, optional): If set to :obj:`False`, no progress bar is shown. Its
            end is where patience ends, and moves on with every improvement.
            (default: :obj:`True`)
        desc (str, optional): What the progress bar is for; the class of the model if
            not given. (default: :obj:`None`)
        checkpoint (str, optional): A file to save the run in, and to continue from if
            it exists; one of another model, other settings or other data raises an
            error, and so does one that another run is using. Only :obj:`max_epochs`
            may be another. It is removed at the end. (default: :obj:`None`)
        checkpoint_every (int, optional): The number of epochs between two savings.
            (default: :obj:`50`)
        history (bool, optional): If set to :obj:`True`, the record holds the values of
            every epoch. (default: :obj:`False`)
        callback (callable, optional): Called as :obj:`callback(epoch, values)` after
            each epoch with its losses, scores and iterations. (default: :obj:`None`)

    Returns:
        FitRecord: The scores and the course of the training.
    """
    from torch_geometric_idgl.nn import IDGL

    is_idgl = isinstance(model, IDGL)
    _check_arguments(monitor, max_epochs, patience, first_phase, checkpoint_every)
    _check_data(data, is_idgl)
    if first_phase > 0 and not is_idgl:
        raise ValueError(
            f"Expected 'first_phase' to be 0 for a model without iterations (got "
            f"{first_phase} for '{type(model).__name__}')"
        )

    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
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
            run = describe_run(
                model,
                data,
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
            model.train()
            optimizer.zero_grad()
            _, loss, _ = _forward(model, data, is_idgl, max_iters, loss_fn, 'train')
            loss.backward()
            optimizer.step()
            out, scores = _evaluate(model, data, is_idgl, max_iters, loss_fn, score_fn)
            values = {'epoch': epoch, 'train_loss': float(loss.detach()), **scores}
            _check_finite(values, monitor)

            if epoch >= first_phase:
                state.num_evals += 1
                state.iterations += values.get('iterations', 0.0)
                if state.best is None or better(values, state.best):
                    state.best = values
                    state.best_state = copy.deepcopy(model.state_dict())
                    state.best_out = out[data.train_mask]
            if history:
                state.history.append(values)
            state.epoch += 1
            state.seconds += time.perf_counter() - start

            if not bar.disable:
                bar.total = end()
                bar.set_postfix(_postfix(values), refresh=False)
            bar.update()
            if path is not None and state.epoch % checkpoint_every == 0:
                save_checkpoint(path, model, optimizer, run, vars(state))
            if callback is not None:
                callback(epoch, values)

        # One epoch at least has come after the first phase.
        assert state.best is not None
        assert state.best_state is not None and state.best_out is not None
        model.load_state_dict(state.best_state)
        if path is not None:
            path.unlink(missing_ok=True)

    if state.epoch >= _SHORT_RUN:
        y = data.y[data.train_mask]
        if _collapsed(state.best_out.to(y.device), y, loss_fn):
            warnings.warn(_what_helps(model, is_idgl), stacklevel=2)
    return FitRecord(
        best_epoch=state.best['epoch'],
        epochs=state.epoch,
        seconds=state.seconds,
        train_score=state.best['train_score'],
        val_score=state.best['val_score'],
        test_score=state.best.get('test_score'),
        val_loss=state.best['val_loss'],
        iterations=state.iterations / state.num_evals if is_idgl else None,
        history=state.history if history else None,
    )


def _forward(
    model: torch.nn.Module,
    data: Data,
    is_idgl: bool,
    max_iters: int | None,
    loss_fn: Callable,
    split: str,
) -> tuple[Tensor, Tensor, float | None]:
    # Outputs for all nodes, loss of a split, and mean number of refinements.
    index = data[f'{split}_mask'].nonzero().squeeze(1)  # found once for all outputs
    y = data.y[index]
    if not is_idgl:
        weight = data.get('edge_weight')
        out = model(data.x, data.edge_index, *([] if weight is None else [weight]))
        return out, loss_fn(out[index], y), None
    out, trace = model(data, max_iters=max_iters, return_trace=True)
    loss = trace.loss(lambda out: loss_fn(out[index], y))
    return out, loss, float(trace.num_iters.to(torch.float).mean())


@torch.no_grad()
def _evaluate(
    model: torch.nn.Module,
    data: Data,
    is_idgl: bool,
    max_iters: int | None,
    loss_fn: Callable,
    score_fn: Callable,
) -> tuple[Tensor, dict[str, float]]:
    # Outputs for all nodes, losses and scores.
    model.eval()
    out, loss, iterations = _forward(model, data, is_idgl, max_iters, loss_fn, 'val')
    values = {'val_loss': float(loss)}
    for split in _SPLITS:
        mask = data.get(f'{split}_mask')
        if mask is not None:
            values[f'{split}_score'] = float(score_fn(out[mask], data.y[mask]))
    if iterations is not None:
        values['iterations'] = iterations
    return out, values


@torch.no_grad()
def _collapsed(out: Tensor, y: Tensor, loss_fn: Callable) -> bool:
    # Whether the mean output does as well for each node, though labels differ.
    if bool((y == y[:1]).all()):
        return False
    loss = float(loss_fn(out, y))
    constant = float(loss_fn(out.mean(dim=0, keepdim=True).expand_as(out), y))
    return abs(loss - constant) < _SAME_LOSS * abs(constant)


def _what_helps(model: torch.nn.Module, is_idgl: bool) -> str:
    helps = ["a smaller 'lr' or 'weight_decay'"]
    if is_idgl:
        helps.insert(0, "a smaller 'smoothness' or 'sparsity'")
    if is_idgl and hasattr(model, 'num_anchors'):
        helps.insert(0, "more anchors ('num_anchors')")
    return (
        f"The outputs of '{type(model).__name__}' have collapsed: the training nodes' "
        f'loss is that of the same output for all nodes. What may help: '
        f'{", ".join(helps)}'
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
    checkpoint_every: int,
) -> None:
    if monitor not in {'loss', 'score'}:
        raise ValueError(
            f"Expected 'monitor' to be one of 'loss', 'score' (got {monitor!r})"
        )
    check_at_least('max_epochs', max_epochs, 1, integer=True)
    check_at_least('patience', patience, 1, integer=True)
    check_at_least('first_phase', first_phase, 0, integer=True)
    check_at_least('checkpoint_every', checkpoint_every, 1, integer=True)
    if first_phase >= max_epochs:
        raise ValueError(
            f"Expected 'max_epochs' to be larger than 'first_phase', in which no "
            f'weights are selected (got {max_epochs} and {first_phase})'
        )


def _check_data(data: Data, is_idgl: bool) -> None:
    keys = ['x', 'y', 'train_mask', 'val_mask'] + ([] if is_idgl else ['edge_index'])
    missing = [key for key in keys if data.get(key) is None]
    if missing:
        raise ValueError(
            f"Expected 'data' to hold {keys} (missing {missing}; a graph can be made "
            f"by 'CosineKNNGraph')"
        )
    for split in _SPLITS:
        mask = data.get(f'{split}_mask')
        if mask is None:
            continue
        if mask.dtype != torch.bool or mask.size() != (data.num_nodes,):
            raise ValueError(
                f"Expected '{split}_mask' to be a boolean vector of {data.num_nodes} "
                f'entries (got {mask.dtype} of shape {list(mask.size())})'
            )
        if not bool(mask.any()):
            raise ValueError(f"Expected '{split}_mask' to select a node (got none)")


def _check_finite(values: dict[str, Any], monitor: str) -> None:
    for key in ['train_loss', 'val_loss']:
        if not math.isfinite(values[key]):
            raise FloatingPointError(
                f"Expected a finite loss (got '{key}' {values[key]} in epoch "
                f'{values["epoch"]})'
            )
    if monitor == 'score' and math.isnan(values['val_score']):
        raise FloatingPointError(
            f"Expected a score to stop on (got 'val_score' nan in epoch "
            f'{values["epoch"]})'
        )
