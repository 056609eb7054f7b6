"""The snippets of the README run, one after the other."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / 'README.md'


def test_readme_snippets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = README.read_text(encoding='utf-8')
    snippets = re.findall(r'```python\n(.*?)```', text, flags=re.DOTALL)
    assert len(snippets) >= 5
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), 'exec'), names)
    assert names['out'].shape == (34, 4)
    assert names['loss'].isfinite()
    assert names['data'].edge_weight.numel() == names['data'].edge_index.size(1) > 0
