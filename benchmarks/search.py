"""Searches hyper-parameters by Optuna: the lowest mean dev cross-entropy.

    python benchmarks/search.py --dataset wine --model gcn-knn --trials 30
    python benchmarks/search.py --dataset wine --model gcn-knn --trials 30 --plots plots

The first trial is the published setting, Optuna's TPE draws the others from
configs/search.yaml. Test labels are hidden, and Wine, Cancer and Digits are split as
the paper does. A trial that is above the median after three seeds is pruned. All trials
are in benchmarks/results/search/optuna/: the same command goes on where it was stopped,
more trials add to those that are there. The best one is written to configs/tuned.yaml,
for `--model gcn-knn-tuned`. Run one search of a system on a data set at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import common
import optuna
import yaml
from common import CONFIGS, DATASETS, RESULTS, TABLES, locked, read_yaml, table
from options import add_options, explain_errors, positive, stage
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from records import checkpoint_file
from systems import SUPPORTED, System, load_settings, run

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
KEPT = ('dev', 'dev_loss', 'dev_cross_entropy', 'epochs', 'best_epoch', 'seconds')


def search_space(base: str, dataset: str) -> dict[str, list]:
    """The values to try of each setting."""
    spaces = read_yaml(CONFIGS / 'search.yaml')
    if base not in spaces:
        raise ValueError(f'Expected one of {", ".join(spaces)} (got {base!r})')
    space = {**spaces[base]['default'], **(spaces[base].get(dataset) or {})}
    return {key: values for key, values in space.items() if values}


def open_study(
    base: str, dataset: str, published: dict[str, Any], folder: Path = RESULTS
) -> optuna.Study:
    """The trials so far; those around other published settings raise an error."""
    file = folder / 'search' / 'optuna' / f'{dataset}_{base}.log'
    file.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(file))),
        study_name=f'{dataset}_{base}',
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
    )
    if not study.trials:
        study.set_user_attr('settings', published)
        study.enqueue_trial({}, user_attrs={'published': True})
    if study.user_attrs['settings'] != published:
        raise ValueError(
            f'Expected the published settings that {file.name} was made with (got '
            f"others); move the file away, or name another folder by '--results'"
        )
    # What a killed process has left is tried again, but for the seeds it has finished.
    last = study.trials[-1]
    if last.state == TrialState.RUNNING:
        study.tell(last.number, state=TrialState.FAIL)
    if last.state in (TrialState.RUNNING, TrialState.FAIL):
        params = {**last.system_attrs.get('fixed_params', {}), **last.params}
        study.enqueue_trial(params, user_attrs=last.user_attrs)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    return study


def tried(study: optuna.Study) -> list[dict[str, Any]]:
    """The settings of finished trials, each once."""
    published = study.user_attrs['settings']
    found: list[dict[str, Any]] = []
    for trial in study.get_trials(states=FINISHED):
        if (settings := {**published, **trial.params}) not in found:
            found.append(settings)
    return found


def search(args: argparse.Namespace) -> optuna.Study:
    """Runs what is missing of a search, and returns all its trials."""
    dataset, system = args.dataset, System(args.model)
    space = search_space(args.model, dataset)
    published = load_settings(system, dataset, paper_splits=dataset in TABLES)
    study = open_study(args.model, dataset, published, args.results)

    def run_seed(trial: optuna.Trial, settings: dict[str, Any], seed: int) -> float:
        # Those of a trial that a killed process has left are there.
        if (name := f'seed {seed}') not in trial.user_attrs:
            about = (dataset, system, settings, seed, 'search')
            file = checkpoint_file(args.root, *about)
            how = {'device': args.device, 'progress': not args.quiet}
            how |= {'settings': settings, 'checkpoint': file, 'hide_test': True}
            try:
                record = run(system, dataset, seed, args.root, **how)
            except FloatingPointError as error:  # a bad trial, not the end of all
                file.unlink(missing_ok=True)
                raise optuna.TrialPruned(str(error)) from error
            trial.set_user_attr(name, {k: record[k] for k in KEPT if k in record})
        record = trial.user_attrs[name]
        return record.get('dev_cross_entropy', record['dev_loss'])

    def objective(trial: optuna.Trial) -> float:
        params = {}
        if not trial.user_attrs.get('published'):
            params = {k: trial.suggest_categorical(k, v) for k, v in space.items()}
        if {**published, **params} in tried(study):
            raise optuna.TrialPruned  # it costs nothing, and does not count
        trial.set_user_attr('versions', common.versions())
        losses: list[float] = []
        for seed in range(args.seeds):
            losses.append(run_seed(trial, {**published, **params}, seed))
            if not math.isfinite(losses[-1]):
                raise optuna.TrialPruned
            trial.report(statistics.fmean(losses), seed)
            if seed + 1 < args.seeds and trial.should_prune():
                raise optuna.TrialPruned
        return statistics.fmean(losses)

    for _ in range(20 * args.trials):  # in a small space all settings are soon known
        if len(tried(study)) < args.trials:
            study.optimize(objective, n_trials=1)
    return study


def write_winner(base: str, dataset: str, params: dict[str, Any], file: Path) -> None:
    """Puts the best setting into the file of tuned ones; its comment stays."""
    with locked(file):
        text = file.read_text(encoding='utf-8') if file.exists() else ''
        lines = text.splitlines(keepends=True)
        comment = ''.join(line for line in lines if line.startswith('#'))
        content = yaml.safe_load(text) or {}
        content.setdefault(base, {})[dataset] = params
        common.write_text(file, comment + yaml.safe_dump(content, sort_keys=True))


def plot(study: optuna.Study, folder: Path) -> None:
    """Draws the losses of all trials."""
    from optuna.visualization.matplotlib import plot_optimization_history

    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it is experimental
        figure = plot_optimization_history(study, target_name='dev loss').figure
    figure.savefig(folder / f'{study.study_name}.svg', bbox_inches='tight')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dataset', choices=DATASETS, required=True)
    parser.add_argument('--model', choices=SUPPORTED, required=True)
    parser.add_argument('--trials', type=positive, default=30, help='all in all')
    parser.add_argument('--seeds', type=positive, default=5, help='runs of each trial')
    parser.add_argument('--tuned', type=Path, default=CONFIGS / 'tuned.yaml')
    parser.add_argument('--plots', type=Path, metavar='FOLDER', help='draw them there')
    add_options(parser)
    return parser.parse_args(argv)


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stage(args)
    study = search(args)
    found = study.get_trials(states=(TrialState.COMPLETE,))
    ranked = sorted(found, key=lambda trial: trial.value)
    if not ranked:
        raise ValueError('Expected a trial that reached its last seed (got none)')
    rows = [[f'{t.value:.4f}', str(t.params or '(published)')] for t in ranked[:10]]
    print('\n' + table(['dev cross-entropy', 'settings'], rows))
    write_winner(args.model, args.dataset, ranked[0].params, args.tuned)
    if args.plots:
        plot(study, args.plots)
    return 0


if __name__ == '__main__':
    sys.exit(main())
