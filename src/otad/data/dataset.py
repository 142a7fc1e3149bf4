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

from otad.checks import check_choice, check_shape, check_tensor, require

Task = Literal["classification", "regression"]
TASKS = ("classification", "regression")


def refuse_repeats(names: Iterable[str], where: str) -> None:
    """Refuses a name that occurs twice where things, such as columns, are found by name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    require(not repeated, where, "distinct names", f"repeated {', '.join(repeated)}")


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
        labeled = check_choice(self.task, "task", TASKS) == "classification"
        enough = len(self.classes) > 1 if labeled else not self.classes
        expected = "two classes or more" if labeled else "no classes for regression"
        require(enough, self.name, expected, self.classes)
        self._check_part("train", self.train_x, self.train_y)
        self._check_part("test", self.test_x, self.test_y)
        shape = (len(self.test_x), *self.input_shape)
        check_shape(self.test_x, f"{self.name} test_x", shape, "to match train_x")
        if labeled:
            first = int(self.train_y[0])
            several = bool((self.train_y != first).any())
            require(several, self.name, "two classes in the train part", repr(self.classes[first]))
        if self.feature_names is not None:
            count = len(self.feature_names)
            fits = (count,) == self.input_shape
            require(fits, self.name, f"one name for each feature {self.input_shape}", count)
            refuse_repeats(self.feature_names, f"{self.name} feature_names")
        refuse_repeats(self.classes, f"{self.name} classes")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(d,) or (C, H, W)."""
        return tuple(self.train_x.shape[1:])

    def fingerprint(self) -> str:
        """sha256 of the contents: equal if and only if a model would see the same data."""
        about = [self.task, self.classes, self.bounds, self.feature_names]
        digest = hashlib.sha256(json.dumps(about).encode())
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
        require(len(x) == len(y), named_y, f"{len(x)} targets like {part}_x", len(y))
        limits = [(x, named_x, self.bounds)] if self.bounds is not None else []
        if self.task == "classification":
            limits.append((y, named_y, (0, len(self.classes) - 1)))
        for values, name, (low, high) in limits:
            least, most = values.min().item(), values.max().item()
            inside = low <= least and most <= high
            require(inside, name, f"values in [{low}, {high}]", f"[{least}, {most}]")
