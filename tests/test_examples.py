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
    ('demo.py', '--epochs', '2', '--seeds', '1', '--out', 'picture.png'),
    ('idgl_wine.py', '--epochs', '2', '--first-phase', '1'),
    ('learned_graph_transform.py', '--gnn', 'GAT', '--epochs', '8'),
    ('learned_graph_transform.py', '--gnn', 'GCN', '--epochs', '8'),
    ('learned_graph_transform.py', '--gnn', 'GraphSAGE', '--epochs', '8'),
    ('custom_metric.py', '--epochs', '2'),
    ('inductive_nodes.py', '--epochs', '2'),
    ('graph_classification.py', '--epochs', '2'),
    ('documents.py', '--epochs', '2'),
    ('mini_batches.py', '--epochs', '1', '--num-nodes', '500', '--parts', '8'),
    ('tables_like_sklearn.py', '--epochs', '2', '--seeds', '1'),
    ('distributed_arxiv.py', '--synthetic', '400', '--epochs', '2'),
    ('distributed_arxiv.py', '--synthetic', '400', '--epochs', '1', '--mini-batch'),
]
STORES_NOTHING = ['demo.py', 'documents.py', 'tables_like_sklearn.py']
PLANETOID = [
    ('idgl_cora.py', '--epochs', '2'),
    ('drop_in_gcn.py', '--epochs', '2'),
    ('idgl_anch_pubmed.py', '--epochs', '1', '--anchors', '50'),
]


def run(script, *args, root, cwd):
    if root is not None:
        args = ['--root', str(root), *args]
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *args],
        cwd=cwd,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def scores(stdout):
    """The numbers that are said to be of the test split."""
    return [float(n) for n in re.findall(r'(?i)test\b[^\n\d]*(\d+\.\d+)', stdout)]


def test_every_example_is_run():
    scripts = {path.name for path in EXAMPLES.glob('*.py')}
    assert scripts == {command[0] for command in EMBEDDED + PLANETOID}


@pytest.mark.parametrize('command', EMBEDDED, ids=' '.join)
def test_embedded_example(command, tmp_path):
    root = None if command[0] in STORES_NOTHING else 'data'
    stdout = run(*command, root=root, cwd=tmp_path)
    if command[0] == 'demo.py':
        rows = re.findall(r'\n(Logistic regression|GCN|IDGL) +([\d %]+)', stdout)
        assert [name for name, _ in rows] == ['Logistic regression', 'GCN', 'IDGL']
        assert [cells.count('%') for _, cells in rows] == [1, 2, 2]
        picture = (tmp_path / 'picture.png').read_bytes()
        assert picture.startswith(b'\x89PNG')
    elif command[0] == 'tables_like_sklearn.py':
        rows = re.findall(r'\n(\w+) +(0\.\d+) ± 0\.\d+ +(0\.\d+) ±', stdout)
        assert len(rows) == 4 and rows[-1][0] == 'IDGLClassifier'
        assert all(0 < float(score) <= 1 for row in rows for score in row[1:])
    else:
        assert scores(stdout) and all(0 < score <= 1 for score in scores(stdout))


def test_documents_of_ones_own(tmp_path):
    """Another folder, with word vectors from a file."""
    texts = {'animals': 'The cat and the old dog.', 'numbers': 'Three plus four!'}
    for name, text in texts.items():
        (tmp_path / 'mine' / name).mkdir(parents=True)
        for i in range(5):
            (tmp_path / 'mine' / name / f'{i}.txt').write_text(text)
    lines = ['cat 1 0 0', 'dog 0.9 0.3 0', 'old 0.8 0.5 0', 'three 0 0 1', 'plus 0 1 1']
    (tmp_path / 'vectors.txt').write_text('\n'.join(lines))
    options = ['--folder', 'mine', '--vectors', 'vectors.txt', '--epochs', '15']
    stdout = run('documents.py', *options, root=None, cwd=tmp_path)
    assert '5 of 9 words have a vector in the file' in stdout
    assert '10 texts of 2 classes: 6 for train, 2 for dev, 2 for test' in stdout
    assert scores(stdout) == [1.0]
    # Of the document with most words, and without words such as "the" and "and".
    assert (
        '"The cat and the old dog."\nis about animals, and IDGL says: animals' in stdout
    )
    links = stdout.partition('New links')[2]
    assert set(re.findall(r'(\w+) - (\w+)', links)) == {
        ('cat', 'dog'),
        ('cat', 'old'),
        ('dog', 'old'),
    }


@pytest.mark.parametrize('attributes', [True, False])
def test_graphs_of_a_data_set(attributes, tmp_path):
    """Files as those that PyG downloads: paths and triangles of three nodes."""
    kinds = [[(1, 2), (2, 3)], [(1, 2), (2, 3), (1, 3)]]
    edges = [(3 * g + i, 3 * g + j) for g in range(20) for i, j in kinds[g % 2]]
    content = {
        'A': [f'{i}, {j}' for a, b in edges for i, j in [(a, b), (b, a)]],
        'graph_indicator': [g + 1 for g in range(20) for _ in range(3)],
        'graph_labels': [g % 2 for g in range(20)],
    }
    if attributes:  # else degrees take their place
        content['node_labels'] = [g % 2 for g in range(20) for _ in range(3)]
    raw = tmp_path / 'TUDataset' / 'TOY' / 'raw'
    raw.mkdir(parents=True)
    for name, values in content.items():
        text = ''.join(f'{value}\n' for value in values)
        (raw / f'TOY_{name}.txt').write_text(text)
    options = ['--dataset', 'TOY', '--epochs', '30']
    stdout = run('graph_classification.py', *options, root='.', cwd=tmp_path)
    assert 'GCN  test accuracy: 1.0000\nIDGL test accuracy: 1.0000\n' in stdout


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
