"""Iterative Deep Graph Learning (IDGL) for PyTorch Geometric."""

from .nn import IDGL, DocumentGNN, IDGLAnch, Trace, to_idgl

__version__ = '0.2.0'

__all__ = ['IDGL', 'IDGLAnch', 'to_idgl', 'DocumentGNN', 'Trace', '__version__']
