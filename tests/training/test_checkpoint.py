import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_geometric import seed_everything

from tests.training.common import (
    QUIET,
    Stopped,
    equal_records,
    long_run,
    make_anch,
    make_data,
    make_gcn,
    make_idgl,
    stop,
)
from torch_geometric_idgl.training import fit
from torch_geometric_idgl.training.checkpoint import locked

KILLED = """
import os, signal, sys
from tests.training.common import long_run

def kill(epoch, values):
    if epoch == 4:
        os.kill(os.getpid(), signal.SIGKILL)

long_run(checkpoint=sys.argv[1], callback=kill)
"""


@pytest.mark.parametrize('make', [make_gcn, make_idgl, make_anch])
@pytest.mark.parametrize('last', [1, 4, 8])
def test_fit_resumes(make, last, tmp_path):
    kwargs = {'max_epochs': 16, 'patience': 6, 'checkpoint_every': 3, 'history': True}
    kwargs = {**kwargs, **QUIET, 'first_phase': 0 if make is make_gcn else 5}

    seed_everything(0)
    model = make()
    record = fit(model, make_data(), **kwargs)
    assert record.epochs > last

    def kill(epoch, values):
        if epoch == last:
            raise Stopped

    path = tmp_path / 'folder' / 'run.pt'
    seed_everything(0)
    with pytest.raises(Stopped):
        fit(make(), make_data(), checkpoint=path, callback=kill, **kwargs)
    assert path.exists() == (last >= 2)

    epochs = []
    seed_everything(0 if last < 2 else 77)  # The state of the generators is restored.
    resumed = make()
    again = fit(
        resumed,
        make_data(),
        checkpoint=path,
        callback=lambda epoch, values: epochs.append(epoch),
        **kwargs,
    )
    assert epochs == list(range((last + 1) // 3 * 3, record.epochs))
    assert equal_records(again, record)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize('make', [make_gcn, make_idgl, make_anch])
def test_checkpoint_is_replaced_at_once(make, tmp_path, monkeypatch):
    path = tmp_path / 'run.pt'
    save = torch.save

    def half(content, file):
        file.write_bytes(b'half')
        if content['progress']['epoch'] == 2:
            raise Stopped
        save(content, file)

    monkeypatch.setattr(torch, 'save', half)
    kwargs = {'max_epochs': 3, 'checkpoint': path, 'checkpoint_every': 1, **QUIET}
    with pytest.raises(Stopped):
        fit(make(), make_data(), **kwargs)
    assert [file.name for file in tmp_path.iterdir()] == ['run.pt']
    monkeypatch.undo()
    assert torch.load(path, weights_only=True)['progress']['epoch'] == 1
    assert fit(make(), make_data(), **kwargs).epochs == 3


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='needs SIGKILL')
def test_fit_resumes_a_killed_process(tmp_path):
    path, root = tmp_path / 'run.pt', Path(__file__).parents[2]
    env = {**os.environ, 'PYTHONPATH': str(root), 'PYTHONHASHSEED': '5'}
    done = subprocess.run([sys.executable, '-c', KILLED, path], env=env, cwd=root)
    assert done.returncode == -signal.SIGKILL
    assert path.exists()

    epochs = []
    again = long_run(checkpoint=path, callback=lambda epoch, _: epochs.append(epoch))
    assert epochs == [4, 5, 6]
    assert equal_records(again, long_run())
    assert list(tmp_path.iterdir()) == []


def test_fit_continues_the_same_model_after_an_interrupt(tmp_path):
    def interrupt(epoch, values):
        if epoch == 2:
            raise KeyboardInterrupt

    kwargs = {'checkpoint': tmp_path / 'run.pt', 'checkpoint_every': 2, **QUIET}
    model = make_idgl(cached=True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, make_data(), max_epochs=9, callback=interrupt, **kwargs)
    # What it has cached and learned meanwhile does not make it another model, nor does
    # another number of epochs.
    assert fit(model, make_data(), max_epochs=4, **kwargs).epochs == 4


@pytest.mark.parametrize('content', [b'', b'half', None, 'cut', {'model': 1}, [1, 2]])
def test_fit_names_a_file_that_is_no_checkpoint(content, tmp_path):
    path = tmp_path / 'run.pt'
    kwargs = {'checkpoint': path, 'max_epochs': 2, **QUIET}
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == 'cut':
        with pytest.raises(Stopped):
            fit(make_gcn(), make_data(), checkpoint_every=1, callback=stop, **kwargs)
        path.write_bytes(path.read_bytes()[:-1000])
    else:
        torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"run.pt' to be a checkpoint that 'fit' .*Remove"
    ):
        fit(make_gcn(), make_data(), **kwargs)
    assert path.read_bytes() == before


def test_fit_names_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'run.pt').mkdir()

    def never(epoch, values):
        pytest.fail('trained before it looked')

    for path in [tmp_path / 'file' / 'run.pt', tmp_path / 'run.pt']:
        with pytest.raises(OSError, match=r"Expected '.*run.pt' to be a file that can"):
            fit(make_gcn(), make_data(), checkpoint=path, callback=never, **QUIET)


@pytest.mark.parametrize('second', [make_gcn, make_idgl])
def test_fit_rejects_a_file_in_use(second, tmp_path):
    path, messages = tmp_path / 'run.pt', []
    kwargs = {'max_epochs': 4, 'checkpoint': path, 'checkpoint_every': 2, **QUIET}

    def start_another(epoch, values):
        # Before and after there is a checkpoint to be seen.
        if epoch in {0, 3}:
            with pytest.raises(BlockingIOError) as error:
                fit(second(), make_data(), **kwargs)
            messages.append(str(error.value))

    assert fit(make_gcn(), make_data(), callback=start_another, **kwargs).epochs == 4
    assert len(messages) == 2
    assert all("run.pt' to be the file of one run at a time" in m for m in messages)
    assert list(tmp_path.iterdir()) == []


def test_locked(tmp_path):
    path = tmp_path / 'results.json'
    lock = tmp_path / 'results.json.lock'
    lock.touch()  # left by a killed process
    for _ in range(2):
        with locked(path, wait=True):
            assert lock.exists()
            with pytest.raises(BlockingIOError, match='one run at a time'):
                with locked(path):
                    pass
            assert lock.exists()
        assert not lock.exists()
