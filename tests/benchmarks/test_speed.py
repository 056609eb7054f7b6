"""The speed benchmark, on tiny data."""

import math
from types import SimpleNamespace

import common
import compare_revisions
import pytest
import speed
import speed_cases
import torch


@pytest.mark.parametrize('system', ['idgl', 'idgl-anch'])
def test_epochs_against_reference_and_gcn(system, tmp_path):
    case = {'job': 'time', 'data': 'wine', 'system': system, 'root': str(tmp_path)}
    result = speed_cases.run_case({**case, 'repeats': 1, 'reference': True})
    assert set(result['seconds']) == {'idgl', 'gcn', 'reference'}
    assert all(min(times) > 0 for times in result['seconds'].values())


@pytest.mark.parametrize('kind', speed.KINDS)
def test_large_cases(kind):
    case = {'job': 'large', 'kind': kind, 'n': 400, 'edges': 2800, 'repeats': 1}
    result = speed_cases.run_case(case)
    assert result['seconds'][0] > 0
    assert result['peak_mb'] >= result['start_mb'] > 0


def test_exponent_is_the_slope():
    points = [{'n': n, 'seconds': 3.0 * n**1.5} for n in (10, 100, 1000)]
    assert math.isclose(speed.exponent(points, 'seconds'), 1.5)


def test_scaling_saves_every_point(tmp_path, monkeypatch):
    answer = {'seconds': [1.0], 'peak_mb': 300.0, 'start_mb': 100.0, 'threads': 1}
    out, saved = tmp_path / 'speed.json', []
    common.write_json(out, {'note': 'of before'})

    def fresh(case, environment):
        assert environment == speed.ONE_THREAD
        saved.append(common.read_json(out))
        return answer

    def scaling(*options):
        speed.main(['--only', 'scaling', '--out', str(out), *options])
        content = common.read_json(out)
        assert content['note'] == 'of before'
        return {row['kind']: row for row in content['scaling']}

    monkeypatch.setattr(speed, 'fresh', fresh)
    rows = scaling('--kinds', 'anchor', 'tiled', '--sizes', '10', '100')
    assert list(rows) == ['anchor', 'tiled']
    assert len(saved[-1]['scaling'][1]['points']) == 1  # before the fourth
    assert rows['tiled']['time_exponent'] == pytest.approx(0.0)
    assert (tmp_path / 'speed.png').exists()

    # A further size goes to those that are known; others that were measured otherwise
    # are not part of the line.
    content = common.read_json(out)
    content['scaling'][1]['points'][1]['environment'] = {}
    common.write_json(out, content)
    answer['seconds'] = [100.0]
    rows = scaling('--kinds', 'tiled', '--sizes', '1000')
    points = rows['tiled']['points']
    assert [point['n'] for point in points] == [10, 100, 1000]
    assert rows['tiled']['time_exponent'] == pytest.approx(1.0)
    assert len(rows['anchor']['points']) == 2
    # Every point says what made it.
    command = 'python benchmarks/speed.py --only scaling --kinds tiled --sizes 1000'
    assert points[2]['made']['command'] == command
    assert 'torch' in points[2]['made']['versions']
    assert points[2]['made']['machine']['threads'] == 1


def test_processes_that_fail(monkeypatch):
    for code, message, match in [
        (-9, '', 'lack of memory'),
        (1, 'ValueError', 'Value'),
    ]:
        done = SimpleNamespace(returncode=code, stderr=message, stdout='')
        monkeypatch.setattr(speed.subprocess, 'run', lambda *_, done=done, **__: done)
        with pytest.raises(RuntimeError, match=match):
            speed.fresh({})


def test_arxiv_takes_turns(monkeypatch):
    cases = []

    def fresh(case):
        cases.append(case['kind'])
        second = 2.0 if case['kind'] == 'arxiv-idgl' else 4.0
        return {'seconds': [9.0, second], 'peak_mb': 100.0, 'start_mb': 10.0}

    monkeypatch.setattr(speed, 'fresh', fresh)
    args = SimpleNamespace(arxiv_nodes=5, arxiv_edges=5, repeats=2)
    assert speed.arxiv(args, None)['ratio'] == 0.5
    assert cases == ['arxiv-idgl', 'arxiv-gcn'] * 2


def test_epochs_keep_rows_that_are_not_asked_for(monkeypatch):
    def fresh(case):
        if case['job'] == 'time':
            times = {'idgl': [1.0, 3.0], 'gcn': [0.5], 'reference': [40.0]}
            return {'seconds': times}
        peak = 900.0 if case['reference'] else 300.0
        return {'seconds': [2.0], 'peak_mb': peak, 'start_mb': 200.0}

    monkeypatch.setattr(speed, 'fresh', fresh)
    known = [{'data': 'cora', 'system': 'idgl'}, {'data': 'digits', 'system': 'idgl'}]
    cases = ['digits/idgl', 'pubmed/idgl-tiled']
    args = SimpleNamespace(cases=cases, root='', repeats=2, only=None)
    rows = speed.epochs(args, known)
    assert rows[0] is known[0]
    assert [f'{r["data"]}/{r["system"]}' for r in rows[1:]] == cases
    row, tiled = rows[1:]
    assert (row['speedup'], row['gcn_epochs']) == (20.0, 4.0)  # of medians
    assert (row['memory_ratio'], row['used_memory_ratio']) == (3.0, 7.0)
    assert (tiled['seconds'], tiled['peak_mb']) == ([2.0], 300.0)
    command = 'python benchmarks/speed.py --only reference --cases digits/idgl'
    assert row['made']['command'] == f'{command} --repeats 2'


def test_documents_side_by_side():
    case = {'sizes': [4, 11, 6], 'refinements': 2}
    result = speed_cases.run_case({'job': 'documents', **case, 'repeats': 2})
    counts = {name: len(times) for name, times in result['seconds'].items()}
    assert counts == {'idgl': 10, 'idgl_ten': 10, 'padded': 2}
    assert result['threads'] >= 1

    data = speed_cases.made_up_documents(case['sizes'])
    ours, padded, ten = (
        speed_cases.documents_epoch(system, data, refinements)().item()
        for system, refinements in [('idgl', 2), ('padded', 2), ('idgl', 10)]
    )
    assert ours == pytest.approx(padded, rel=1e-5)
    assert ours != ten
    for system in ('idgl', 'padded'):
        job = {'job': 'documents-memory', 'system': system, **case}
        result = speed_cases.run_case(job)
        assert result['peak_mb'] >= result['start_mb'] > 0


def test_documents_are_a_part_of_the_file(tmp_path, monkeypatch):
    cases = []

    def fresh(case, environment):
        assert environment['OMP_NUM_THREADS'] == '1'
        cases.append((case['job'], case.get('system')))
        if case['job'] == 'documents':
            times = {'idgl': [1.0, 3.0], 'idgl_ten': [4.0], 'padded': [40.0]}
            return {'seconds': times, 'threads': 1}
        peak = 3000.0 if case['system'] == 'padded' else 600.0
        return {'seconds': [2.0], 'peak_mb': peak, 'start_mb': 300.0}

    monkeypatch.setattr(speed, 'fresh', fresh)
    monkeypatch.setattr(speed, 'TOKENS', (60, 1000))
    out = tmp_path / 'speed.json'
    common.write_json(out, {'epochs': [], 'note': 'of before'})
    speed.main(['--only', 'documents', '--repeats', '2', '--out', str(out)])
    memory = 'documents-memory'
    assert cases == [('documents', None), (memory, 'idgl'), (memory, 'padded')]
    content = common.read_json(out)
    row = content.pop('documents')
    assert content == {'epochs': [], 'note': 'of before'}
    assert (row['speedup'], row['memory_ratio']) == (20.0, 5.0)
    rates = {'idgl': 1.0, 'idgl_ten': 0.5, 'padded': 0.05}
    assert row['documents_per_second'] == rates
    command = 'python benchmarks/speed.py --only documents --repeats 2'
    assert row['made']['command'] == command
    assert row['made']['machine']['threads'] == 1


def test_knn_side_by_side():
    pytest.importorskip('faiss', reason="needs the extra 'knn' (faiss-cpu)")
    result = speed_cases.run_case({'job': 'knn', 'n': 300, 'k': 5, 'repeats': 2})
    counts = {name: len(times) for name, times in result['seconds'].items()}
    assert counts == {'exact': 2, 'approximate': 2, 'faiss_flat': 2}
    assert result['recall'] == 1.0  # Small graphs are searched exactly.
    searches = speed_cases.knn_searches(300, 5)
    assert speed_cases.recall(searches['faiss_flat'](), searches['exact']()) > 0.99
    halves = torch.tensor([[0, 2], [3, 1]]), torch.tensor([[0, 1], [1, 2]])
    assert speed_cases.recall(*halves) == 0.5


def test_knn_is_a_part_of_the_file(tmp_path, monkeypatch):
    def fresh(case, environment):
        assert environment['OMP_NUM_THREADS'] == '1'
        assert case == {'job': 'knn', 'n': 1000, 'k': 20, 'repeats': 2}
        seconds = {'exact': [20.0], 'approximate': [2.0, 4.0], 'faiss_flat': [15.0]}
        return {'seconds': seconds, 'recall': 0.95, 'threads': 1, 'faiss': '1.0'}

    monkeypatch.setattr(speed, 'fresh', fresh)
    out = tmp_path / 'speed.json'
    options = '--only knn --knn-nodes 1000 --repeats 2'
    speed.main([*options.split(), '--out', str(out)])
    row = common.read_json(out)['knn']
    assert row['speedup'] == pytest.approx(20 / 3)
    assert row['made']['command'] == f'python benchmarks/speed.py {options}'
    assert row['made']['versions']['faiss'] == '1.0'
    assert row['recall'] == 0.95


def test_revisions_side_by_side(tmp_path, monkeypatch, capsys):
    packages = []

    def fresh(case, environment):
        packages.append(environment['PYTHONPATH'])
        before = environment['PYTHONPATH'] == str(tmp_path)
        times = [9.0, 4.0] if before else [9.0, 1.0]
        return {'seconds': times, 'peak_mb': 200.0 if before else 100.0}

    monkeypatch.setattr(compare_revisions, 'fresh', fresh)
    monkeypatch.setattr(
        compare_revisions.subprocess, 'check_output', lambda *a, **k: 'abc\n'
    )
    out = tmp_path / 'compare.json'
    argv = ['--before', str(tmp_path), '--cases', 'small/idgl', '--repeats', '2']
    compare_revisions.main([*argv, '--out', str(out)])
    assert len(packages) == 4 and packages[:2] == packages[2:]
    row = common.read_json(out)['cases']['small/idgl']
    assert (row['time_ratio'], row['memory_ratio']) == (0.25, 0.5)
    assert row['before']['revision'] == 'abc'
    assert 'small/idgl: 0.25 time, 0.50 memory' in capsys.readouterr().out
    result = speed_cases.run_case(
        {**compare_revisions.CASES['small/idgl'], 'repeats': 1}
    )
    assert result['peak_mb'] >= result['start_mb'] > 0
