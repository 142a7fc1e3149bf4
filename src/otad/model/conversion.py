"""Conversion of estimators, DataFrames, arrays and other data to a module and tensors.

`otad.defend`, `evaluate` and `attack` convert their first arguments by `converted`, and what needs
no targets, such as `otad.predict`, `certify` and `explain`, by `converted_inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from otad.arguments import check_options
from otad.checks import naming, require
from otad.data.dataset import encode_labels
from otad.data.encoding import TableEncoding, frame_numbers, is_frame, refuse_dates
from otad.errors import InputError

MOST_BYTES = 2**33  # a DataLoader that gives more is refused, because it may never end


class Estimator(Protocol):
    """A fitted `OTADClassifier` or `OTADRegressor`, which has a `module_`."""

    def as_inputs(self, X: Any) -> Tensor: ...
    def as_targets(self, y: Any) -> Tensor: ...


class DataFrame(Protocol):
    """A DataFrame or Series of pandas, or of a library like it."""

    def to_numpy(self) -> NDArray[Any]: ...


ArrayLike = Tensor | NDArray[Any] | DataLoader[Any] | DataFrame | list[Any] | tuple[Any, ...]
"""Tensors are used as they are; other data are converted to the dtype and device of the model."""


class Converted(NamedTuple):
    module: Any
    x: Tensor
    y: Tensor | None


def converted(model: nn.Module | Estimator, x: ArrayLike, y: ArrayLike | None = None) -> Converted:
    """Return the module, inputs (n,*) and targets (n,) of a model and its data.

    A DataLoader gives batches of (inputs, targets) or of inputs alone, which are put together. The
    targets of an estimator are labels like those it was fitted with. The targets of a module are
    class numbers, or names if the notes of the model list its `classes`. A DataFrame must have the
    columns that the model was trained with, in the same order, if their names are known."""
    given = {"model": model, "x": x, "y": y}
    check_options({"model": nn.Module | Estimator, "x": ArrayLike, "y": ArrayLike | None}, given)
    if isinstance(x, DataLoader):
        require(y is None, "y", "None, as a DataLoader gives the targets too", type(y).__name__)
        x, y = _all_batches(x)
    if isinstance(model, nn.Module):
        targets = None if y is None else _targets(model, y)
        if isinstance(x, (list, tuple)) and targets is not None and targets.dim() == 1:
            _refuse_several_inputs(x, targets)
        return Converted(model, _inputs(model, x), targets)
    with naming(X="x"):
        inputs = model.as_inputs(x)  # raises an error if the estimator is not fitted
    return Converted(vars(model)["module_"], inputs, None if y is None else model.as_targets(y))


def converted_inputs(model: nn.Module | Estimator, x: ArrayLike) -> Converted:
    """Return the module and its inputs like `converted`, without the targets of a DataLoader, which
    may be none that the model knows."""
    return converted(model, _all_batches(x)[0] if isinstance(x, DataLoader) else x)


def like_inputs(module: nn.Module, values: ArrayLike, name: str) -> Tensor:
    """Return numbers as a tensor in the dtype and on the device of a model's inputs.

    A tensor is returned as it is."""
    if isinstance(values, Tensor):
        return values
    array = _numbers(values, name)
    like = _weight_of(module)
    wide = np.float64 if like.dtype == torch.float64 else np.float32
    with np.errstate(over="ignore"):  # infinite numbers are refused where inputs are checked
        return torch.from_numpy(array.astype(wide)).to(like)


def classes_of(model: nn.Module | Estimator) -> tuple[Any, ...]:
    """Return the labels of an estimator, or the names of the classes of a module if it has any."""
    if isinstance(model, nn.Module):
        return tuple(map(str, _notes(model).get("classes") or ()))
    return tuple(np.asarray(getattr(model, "classes_", ())).tolist())


def class_numbers(y: ArrayLike, classes: Sequence[Any]) -> NDArray[Any]:
    """Return targets (n,) as numbers: labels become their positions in `classes`.

    Numbers are unchanged if the classes have names, or are not known."""
    array = _array(y.detach().cpu() if isinstance(y, Tensor) else y, "y")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "OUT" and all(isinstance(name, str) for name in classes):
        return _numbers(array, "y")
    expected = "class numbers, as the model has no names of classes"
    require(len(classes) > 0, "y", expected, f"an array of {array.dtype}")
    return encode_labels(array.tolist(), classes, "y").numpy()


def _refuse_several_inputs(x: Sequence[Any], y: Tensor) -> None:
    """Refuse a list or tuple of batches, each with one row for every target."""
    batches = all(getattr(part, "shape", ())[:1] == y.shape[:1] for part in x)
    got = f"a {type(x).__name__} of {len(x)}: networks of several inputs are not supported"
    require(not batches or len(x) in (0, len(y)), "x", "one tensor", got)


def _inputs(module: nn.Module, x: Any) -> Tensor:
    known = _notes(module).get("feature_names")
    encoding = TableEncoding.of(_notes(module)) if hasattr(x, "columns") else None
    if encoding is not None and [str(name) for name in x.columns] != known:
        return encoding.encode_frame(x, "x").to(_weight_of(module))
    if known is not None and hasattr(x, "columns"):
        found = [str(name) for name in x.columns]
        require(found == list(known), "x", f"the columns {', '.join(known)}", ", ".join(found))
    return like_inputs(module, x, "x")


def _targets(module: nn.Module, y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return y
    array = class_numbers(y, classes_of(module))
    values = like_inputs(module, array, "y")
    is_value = getattr(getattr(module, "backbone", module), "task", None) == "regression"
    is_number = array.dtype.kind == "f" or is_value
    return values if is_number else torch.from_numpy(array.astype(np.int64)).to(values.device)


def _numbers(values: Any, name: str) -> NDArray[Any]:
    refuse_dates(values, name)
    array = _array(values, name)
    if array.dtype.kind == "O" and is_frame(values):
        array = frame_numbers(values, name)
    require(array.dtype.kind in "biuf", name, "numbers", f"an array of {array.dtype}")
    return array


def _array(values: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{name}: expected an array of numbers, got: {error}") from error


def _notes(module: nn.Module) -> dict[str, Any]:
    notes = getattr(module, "notes", {})
    return notes if isinstance(notes, dict) else {}


def _weight_of(module: nn.Module) -> Tensor:
    """Return a tensor in the dtype and on the device of a module's inputs."""
    mean = getattr(getattr(module, "backbone", module), "mean", None)
    tensors = (mean, *module.parameters(), *module.buffers())
    floats = (one for one in tensors if isinstance(one, Tensor) and one.is_floating_point())
    return next(floats, torch.zeros(()))


def _all_batches(loader: DataLoader[Any]) -> tuple[Tensor, Tensor | None]:
    batches, size = [], 0
    for batch in loader:
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        fits = len(parts) in (1, 2) and all(isinstance(part, Tensor) for part in parts)
        found = f"a batch of {[type(part).__name__ for part in parts]}"
        require(fits, "x", "batches of tensors (inputs, targets), or of inputs alone", found)
        size += sum(part.nbytes for part in parts)
        expected = f"a DataLoader that ends within {MOST_BYTES:,} bytes"
        require(size <= MOST_BYTES, "x", expected, "more: give it a part of the data")
        batches.append(parts)
    require(batches, "x", "a DataLoader with at least one batch", "none")
    columns = [torch.cat(column) for column in zip(*batches, strict=True)]
    return columns[0], columns[1] if len(columns) == 2 else None
