"""Saving and loading a run, such that it continues as if it had not been stopped."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

__all__ = [
    'describe_run',
    'load_checkpoint',
    'replacing',
    'rng_state',
    'save_checkpoint',
    'set_rng_state',
]


def describe_run(model: torch.nn.Module, data: Data) -> dict[str, Any]:
    """What another run may have otherwise: the arguments of the model's constructor,
    as far as it keeps them, and the labels and masks of the data.
    """
    names = {
        name
        for cls in type(model).__mro__
        if issubclass(cls, torch.nn.Module) and '__init__' in vars(cls)
        for name in inspect.signature(cls.__init__).parameters
    }
    found: dict[str, Any] = {'model': type(model).__name__}
    for name in sorted(names):
        value = getattr(model, name, None)
        if isinstance(value, (bool, int, float, str)):
            found[name] = value
    digest = hashlib.sha256()
    for key in ['y', 'train_mask', 'val_mask', 'test_mask']:
        if isinstance(value := data.get(key), torch.Tensor):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return {**found, 'data': digest.hexdigest()[:16]}


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    progress: dict[str, Any],
) -> None:
    """Saves the state of a run, that of the random number generators included."""
    content = {
        'settings': settings,
        'model': model.state_dict(),
        'optimizer': optimizer.state_dict(),
        'progress': progress,
        'rng': rng_state(),
    }
    with replacing(path) as temp:
        torch.save(content, temp)


def load_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Restores the state of a run with equal settings, and returns its progress."""
    content = torch.load(path, map_location='cpu', weights_only=True)
    saved = content['settings']
    other = [k for k in {**settings, **saved} if saved.get(k) != settings.get(k)]
    if other:
        wanted = {key: settings.get(key) for key in other}
        found = {key: saved.get(key) for key in other}
        raise ValueError(
            f"Expected the checkpoint '{path}' to be of a run with {wanted} (got "
            f'{found}). Remove it to start anew'
        )
    model.load_state_dict(content['model'])
    optimizer.load_state_dict(content['optimizer'])
    set_rng_state(content['rng'])
    return content['progress']


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file to write, which then takes the place of :obj:`path` at once.

    A process that is killed meanwhile leaves the former file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        yield temp
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def rng_state() -> dict[str, Any]:
    """The state of all random number generators."""
    # Only types that can be loaded with `weights_only=True`.
    state: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *rest = state
    return {
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        'numpy': (name, keys.tolist(), *rest),
        'python': random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what :meth:`rng_state` gave."""
    torch.set_rng_state(state['torch'])
    if state['cuda']:
        torch.cuda.set_rng_state_all(state['cuda'])
    np.random.set_state(state['numpy'])  # noqa: NPY002
    random.setstate(state['python'])
