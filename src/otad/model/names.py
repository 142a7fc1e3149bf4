"""The names of classes and features in the notes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from otad.checks import require
from otad.data.dataset import refuse_repeats
from otad.io.codec import to_plain
from otad.nets import Backbone


class Described(Protocol):
    """A model or a trained network, and what is noted about its data."""

    @property
    def backbone(self) -> Backbone: ...

    @property
    def notes(self) -> dict[str, Any]: ...


def interface_of(net: Backbone) -> dict[str, Any]:
    """Return the task, the shape and bounds of inputs, and the number of outputs."""
    names = ("task", "input_shape", "n_outputs", "bounds")
    return dict(to_plain({name: getattr(net, name) for name in names}))


def check_names(notes: Mapping[str, Any], interface: Mapping[str, Any]) -> None:
    """Refuse notes without one name for each class, or without one for each feature of a table.
    Notes without any names are accepted."""
    shape, labeled = interface["input_shape"], interface["task"] == "classification"
    counts = {"feature_names": shape[0] if len(shape) == 1 else 0}
    if labeled:
        counts["classes"] = interface["n_outputs"]
    for name, count in counts.items():
        listed = notes.get(name) or []
        fits = isinstance(listed, list | tuple) and len(listed) in (0, count)
        fits = fits and all(isinstance(one, str | int | float) for one in listed)
        require(fits, f"notes.{name}", f"{count} names, or none", repr(listed)[:200])
    if labeled:  # answers and targets are found by these names
        refuse_repeats(map(str, notes.get("classes") or ()), "notes.classes")


def class_names_of(model: Described) -> tuple[str, ...]:
    """Return the names of the classes, or numbers for a model without names; none in regression."""
    if model.backbone.task == "regression":
        return ()
    return tuple(map(str, model.notes.get("classes") or range(model.backbone.n_outputs)))
