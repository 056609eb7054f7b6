"""Pure functions: constant sparse products, kNN graphs, ragged batches."""

from .features import to_features
from .knn import knn_graph
from .layout import Layout
from .sparse import Pattern, SparseMatrix, sddmm, spmm

__all__ = [
    'Layout',
    'Pattern',
    'SparseMatrix',
    'knn_graph',
    'sddmm',
    'spmm',
    'to_features',
]
