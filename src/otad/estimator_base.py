"""What `OTADClassifier` and `OTADRegressor` share: they train a network and defend it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from otad.arguments import check_options, hints_of
from otad.checks import check_choice, check_tensor, naming, require
from otad.data import Standardizer, Task, holdout
from otad.data.dataset import in_working_dtype, usual_statistics
from otad.data.encoding import TableEncoding, refuse_cells, refuse_dates, refuse_targets
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
GIVEN_AS = {
    "x": "X", "train_x": "X", "val_x": "X", "train_y": "y", "val_y": "y",
    "weights": "sample_weight", "blocks": "n_blocks",
}  # fmt: skip
"""What a user of an estimator calls the arguments of the functions that it calls."""
Array = NDArray[Any]


@dataclass(eq=False, repr=False)
class OTADEstimator(ABC, BaseEstimator):  # type: ignore[misc]
    """What both estimators share. The parameters are described in `OTADClassifier`."""

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
        """Train a network on X and y, and defend it with the bank of its training points.

        The data is used in float32, or in float64 where a feature or target varies too little for
        float32. If a fit is refused, an earlier fit remains unchanged.

        Parameters
        ----------
        X : array or DataFrame (n, d) or (n, c, h, w)
            Inputs. A DataFrame may have text or categories, which become one-hot columns, and
            missing values. Missing text is a category of its own. A missing number becomes the
            median, and a further column is 1 there. Later, unknown categories and missing values in
            other columns are refused, as are missing values in arrays.
        y : array (n,)
            Labels of any type, or in regression numbers.
        sample_weight : array (n,), optional
            How much each row counts in the training of the network, as if it were there that many
            times. Only ratios matter. Every row of positive weight is one point of the bank; rows
            of weight 0 are left out.

        Returns
        -------
        self
            The fitted estimator.
        """
        fitted = copy(self)
        fitted._fit(X, y, sample_weight)
        self.__dict__ = fitted.__dict__
        return self

    @abstractmethod
    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None: ...

    def save(self, folder: str | Path, *, evaluation: Any = None) -> Path:
        """Write the fitted estimator to a folder, and return the path of its card.

        `load` of this class reads the estimator again, with the same predictions. `otad.load` reads
        its `module_`. An integer `random_state` is saved; the state of a generator is not.

        Parameters
        ----------
        folder : str or Path
            The folder to write.
        evaluation : Evaluation, optional
            The figures of this evaluation are then listed on the model card; see `OTAD.save`.
        """
        check_is_fitted(self, "module_")
        return save_estimator(self, folder, evaluation)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Self:
        """Load the estimator that `save` wrote to a folder, with its module on this device."""
        return load_estimator(cls, folder, device)

    def distance(self, X: Any) -> Array:
        """Return the distance of each input from the training points (n,); see `OTAD.distance`."""
        inputs = self.as_inputs(X).split(ROWS_AT_ONCE)
        return torch.cat([self.module_.distance(rows) for rows in inputs]).cpu().numpy()

    def is_foreign(self, X: Any) -> Array:
        """Return whether each input (n,) is too far from the training points to be answered.

        Raises
        ------
        InputError
            If the estimator was fitted without `abstain_beyond`, which sets the limit.
        """
        check_is_fitted(self, "module_")
        limit = self.module_.abstain_beyond
        require(limit is not None, "abstain_beyond", "a quantile such as 0.95 in `fit`", None)
        found: Array = self.distance(X) > limit
        return found

    def explain(self, X: Any) -> list[Explanation]:
        """Explain each prediction by the training points it rests on; X may be a single input."""
        check_is_fitted(self, "module_")
        if np.ndim(X) == len(self.module_.backbone.input_shape):
            X = np.asarray(X)[None]
        with naming(x="X"):
            return explain(self, X)

    def _check_training_data(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[Tensor, Array, Array | None]:
        """Return inputs as a tensor, targets (n,) as they came, and weights (n,) or None, of the
        rows with a positive weight. Options of the wrong type are refused."""
        check_options(hints_of(type(self).__init__), self.get_params(deep=False))
        options = {"allow_nd": True, "ensure_min_samples": 2}
        options["y_numeric"] = self._task == "regression"
        refuse_dates(X, "X")
        refuse_targets(y, self._task)
        given, self.encoding_ = X, TableEncoding.of_frame(X, sample_weight)
        if self.encoding_ is not None:
            X = self.encoding_.encode_frame(X, "X")
        inputs, targets = self._validated(X, y, **options)
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

    def _validated(self, *data: Any, **options: Any) -> Any:
        """Return arrays as scikit-learn checks them; an error names the cell of a DataFrame."""
        try:
            return validate_data(self, *data, dtype=DTYPES, **options)
        except (TypeError, ValueError):
            refuse_cells(data[0], "X")
            raise

    def as_inputs(self, X: Any) -> Tensor:
        """Return inputs as a tensor that `module_` takes; the names of columns are compared."""
        check_is_fitted(self, "module_")
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        refuse_dates(X, "X")
        if self.encoding_ is not None:
            inputs = self.encoding_.encode_frame(X, "X").numpy()
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            inputs = self._validated(X, allow_nd=True, reset=False)
        found = torch.tensor(np.ascontiguousarray(inputs)).to(self.module_.backbone.mean)
        return self.module_.backbone.check_inputs(found, "X")

    @property
    def groups_(self) -> tuple[tuple[int, ...], ...]:
        """The one-hot columns of each text column, for `otad.L2(eps, groups=...)`."""
        return () if self.encoding_ is None else self.encoding_.groups

    def _given(self, *names: str) -> dict[str, Any]:
        """Return parameters as plain Python values; grid searches pass values of NumPy."""
        values = {name: getattr(self, name) for name in names}
        return {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}

    @property
    def _progress(self) -> bool | None:
        return None if self.verbose is None else bool(self.verbose > 0)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the defense."""
        check_choice(self.on_failure, "on_failure", ("fallback", "raise"))
        asked = self._given("n_neighbors", "scope", "smoothness", "strong_convexity")
        solving = self._given("mode", "climb", "max_smoothness", "on_failure")
        return asked | {"solver": solver_for(asked["scope"], **solving)}

    def _learn(
        self, x: Tensor, y: Tensor, n_outputs: int, weights: Array | None, **notes: Any
    ) -> None:
        """Train a network and defend it, with notes for the card of the model."""
        x, targets = in_working_dtype(x, y)
        check_tensor(x, "X", "n,d" if x.dim() == 2 else "n,c,h,w")
        if targets.is_floating_point():
            check_tensor(targets, "y", "n")
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
            named: Any = {"task": self._task, "name": "validation_fraction"}
            rows, held = holdout(y, self.validation_fraction, seed, **named)
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
        defense = self._settings() | {"progress": self._progress}
        with naming(**GIVEN_AS):
            net, result = fit_backbone(parts, config, progress=self._progress, **options)
            self.module_ = defend(net, x[rows], targets[rows], **defense)
        self.history_, self.n_iter_ = result.history, len(result.history)
        if quantile is not None:
            chosen = distance_threshold(self.module_, held_out, quantile=quantile)
            self.module_.abstain_beyond = chosen
        if len(names) > 0:
            notes["feature_names"] = list(names)
        self.module_.notes |= notes

    def _answers(self, inputs: Tensor) -> Tensor:
        """Return the answers of the module, also where it abstains."""
        module = self.module_
        if module.abstain_beyond is None:
            return module(inputs)  # type: ignore[no-any-return]
        return module.backbone.head(module.trace(inputs).solution.image)  # type: ignore[no-any-return]

    def _outputs(self, X: Any) -> Array:
        """Return logits (n, C) or values (n,), float64."""
        inputs = self.as_inputs(X)
        outputs: list[Tensor] = []
        with progress_bar("predicting", self._progress) as report, torch.no_grad():
            for rows in inputs.split(ROWS_AT_ONCE):
                outputs.append(self._answers(rows))
                report(sum(map(len, outputs)), len(inputs))
        return torch.cat(outputs).double().cpu().numpy()


def as_column(y: Any) -> Array:
    found: Array = column_or_1d(y.detach().cpu().numpy() if isinstance(y, Tensor) else y)
    return found
