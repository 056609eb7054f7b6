import pytest
import search
from common import read_yaml
from optuna.trial import TrialState
from systems import System, load_settings

PUBLISHED = load_settings(System('gcn-knn'), 'wine', paper_splits=True)


@pytest.fixture
def calls(monkeypatch):
    """What is trained: the loss is lowest with a dropout of 0.7, whatever else."""
    found = []

    def fake(system, dataset, seed, root, *, settings, hide_test, checkpoint, **kwargs):
        assert hide_test and checkpoint.parent.name == 'search'
        found.append((settings, seed))
        loss = 0.1 + abs(settings['dropout'] - 0.7)
        record = {'dev': 0.5, 'dev_loss': 9.0, 'dev_cross_entropy': loss}
        return {**record, 'epochs': 3, 'seconds': 1.0}

    monkeypatch.setattr(search, 'run', fake)
    return found


def arguments(folder, *more):
    argv = ['--dataset', 'wine', '--model', 'gcn-knn', '--results', str(folder)]
    return [*argv, '--tuned', str(folder / 'tuned.yaml'), *more]


def run_search(model, trials, seeds, folder, dataset='wine'):
    argv = ['--dataset', dataset, '--model', 'gcn-knn', '--results', str(folder)]
    args = search.parse_args([*argv, '--trials', str(trials), '--seeds', str(seeds)])
    args.model = model  # which may be none that is searched
    return search.search(args)


def test_lowest_dev_cross_entropy_wins(calls, tmp_path, capsys):
    (tmp_path / 'tuned.yaml').write_text('# A comment.\nidgl: {wine: {lr: 0.1}}\n')
    argv = arguments(tmp_path, '--trials', '12', '--seeds', '2')
    assert search.main([*argv, '--plots', str(tmp_path / 'plots')]) == 0
    assert [seed for _, seed in calls[:4]] == [0, 1, 0, 1]
    assert calls[0][0] == PUBLISHED  # the first trial
    assert len({str(settings) for settings, _ in calls}) > 6
    text = (tmp_path / 'tuned.yaml').read_text()
    assert text.startswith('# A comment.\n')
    content = read_yaml(tmp_path / 'tuned.yaml')
    assert content['idgl'] == {'wine': {'lr': 0.1}}
    assert content['gcn-knn']['wine']['dropout'] == 0.7
    assert '| 0.1000 ' in capsys.readouterr().out
    assert (tmp_path / 'plots' / 'wine_gcn-knn.svg').exists()

    # Finished trials are not run again, more are added to them.
    done = len(calls)
    assert search.main(argv) == 0
    assert len(calls) == done
    assert search.main(arguments(tmp_path, '--trials', '13', '--seeds', '2')) == 0
    assert len(calls) == done + 2 == 26
    study = search.open_study('gcn-knn', 'wine', PUBLISHED, tmp_path)
    assert len(search.tried(study)) == 13
    assert {'seed 0', 'seed 1', 'versions'} <= set(study.trials[1].user_attrs)
    assert 'test' not in study.trials[1].user_attrs['seed 0']


def test_stopped_trial_goes_on(calls, tmp_path, monkeypatch):
    train = search.run

    def stop(*args, **kwargs):
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train(*args, **kwargs)

    monkeypatch.setattr(search, 'run', stop)
    with pytest.raises(KeyboardInterrupt):
        run_search('gcn-knn', 3, 3, tmp_path)
    study = search.open_study('gcn-knn', 'wine', PUBLISHED, tmp_path)
    stopped = study.trials[1]
    study.ask()  # what a killed process leaves behind: a trial that is not told

    monkeypatch.setattr(search, 'run', train)
    study = run_search('gcn-knn', 3, 3, tmp_path)
    assert len(search.tried(study)) == 3
    assert not study.get_trials(states=(TrialState.RUNNING,))
    assert stopped.params in [t.params for t in study.trials[2:]]
    seeds = [(str(settings), seed) for settings, seed in calls]
    assert len(seeds) == len(set(seeds))  # no seed was trained twice


def test_bad_trials_do_not_end_the_search(tmp_path, monkeypatch, capsys):
    losses = iter([0.5, float('nan')])

    def fake(*args, settings, **kwargs):
        if (loss := next(losses, None)) is None:
            raise FloatingPointError('Expected a finite loss')
        return {'dev': 0.5, 'dev_loss': loss}  # LDS has no other

    monkeypatch.setattr(search, 'run', fake)
    study = run_search('lds', 4, 1, tmp_path)
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE] + [TrialState.PRUNED] * 3
    assert (study.best_trial.params, study.best_value) == ({}, 0.5)
    argv = arguments(tmp_path, '--trials', '1', '--seeds', '1')
    assert search.main(argv) == 1  # all diverged
    assert 'reached its last seed (got none)' in capsys.readouterr().err


def test_settings_are_tried_once(calls, tmp_path, monkeypatch):
    space = {'dropout': [0.3, 0.5, 0.7], 'lr': [0.01]}  # the published among them
    monkeypatch.setattr(search, 'search_space', lambda *args: space)
    study = run_search('gcn-knn', 10, 1, tmp_path)
    assert sorted(settings['dropout'] for settings, _ in calls) == [0.3, 0.5, 0.7]
    assert len(search.tried(study)) == 3
    run_search('gcn-knn', 10, 1, tmp_path)
    assert len(calls) == 3


def test_trials_above_the_median_are_pruned(tmp_path, monkeypatch):
    seen = []

    def fake(system, dataset, seed, root, *, settings, **kwargs):
        seen.append(seed)
        return {'dev_loss': float(len(seen))}  # always worse

    monkeypatch.setattr(search, 'run', fake)
    study = run_search('gcn-knn', 7, 5, tmp_path)
    pruned = [t for t in study.trials if t.state == TrialState.PRUNED]
    assert [len(trial.intermediate_values) for trial in pruned] == [3, 3]


def test_other_published_settings_are_refused(calls, tmp_path, monkeypatch):
    run_search('gcn-knn', 1, 1, tmp_path)
    changed = {**PUBLISHED, 'patience': 7}
    monkeypatch.setattr(search, 'load_settings', lambda *args, **kwargs: changed)
    with pytest.raises(ValueError, match='Expected the published settings'):
        run_search('gcn-knn', 2, 1, tmp_path)


def test_search_wants_plain_systems(tmp_path):
    for name in ['gcn-tuned', 'idgl-noil', 'logreg']:
        with pytest.raises(ValueError, match=rf"\(got '{name}'\)"):
            run_search(name, 2, 1, tmp_path, dataset='cora')
    assert not list(tmp_path.rglob('*.log'))
