import builtins
import os
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
from torch_geometric.io import fs

from torch_geometric_idgl.datasets import stage_data

BESIDE = Path(__file__).parents[2] / 'shared' / 'data'


@pytest.fixture(scope='session')
def data_source():
    """The read-only directory of the real data."""
    source = Path(os.environ.get('IDGL_DATA', BESIDE))
    if not source.is_dir():
        pytest.skip(
            f"needs the real data, but '{source}' is not a directory (set IDGL_DATA to "
            f'one that holds Planetoid/Cora/raw/ etc.)'
        )
    return source


@pytest.fixture(scope='session')
def data_root(data_source, tmp_path_factory):
    """A scratch copy of the real data."""
    return stage_data(data_source, tmp_path_factory.mktemp('data'))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test downloads anything, nor asks."""

    def download(*args, **kwargs):
        raise URLError('tests have no network')

    def ask(*args):
        raise AssertionError('not allowed to ask')

    monkeypatch.setattr(fs, 'cp', download)
    monkeypatch.setattr(urllib.request, 'urlopen', download)
    monkeypatch.setattr(builtins, 'input', ask)
