"""`OTADClassifier` and `OTADRegressor`, with the conventions of scikit-learn.

`fit` standardizes the inputs inside the model, trains a residual network with the transport energy
of the paper's eq. (1), and defends it with the bank of its training points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from otad.certify import Certificate, Interval, certify, certify_values
from otad.checks import check_choice, naming, require
from otad.data import Task
from otad.data.dataset import encode_labels
from otad.data.encoding import refuse_targets
from otad.estimator_base import Array, OTADEstimator, as_column


@dataclass(eq=False, repr=False)
class OTADClassifier(ClassifierMixin, OTADEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that interpolates between its training points.

    `fit` trains a residual network and defends it: the feature of a new input is interpolated
    between the features of training points by convex integration.

    Parameters
    ----------
    n_neighbors : int
        K, the number of training points that a prediction uses.
    scope : "local" or "global"
        "local" makes a map through the K nearest training points of each input. "global" makes one
        map through all training points, the same for all inputs. If no smoothness allows a global
        map, a warning says so, and the outputs of the network are interpolated instead.
    smoothness, strong_convexity : float
        L and l, the largest and the smallest curvature of the potential of the map. If `smoothness`
        is None, L is 2 in local scope. In global scope it is the least L that all training points
        allow; for a smaller L, training points that contradict others are left out.
    n_blocks, hidden : int
        The number of residual blocks of the network, and their inner width. If `hidden` is None, it
        is the number of features, but at least 64 and at most 1024 or the number of training rows.
    energy_weight : float
        The weight of the transport energy, alpha in the paper. The larger it is, the more the
        network resembles optimal transport, and the fewer rows need a larger L than the one asked
        for.
    epochs, batch_size, learning_rate, weight_decay, optimizer
        The training. `optimizer` is "adamw" or "sgd".
    mode, climb, max_smoothness, on_failure
        How the solver works in local scope; see `otad.cip.ExactCip`.
    bounds : (float, float), optional
        The lowest and highest legal input value, such as (0, 1) for pixels. If None, no bounds.
    validation_fraction : float, optional
        The fraction of rows that neither training nor the bank uses. The score of the network on
        them after each epoch is in `history_`.
    abstain_beyond : float, optional
        A quantile such as 0.95 of the distances of the validation rows from the bank. An input that
        is farther away `is_foreign`; of inputs like the training data this is at most a fraction of
        1 - 0.95. `module_` does not answer such an input, and `otad.evaluate` counts it as an
        error. `predict` still answers, because scikit-learn expects a label for every row.
    class_weight : dict, "balanced" or None
        A factor for the `sample_weight` of each class: a dict from labels to weights, or "balanced"
        for the same total in all classes. A class of weight 0 is left out.
    device : str
        Where to compute, such as "cpu" or "cuda".
    random_state : int, RandomState or None
        The seed.
    verbose : int, bool or None
        Progress bars. If None, they appear on a terminal or in a notebook after two seconds and
        vanish at the end. 0 draws none. A value above 0 draws them at once, and they stay.

    Attributes
    ----------
    module_ : OTAD
        The fitted torch module. In global scope `module_.smoothness` is the L of its map, and
        `module_.potential.left_out` lists the training rows that the map leaves out.
    classes_ : ndarray
        The labels, ascending.
    history_, n_iter_ : tuple, int
        Loss, energy and scores of the network after each epoch, and the number of epochs.
    n_features_in_, feature_names_in_ : int, ndarray
        As everywhere in scikit-learn. For images, the number of channels.
    encoding_, groups_ : TableEncoding or None, tuple
        How text and missing cells of a DataFrame become numbers, and the one-hot columns of each
        text column, which are the `groups` of a threat.

    Examples
    --------
    >>> import otad
    >>> wine = otad.data.load("wine")
    >>> X, y = wine.train_x.numpy(), wine.train_y.numpy()
    >>> clf = otad.OTADClassifier(epochs=10, hidden=16, random_state=0).fit(X, y)
    >>> clf.predict(wine.test_x.numpy()).shape
    (36,)
    >>> clf.score(wine.test_x.numpy(), wine.test_y.numpy()) > 0.7
    True
    >>> clf.certify(X[:3]).radius.shape
    torch.Size([3])
    """

    _task: ClassVar[Task] = "classification"
    classes_: Array = field(init=False)
    class_weight: dict[Any, float] | str | None = field(default=None, kw_only=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        inputs, labels, weights = self._check_training_data(X, y, sample_weight)
        check_classification_targets(labels)
        if self.class_weight is not None:
            by_class = self._weights_of_classes(labels, weights)
            weights, used = by_class if weights is None else by_class * weights, by_class > 0
            inputs, labels, weights = inputs[used], labels[used], weights[used]
            require(len(labels), "class_weight", "a positive weight of some class", "none")
        self.classes_, codes = np.unique(labels, return_inverse=True)
        found = f"one class: {self.classes_.tolist()[0]!r}"
        require(len(self.classes_) > 1, "y", "at least two classes", found)
        names = list(map(str, self.classes_))
        self._learn(inputs, torch.tensor(codes), len(names), weights, classes=names)

    def _weights_of_classes(self, labels: Array, weights: Array | None) -> Array:
        """Return the weight of the class of each row (n,)."""
        classes, codes = np.unique(labels, return_inverse=True)
        given = self.class_weight
        if isinstance(given, str):
            check_choice(given, "class_weight", ("balanced",))
            totals = np.bincount(codes, weights)
            each: Array = totals.sum() / (len(classes) * totals)
            return each[codes]
        known, given = classes.tolist(), given or {}
        unknown = [label for label in given if label not in known]
        require(not unknown, "class_weight", f"classes of y, which are {known}", unknown)
        each = np.array([given.get(label, 1.0) for label in known], np.float64)
        fits = bool(np.isfinite(each).all()) and each.min() >= 0
        require(fits, "class_weight", "finite weights of at least 0", given)
        return each[codes]

    def as_targets(self, y: Any) -> Tensor:
        """Return the positions of labels (n,) in `classes_`; other labels are refused."""
        return encode_labels(as_column(y).tolist(), self.classes_.tolist(), "y")

    def predict(self, X: Any) -> Array:
        """Return the label of each input (n,)."""
        best: Array = self._outputs(X).argmax(axis=1)
        return self.classes_[best]

    def decision_function(self, X: Any) -> Array:
        """Return logits (n, C); for two classes, the second logit minus the first (n,)."""
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> Array:
        """Return the softmax of the logits (n, C), with columns in the order of `classes_`."""
        shares: Array = softmax(self._outputs(X), axis=1)
        return shares

    def certify(self, X: Any, *, unit: Any = None) -> Certificate:
        """Prove l2 radii (n,) within which no change of an input changes its label.

        Predictions in the certificate are positions in `classes_`; its methods take labels.

        Parameters
        ----------
        X : array or DataFrame (n, d) or (n, c, h, w)
            Inputs.
        unit : array, optional
            The unit in which the change of each feature is measured, of the shape of one input. If
            None, plain input units.

        See Also
        --------
        otad.certify : what the proof assumes, and which models it refuses.
        """
        with naming(x="X"):
            return certify(self, X, unit=unit)


class OTADRegressor(RegressorMixin, OTADEstimator):  # type: ignore[misc]
    """A scikit-learn regressor that interpolates between its training points.

    Parameters and attributes are those of `OTADClassifier`, except `class_weight` and `classes_`.
    The target is standardized for the training. The outputs are in units of the target.

    Examples
    --------
    >>> import otad
    >>> diabetes = otad.data.load("diabetes")
    >>> X, y = diabetes.train_x[:100].numpy(), diabetes.train_y[:100].numpy()
    >>> reg = otad.OTADRegressor(epochs=5, hidden=16, random_state=0).fit(X, y)
    >>> reg.predict(X[:3]).shape
    (3,)
    >>> reg.certify(X[:3], eps=0.1)
    Interval(3 inputs, eps 0.1, width median ...)
    """

    _task: ClassVar[Task] = "regression"

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        inputs, values, weights = self._check_training_data(X, y, sample_weight)
        self._learn(inputs, torch.tensor(values.astype(np.float64)), 1, weights)

    def as_targets(self, y: Any) -> Tensor:
        """Return values (n,) in the dtype of the module."""
        values = as_column(y)
        refuse_targets(values, self._task)
        return torch.tensor(values.astype(np.float64)).to(self.module_.backbone.mean)

    def predict(self, X: Any) -> Array:
        """Return the value of each input (n,)."""
        return self._outputs(X)

    def certify(self, X: Any, eps: float, *, unit: Any = None) -> Interval:
        """Prove bounds (n,) on the answer to every input within l2 distance `eps`.

        Parameters
        ----------
        X : array or DataFrame (n, d) or (n, c, h, w)
            Inputs.
        eps : float
            The distance, at least 0.
        unit : array, optional
            As in `OTADClassifier.certify`.

        See Also
        --------
        otad.certify_values : what the proof assumes, and which models it refuses.
        """
        with naming(x="X"):
            return certify_values(self, X, eps, unit=unit)
