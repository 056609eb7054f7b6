"""Iterative Deep Graph Learning (IDGL) for PyTorch Geometric."""

from .nn import IDGL, IDGLAnch, Trace, to_idgl

__version__ = '0.1.0'

__all__ = ['IDGL', 'IDGLAnch', 'Trace', 'to_idgl', '__version__']
