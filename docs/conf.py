"""How Sphinx builds the documentation (`make docs`)."""

from docutils import nodes
from latex2mathml.converter import convert

import torch_geometric_idgl

project = 'torch_geometric_idgl'
author = 'torch_geometric_idgl contributors'
copyright = author
version = release = torch_geometric_idgl.__version__

extensions = [
    'myst_nb',  # Markdown and notebooks
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
]
exclude_patterns = ['_build']
html_theme = 'furo'
html_title = 'IDGL for PyTorch Geometric'
html_static_path = ['_static']
html_css_files = ['wide_tables.css']
html_math_renderer = 'mathml'

myst_enable_extensions = ['amsmath', 'colon_fence', 'dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # The notebook is stored with its outputs.

add_module_names = False
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # Docstrings say the types.
napoleon_custom_sections = [('Attributes', 'params_style')]
napoleon_use_param = False  # Types in docstrings are words, not links.
napoleon_use_rtype = False

# Names of other projects are no links: the build needs no network. As in PyG, `:obj:`
# is for values and arguments.
nitpick_ignore_regex = [
    (r'py:.*', r'(numpy|scipy|sklearn|torch|torch_geometric)\..*'),
    (r'py:obj', r'(?s).*'),
]
nitpick_ignore = [
    ('py:attr', 'inner_product'),
    ('py:class', 'Data'),
    ('py:class', 'torch_geometric_idgl.ops.batch.Nodes'),
    ('py:meth', 'forward'),
]


def draw_formula(self, node):
    """Browsers draw MathML by themselves: no script has to be fetched."""
    display = 'block' if isinstance(node, nodes.math_block) else 'inline'
    self.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer('mathml', (draw_formula, None), (draw_formula, None))
