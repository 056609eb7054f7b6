"""IDGL the scikit-learn way: a table with few labels, in a handful of lines.

Digits with 50 labels. Rows without a label have the label -1, as `LabelSpreading` has
it; both learn from them too. A fifth of the rows is not there in training at all, and
is classified afterwards. All models get the same columns: standardised, or pixels as
they are with `--raw`.

    python examples/tables_like_sklearn.py
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading

from torch_geometric_idgl.sklearn import IDGLClassifier

parser = argparse.ArgumentParser()
parser.add_argument('--labels', type=int, default=50)
parser.add_argument('--seeds', type=int, default=3, help='how many')
parser.add_argument('--epochs', type=int, default=200, help='at most')
parser.add_argument('--raw', action='store_true', help='do not standardise')
args = parser.parse_args()

digits = load_digits()
scores: dict[str, list] = {}
for seed in range(args.seeds):
    X, X_new, y, y_new = train_test_split(
        digits.data, digits.target, test_size=0.2, random_state=seed
    )
    if not args.raw:
        scaler = StandardScaler().fit(X)
        X, X_new = scaler.transform(X), scaler.transform(X_new)
    known, unknown = train_test_split(
        np.arange(len(y)), train_size=args.labels, stratify=y, random_state=seed
    )
    y_known = np.full_like(y, -1)
    y_known[known] = y[known]
    models = {
        'LogisticRegression': LogisticRegression(max_iter=1000),
        'KNeighborsClassifier': KNeighborsClassifier(n_neighbors=1),
        'LabelSpreading': LabelSpreading(kernel='knn', n_neighbors=7),
        'IDGLClassifier': IDGLClassifier(
            standardize=False,
            epsilon=0.9 if args.raw else 0.65,  # cosines of pixels are all large
            num_anchors=200,  # quicker than all pairs of rows
            max_epochs=args.epochs,
            random_state=seed,
            verbose=True,
        ),
    }
    for name, model in models.items():
        if name in {'LabelSpreading', 'IDGLClassifier'}:
            model.fit(X, y_known)
            found = model.transduction_[unknown]
        else:
            found = model.fit(X[known], y[known]).predict(X[unknown])
        pair = [np.mean(found == y[unknown]), model.score(X_new, y_new)]
        scores.setdefault(name, []).append(pair)

print(f'\nTest accuracy on Digits, {args.labels} labels, {args.seeds} seeds')
print(f'{"":<22}{"unlabelled rows":>18}{"new rows":>18}')
for name, pairs in scores.items():
    mean, std = np.mean(pairs, axis=0), np.std(pairs, axis=0)
    cells = [f'{m:.3f} ± {s:.3f}' for m, s in zip(mean, std, strict=True)]
    print(f'{name:<22}' + ''.join(f'{cell:>18}' for cell in cells))
