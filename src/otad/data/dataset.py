"""The frozen `Dataset`: the form in which data reaches the rest of the library."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from otad.checks import check_choice, check_shape, check_tensor
from otad.errors import InputError

Task = Literal["classification", "regression"]
TASKS = ("classification", "regression")


def refuse_repeats(names: Iterable[str], where: str) -> None:
    """Refuses a name that occurs twice where things, such as columns, are found by name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(
            f"{where}: expected distinct names, got more than once: {', '.join(repeated)}"
        )


class Preparation(Protocol):
    """What was done to the inputs of a data set, such as `CellPreparation`."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test parts of one data set, checked once, on the CPU.

    Inputs are float32: vectors (N, d), or images (N, C, H, W) within `bounds`. Targets are (N,):
    int64 indices into `classes`, or float32 values with no classes for regression. Inputs are not
    normalized: that belongs inside the model, so that distances are in the user's own units. (Cells
    are the exception, and `preparation` repeats what was done to them.)
    """

    name: str
    train_x: Tensor = field(repr=False)
    train_y: Tensor = field(repr=False)
    test_x: Tensor = field(repr=False)
    test_y: Tensor = field(repr=False)
    task: Task
    source: str
    classes: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    feature_names: tuple[str, ...] | None = None
    preparation: Preparation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_choice(self.task, "task", TASKS)
        if self.task == "classification" and len(self.classes) < 2:
            raise InputError(f"{self.name}: expected two classes or more, got {self.classes}")
        if self.task == "regression" and self.classes:
            raise InputError(f"{self.name}: expected no classes for regression")
        self._check_part("train", self.train_x, self.train_y)
        self._check_part("test", self.test_x, self.test_y)
        expected = (len(self.test_x), *self.input_shape)
        check_shape(self.test_x, f"{self.name} test_x", expected, "to match train_x")
        if self.task == "classification" and bool((self.train_y == self.train_y[0]).all()):
            only = self.classes[int(self.train_y[0])]
            raise InputError(f"{self.name}: expected two classes in the train part, got {only!r}")
        if self.feature_names is not None and (len(self.feature_names),) != self.input_shape:
            raise InputError(
                f"{self.name}: expected one name for each feature {self.input_shape}, "
                f"got {len(self.feature_names)} names"
            )
        refuse_repeats(self.feature_names or (), f"{self.name} feature_names")
        refuse_repeats(self.classes, f"{self.name} classes")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(d,) or (C, H, W)."""
        return tuple(self.train_x.shape[1:])

    def fingerprint(self) -> str:
        """sha256 of the contents: equal if and only if a model would see the same data."""
        digest = hashlib.sha256()
        digest.update(
            json.dumps([self.task, self.classes, self.bounds, self.feature_names]).encode()
        )
        for part in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()

    def _check_part(self, part: str, x: Tensor, y: Tensor) -> None:
        named_x, named_y = f"{self.name} {part}_x", f"{self.name} {part}_y"
        images = isinstance(x, Tensor) and x.dim() == 4
        check_tensor(x, named_x, "N,C,H,W" if images else "N,d", dtypes=(torch.float32,))
        target = torch.int64 if self.task == "classification" else torch.float32
        check_tensor(y, named_y, "N", dtypes=(target,))
        if len(x) != len(y):
            raise InputError(f"{named_y}: expected {len(x)} targets like {part}_x, got {len(y)}")
        if self.bounds is not None:
            low, high = self.bounds
            least, most = float(x.min()), float(x.max())
            if least < low or most > high:
                raise InputError(
                    f"{named_x}: expected values in [{low}, {high}], got [{least}, {most}]"
                )
        if self.task == "classification":
            least_label, most_label = int(y.min()), int(y.max())
            if least_label < 0 or most_label >= len(self.classes):
                raise InputError(
                    f"{named_y}: expected labels 0 to {len(self.classes) - 1}, "
                    f"got {least_label} to {most_label}"
                )
