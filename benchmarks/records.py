"""What is kept of runs: results files, one for each system on a data set, checkpoints
of half-finished runs, and how a cell of a table shows them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
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
    """The content of a results file, or that of a new one: what all its runs have in
    common (data, system, settings), and the runs. Other settings raise an error.
    """
    content = read_json(file) or {**about, 'runs': []}
    there, now = (
        {**given['settings'], 'documents': given.get('documents')}
        for given in (content, about)
    )
    keys = {key for key in {**there, **now} if there.get(key) != now.get(key)}
    if changed := {key: (there.get(key), now.get(key)) for key in keys}:
        raise ValueError(
            f'Expected the settings that {file.name} was made with (got other values '
            f'of {changed}, there and now); move the file away to run anew, or name '
            f"another folder by '--results'"
        )
    return content


def summary(about: dict[str, Any], run: dict[str, Any]) -> str:
    """How a run went, in a line."""
    name = f'{about["dataset"]} {about["system"]} seed {run["seed"]}'
    found = f'test {100 * run["test"]:.1f}, dev {100 * run["dev"]:.1f}'
    return f'{name}: {found}, {run["epochs"]} epochs, {run["seconds"]:.1f} s'


def run_missing(
    file: Path,
    about: dict[str, Any],
    command: str,
    seeds: Iterable[int],
    run_seed: Callable[[int], dict[str, Any]],
    device: torch.device | str,
    describe: Callable[[dict, dict], str] = summary,
) -> list[dict[str, Any]]:
    """Runs the seeds that a results file does not have yet, and adds each at once, with
    memory, machine and versions. Says how each one went; returns all of them. The
    command is that of the file, but for the seeds.
    """
    found = []
    for seed in seeds:
        stored = {run['seed']: run for run in read_runs(file, about)['runs']}
        run = stored.get(seed) or {
            'seed': seed,
            **run_seed(seed),
            'peak_memory_mb': common.peak_memory_mb(),
            'machine': common.machine(device),
            'versions': common.versions(),
        }
        if seed not in stored:
            add_run(file, about, command, run)
        remark = ' (stored, not run)' * (seed in stored)
        print(describe(about, run) + remark, flush=True)
        found.append(run)
    return found


def add_run(file: Path, about: dict[str, Any], command: str, run: dict) -> None:
    """Adds a run, unless another process has finished this seed meanwhile."""
    with locked(file):
        content = read_runs(file, about)
        seeds = [run['seed'], *(other['seed'] for other in content['runs'])]
        if run['seed'] not in seeds[1:]:
            content['runs'].append(run)
            options = f' --first {min(seeds)}' * (min(seeds) > 0)
            count = max(seeds) - min(seeds) + 1
            content['command'] = f'{command} --runs {count}{options}'
            write_json(file, content)


def score_cell(
    scores: list[float],
    figure: float | str | None = None,
    remark: str = '',
    sign: str = '-',
) -> str:
    """Mean and deviation in percent, how many runs if not five, and the paper's figure
    in brackets.
    """
    beside = '' if figure is None else f' ({figure})'
    if not scores:
        return beside.strip() or '–'
    count = len(scores)
    runs = '' if count == RUNS else f', {count} run{"s" * (count != 1)}'
    return percent(scores, sign=sign) + runs + remark + beside
