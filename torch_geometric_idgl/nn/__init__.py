"""Models and the modules they are made of."""

from .backbone import OperatorConv
from .document import DocumentGNN
from .graph_learner import GraphLearner
from .idgl import IDGL, IDGLAnch
from .similarity import RBF, Attention, Cosine, Metric, WeightedCosine
from .trace import Trace
from .wrap import to_idgl

__all__ = [
    'IDGL',
    'IDGLAnch',
    'to_idgl',
    'Trace',
    'DocumentGNN',
    'GraphLearner',
    'Metric',
    'WeightedCosine',
    'Cosine',
    'RBF',
    'Attention',
    'OperatorConv',
]
