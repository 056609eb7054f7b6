"""Training with early stopping, progress bars, resumption and several seeds."""

from .loop import FitRecord, accuracy, fit, r2_score
from .seeds import run_seeds

__all__ = ['FitRecord', 'accuracy', 'fit', 'r2_score', 'run_seeds']
