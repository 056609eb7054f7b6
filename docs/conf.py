"""How Sphinx builds the documentation (`make docs`)."""

import torch_geometric_idgl

project = 'torch_geometric_idgl'
author = 'torch_geometric_idgl contributors'
copyright = author
version = release = torch_geometric_idgl.__version__

extensions = [
    'myst_nb',  # Markdown and notebooks
    'sphinx.ext.autodoc',
    'sphinx.ext.mathjax',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
]
exclude_patterns = ['_build']
html_theme = 'furo'
html_title = 'IDGL for PyTorch Geometric'

myst_enable_extensions = ['amsmath', 'colon_fence', 'dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # The notebook is stored with its outputs.

add_module_names = False
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # Docstrings say the types.
napoleon_use_ivar = True
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
