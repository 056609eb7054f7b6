"""Models and the modules they are made of."""

from .anchors import Anchors, sample_anchors
from .backbone import Backbone
from .conv import (
    APPNPLayer,
    EdgeLayer,
    GCNLayer,
    GINLayer,
    OperatorConv,
    SAGELayer,
)
from .graph_learner import GraphLearner
from .idgl import IDGL
from .idgl_anch import IDGLAnch
from .regularization import graph_regularization
from .similarity import RBF, Attention, Cosine, Metric, WeightedCosine
from .trace import Trace

__all__ = [
    'IDGL',
    'RBF',
    'APPNPLayer',
    'Anchors',
    'Attention',
    'Backbone',
    'Cosine',
    'EdgeLayer',
    'GCNLayer',
    'GINLayer',
    'GraphLearner',
    'IDGLAnch',
    'Metric',
    'OperatorConv',
    'SAGELayer',
    'Trace',
    'WeightedCosine',
    'graph_regularization',
    'sample_anchors',
]
