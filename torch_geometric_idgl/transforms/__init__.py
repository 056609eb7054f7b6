"""Transforms that build, learn or perturb the graph of a :class:`Data` object."""

from .knn_graph import CosineKNNGraph
from .learn_graph import LearnGraph
from .perturb_edges import PerturbEdges

__all__ = ['CosineKNNGraph', 'LearnGraph', 'PerturbEdges']
