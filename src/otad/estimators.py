"""`OTADClassifier` and `OTADRegressor`, with the conventions of scikit-learn.

`fit` standardizes the inputs inside the model, trains a residual network with the transport energy
of the paper's eq. (1), and defends it with the bank of its training points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from otad.arguments import check_options, hints_of
from otad.certify import Certificate, Interval, certify, certify_values
from otad.checks import check_choice, check_finite, require
from otad.data import Standardizer, Task, holdout
from otad.data.dataset import encode_labels, in_working_dtype, usual_statistics
from otad.data.encoding import TableEncoding
from otad.errors import InputError
from otad.estimator_folder import load_estimator, save_estimator
from otad.explain import Explanation, explain
from otad.model.answerer_options import check_settings, solver_for
from otad.model.defend import defend
from otad.model.foreign import conformal_rank, distance_threshold
from otad.progress import progress_bar
from otad.training import TrainConfig, fit_backbone
from otad.training.recipes import LEAST_WIDTH, usual_width

DTYPES = (np.float64, np.float32)  # of inputs; others are converted to the first
ROWS_AT_ONCE = 4096  # of a prediction, to bound its working memory
Array = NDArray[Any]


@dataclass(eq=False, repr=False)
class _OTADEstimator(ABC, BaseEstimator):  # type: ignore[misc]
    """What both estimators share; the parameters are described in `OTADClassifier`."""

    _task: ClassVar[Task]
    encoding_ = cast(TableEncoding | None, None)  # no parameter, so it has no annotation

    n_neighbors: int = 10
    _: KW_ONLY
    scope: str = "local"
    smoothness: float | None = None
    strong_convexity: float = 0.0
    n_blocks: int = 5
    hidden: int | None = None
    energy_weight: float = 0.2
    epochs: int = 30
    batch_size: int = 32
    learning_rate: float = 0.003
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    mode: str = "consistent"
    climb: tuple[float, float] | None = None
    max_smoothness: float | None = None
    on_failure: str = "fallback"
    bounds: tuple[float, float] | None = None
    validation_fraction: float | None = None
    abstain_beyond: float | None = None
    device: str = "cpu"
    random_state: int | np.random.RandomState | None = None
    verbose: int | bool | None = None

    @torch.inference_mode(False)  # weights made in that mode could not be trained
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from inputs X (n, d) or (n, c, h, w) of any dtype and y (n,): labels of any type,
        or in regression numbers. They are worked with in float32, or in float64 where the spread of
        a feature or target is too small for it. A fit that is refused leaves all of an earlier one.

        A DataFrame may have text or categories, which become one-hot columns, and missing values:
        of text a category of its own, of numbers the median, and a further column that is 1 there.
        Unknown categories, missing values in other columns, and in arrays, are refused.

        `sample_weight` (n,): how much a row counts in the training of the network, as if it were
        there so many times; only ratios matter. Every row of positive weight is one point of the
        bank, whatever its weight; rows of weight 0 are left out of everything.
        """
        fitted = copy(self)
        fitted._fit(X, y, sample_weight)
        self.__dict__ = fitted.__dict__
        return self

    @abstractmethod
    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None: ...

    def save(self, folder: str | Path, *, evaluation: Any = None) -> Path:
        """Write the fitted estimator to a folder, as `OTAD.save`; the path of its card. `load`
        reads it again, with the same predictions, and `otad.load` its `module_`. Of `random_state`
        an integer is saved, not the state of a generator."""
        check_is_fitted(self, "module_")
        return save_estimator(self, folder, evaluation)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Self:
        """The estimator that `save` wrote to a folder, with its module on this device."""
        return load_estimator(cls, folder, device)

    def distance(self, X: Any) -> Array:
        """How far each input is from the training points (n,), see `OTAD.distance`."""
        inputs = self.as_inputs(X).split(ROWS_AT_ONCE)
        return torch.cat([self.module_.distance(rows) for rows in inputs]).cpu().numpy()

    def is_foreign(self, X: Any) -> Array:
        """Whether each input (n,) is so far from the training points that it should be refused: see
        `abstain_beyond`."""
        check_is_fitted(self, "module_")
        limit = self.module_.abstain_beyond
        require(limit is not None, "abstain_beyond", "a quantile such as 0.95 in `fit`", None)
        found: Array = self.distance(X) > limit
        return found

    def explain(self, X: Any) -> list[Explanation]:
        """For each input the training points its prediction rests on; X may be a single input."""
        check_is_fitted(self, "module_")
        if np.ndim(X) == len(self.module_.backbone.input_shape):
            X = np.asarray(X)[None]
        return explain(self, X)

    def _check_training_data(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[Tensor, Array, Array | None]:
        """Inputs as a tensor, targets (n,) as they came, and weights (n,) or None, of rows with a
        positive weight; options of other types are refused."""
        check_options(hints_of(type(self).__init__), self.get_params(deep=False))
        options = {"allow_nd": True, "ensure_min_samples": 2}
        options["y_numeric"] = self._task == "regression"
        given, self.encoding_ = X, TableEncoding.of_frame(X, sample_weight)
        if self.encoding_ is not None:
            X = self.encoding_.encode_frame(X, "X")
        inputs, targets = validate_data(self, X, y, dtype=DTYPES, **options)
        if self.encoding_ is not None:
            validate_data(self, given, skip_check_array=True)  # stores the names of columns
        require(inputs.ndim in (2, 4), "X", "vectors (n, d) or images (n, c, h, w)", inputs.shape)
        targets = column_or_1d(targets, warn=True)
        if sample_weight is None:
            return torch.tensor(np.ascontiguousarray(inputs)), targets, None
        how = {"dtype": np.float64, "ensure_non_negative": True}
        weights = _check_sample_weight(sample_weight, inputs, **how)
        used = weights > 0
        require(used.any(), "sample_weight", "at least one positive weight", "none")
        return torch.tensor(inputs[used]), targets[used], weights[used]

    def as_inputs(self, X: Any) -> Tensor:
        """Inputs as a tensor that `module_` takes; the names of columns are compared."""
        check_is_fitted(self, "module_")
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        if self.encoding_ is not None:
            inputs = self.encoding_.encode_frame(X, "X").numpy()
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            inputs = validate_data(self, X, dtype=DTYPES, allow_nd=True, reset=False)
        return torch.tensor(np.ascontiguousarray(inputs)).to(self.module_.backbone.mean)

    @property
    def groups_(self) -> tuple[tuple[int, ...], ...]:
        """The one-hot columns of each column of text, for `otad.L2(eps, groups=...)`."""
        return () if self.encoding_ is None else self.encoding_.groups

    def _given(self, *names: str) -> dict[str, Any]:
        """Parameters as plain Python values; grid searches hand over numpy's."""
        values = {name: getattr(self, name) for name in names}
        return {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}

    @property
    def _progress(self) -> bool | None:
        return None if self.verbose is None else bool(self.verbose > 0)

    def _settings(self) -> dict[str, Any]:
        """Those of the defense."""
        check_choice(self.on_failure, "on_failure", ("fallback", "raise"))
        asked = self._given("n_neighbors", "scope", "smoothness", "strong_convexity")
        solving = self._given("mode", "climb", "max_smoothness", "on_failure")
        return asked | {"solver": solver_for(asked["scope"], **solving)}

    def _learn(
        self, x: Tensor, y: Tensor, n_outputs: int, weights: Array | None, **notes: Any
    ) -> None:
        """Train a network and defend it, with notes for the card of the model."""
        x, targets = in_working_dtype(x, y)
        check_finite(x, "X")
        try:
            drawn_by = check_random_state(self.random_state)
        except ValueError as error:
            raise InputError(f"random_state: expected a seed, got: {error}") from error
        seed = int(drawn_by.randint(np.iinfo(np.int32).max))
        recipe = ("epochs", "batch_size", "learning_rate", "weight_decay", "optimizer", "device")
        config = TrainConfig(**self._given("energy_weight", *recipe), seed=seed)
        rows = torch.arange(len(x))
        parts: tuple[Tensor, ...] = (x, y)
        held_out = x[:0]
        if self.validation_fraction is not None:
            rows, held = holdout(y, self.validation_fraction, seed, task=self._task)
            held_out = x[held]
            parts = (x[rows], y[rows], x[held], y[held])
        if (quantile := self._given("abstain_beyond")["abstain_beyond"]) is not None:
            expected = "None without validation_fraction, the rows by which it is chosen"
            require(len(held_out), "abstain_beyond", expected, quantile)
            conformal_rank(len(held_out), quantile)
        check_settings(len(rows), **self._settings())
        blocks, hidden, bounds = self._given("n_blocks", "hidden", "bounds").values()
        if hidden is None:  # a block as narrow as two or three features learns too little
            hidden = max(LEAST_WIDTH, usual_width(x.shape[1:], len(rows)))
        options: dict[str, Any] = {"task": self._task, "n_outputs": n_outputs, "bounds": bounds}
        options["options"] = {"blocks": blocks, "hidden": hidden}
        names = getattr(self, "feature_names_in_", ())
        if self.encoding_ is not None:
            names = self.encoding_.feature_names
            notes["preparation"] = self.encoding_.to_json()
        inputs = Standardizer.fit(parts[0], usual_statistics(x), names)
        options["inputs"] = inputs if self.encoding_ is None else self.encoding_.unscaled(inputs)
        if weights is not None:
            options["weights"] = torch.tensor(weights)[rows]
        net, result = fit_backbone(parts, config, progress=self._progress, **options)
        self.history_, self.n_iter_ = result.history, len(result.history)
        defense = self._settings() | {"progress": self._progress}
        self.module_ = defend(net, x[rows], targets[rows], **defense)
        if quantile is not None:
            chosen = distance_threshold(self.module_, held_out, quantile=quantile)
            self.module_.abstain_beyond = chosen
        if len(names) > 0:
            notes["feature_names"] = list(names)
        self.module_.notes |= notes

    def _answers(self, inputs: Tensor) -> Tensor:
        """Those of the module, also where it abstains."""
        module = self.module_
        if module.abstain_beyond is None:
            return module(inputs)  # type: ignore[no-any-return]
        return module.backbone.head(module.trace(inputs).solution.image)  # type: ignore[no-any-return]

    def _outputs(self, X: Any) -> Array:
        """Logits (n, C) or values (n,), float64."""
        inputs = self.as_inputs(X)
        outputs: list[Tensor] = []
        with progress_bar("predicting", self._progress) as report, torch.no_grad():
            for rows in inputs.split(ROWS_AT_ONCE):
                outputs.append(self._answers(rows))
                report(sum(map(len, outputs)), len(inputs))
        return torch.cat(outputs).double().cpu().numpy()


def _column(y: Any) -> Array:
    found: Array = column_or_1d(y.detach().cpu().numpy() if isinstance(y, Tensor) else y)
    return found


@dataclass(eq=False, repr=False)
class OTADClassifier(ClassifierMixin, _OTADEstimator):  # type: ignore[misc]
    """A classifier whose features are interpolated between training points.

    Parameters
    ----------
    n_neighbors, smoothness, strong_convexity : the map asked for: training points used for a
        prediction (K), and the largest and smallest curvature of its potential (L, l). L is 2
        where it is None.
    scope : "local", a map through the K nearest training points of each input; or "global", the
        same map for all inputs, through all training points. Then `smoothness` None is the least L
        that all of them allow, and for a smaller one those that contradict others are left out.
        Where no L does, a warning says so, and the network's outputs are interpolated instead.
    n_blocks, hidden : residual blocks of the network, and their inner width (None: that of the
        inputs, but at least 64, at most the rows of training if they are more, and at most 1024).
    energy_weight : the paper's alpha. The larger, the more the network resembles optimal
        transport, and the fewer rows need a larger L than the one asked for.
    epochs, batch_size, learning_rate, weight_decay, optimizer ("adamw", "sgd") : the training.
    mode, climb, max_smoothness, on_failure ("fallback", "raise") : as in `otad.cip.ExactCip`; in
        local scope.
    class_weight : what `sample_weight` is multiplied by in each class: a dict from labels to
        weights (1 for a class that is not in it); "balanced", the same total for all classes; or
        None. A class of weight 0 is left out.
    bounds : lowest and highest legal input value, such as (0, 1) for pixels; None for no bounds.
    validation_fraction : share of the rows that training and bank do not use; the network's score
        on them after each epoch is in `history_`.
    abstain_beyond : a quantile such as 0.95 of the distances from the bank of those rows, beyond
        which an input `is_foreign`: at most a share of 1 - 0.95 of inputs like the training data.
        `module_` gives it no answer, so that `otad.evaluate` counts it as an error; `predict` does,
        as scikit-learn wants a label for every row. None to answer all.
    device, random_state : where to work, and the seed.
    verbose : progress bars. None: on a terminal or in a notebook, after two seconds, and they
        vanish at the end; 0: none; above 0: at once, and they stay.

    Attributes
    ----------
    module_ : the fitted `otad.OTAD`, a torch module. In global scope `module_.smoothness` is the L
        of its map and `module_.potential.left_out` the training rows that it leaves out.
    classes_ : the labels, ascending.
    history_, n_iter_ : loss, energy and scores of the network after each epoch; their number.
    n_features_in_, feature_names_in_ : as everywhere in scikit-learn; for images the channels.
    encoding_, groups_ : how the text and missing cells of a DataFrame became numbers, None where
        there were none; and the one-hot columns of each column of text, the `groups` of a threat.
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
        found = f"one class: {labels[0]!r}"
        require(len(self.classes_) > 1, "y", "at least two classes", found)
        names = list(map(str, self.classes_))
        self._learn(inputs, torch.tensor(codes), len(names), weights, classes=names)

    def _weights_of_classes(self, labels: Array, weights: Array | None) -> Array:
        """That of the class of each row (n,)."""
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
        """The positions of labels (n,) in `classes_`; others are refused."""
        return encode_labels(_column(y).tolist(), self.classes_.tolist(), "y")

    def predict(self, X: Any) -> Array:
        """The label of each input (n,)."""
        best: Array = self._outputs(X).argmax(axis=1)
        return self.classes_[best]

    def decision_function(self, X: Any) -> Array:
        """Logits (n, C); for two classes that of the second above that of the first (n,)."""
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> Array:
        """The softmax of the logits (n, C), columns in the order of `classes_`."""
        shares: Array = softmax(self._outputs(X), axis=1)
        return shares

    def certify(self, X: Any, *, unit: Any = None) -> Certificate:
        """Proved l2 radii (n,) within which no change of an input changes its label.

        `unit`, of the shape of one input, is what the change of each feature is divided by; None
        for plain input units. Labels in the certificate are positions in `classes_`. See
        `otad.certify.certify` for what it assumes and refuses.
        """
        return certify(self, X, unit=unit)


class OTADRegressor(RegressorMixin, _OTADEstimator):  # type: ignore[misc]
    """A regressor whose features are interpolated between training points.

    Parameters and attributes are those of `OTADClassifier`, without those of classes. The target is
    standardized for the training; the module's own outputs are in the target's units.
    """

    _task: ClassVar[Task] = "regression"

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        inputs, values, weights = self._check_training_data(X, y, sample_weight)
        self._learn(inputs, torch.tensor(values.astype(np.float64)), 1, weights)

    def as_targets(self, y: Any) -> Tensor:
        """Values (n,) in the dtype of the module."""
        return torch.tensor(_column(y).astype(np.float64)).to(self.module_.backbone.mean)

    def predict(self, X: Any) -> Array:
        """The value of each input (n,)."""
        return self._outputs(X)

    def certify(self, X: Any, eps: float, *, unit: Any = None) -> Interval:
        """Proved bounds (n,) on the answer to every input within l2 distance eps.

        `unit` as in `OTADClassifier.certify`; see `otad.certify.certify_values`.
        """
        return certify_values(self, X, eps, unit=unit)
