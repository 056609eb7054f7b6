"""Searches hyper-parameters on the dev set.

    python benchmarks/search.py --dataset cora --model gcn --trials 50
    python benchmarks/search.py --dataset cora --model idgl --trials 50 --halve
    python benchmarks/search.py --dataset cora --model gcn --try 'dropout: 0.8, lr: 0.1'

The first trial is the published setting, the others are drawn from configs/search.yaml:
all settings anew, or each of them with the probability `--change`; `--try` adds trials
that are given. With `--halve`, only the better half of the trials goes on to the next
seed (and the published setting, where its runs are there already). Each training run is
logged to benchmarks/results/search/ and never repeated; the test labels are hidden from
it. Wine, Cancer and Digits are split as the paper does. Of all trials in the log that
have most seeds, whichever search they were of, the setting with the best mean dev score
(then the lowest mean dev cross-entropy: the whole loss of IDGL depends on the weights
of its regularisers) is written to configs/tuned.yaml, for `--settings tuned`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import yaml
from common import (
    CONFIGS,
    DATASETS,
    RESULTS,
    TABLES,
    locked,
    percent,
    read_yaml,
    table,
    write_text,
)
from node_classification import read_results
from options import add_options, explain_errors, positive, run_options, stage
from records import checkpoint_file
from systems import System, load_settings, model_options, run


def search_space(base: str, dataset: str) -> dict[str, list]:
    """The values to try of each setting."""
    spaces = read_yaml(CONFIGS / 'search.yaml')
    if base not in spaces:
        raise ValueError(f'Expected one of {", ".join(spaces)} (got {base!r})')
    space = {**spaces[base]['default'], **(spaces[base].get(dataset) or {})}
    return {key: values for key, values in space.items() if values}


def draw_trials(
    space: dict[str, list],
    trials: int,
    seed: int = 0,
    change: float = 1.0,
    published: dict[str, Any] | None = None,
) -> list[dict]:
    r"""Changes of the published setting that give distinct ones, the same for the same
    arguments; a larger number of trials begins with those of a smaller one.

    The first trial changes nothing. A space that has no more than the wanted trials is
    tried completely. With :obj:`change` below one, a trial draws each setting with this
    probability only, the others stay as published; a setting with a single value takes
    it in every trial.
    """
    rng = random.Random(seed)
    published = published or {}
    size = math.prod(len(values) for values in space.values())
    if all(published.get(key) in values for key, values in space.items()):
        size -= 1  # the published setting, which is the first trial
    chosen: list[dict] = [{}]
    seen = {as_key(published)}
    while len(chosen) < min(trials, size + 1):
        trial = {
            key: rng.choice(values)
            for key, values in sorted(space.items())
            if change == 1.0 or len(values) == 1 or rng.random() < change
        }
        if (key := as_key({**published, **trial})) not in seen:
            seen.add(key)
            chosen.append(trial)
    return chosen


def add_trials(
    trials: list[dict],
    given: Sequence[dict[str, Any]],
    known: set[str],
    published: dict[str, Any],
) -> list[dict]:
    """Adds the trials that somebody has given to those that were drawn, but for
    settings that are among them already; they may change what is known.

    What epochs are chosen by is not among what they may change: where it is the dev
    score, that is a maximum, which no other trial's compares with.
    """
    trials = list(trials)
    known = known - {'monitor'}
    for params in given:
        unknown = sorted({*params} - known)
        if unknown:
            raise ValueError(
                f'Expected settings among {", ".join(sorted(known))} (got '
                f'{", ".join(unknown)})'
            )
        settings = {**published, **params}
        if all({**published, **trial} != settings for trial in trials):
            trials.append(params)
    return trials


def as_key(settings: dict[str, Any]) -> str:
    """The same text for the same settings."""
    return json.dumps(settings, sort_keys=True)


def as_text(params: dict[str, Any]) -> str:
    """Settings on one line, as `--try` takes them."""
    return yaml.safe_dump(params, default_flow_style=True, width=math.inf).strip()[1:-1]


def from_text(text: str) -> dict[str, Any]:
    """Reads such a line."""
    try:
        params = yaml.safe_load('{' + text + '}')
    except yaml.YAMLError:
        params = None
    if not isinstance(params, dict) or not params or None in params.values():
        raise argparse.ArgumentTypeError(
            f"expected settings as 'dropout: 0.8, lr: 0.1' (got {text!r})"
        )
    return params


def log_file(base: str, dataset: str, folder: Path = RESULTS) -> Path:
    """Where the runs of a search are kept."""
    return folder / 'search' / f'{dataset}_{base}.jsonl'


def read_log(file: Path) -> list[dict[str, Any]]:
    """Reads finished runs; a line cut off by an interruption does not count."""
    records = []
    for line in file.read_text(encoding='utf-8').splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def read_trials(file: Path, published: dict[str, Any]) -> list[dict[str, Any]]:
    """The finished runs that changed what is published now, epochs chosen alike."""
    return [
        r
        for r in read_log(file)
        if r['settings'] == {**published, **r['params']}
        and r['settings'].get('monitor') == published.get('monitor')
    ]


def append_log(file: Path, record: dict[str, Any]) -> None:
    """Adds one line, on a line of its own even after a cut-off one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cut_off = file.exists() and not file.read_bytes().endswith(b'\n')
    with file.open('a', encoding='utf-8') as stream:
        stream.write('\n' * cut_off + json.dumps(record) + '\n')


def rank(log: list[dict[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """Trials with all seeds finished, the best first."""
    by_trial: dict[str, dict[int, dict]] = {}
    for record in log:
        if record['seed'] < seeds:
            trial = by_trial.setdefault(as_key(record['settings']), {})
            trial.setdefault(record['seed'], record)
    ranked = []
    for trial in by_trial.values():
        if len(trial) == seeds:
            records = list(trial.values())
            losses = [r.get('dev_cross_entropy', r['dev_loss']) for r in records]
            ranked.append(
                {
                    'params': records[0]['params'],
                    'dev': [r['dev'] for r in records],
                    'dev_loss': common.mean_std(losses)[0],
                }
            )
    # Means in double precision may differ by rounding only: that is a tie.
    return sorted(
        ranked, key=lambda t: (-round(common.mean_std(t['dev'])[0], 9), t['dev_loss'])
    )


def most_seeds(log: list[dict[str, Any]]) -> int:
    """The largest number of seeds that at least two trials have: what all are compared
    with, so that a search with few seeds does not replace the winner of one with more
    (and one that was stopped at the first trial of a further seed decides nothing).
    """
    seeds: dict[str, set[int]] = {}
    for record in log:
        seeds.setdefault(as_key(record['settings']), set()).add(record['seed'])
    return sorted([0, 0, *map(len, seeds.values())])[-2]


def write_winner(base: str, dataset: str, params: dict[str, Any], file: Path) -> None:
    """Puts the best setting into the file of tuned ones; its comment stays."""
    with locked(file):
        text = file.read_text(encoding='utf-8') if file.exists() else ''
        comment = ''.join(
            line for line in text.splitlines(keepends=True) if line.startswith('#')
        )
        content = yaml.safe_load(text) or {}
        content.setdefault(base, {})[dataset] = params
        write_text(file, comment + yaml.safe_dump(content, sort_keys=True))


def search(
    base: str,
    dataset: str,
    root: str,
    trials: int,
    seeds: int,
    *,
    seed: int = 0,
    change: float = 1.0,
    halve: bool = False,
    given: Sequence[dict[str, Any]] = (),
    device='cpu',
    progress: bool = True,
    folder: Path = RESULTS,
) -> list[dict[str, Any]]:
    """Runs what is missing of a search; returns all trials that are logged, the best
    first.
    """
    system = System.parse(base)
    if system.settings != 'paper' or system.ablation:
        raise ValueError(f"Expected a system without suffixes (got '{base}')")
    published = load_settings(system, dataset, paper_splits=dataset in TABLES)
    file = log_file(base, dataset, folder)
    space = search_space(base, dataset)
    drawn = draw_trials(space, trials, seed, change, published)
    known = {*published, *space, *model_options(base)}
    drawn = add_trials(drawn, given, known, published)
    keys = [as_key({**published, **params}) for params in drawn]
    options = f'--trials {trials} --seeds {seeds}'
    options += ''.join(f' --try {shlex.quote(as_text(params))}' for params in given)
    options += f' --seed {seed}' * (seed != 0) + f' --change {change}' * (change < 1)
    command = f'python benchmarks/search.py --dataset {dataset} --model {base} '
    command += options + ' --halve' * halve

    def finished() -> list[dict[str, Any]]:
        trials = read_trials(file, published)
        return [r for r in trials if as_key(r['settings']) in keys]

    # Of the published setting, finished runs are at hand.
    published_runs = {
        r['seed']: r
        for r in read_results(dataset, system, folder, dataset in TABLES)['runs']
        if 'dev_cross_entropy' in r
    }
    remaining = list(range(len(drawn)))
    for run_seed in range(seeds):
        done = {as_key(r['settings']) for r in finished() if r['seed'] == run_seed}
        free = [0] if run_seed in published_runs else []
        for number in sorted({*remaining, *free}):
            if keys[number] in done:
                continue
            params = drawn[number]
            settings = {**published, **params}
            checkpoint = checkpoint_file(
                root, dataset, system, settings, run_seed, 'search'
            )
            try:
                record = None if params else published_runs.get(run_seed)
                record = record or run(
                    system,
                    dataset,
                    run_seed,
                    root,
                    settings=settings,
                    device=device,
                    progress=progress,
                    checkpoint=checkpoint,
                    hide_test=True,
                )
            except FloatingPointError as error:
                # A diverged run is a bad trial, not the end of the search.
                record = {'dev': 0.0, 'dev_loss': 1e9, 'epochs': 0, 'seconds': 0.0}
                checkpoint.unlink(missing_ok=True)
                print(f'trial {number}: {error}', file=sys.stderr)
            kept = ('dev', 'dev_loss', 'dev_cross_entropy')
            kept += ('epochs', 'best_epoch', 'seconds')
            line: dict[str, Any] = {'trial': number, 'seed': run_seed, 'params': params}
            line |= {key: record[key] for key in kept if key in record}
            line |= {'settings': settings, 'command': command}
            made = {'machine': common.machine(device), 'versions': common.versions()}
            # Runs that were at hand say themselves what made them.
            made = {key: record.get(key, value) for key, value in made.items()}
            append_log(file, {**line, **made})
            print(
                f'trial {number} seed {run_seed}: dev {100 * line["dev"]:.1f}, '
                f'loss {line["dev_loss"]:.4f} {params or "(published)"}',
                flush=True,
            )
        if halve:
            ranked = [
                keys.index(as_key({**published, **t['params']}))
                for t in rank(finished(), run_seed + 1)
            ]
            ranked = [number for number in ranked if number in remaining]
            remaining = sorted(ranked[: math.ceil(len(ranked) / 2)])
    trials = read_trials(file, published)
    return rank(trials, max(seeds, most_seeds(trials)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dataset', choices=DATASETS, required=True)
    parser.add_argument('--model', required=True)
    parser.add_argument('--trials', type=positive, default=50, help='the budget')
    parser.add_argument('--seeds', type=positive, default=3, help='runs of each trial')
    parser.add_argument('--seed', type=int, default=0, help='of the trials drawn')
    parser.add_argument(
        '--change', type=float, default=1.0, help='probability to draw a setting anew'
    )
    parser.add_argument(
        '--halve', action='store_true', help='only the better half gets the next seed'
    )
    parser.add_argument(
        '--try',
        dest='given',
        type=from_text,
        action='append',
        default=[],
        metavar='SETTINGS',
        help="a further trial, such as 'dropout: 0.8, lr: 0.1'; may be repeated",
    )
    parser.add_argument('--tuned', type=Path, default=CONFIGS / 'tuned.yaml')
    add_options(parser)
    args = parser.parse_args(argv)
    if not 0 < args.change <= 1:
        parser.error(f'--change must be in (0, 1] (got {args.change})')
    return args


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    ranked = search(
        args.model,
        args.dataset,
        args.root,
        args.trials,
        args.seeds,
        seed=args.seed,
        change=args.change,
        halve=args.halve,
        given=args.given,
        **run_options(args),
    )
    rows = [
        [percent(t['dev']), f'{t["dev_loss"]:.4f}', str(t['params'] or '(published)')]
        for t in ranked[:10]
    ]
    print('\n' + table(['dev (%)', 'dev loss', 'settings'], rows))
    write_winner(args.model, args.dataset, ranked[0]['params'], args.tuned)
    return 0


if __name__ == '__main__':
    sys.exit(main())
