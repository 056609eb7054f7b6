import json

import numpy as np
import pytest
import torch

from tests.training.common import (
    QUIET,
    Stopped,
    equal_records,
    make_data,
    make_gcn,
    make_idgl,
)
from torch_geometric_idgl.training import FitRecord, run_seeds


def test_run_seeds(tmp_path):
    path, seen = tmp_path / 'results' / 'gcn.json', []

    def data_of(seed):
        seen.append(seed)
        return make_data(seed)

    kwargs = {'max_epochs': 5, **QUIET}
    records = run_seeds(make_gcn, data_of, [0, 1], path, **kwargs)
    assert [type(record) for record in records] == [FitRecord] * 2
    assert records[0] != records[1]
    rows = json.loads(path.read_text())
    assert [row.pop('seed') for row in rows] == [0, 1]
    assert [FitRecord(**row) for row in rows] == records

    # Only the new seed is run; the same seed gives the same elsewhere.
    assert run_seeds(make_gcn, data_of, [2, 1, 0], path, **kwargs)[1:] == records[::-1]
    assert seen == [0, 1, 2]
    (other,) = run_seeds(make_gcn, data_of, [1], tmp_path / 'other.json', **kwargs)
    assert equal_records(other, records[1])
    assert [file.name for file in path.parent.iterdir()] == ['gcn.json']


def test_run_seeds_continues(tmp_path):
    kwargs = {'max_epochs': 12, 'checkpoint_every': 2, **QUIET}
    expected = run_seeds(
        make_idgl, make_data, range(3), tmp_path / 'expected.json', **kwargs
    )

    seen = []

    def kill(epoch, values):
        seen.append(epoch)
        if len(seen) == 12 + 7:  # In the middle of the second seed.
            raise Stopped

    path, checkpoint = tmp_path / 'results.json', tmp_path / 'state' / 'run.pt'
    kwargs.update(checkpoint=checkpoint, callback=kill)
    with pytest.raises(Stopped):
        run_seeds(make_idgl, make_data, range(3), path, **kwargs)
    assert [row['seed'] for row in json.loads(path.read_text())] == [0]
    assert [file.name for file in checkpoint.parent.iterdir()] == ['run-seed1.pt']

    records = run_seeds(make_idgl, make_data, range(3), path, **kwargs)
    assert seen[12 + 7] == 6
    for record, other in zip(records, expected, strict=True):
        assert equal_records(record, other)
    assert list(checkpoint.parent.iterdir()) == []


@pytest.mark.parametrize(
    'seeds',
    [
        np.array([1, 0]),
        torch.tensor([1, 0]),
        [np.int64(1), torch.tensor(0)],
        iter([1, 0]),
    ],
)
def test_run_seeds_takes_whole_numbers(seeds, tmp_path):
    path = tmp_path / 'results.json'
    records = run_seeds(make_gcn, make_data, seeds, path, max_epochs=1, **QUIET)
    assert [row['seed'] for row in json.loads(path.read_text())] == [1, 0]
    assert run_seeds(make_gcn, make_data, [1, 0], path) == records


@pytest.mark.parametrize(
    ('seeds', 'match'),
    [
        (3, r'whole numbers, .*\(got 3\)'),
        ([0, 0.5], r'whole numbers, .*\(got \[0, 0.5\]\)'),
        (torch.rand(2), r'whole numbers, .*\(got tensor'),
        (np.array(3), r'whole numbers, .*\(got array\(3\)\)'),
        ('01', r"whole numbers, .*\(got '01'\)"),
        ([0, -1], r"'seeds' to be at least 0 \(got -1\)"),
    ],
)
def test_run_seeds_rejects_other_seeds(seeds, match, tmp_path):
    with pytest.raises((TypeError, ValueError), match=match):
        run_seeds(make_gcn, make_data, seeds, tmp_path / 'results.json', **QUIET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'text', ['', '[{"seed": 0, "epo', '3', '[1]', '[{"epochs": 1}]', '[{"seed": 0}]']
)
def test_run_seeds_names_a_corrupt_file(text, tmp_path):
    path = tmp_path / 'results.json'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Expected '.*results.json' to hold results"):
        run_seeds(make_gcn, make_data, [0], path, **QUIET)
    assert path.read_text() == text


def test_run_seeds_names_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').touch()
    path = tmp_path / 'file' / 'results.json'
    with pytest.raises(OSError, match=r"results.json' to be a file that can be"):
        run_seeds(lambda data: pytest.fail('trained'), make_data, [0], path)


def test_run_seeds_says_which_seed(tmp_path, capfd):
    args = (make_gcn, make_data, [3])
    run_seeds(*args, tmp_path / 'a.json', max_epochs=1)
    assert 'GCN, seed 3: 100%' in capfd.readouterr().err
    run_seeds(*args, tmp_path / 'b.json', max_epochs=1, desc='mine')
    assert 'mine, seed 3: 100%' in capfd.readouterr().err
