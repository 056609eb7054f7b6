"""Classifiers that use no graph: logistic regression and an RBF support vector machine.

Their hyper-parameters are those with the best accuracy on the dev set.
"""

from __future__ import annotations

import time

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import ParameterGrid
from sklearn.svm import SVC
from torch_geometric.data import Data

__all__ = ['fit_classical']


def fit_classical(
    name: str, data: Data, *, C: list[float], gamma: list[float] | None = None, seed=0
) -> dict:
    r"""Fits a classifier for each setting, keeps the best on the dev set.

    Args:
        name (str): :obj:`'logreg'` or :obj:`'rbf-svm'`.
        data (Data): Features, labels and masks.
        C (list[float]): Inverse strengths of regularisation to choose from.
        gamma (list[float], optional): Kernel widths to choose from (SVM only).
        seed (int, optional): (default: :obj:`0`)
    """
    start = time.perf_counter()
    x, y = data.x.cpu().numpy(), data.y.cpu().numpy()
    train, dev, test = (
        m.cpu().numpy() for m in (data.train_mask, data.val_mask, data.test_mask)
    )
    if name == 'logreg':
        models = [LogisticRegression(C=c, max_iter=10_000) for c in C]
    elif name == 'rbf-svm':
        grid = ParameterGrid({'C': C, 'gamma': gamma})
        models = [SVC(kernel='rbf', random_state=seed, **p) for p in grid]
    else:
        raise ValueError(f"Expected 'logreg' or 'rbf-svm' (got '{name}')")
    # Ties go to the first of the list, the most strongly regularised setting.
    best = max((m.fit(x[train], y[train]) for m in models), key=_scorer(x, y, dev))
    chosen = {k: v for k, v in best.get_params().items() if k in ('C', 'gamma')}
    return {
        'train': _scorer(x, y, train)(best),
        'dev': _scorer(x, y, dev)(best),
        'test': _scorer(x, y, test)(best),
        'dev_loss': None,
        'epochs': len(models),
        'best_epoch': models.index(best),
        'seconds': time.perf_counter() - start,
        'chosen': chosen,
    }


def _scorer(x: np.ndarray, y: np.ndarray, mask: np.ndarray):
    return lambda model: float(model.score(x[mask], y[mask]))
