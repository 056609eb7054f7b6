"""A learned graph is a linear operator."""

from .anchor import AnchorGraph
from .base import Affinity, Change, GraphOperator, Message
from .dense import DenseGraph
from .factors import DenseFactor, Factor, SelectedFactor, WeightedFactor
from .low_rank import LowRankGraph
from .mixture import (
    ColumnScaled,
    Memoized,
    Mixture,
    RowNormalized,
    column_mask,
    shared_products,
    weighted_sum,
)
from .scores import InnerScores, PairScores, Scores, Tile, WeightedScores
from .signal import Signal
from .sparse import SparseGraph
from .sparsify import sparsify
from .tiled import TiledGraph

__all__ = [
    'Affinity',
    'AnchorGraph',
    'Change',
    'ColumnScaled',
    'DenseFactor',
    'DenseGraph',
    'Factor',
    'GraphOperator',
    'InnerScores',
    'LowRankGraph',
    'Memoized',
    'Message',
    'Mixture',
    'PairScores',
    'RowNormalized',
    'Scores',
    'SelectedFactor',
    'Signal',
    'SparseGraph',
    'Tile',
    'TiledGraph',
    'WeightedFactor',
    'WeightedScores',
    'column_mask',
    'shared_products',
    'sparsify',
    'weighted_sum',
]
