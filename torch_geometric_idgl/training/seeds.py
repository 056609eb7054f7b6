"""Fitting a model for several seeds, with the results in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch_geometric import seed_everything
from torch_geometric.data import Data

from .checkpoint import replacing
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
        seeds (iterable): The seeds.
        results_path (str): The JSON file.
        **fit_kwargs (optional): Arguments of :meth:`fit`. If :obj:`checkpoint` is
            given, a seed that was stopped half-way continues from there; the seed
            is made part of the file name.

    Returns:
        list: The :class:`FitRecord` of every seed.
    """
    results_path = Path(results_path)
    checkpoint = fit_kwargs.pop('checkpoint', None)
    runs = _read_json(results_path)
    records = []
    for seed in seeds:
        if seed not in runs:
            seed_everything(seed)
            data = make_data(seed)
            model = make_model(data)
            file = None
            if checkpoint is not None:
                file = Path(checkpoint)
                file = file.with_name(f'{file.stem}-seed{seed}{file.suffix}')
            record = fit(model, data, checkpoint=file, **fit_kwargs)
            # Read anew, for another process may have finished other seeds meanwhile.
            runs = {**_read_json(results_path), seed: asdict(record)}
            _write_json(results_path, runs)
        records.append(FitRecord(**runs[seed]))
    return records


def _read_json(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    runs = json.loads(path.read_text())
    return {run.pop('seed'): run for run in runs}


def _write_json(path: Path, runs: dict[int, dict[str, Any]]) -> None:
    with replacing(path) as temp:
        rows = [{'seed': seed, **run} for seed, run in runs.items()]
        temp.write_text(json.dumps(rows, indent=2) + '\n')
