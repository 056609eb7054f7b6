"""A learned graph is a linear operator. Internal: models hand operators out in their
:class:`~torch_geometric_idgl.Trace`, but the classes may change from version to
version.
"""

from .anchor import AnchorGraph
from .base import Affinity, GraphOperator, Measures
from .combined import BlockGraph, Mixture
from .dense import DenseGraph
from .feature import FeatureGraph
from .low_rank import CompleteGraph, LowRankGraph
from .node import NodeGraph
from .scores import (
    InnerScores,
    PairScores,
    RepeatedScores,
    Scores,
    WeightedScores,
    sparsify,
)
from .sparse import SparseGraph
from .tiled import TiledGraph

__all__ = [
    'Affinity',
    'AnchorGraph',
    'BlockGraph',
    'CompleteGraph',
    'DenseGraph',
    'FeatureGraph',
    'GraphOperator',
    'InnerScores',
    'LowRankGraph',
    'Measures',
    'Mixture',
    'NodeGraph',
    'PairScores',
    'RepeatedScores',
    'Scores',
    'SparseGraph',
    'TiledGraph',
    'WeightedScores',
    'sparsify',
]
