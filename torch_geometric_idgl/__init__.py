"""Iterative Deep Graph Learning (IDGL) for PyTorch Geometric."""

from .nn import IDGL, IDGLAnch, Trace

__version__ = '0.1.0'

__all__ = ['IDGL', 'IDGLAnch', 'Trace', '__version__']
