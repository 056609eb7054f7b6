import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / 'examples'

# Each example with the smallest budget that still goes through all of its steps.
EMBEDDED = [
    ('demo.py', '--epochs', '2', '--first-phase', '1', '--out', 'picture.png'),
    ('idgl_wine.py', '--epochs', '2', '--first-phase', '1'),
    ('learned_graph_transform.py', '--gnn', 'GAT', '--epochs', '8'),
    ('learned_graph_transform.py', '--gnn', 'GCN', '--epochs', '8'),
    ('learned_graph_transform.py', '--gnn', 'GraphSAGE', '--epochs', '8'),
    ('custom_metric.py', '--epochs', '2'),
    ('inductive_nodes.py', '--epochs', '2'),
]
PLANETOID = [
    ('idgl_cora.py', '--epochs', '2'),
    ('drop_in_gcn.py', '--epochs', '2'),
    ('idgl_anch_pubmed.py', '--epochs', '1', '--anchors', '50'),
]


def run(script, *args, root, cwd):
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / script), '--root', str(root), *args],
        cwd=cwd,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def scores(stdout):
    """The numbers that are said to be of the test nodes."""
    return [float(n) for n in re.findall(r'(?i)test\b[^\n\d]*(\d+\.\d+)', stdout)]


def test_every_example_is_run():
    scripts = {path.name for path in EXAMPLES.glob('*.py')}
    assert scripts == {command[0] for command in EMBEDDED + PLANETOID}


@pytest.mark.parametrize('command', EMBEDDED, ids=' '.join)
def test_embedded_example(command, tmp_path):
    stdout = run(*command, root='data', cwd=tmp_path)
    if command[0] == 'demo.py':
        for name in ['GCN without a graph', 'GCN on the 24-NN graph', 'IDGL']:
            assert f'\n{name} ' in stdout
        picture = (tmp_path / 'picture.png').read_bytes()
        assert picture.startswith(b'\x89PNG')
    else:
        assert scores(stdout) and all(0 < score <= 1 for score in scores(stdout))


@pytest.mark.parametrize('command', PLANETOID, ids=' '.join)
def test_planetoid_example(command, data_root, tmp_path):
    stdout = run(*command, root=data_root, cwd=tmp_path)
    assert scores(stdout) and all(0 < score <= 1 for score in scores(stdout))


@pytest.mark.parametrize('script', ['idgl_cora.py', 'idgl_anch_pubmed.py'])
def test_data_is_downloaded(script, tmp_path, monkeypatch):
    """As PyG's own examples do, and to where it says."""
    monkeypatch.setattr(sys, 'argv', [script, '--root', str(tmp_path)])
    with pytest.raises(URLError):
        runpy.run_path(str(EXAMPLES / script), run_name='__main__')
    assert len([*tmp_path.glob('Planetoid/*/raw')]) == 1
