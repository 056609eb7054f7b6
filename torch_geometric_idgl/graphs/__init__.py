"""A learned graph is a linear operator. Internal: models hand operators out in their
:class:`~torch_geometric_idgl.Trace`, but the classes may change from version to
version.
"""

from .anchor import AnchorGraph
from .base import Affinity, GraphOperator, Measures
from .dense import DenseGraph
from .low_rank import CompleteGraph, FeatureGraph, LowRankGraph
from .mixture import BlockGraph, Mixture, NodeGraph
from .sparse import SparseGraph
from .tiled import (
    InnerScores,
    PairScores,
    RepeatedScores,
    Scores,
    TiledGraph,
    WeightedScores,
    sparsify,
)

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
