"""Pure functions and immutable values: sparse products, kNN graphs, ragged batches.
Internal, but for :func:`knn_graph`.
"""

from .batch import Nodes
from .features import Features
from .knn import knn_graph
from .sparse import Pattern, SparseMatrix, sddmm

__all__ = ['Features', 'Nodes', 'Pattern', 'SparseMatrix', 'knn_graph', 'sddmm']
