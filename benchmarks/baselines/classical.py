"""Classifiers without a graph: logistic regression, support vector machine (RBF)."""

import time
from functools import partial

from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC
from torch_geometric.data import Data

MODELS = {'logreg': partial(LogisticRegression, max_iter=10_000), 'rbf-svm': SVC}


def fit_classical(name: str, data: Data, **grid: list[float]) -> dict:
    """Fits a classifier for each setting of a grid, keeps the best on the dev set; of
    equals, the first of the lists. Neither classifier draws random numbers, and there
    need not be test nodes.
    """
    start = time.perf_counter()
    x, y = data.x.cpu().numpy(), data.y.cpu().numpy()
    names = {'train': 'train_mask', 'dev': 'val_mask', 'test': 'test_mask'}
    masks = {key: data[name] for key, name in names.items() if name in data}
    part = {key: mask.cpu().numpy().nonzero()[0] for key, mask in masks.items()}
    split = [(part['train'], part['dev'])]
    search = GridSearchCV(MODELS[name](), grid, cv=split, refit=False).fit(x, y)
    model = MODELS[name](**search.best_params_).fit(x[part['train']], y[part['train']])
    scores = {key: float(model.score(x[i], y[i])) for key, i in part.items()}
    return scores | {
        'dev_loss': None,
        'epochs': len(search.cv_results_['params']),
        'best_epoch': int(search.best_index_),
        'seconds': time.perf_counter() - start,
        'chosen': search.best_params_,
    }
