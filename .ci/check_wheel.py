"""Use the installed package where only its requirements are installed."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from pathlib import Path

import torch

import torch_geometric_idgl
from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.view import GraphView

OPTIONAL = [
    'faiss',
    'matplotlib',
    'ogb',
    'pandas',
    'sklearn',
    'torch_scatter',
    'torch_sparse',
]


def main() -> None:
    """Imports every module and trains both models one step."""
    present = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert not present, f'Expected a clean environment (got {present})'

    package = Path(torch_geometric_idgl.__file__).parent
    assert 'site-packages' in package.parts, f'Imported from {package}'
    assert (package / 'py.typed').is_file(), 'py.typed is missing'

    name = torch_geometric_idgl.__name__
    version = importlib.metadata.version(name)
    assert version == torch_geometric_idgl.__version__, version
    files = importlib.metadata.files(name) or []
    assert any(file.name == 'LICENSE' for file in files), 'LICENSE is missing'

    for module in pkgutil.walk_packages([str(package)], f'{name}.'):
        if module.name == f'{name}.sklearn':
            continue  # built on an optional package, as a whole
        importlib.import_module(module.name)
    try:
        importlib.import_module(f'{name}.sklearn')
    except ImportError as error:
        assert 'pip install' in str(error), error

    x = torch.randn(12, 5)
    for model in [IDGL(5, 8, 2, 3, k=4), IDGLAnch(5, 8, 2, 3, k=4, num_anchors=6)]:
        out, trace = model(x, return_trace=True)
        trace.loss(lambda out: out.square().mean()).backward()
        assert out.shape == (12, 3), out.shape
        assert all(p.grad is not None for p in model.parameters()), model
        _, trace = model.eval()(x, return_trace=True)
        page = GraphView.from_trace(trace).to_html()
        assert 'graphology' in page and 'Sigma' in page, 'the viewer lacks its library'
    print(f'{name} {version} works without optional packages')


if __name__ == '__main__':
    main()
