"""Fitting a model for several seeds, with the results in a file."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch_geometric import seed_everything
from torch_geometric.data import Data

from ..checks import check_at_least
from .checkpoint import check_writable, locked, replacing
from .loop import FitRecord, fit

__all__ = ['run_seeds']


def run_seeds(
    make_model: Callable[[Data], torch.nn.Module],
    make_data: Callable[[int], Data],
    seeds: Iterable[int],
    results_path: str | os.PathLike,
    **fit_kwargs: Any,
) -> list[FitRecord]:
    r"""Trains one model per seed, and continues where an earlier call was stopped.

    Every finished seed is written to a JSON file at once, a list of the fields of
    :class:`FitRecord` and the :obj:`seed`; seeds that are found there are not run
    again. Use a file for one experiment only: it is not checked that the models and
    settings of its seeds are those of the call.

    Args:
        make_model (callable): Gives the model for the data.
        make_data (callable): Gives the data for the seed.
        seeds (iterable): The seeds, whole numbers: a list, a range, an array or a
            tensor.
        results_path (str): The JSON file.
        **fit_kwargs (optional): Arguments of :meth:`fit`. If :obj:`checkpoint` is
            given, a seed that was stopped half-way continues from there; the seed
            is made part of the file name, and of the progress bar's :obj:`desc`.

    Returns:
        list: The :class:`FitRecord` of every seed.
    """
    numbers = _whole_numbers(seeds)
    path = Path(results_path)
    checkpoint = fit_kwargs.pop('checkpoint', None)
    desc = fit_kwargs.pop('desc', None)
    records = _read_results(path)
    if not records.keys() >= set(numbers):
        check_writable(path)
    for seed in numbers:
        if seed in records:
            continue
        seed_everything(seed)
        data = make_data(seed)
        model = make_model(data)
        file = None
        if checkpoint is not None:
            file = Path(checkpoint)
            file = file.with_name(f'{file.stem}-seed{seed}{file.suffix}')
        name = type(model).__name__ if desc is None else desc
        record = fit(
            model, data, checkpoint=file, desc=f'{name}, seed {seed}', **fit_kwargs
        )
        # Read anew, for another process may have finished other seeds meanwhile.
        with locked(path, wait=True):
            records = {**_read_results(path), seed: record}
            _write_results(path, records)
    return [records[seed] for seed in numbers]


def _whole_numbers(seeds: Any) -> list[int]:
    # An array or a tensor gives the numbers of Python.
    values = seeds.tolist() if hasattr(seeds, 'tolist') else seeds
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(
            f"Expected 'seeds' to be whole numbers, such as 'range(5)' or '[0, 1]' "
            f'(got {seeds!r})'
        ) from error
    for number in numbers:
        check_at_least('seeds', number, 0, integer=True)
    return numbers


def _read_results(path: Path) -> dict[int, FitRecord]:
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding='utf-8'))
        return {row.pop('seed'): FitRecord(**row) for row in rows}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected '{path}' to hold results of 'run_seeds', a JSON list (got: "
            f'{type(error).__name__}, {error}). Move it away to run all seeds anew'
        ) from error


def _write_results(path: Path, records: dict[int, FitRecord]) -> None:
    rows = [{'seed': seed, **asdict(record)} for seed, record in records.items()]
    with replacing(path) as temp:
        temp.write_text(json.dumps(rows, indent=2) + '\n', encoding='utf-8')
