r"""IDGL as a classifier of scikit-learn, for plain tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

try:
    from scipy.sparse import csr_array
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.preprocessing import StandardScaler, normalize
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as e:
    raise ImportError(
        "'IDGLClassifier' is built on scikit-learn (1.6 or newer). Install it with "
        "'pip install torch_geometric_idgl[datasets]'"
    ) from e

from .checks import check_unit_interval
from .graphs import AnchorGraph
from .nn import IDGL, GraphLearner, IDGLAnch
from .ops.numeric import safe_reciprocal
from .training import fit

__all__ = ['IDGLClassifier']

_LARGE = 2_000  # rows beyond which learned graphs have anchors
_ANCHORS = 300
_BLOCK = 1_000  # new rows at a time
_DECIMALS = 9  # of cosines, such that equal rows are equally near


class _Graph(NamedTuple):
    """A learned graph of the training rows, as others see it who join it. They are
    compared with all training rows, or with the anchors.
    """

    learner: GraphLearner
    compared: Tensor  # what the metric makes of them: [s, K]
    hidden: Tensor  # what they send in the first layer: [s, hidden_channels]
    out: Tensor  # and in the second: [s, out_channels]

    def similarities(self, vectors: Tensor) -> Tensor:
        metric = self.learner.metric
        value = metric.pair(metric.embed(vectors), self.compared)
        return value.masked_fill(value <= self.learner.epsilon, 0.0)

    def weights(self, vectors: Tensor) -> Tensor:
        """How much each row receives from those it is compared with."""
        value = self.similarities(vectors)
        return value * safe_reciprocal(value.sum(dim=1, keepdim=True))


class IDGLClassifier(ClassifierMixin, BaseEstimator):
    r"""A semi-supervised classifier of tables that learns a graph of their rows.

    :class:`~torch_geometric_idgl.nn.IDGL` with two GCN layers in the form of
    scikit-learn, beside :class:`sklearn.semi_supervised.LabelSpreading`: rows without a
    label have the label -1. It starts from the cosine kNN graph of the rows.

    .. code-block:: python

        y[unknown] = -1
        model = IDGLClassifier(random_state=0).fit(X, y)
        model.transduction_[unknown]  # labels of rows that were there in training
        model.predict(X_new)  # labels of rows that were not

    *New rows* join the graph of the training rows as receivers. They are compared with
    training rows (or anchors) only, just as these are with one another, and change
    nothing in them: a prediction does not depend on the other rows of the call, and
    that for a training row is its transduction (but for ties: where several rows are
    equally near, training takes the first). In the kNN graph a row receives from those
    that have it among their nearest, and in any case from its own nearest one.

    *Early stopping* needs labels that are not trained on. A share of those of each
    class is set aside, but never the last one. If no class can spare any, the loss of
    the training rows is looked at instead.

    *Labels -1 and one other* are two classes, as in other classifiers: with a single
    class there would be nothing to learn.

    Args:
        hidden_channels (int, optional): Size of the embeddings. (default: :obj:`16`)
        k (int, optional): The number of neighbours in the kNN graph, the row itself
            included. (default: :obj:`20`)
        num_anchors (int or str, optional): Anchors of
            :class:`~torch_geometric_idgl.nn.IDGLAnch`, whose time is linear in the
            number of rows; :obj:`None` is :class:`~torch_geometric_idgl.nn.IDGL`, which
            compares all pairs. :obj:`"auto"` is 300 for tables of more than 2,000 rows,
            and :obj:`None` for others. (default: :obj:`"auto"`)
        heads (int, optional): Number of heads of the metric. (default: :obj:`4`)
        epsilon (float, optional): Similarities up to this one are set to zero.
            (default: :obj:`0.65`)
        initial_weight (float, optional): The weight of the kNN graph.
            (default: :obj:`0.4`)
        update_weight (float, optional): The weight of the refined graph against the
            first learned one. (default: :obj:`0.1`)
        smoothness (float, optional): The weight of the smoothness of features on the
            learned graph. (default: :obj:`0.4`)
        connectivity (float, optional): The weight of the log barrier on degrees.
            (default: :obj:`0.1`)
        sparsity (float, optional): The weight of the squared norm of the graph.
            (default: :obj:`0.`)
        tol (float, optional): Refine until the graph changes by less than this share.
            (default: :obj:`1e-4`)
        max_iters (int, optional): The maximal number of refinements.
            (default: :obj:`4`)
        dropout (float, optional): Dropout after the first layer. (default: :obj:`0.5`)
        lr (float, optional): The learning rate of Adam. (default: :obj:`0.03`)
        weight_decay (float, optional): The weight decay of Adam.
            (default: :obj:`5e-4`)
        max_epochs (int, optional): The largest number of epochs.
            (default: :obj:`200`)
        patience (int, optional): The number of epochs without improvement after which
            to stop. (default: :obj:`50`)
        validation_fraction (float, optional): The share of labels to stop early on.
            (default: :obj:`0.2`)
        standardize (bool, optional): Whether to give each column mean 0 and variance 1
            over the training rows, labelled or not. Cosines depend on both. Leave it
            out for columns that are comparable as they are. (default: :obj:`True`)
        random_state (int, RandomState instance or None, optional): For weights, dropout
            and the choice of labels to stop on. (default: :obj:`None`)
        verbose (bool, optional): Whether to show a progress bar.
            (default: :obj:`False`)

    Attributes:
        classes_ (numpy.ndarray): The labels.
        transduction_ (numpy.ndarray): The label of each training row, predicted ones
            also where a label was given.
        label_distributions_ (numpy.ndarray): The probabilities they come from.
        graph_ (scipy.sparse.csr_array): The graph that was learned: the :obj:`k` most
            similar other rows of each row, with their similarity (with anchors, the
            probability of two-step walks). Rows may have fewer, as
            :obj:`epsilon` removes some.
        model_ (IDGL): The trained model, in double precision.
        record_ (FitRecord): The course of the training.
        n_iter_ (int): The number of epochs trained.
        n_features_in_ (int): The number of columns.
        feature_names_in_ (numpy.ndarray): Their names, where the table has them.
    """

    def __init__(
        self,
        hidden_channels: int = 16,
        *,
        k: int = 20,
        num_anchors: int | str | None = 'auto',
        heads: int = 4,
        epsilon: float = 0.65,
        initial_weight: float = 0.4,
        update_weight: float = 0.1,
        smoothness: float = 0.4,
        connectivity: float = 0.1,
        sparsity: float = 0.0,
        tol: float | None = 1e-4,
        max_iters: int = 4,
        dropout: float = 0.5,
        lr: float = 0.03,
        weight_decay: float = 5e-4,
        max_epochs: int = 200,
        patience: int = 50,
        validation_fraction: float = 0.2,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_channels = hidden_channels
        self.k = k
        self.num_anchors = num_anchors
        self.heads = heads
        self.epsilon = epsilon
        self.initial_weight = initial_weight
        self.update_weight = update_weight
        self.smoothness = smoothness
        self.connectivity = connectivity
        self.sparsity = sparsity
        self.tol = tol
        self.max_iters = max_iters
        self.dropout = dropout
        self.lr = lr
        self.weight_decay = weight_decay
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> IDGLClassifier:
        r"""Learns a graph of all rows, and to classify them.

        Args:
            X (array-like): The table, of shape :obj:`[n_samples, n_features]`.
            y (array-like): The label of each row, or -1.

        Returns:
            IDGLClassifier: The fitted classifier.
        """
        check_unit_interval('validation_fraction', self.validation_fraction)
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes = np.unique(y)
        if len(classes) > 2:
            classes = classes[classes != -1]
        elif classes.tolist() == [-1]:
            raise ValueError("Expected 'y' to hold a label (got -1 for all rows)")
        self.classes_ = classes
        label = np.searchsorted(classes, y).clip(max=len(classes) - 1)
        labelled = classes[label] == y

        random_state = check_random_state(self.random_state)
        held_out = self._held_out(label, labelled, random_state)
        train = labelled & ~held_out
        self._scaler = StandardScaler().fit(X) if self.standardize else None
        x = torch.from_numpy(self._scaled(X))
        data = Data(
            x=x.float(),
            y=torch.from_numpy(label),
            train_mask=torch.from_numpy(train),
            val_mask=torch.from_numpy(held_out if held_out.any() else train),
        )
        with torch.random.fork_rng():  # that of the caller goes on as if nothing was
            torch.manual_seed(int(random_state.randint(2**31 - 1)))
            self.model_ = self._make_model(*X.shape).float()
            self.record_ = fit(
                self.model_,
                data,
                lr=self.lr,
                weight_decay=self.weight_decay,
                max_epochs=self.max_epochs,
                patience=self.patience,
                progress=self.verbose,
                desc=f'{type(self.model_).__name__}, {len(X):,} rows',
            )
        self.n_iter_ = self.record_.epochs
        self._remember(x)
        return self

    def predict(self, X: Any) -> np.ndarray:
        r"""Returns the label of each row.

        Args:
            X (array-like): The rows, of shape :obj:`[n_samples, n_features]`.
        """
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    @torch.no_grad()
    def predict_proba(self, X: Any) -> np.ndarray:
        r"""Returns the probability of each class for each row.

        Args:
            X (array-like): The rows, of shape :obj:`[n_samples, n_features]`.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        blocks = torch.from_numpy(self._scaled(X)).split(_BLOCK)
        return torch.cat([self._outputs(x) for x in blocks]).softmax(dim=1).numpy()

    def _held_out(
        self, label: np.ndarray, labelled: np.ndarray, random_state: Any
    ) -> np.ndarray:
        """Which labels to stop early on."""
        held_out = np.zeros_like(labelled)
        for number in range(len(self.classes_)):
            own = np.flatnonzero(labelled & (label == number))
            rows = random_state.permutation(own)
            size = round(self.validation_fraction * len(rows))
            held_out[rows[: min(size, len(rows) - 1)]] = True
        return held_out

    def _scaled(self, X: np.ndarray) -> np.ndarray:
        return X if self._scaler is None else self._scaler.transform(X)

    def _make_model(self, num_rows: int, num_columns: int) -> IDGL:
        num_anchors = self.num_anchors
        if isinstance(num_anchors, str):
            if num_anchors != 'auto':
                raise ValueError(
                    f"Expected 'num_anchors' to be a number, 'auto' or None "
                    f'(got {num_anchors!r})'
                )
            num_anchors = _ANCHORS if num_rows > _LARGE else None
        options: dict[str, Any] = {
            'num_layers': 2,
            'out_channels': len(self.classes_),
            'dropout': self.dropout,
            'heads': self.heads,
            'epsilon': self.epsilon,
            'k': self.k,
            'initial_weight': self.initial_weight,
            'update_weight': self.update_weight,
            'tol': self.tol,
            'max_iters': self.max_iters,
            'smoothness': self.smoothness,
            'connectivity': self.connectivity,
            'sparsity': self.sparsity,
            'cached': True,
        }
        if num_anchors is None:
            return IDGL(num_columns, self.hidden_channels, **options)
        options['num_anchors'] = num_anchors
        return IDGLAnch(num_columns, self.hidden_channels, **options)

    @torch.no_grad()
    def _remember(self, x: Tensor) -> None:
        """What is known of the training rows, for them and for new ones."""
        model = self.model_.double().eval()
        calls: list[tuple] = []

        def note(learner: Any, inputs: tuple, affinity: Any) -> None:
            vectors, _, anchors, *_ = inputs
            vectors = vectors if isinstance(vectors, Tensor) else vectors.to_dense()
            calls.append((learner, vectors, anchors, affinity))

        learners = (model.feature_learner, model.embedding_learner)
        hooks = [learner.register_forward_hook(note) for learner in learners]
        logits, trace = model(x, return_trace=True)
        for hook in hooks:
            hook.remove()
        model.cached = False

        first, second = model.backbone.convs
        hidden = first.project(x)  # type: ignore[operator]
        out = second.project(trace.mixed.matmul(hidden).relu())  # type: ignore[operator]
        self._hidden, self._out = hidden, out
        self._graphs = []
        for learner, vectors, anchors, affinity in calls:
            sent = hidden, out
            if anchors is not None:
                walks = AnchorGraph(affinity)
                sent = walks.to_anchors(hidden), walks.to_anchors(out)
            compared = vectors if anchors is None else vectors[anchors.index]
            compared = learner.metric.embed(compared)
            self._graphs.append(_Graph(learner, compared, *sent))
        self._rows = torch.from_numpy(normalize(x.numpy()))
        self._reach = torch.cat(
            [self._farthest_neighbour(i) for i in torch.arange(len(x)).split(_BLOCK)]
        )

        self.label_distributions_ = logits.softmax(dim=1).numpy()
        self.transduction_ = self.classes_[self.label_distributions_.argmax(axis=1)]
        _, vectors, anchors, affinity = calls[-1]
        back = None
        if anchors is not None:
            back = AnchorGraph(affinity).anchor_scale * affinity.to_dense().t()
        self.graph_ = self._strongest(self._graphs[-1], vectors, back)

    def _cosines(self, rows: Tensor) -> Tensor:
        return (rows @ self._rows.t()).round(decimals=_DECIMALS)

    def _farthest_neighbour(self, index: Tensor) -> Tensor:
        """The cosine of training rows to the last of their neighbours."""
        if self.k >= len(self._rows):  # All are neighbours, and so is any new row.
            return torch.full(index.shape, -torch.inf, dtype=torch.double)
        cosines = self._cosines(self._rows[index])
        cosines[torch.arange(len(index)), index] = torch.inf
        return cosines.topk(self.k, dim=1).values[:, -1]

    def _strongest(self, graph: _Graph, vectors: Tensor, back: Any) -> csr_array:
        """The strongest edges of the training rows, as a sparse matrix."""
        size = len(vectors)
        parts = []
        for index in torch.arange(size).split(_BLOCK):
            if back is None:
                weight = graph.similarities(vectors[index])
            else:
                weight = graph.weights(vectors[index]) @ back
            weight[torch.arange(len(index)), index] = 0.0
            value, column = weight.topk(min(self.k, size), dim=1)
            row = index.unsqueeze(1).expand_as(column)
            parts.append([entry[value > 0] for entry in (value, row, column)])
        entries = [torch.cat(part).numpy() for part in zip(*parts, strict=True)]
        return csr_array((entries[0], tuple(entries[1:])), shape=(size, size))

    def _outputs(self, x: Tensor) -> Tensor:
        """Algorithm 1 for rows that receive from training rows, with as many
        refinements as these had.
        """
        lam, eta = self.initial_weight, self.update_weight
        cosines = self._cosines(torch.from_numpy(normalize(x.numpy())))
        near = cosines >= self._reach
        near[torch.arange(len(x)), cosines.argmax(dim=1)] = True
        initial = near.double() / min(self.k, len(self._rows))

        graph, *refined = self._graphs
        first = graph.weights(x)
        shared = lam * (initial @ self._hidden)
        learned = (1 - lam) * (first @ graph.hidden)
        z = (shared + learned).relu()
        shared = shared + (1 - eta) * learned
        out = (1 - lam) * (first @ graph.out)
        for graph in refined:
            weights = (1 - lam) * graph.weights(z)
            z = (shared + eta * (weights @ graph.hidden)).relu()
        if refined:
            out = (1 - eta) * out + eta * (weights @ graph.out)
        return lam * (initial @ self._out) + out
