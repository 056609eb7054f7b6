"""What is kept of runs: results files, one for each system on a data set, checkpoints
of half-finished runs, and how a cell of a table shows them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any

import common
import torch
from common import locked, percent, read_json, write_json

from torch_geometric_idgl.training import FitRecord

RUNS = 5  # of a cell, if it does not say how many


def checkpoint_file(
    root: str, dataset: str, system: Any, settings: Any, seed: int, purpose: str
) -> Path:
    """Where a half-finished seed is kept; other settings do not go on from it, nor do
    runs for another purpose (a search, a timing).
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    name = f'{dataset}_{system}_{digest[:8]}_seed{seed}.pt'
    return Path(root) / 'checkpoints' / purpose / name


def fitted(record: FitRecord, model: torch.nn.Module) -> dict[str, Any]:
    """What `fit` has found, as results files name it."""
    return {
        'dev': record.val_score,
        'test': record.test_score,
        'dev_loss': record.val_loss,
        'epochs': record.epochs,
        'best_epoch': record.best_epoch,
        'seconds': record.seconds,
        'iterations': record.iterations,
        'parameters': sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def read_runs(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The content of a results file, or that of a new one.

    Args:
        file (Path): The file.
        about (dict): What all its runs have in common: data, system, settings, and
            perhaps the number of documents. Other settings or documents raise an error.
    """
    content = read_json(file) or {**about, 'runs': []}
    there, now = (
        {**given['settings'], 'documents': given.get('documents')}
        for given in (content, about)
    )
    changed = {
        key: (there.get(key), now.get(key))
        for key in {**there, **now}
        if there.get(key) != now.get(key)
    }
    if changed:
        raise ValueError(
            f'Expected the settings that {file.name} was made with (got other values '
            f'of {changed}, there and now); move the file away to run anew, or name '
            f"another folder by '--results'"
        )
    return content


def add_run(
    file: Path,
    about: dict[str, Any],
    seed: int,
    record: dict[str, Any],
    command: Callable[[str], str],
    device: torch.device | str,
) -> dict[str, Any]:
    """Adds a run to its results file, unless the seed is there by now.

    Args:
        file (Path): The file.
        about (dict): See :meth:`read_runs`.
        seed (int): The seed of the run.
        record (dict): What the run has found.
        command (callable): The command that gives all runs of the file, from its
            options for their seeds.
        device (torch.device): What it ran on.

    Returns:
        dict: The run with its seed, memory, machine and versions.
    """
    record = {
        'seed': seed,
        **record,
        'peak_memory_mb': common.peak_memory_mb(),
        'machine': common.machine(device),
        'versions': common.versions(),
    }
    with locked(file):
        # Another process may have finished another seed, or changed the settings.
        content = read_runs(file, about)
        if seed not in (seeds := [run['seed'] for run in content['runs']]):
            content['command'] = command(_seed_options([seed, *seeds]))
            content['runs'].append(record)
            write_json(file, content)
    return record


def _seed_options(seeds: list[int]) -> str:
    # Of seeds with gaps, it gives those between as well.
    first = min(seeds)
    return f'--runs {max(seeds) - first + 1}' + f' --first {first}' * (first > 0)


def run_missing(
    name: str,
    stored: list[dict[str, Any]],
    seeds: Iterable[int],
    run_seed: Callable[[int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Runs the seeds that are not stored yet, and says how each of them went. Returns
    the runs of all these seeds.
    """
    known = {record['seed']: record for record in stored}
    records = []
    for seed in seeds:
        records.append(known[seed] if seed in known else run_seed(seed))
        line = _line(name, records[-1]) + ' (stored, not run)' * (seed in known)
        print(line, flush=True)
    return records


def _line(name: str, record: dict[str, Any]) -> str:
    text = (
        f'{name} seed {record["seed"]}: test {100 * record["test"]:.1f}, '
        f'dev {100 * record["dev"]:.1f}, {record["epochs"]} epochs'
    )
    if record.get('iterations') is not None:
        text += f', {record["iterations"]:.1f} refinements'
    return text + (
        f', {record["seconds"]:.1f} s, {record["peak_memory_mb"]:.0f} MB at most'
    )


def score_cell(
    scores: list[float], figure: float | str | None = None, remark: str = ''
) -> str:
    """Mean and deviation in percent, how many runs if not five, and the paper's figure
    in brackets.
    """
    beside = '' if figure is None else f' ({figure})'
    beside = beside.replace('memory', 'out of memory')
    if not scores:
        return beside.strip() or '–'
    runs = '' if len(scores) == RUNS else f', {count(scores)}'
    return percent(scores) + runs + remark + beside


def count(runs: Sized) -> str:
    """How many runs there are."""
    return f'{len(runs)} run{"s" if len(runs) != 1 else ""}'
