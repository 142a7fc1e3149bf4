"""Estimators on disk: the folder of their module, whose card notes what the estimator knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from otad.arguments import check_options, hints_of
from otad.checks import check_choice, refusing, require
from otad.data.encoding import TableEncoding
from otad.io.codec import from_plain, to_plain
from otad.model.loading import load
from otad.training import EpochRecord

INTEGERS = tuple(f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64))
LABELS = ("str", "object", "bool", "float16", "float32", "float64", *INTEGERS)  # can be saved
Fitted = TypeVar("Fitted")


def save_estimator(estimator: Any, folder: str | Path, evaluation: Any = None) -> Path:
    """Write a fitted estimator, as `OTAD.save` does, and return the path of its card."""
    check_options(hints_of(save_estimator), {"folder": folder})
    params = {name: _plain(value) for name, value in estimator.get_params(deep=False).items()}
    about = {
        "class": type(estimator).__name__,
        "params": params,
        "history": to_plain(estimator.history_),
        "n_features_in": estimator.n_features_in_,
    }
    classes = getattr(estimator, "classes_", None)
    if classes is not None:
        kind = {"U": "str", "T": "str"}.get(classes.dtype.kind, classes.dtype.name)
        values = classes.tolist()
        plain = kind in LABELS and (kind != "object" or all(isinstance(v, str) for v in values))
        require(plain, "classes_", "text, numbers or booleans, to save them", kind)
        about["classes"] = {"dtype": kind, "values": values}
    return estimator.module_.save(folder, evaluation=evaluation, estimator=about)  # type: ignore[no-any-return]


def load_estimator(kind: type[Fitted], folder: str | Path, device: str) -> Fitted:
    """The estimator of this class that `save_estimator` wrote, with its module on the device."""
    check_options(hints_of(load_estimator), {"folder": folder, "device": device})
    module = load(folder, device=device)
    about, expected = module.notes.get("estimator", {}), f"a folder written by {kind.__name__}.save"
    found = about.get("class", "none") if isinstance(about, dict) else "none"
    require(found == kind.__name__, str(folder), expected, found)
    made: Any
    with refusing(f"{folder}: expected {expected}"):
        made = kind(**{name: _restored(value) for name, value in about["params"].items()})
        check_options(hints_of(kind.__init__), made.get_params(deep=False))
        made.history_ = from_plain(tuple[EpochRecord, ...], about["history"], "history")
        made.n_iter_, made.n_features_in_ = len(made.history_), int(about["n_features_in"])
        made.encoding_ = TableEncoding.of(module.notes)
        names = module.notes.get("feature_names")
        if names := names if made.encoding_ is None else made.encoding_.names:
            made.feature_names_in_ = np.array([str(name) for name in names], dtype=object)
        if "classes" in about:
            dtype = check_choice(about["classes"]["dtype"], "classes", LABELS)
            made.classes_ = np.array(about["classes"]["values"], dtype=dtype)
            count = (module.backbone.n_outputs,)
            require(made.classes_.shape == count, "classes", f"{count[0]}", made.classes_.shape)
    made.module_ = module
    return made  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """A parameter in JSON, which has neither tuples nor keys other than text. The state of a
    `RandomState` is not saved."""
    if isinstance(value, np.random.RandomState):
        return None
    if isinstance(value, dict):
        return {"items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value["items"]}
    return tuple(map(_restored, value)) if isinstance(value, list) else value
