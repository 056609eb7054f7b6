"""Saving and loading a run, such that it continues as if it had not been stopped."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .description import differences

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    'check_writable',
    'fixed_rng',
    'load_checkpoint',
    'locked',
    'read_checkpoint',
    'replacing',
    'rng_state',
    'save_checkpoint',
    'set_rng_state',
]

_KEYS = {'run', 'model', 'optimizer', 'progress', 'rng'}


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, str],
    progress: dict[str, Any],
) -> None:
    """Saves the state of a run, that of the random number generators included."""
    content = {
        'run': run,
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
    run: dict[str, str],
) -> dict[str, Any]:
    """Restores the state of a run of the same description; returns its progress."""
    content = read_checkpoint(path)
    if content['run'] != run:
        raise ValueError(
            f"Expected '{path}' to be a checkpoint of the same run (got one of "
            f'another: {differences(run, content["run"])}). Remove it to start anew, '
            f"or give another file as 'checkpoint'"
        )
    model.load_state_dict(content['model'])
    optimizer.load_state_dict(content['optimizer'])
    set_rng_state(content['rng'])
    return content['progress']


def read_checkpoint(path: Path, saver: str = 'fit') -> dict[str, Any]:
    """What a checkpoint holds; an error names what should have saved it."""
    with path.open('rb') as file:
        try:
            content = torch.load(file, map_location='cpu', weights_only=True)
        except Exception as error:  # torch raises many kinds
            size = path.stat().st_size
            got = f'{size} bytes that cannot be read: {type(error).__name__}'
            raise _not_a_checkpoint(path, got, saver) from error
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        raise _not_a_checkpoint(path, 'something else', saver)
    return content


def _not_a_checkpoint(path: Path, got: str, saver: str) -> ValueError:
    return ValueError(
        f"Expected '{path}' to be a checkpoint that '{saver}' has saved (got {got}). "
        f"Remove it to start anew, or give another file as 'checkpoint'"
    )


def check_writable(path: Path) -> None:
    """Raise unless a file can be written: at once, not after hours of training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError('it is a folder')
    except OSError as error:
        raise OSError(
            f"Expected '{path}' to be a file that can be written (got: "
            f'{error.strerror or error})'
        ) from error


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Keeps others that use this from a file (where the system has such locks).

    The lock of a process that is killed ends with it, even if its file stays.
    """
    if fcntl is None:
        yield
        return
    file = path.with_name(f'{path.name}.lock')
    lock = _lock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        raise BlockingIOError(
            f"Expected '{path}' to be the file of one run at a time (got one that "
            f'another run is using). Wait for it, or give another file'
        )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is ours
        os.close(lock)


def _lock(file: Path, mode: int) -> int | None:
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, mode)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError:  # a file system without locks
            return lock
        # The one before may have removed the file that was waited for.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(file)):
                return lock
        os.close(lock)


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
    # A machine with other GPUs goes on with random numbers of its own.
    if len(state['cuda']) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state['cuda'])
    np.random.set_state(state['numpy'])  # noqa: NPY002
    random.setstate(state['python'])


@contextlib.contextmanager
def fixed_rng() -> Iterator[None]:
    """Within, random numbers are the same each time; those after it are not touched."""
    state = rng_state()
    torch.default_generator.manual_seed(0)  # Data sets are loaded by the CPU.
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    try:
        yield
    finally:
        set_rng_state(state)
