"""The speed benchmark, on tiny data."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import common
import pytest
import report
import speed
import torch

MADE = {'command': 'python benchmarks/speed.py', 'versions': {}, 'machine': {}}


@pytest.fixture
def answer(monkeypatch):
    """Measures nothing: seconds and memory are those of a test, one run each."""
    answers, calls = {}, []

    def run(name, method, **options):
        calls.append((name, method, *options.values()))
        seconds, peak = answers[method].pop(0)
        return {'seconds': seconds, 'peak_mb': peak, 'used_mb': peak, 'made': MADE}

    def pool(workers, context, start, threads):
        assert start is torch.set_num_threads
        calls.append(threads[0])
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(speed, 'run', run)
    monkeypatch.setattr(speed, 'ProcessPoolExecutor', pool)
    monkeypatch.setattr(speed.sys, 'path', list(speed.sys.path))
    return answers, calls


def main(folder, *argv):
    speed.main([*argv, '--results', str(folder), '--root', 'data'])
    return common.read_json(folder / 'speed.json')


@pytest.mark.parametrize('system', ['idgl', 'idgl-anch'])
def test_an_epoch_trains(system, tmp_path, monkeypatch):
    trained = []
    adam = torch.optim.Adam

    def spy(parameters, **options):
        trained.append([*parameters])
        return adam(trained[-1], **options)

    monkeypatch.setattr(torch.optim, 'Adam', spy)
    for method in ('idgl', 'gcn', 'reference'):
        epoch = speed.real(f'wine/{system}', method, str(tmp_path))
        before = [parameter.clone() for parameter in trained[-1]]
        epoch()
        assert len(before) == 4
        for old, new in zip(before, trained[-1], strict=True):
            assert not old.equal(new)


@pytest.mark.parametrize('name', ['low-rank', 'anchor', 'anchor-recomputed', 'tiled'])
def test_made_up_data_of_any_size(name):
    found = speed.run(name, 'idgl', n=400)
    assert found['seconds'] > 0
    assert found['peak_mb'] >= found['used_mb'] >= 0
    assert found['made']['command'] == f'python benchmarks/speed.py --only {name}'
    assert found['made']['machine']['threads'] == torch.get_num_threads()
    assert 'torch' in found['made']['versions']


def test_padded_documents_have_the_same_loss():
    losses = []
    for method in ('idgl', 'padded'):
        torch.manual_seed(0)
        losses.append(speed.documents(method, [4, 11, 6])())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_knn(monkeypatch):
    pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    monkeypatch.setitem(speed.CASES, 'knn', ('knn', [], partial(speed.knn, n=300, k=5)))
    # Small graphs are searched exactly.
    assert speed.run('knn', 'approximate')['recall'] == 1.0
    exact, flat = (speed.knn(method, 300, 5)() for method in ('exact', 'faiss_flat'))
    assert exact.shape == flat.shape == (300, 5)
    assert (exact.sort().values == flat.sort().values).float().mean() > 0.99


def test_a_case_in_its_own_process(tmp_path, monkeypatch):
    # Of one thread, which the machine of the result says.
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    case = ('epochs', ['gcn'], speed.CASES['wine/idgl'][2])
    monkeypatch.setitem(speed.CASES, 'wine/idgl', case)
    args = argparse.Namespace(root=str(tmp_path), repeats=1, before=None)
    found = speed.in_turns('wine/idgl', args)['gcn']
    assert found['all_seconds'] == [found['seconds']]
    assert found['peak_mb'] > 100
    assert found['made']['machine']['threads'] == 1


def test_epochs_take_turns(tmp_path, answer):
    answers, calls = answer
    answers['idgl'] = [(1.0, 300.0), (3.0, 310.0), (2.0, 310.0)]
    answers['gcn'] = [(0.5, 200.0)] * 3
    answers['reference'] = [(40.0, 900.0)] * 3
    before = [{'data': 'cora', 'system': 'idgl'}, {'data': 'digits', 'system': 'idgl'}]
    content = {'epochs': before, 'note': 'of before'}
    common.write_json(tmp_path / 'speed.json', content)
    content = main(tmp_path, '--only', 'cora/idgl')
    turn = [('cora/idgl', method, 'data') for method in ('idgl', 'gcn', 'reference')]
    assert [call for call in calls if isinstance(call, tuple)] == turn * 3
    # Other rows stay as they are, and where.
    assert content['note'] == 'of before' and content['epochs'][1] == before[1]
    row = content['epochs'][0]
    assert row['seconds'] == {'idgl': 2.0, 'gcn': 0.5, 'reference': 40.0}
    assert row['all_seconds']['idgl'] == [1.0, 3.0, 2.0]
    assert (row['speedup'], row['gcn_epochs']) == (20.0, 4.0)
    assert (row['peak_mb'], row['reference_peak_mb']) == (310.0, 900.0)
    assert row['made'] == MADE


def test_rows_that_have_tables(tmp_path, answer):
    answers, calls = answer
    answers['idgl'] = [(4.0, 300.0)] * 4
    answers['gcn'] = [(2.0, 200.0)]
    answers['padded'] = [(60.0, 3000.0)]
    rows = ['pubmed/idgl-tiled', 'arxiv', 'documents', 'newsgroups']
    content = main(tmp_path, '--repeats', '1', '--only', *rows)
    table = [row[2:] for row in report.speed_table(tmp_path)[1:]]
    assert table == [
        ['4,000 ms', '–', '–', '300 MB', '–'],
        ['4,000 ms', '–', '2.0', '300 MB', '–'],
        ['4,000 ms', '15×', '–', '300 MB', '3,000 MB'],
    ]
    assert content['newsgroups']['epoch_minutes'] == pytest.approx(4 * 10 / 60)
    # CPU time of one thread, where it says so.
    threads = dict(zip(calls[1::2], calls[::2], strict=True))
    assert threads['documents', 'padded'] == 1
    assert threads['arxiv', 'gcn'] == torch.get_num_threads()


def test_scaling(tmp_path, answer):
    answers, calls = answer
    answers['idgl'] = [(3.0 * n**1.5, 2.0 * n) for n in speed.SIZES[:3]]
    common.write_json(tmp_path / 'speed.json', {'knn': {'k': 20}})
    content = main(tmp_path, '--only', 'tiled', '--repeats', '1')
    assert content['knn'] == {'k': 20}
    (row,) = content['scaling']
    assert [point['n'] for point in row['points']] == speed.SIZES[:3]
    assert row['time_exponent'] == pytest.approx(1.5)
    assert row['memory_exponent'] == pytest.approx(1.0)
    assert report.scaling_table(tmp_path)[1][:4] == ['tiled', '1.50', '1.00', '30,000']
    assert (tmp_path / 'speed.png').exists()
    assert calls == [1, ('tiled', 'idgl', 3_000), 1, ('tiled', 'idgl', 10_000)] + [
        *(1, ('tiled', 'idgl', 30_000)),
    ]


def test_rows_before_a_failure_are_kept(tmp_path, answer):
    answers, _ = answer
    answers['idgl'] = [(1.0, 300.0)]
    answers['padded'] = [(2.0, 300.0)]
    with pytest.raises(IndexError):  # of the newsgroups
        main(tmp_path, '--repeats', '1', '--only', 'documents', 'newsgroups')
    assert list(common.read_json(tmp_path / 'speed.json')) == ['documents']


def test_revisions_take_turns(tmp_path, answer, monkeypatch):
    answers, _ = answer
    answers['idgl'] = [(4.0, 200.0), (1.0, 100.0)] * 2
    monkeypatch.setattr(common, 'commit', lambda folder: f'that of {folder}')
    argv = ['--before', str(tmp_path), '--only', 'wine/idgl', '--repeats', '2']
    assert main(tmp_path, *argv) is None  # it has a file of its own
    assert speed.sys.path[:4] == [str(speed.HERE.parent), str(tmp_path.resolve())] * 2
    row = common.read_json(tmp_path / 'compare_revisions.json')['cases']['wine/idgl']
    assert (row['time_ratio'], row['memory_ratio']) == (0.25, 0.5)
    assert row['before']['all_seconds'] == [4.0, 4.0]
    assert row['before']['revision'] == f'that of {tmp_path / "benchmarks"}'
    assert row['after']['revision'] == common.COMMIT
