"""Training on one graph: early stopping, progress, resumption, several seeds."""

from .loop import FitRecord, accuracy, fit
from .seeds import run_seeds

__all__ = ['FitRecord', 'accuracy', 'fit', 'run_seeds']
