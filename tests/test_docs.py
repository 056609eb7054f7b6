"""Code in the README, the documentation and its notebook runs, and pages name what
exists.
"""

import importlib.util
import json
import re
from pathlib import Path

import matplotlib
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / 'docs'
PACKAGE = ROOT / 'torch_geometric_idgl'
PAGES = [
    ROOT / 'README.md',
    *(page for page in sorted(DOCS.rglob('*.md')) if '_build' not in page.parts),
]
NOTEBOOKS = sorted(DOCS.glob('notebooks/*.ipynb'))
# A block of Python, and what it prints if a block of text follows at once.
BLOCK = re.compile(r'^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?', re.M | re.S)

# What pages say of their numbers, which are not shown as output.
CLAIMS = {
    'docs/start.md': ['record.epochs <= 20', 'edge_weight.min() > 0.2'],
    'docs/guides/no_graph.md': ['data.edge_index is None', 'graph.num_edges == 500'],
    'docs/guides/noisy_graph.md': [
        'abs(noisy.num_edges - data.num_edges - 3000) < 200',
        "data.num_edges == 1320 and scores['IDGL'] > max(scores['GCN'], alone)",
        'clean.num_edges <= 10 * clean.num_nodes',
    ],
    'docs/guides/look.md': ['0.5 < within_class_share(trace.learned) < 1', 'len(new)'],
}


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    return BLOCK.findall(page.read_text(encoding='utf-8'))


def run(code, page, names):
    exec(compile(code, name(page), 'exec'), names)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use('Agg')
    torch.manual_seed(0)


@pytest.mark.parametrize('page', [p for p in PAGES if blocks(p)], ids=name)
def test_code_blocks_run(page, capsys):
    names = {'__name__': 'page'}
    for code, printed in blocks(page):
        run(code, page, names)
        said = capsys.readouterr().out
        if printed:
            assert said == printed
    for claim in CLAIMS.get(name(page), []):
        assert eval(claim, names), claim


@pytest.mark.parametrize('page', NOTEBOOKS, ids=name)
def test_notebook_runs(page):
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    codes = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    names = {'__name__': 'page'}
    for code in codes:
        run(code, page, names)


@pytest.mark.parametrize('page', NOTEBOOKS, ids=name)
def test_notebook_is_stored_with_outputs(page):
    assert page.stat().st_size < 300_000
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    cells = [c for c in cells if c['cell_type'] == 'code']
    assert [c['execution_count'] for c in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for c in cells for output in c['outputs']]
    assert any('image/png' in output.get('data', {}) for output in outputs)
    assert not any(output['output_type'] == 'error' for output in outputs)


def test_every_guide_has_code():
    guides = [page for page in DOCS.glob('guides/*.md') if page.stem != 'index']
    assert len(guides) >= 7
    assert [page.name for page in guides if not blocks(page)] == []


def test_pages_name_files_that_exist():
    """Paths in backticks that begin with a folder of the repository."""
    pattern = r'`((?:benchmarks|docs|examples|tests|torch_geometric_idgl)/[\w./-]+)`'
    wrong = [
        f'{name(page)}: {path}'
        for page in PAGES
        for path in re.findall(pattern, page.read_text(encoding='utf-8'))
        if not (ROOT / path).exists()
    ]
    assert wrong == []


def test_map_of_the_house():
    """The page for contributors has a row for each module, and no other."""
    text = (DOCS / 'contributing.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| `([\w/]+\.py)` \|', text, re.M)
    modules = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob('*.py')
        if path.name != '__init__.py'
    ]
    assert sorted(rows) == sorted(modules)


def test_every_public_module_is_in_the_reference():
    internal = {'__init__', '__pycache__', 'checks', 'graphs', 'ops', 'py'}
    public = {path.name.partition('.')[0] for path in PACKAGE.iterdir()} - internal
    text = ''.join(page.read_text(encoding='utf-8') for page in DOCS.glob('api/*.md'))
    documented = re.findall(
        r'^\.\. automodule:: torch_geometric_idgl\.(\w+)$', text, re.M
    )
    assert {*documented} == public


def test_broken_links_are_found(tmp_path):
    spec = importlib.util.spec_from_file_location('links', DOCS / 'check_links.py')
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    (tmp_path / 'a.html').write_text(
        '<p id="here"><a href="#here"><a href="b.html"><a href="https://pyg.org">'
        '<a href="b.html#nowhere"><img src="missing.png"><a href="#there">'
    )
    (tmp_path / 'b.html').write_text('<a href="a.html#here">')
    assert links.broken_links(tmp_path) == [
        'a.html: b.html#nowhere',
        'a.html: missing.png',
        'a.html: #there',
    ]
