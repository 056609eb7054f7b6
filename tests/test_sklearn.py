import pickle

import numpy as np
import pytest
import torch
from scipy.sparse import issparse
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs
from sklearn.utils.estimator_checks import parametrize_with_checks

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.sklearn import IDGLClassifier

QUICK = {'max_epochs': 15, 'max_iters': 2, 'lr': 0.1}


@parametrize_with_checks([IDGLClassifier(**QUICK)])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope='module')
def table():
    """Three clusters with four labels each, and what is true of all."""
    X, y = make_blobs(60, n_features=5, centers=3, random_state=0)
    known = np.concatenate([np.flatnonzero(y == label)[:4] for label in range(3)])
    y_known = np.full_like(y, -1)
    y_known[known] = y[known]
    return X, y_known, y


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'num_anchors': 20},
        {'max_iters': 0},
        {'k': 1},
        {'k': 100},
        {'epsilon': 0.0},
        {'standardize': False},
    ],
    ids=str,
)
def test_training_rows_are_predicted_as_they_were_learned(options, table):
    X, y_known, y = table
    model = IDGLClassifier(**{**QUICK, **options}, random_state=0).fit(X, y_known)
    assert model.classes_.tolist() == [0, 1, 2]
    assert np.mean(model.transduction_ == y) > 0.9
    assert model.label_distributions_.shape == (60, 3)
    assert np.allclose(model.predict_proba(X), model.label_distributions_)
    assert (model.predict(X) == model.transduction_).all()


def test_unlabelled_rows_take_part(table):
    X, y_known, y = table
    model = IDGLClassifier(**QUICK, random_state=0).fit(X, y_known)
    alone = clone(model).fit(X[y_known >= 0], y_known[y_known >= 0])
    assert model.graph_.shape == (60, 60)
    assert alone.graph_.shape == (12, 12)
    assert not np.allclose(model.predict_proba(X), alone.predict_proba(X))
    assert model.score(X, y) > 0.9


def test_new_rows_do_not_depend_on_each_other(table):
    X, y_known, _ = table
    model = IDGLClassifier(**QUICK, random_state=0).fit(X[:40], y_known[:40])
    together = model.predict_proba(X[40:])
    alone = np.concatenate([model.predict_proba(row[None]) for row in X[40:]])
    assert np.allclose(together, alone, rtol=0, atol=1e-12)
    assert np.allclose(together.sum(axis=1), 1)


def test_rows_unlike_any_other_are_classified(table):
    """No training row has them among its nearest, and no similarity is left."""
    X, y_known, _ = table
    model = IDGLClassifier(**QUICK, epsilon=0.999, random_state=0).fit(X, y_known)
    proba = model.predict_proba(-100 * X[:5] + 1000)
    assert np.isfinite(proba).all()
    assert (proba.max(axis=1) > 0.34).all()  # not the same for all classes


@pytest.mark.parametrize('num_anchors', [None, 20])
def test_graph(num_anchors, table):
    X, y_known, y = table
    model = IDGLClassifier(**QUICK, k=5, num_anchors=num_anchors, random_state=0)
    graph = model.fit(X, y_known).graph_
    assert issparse(graph) and graph.format == 'csr' and graph.shape == (60, 60)
    assert (graph.data > 0).all() and (graph.diagonal() == 0).all()
    assert 0 < np.diff(graph.indptr).max() <= 5
    row, column = graph.nonzero()
    assert np.mean(y[row] == y[column]) > 0.9


def test_graph_holds_the_similarities_of_the_model(table):
    X, y_known, _ = table
    model = IDGLClassifier(**QUICK, standardize=False, k=60, random_state=0)
    model.fit(X, y_known)
    with torch.no_grad():
        _, trace = model.model_(torch.from_numpy(X), return_trace=True)
    expected = trace.learned.to_dense().numpy()
    np.fill_diagonal(expected, 0)
    assert np.allclose(model.graph_.toarray(), expected)


def test_large_tables_have_anchors(monkeypatch, table):
    X, y_known, _ = table
    fitted = IDGLClassifier(**QUICK).fit(X, y_known)
    assert type(fitted.model_) is IDGL
    monkeypatch.setattr('torch_geometric_idgl.sklearn._LARGE', 59)
    fitted = IDGLClassifier(**QUICK).fit(X, y_known)
    assert type(fitted.model_) is IDGLAnch and fitted.model_.num_anchors == 300
    fitted = IDGLClassifier(**QUICK, num_anchors=None).fit(X, y_known)
    assert type(fitted.model_) is IDGL


def test_seeds_and_the_random_numbers_of_the_caller(table):
    X, y_known, _ = table
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = IDGLClassifier(**QUICK, random_state=1).fit(X, y_known)
    assert torch.equal(torch.rand(3), expected)
    second = IDGLClassifier(**QUICK, random_state=1).fit(X, y_known)
    other = IDGLClassifier(**QUICK, random_state=2).fit(X, y_known)
    assert np.array_equal(first.predict_proba(X), second.predict_proba(X))
    assert not np.allclose(first.predict_proba(X), other.predict_proba(X))


def test_labels_to_stop_on_leave_one_of_each_class():
    model = IDGLClassifier(validation_fraction=0.5)
    model.classes_ = np.array([0, 1, 2])
    label = np.array([0, 0, 0, 0, 1, 2, 2, 0])
    labelled = np.array([True] * 7 + [False])
    held_out = model._held_out(label, labelled, np.random.RandomState(0))
    assert held_out[:4].sum() == 2
    assert not held_out[4] and held_out[5:7].sum() == 1 and not held_out[7]


def test_one_label_for_each_class():
    """None can be spared: the training rows tell when to stop."""
    X, y = make_blobs(30, centers=2, cluster_std=0.3, random_state=0)
    y_known = np.full_like(y, -1)
    for label in range(2):
        y_known[np.flatnonzero(y == label)[0]] = label
    model = IDGLClassifier(**QUICK, random_state=0).fit(X, y_known)
    assert model.score(X, y) > 0.9


def test_kinds_of_labels():
    X, y = load_iris(return_X_y=True)
    X, y = X[::3], y[::3]
    names = np.array(['a', 'b', 'c'])[y]
    model = IDGLClassifier(**QUICK, random_state=0).fit(X, names)
    assert model.classes_.tolist() == ['a', 'b', 'c']
    assert set(model.predict(X)) <= {'a', 'b', 'c'}
    # With a single class beside it, -1 is a class as well.
    signs = np.where(y[y < 2] == 0, -1, 1)
    model = IDGLClassifier(**QUICK, random_state=0).fit(X[y < 2], signs)
    assert model.classes_.tolist() == [-1, 1]
    assert model.score(X[y < 2], signs) == 1


def test_pickled_predicts_the_same(table):
    X, y_known, _ = table
    for num_anchors in (None, 20):
        model = IDGLClassifier(**QUICK, num_anchors=num_anchors, random_state=0)
        model.fit(X, y_known)
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_wrong_arguments(table):
    X, y_known, _ = table
    with pytest.raises(ValueError, match="Expected 'num_anchors' to be a number, 'aut"):
        IDGLClassifier(num_anchors='many').fit(X, y_known)
    with pytest.raises(ValueError, match="Expected 'validation_fraction' to be in"):
        IDGLClassifier(validation_fraction=2.0).fit(X, y_known)
    with pytest.raises(ValueError, match="Expected 'y' to hold a label"):
        IDGLClassifier().fit(X, np.full(60, -1))


def test_default_number_type_of_the_caller(table):
    rows, labels, _ = table
    torch.set_default_dtype(torch.float64)
    try:
        model = IDGLClassifier(max_epochs=3, random_state=0).fit(rows, labels)
        assert model.predict(rows).shape == (len(rows),)
    finally:
        torch.set_default_dtype(torch.float32)
