"""Transforms that build, learn or change the graph of a :class:`Data` object."""

from .knn_graph import CosineKNNGraph
from .learn_graph import LearnGraph
from .perturb_edges import PerturbEdges
from .prune_edges import PruneEdges

__all__ = ['CosineKNNGraph', 'LearnGraph', 'PerturbEdges', 'PruneEdges']
