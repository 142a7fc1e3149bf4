"""The frozen `Dataset`, the standardization of inputs, and the integer codes of classes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from otad.checks import (
    check_alike,
    check_bounds,
    check_choice,
    check_finite,
    check_shape,
    check_tensor,
    require,
)
from otad.short_repr import short_repr

Task = Literal["classification", "regression"]
Per = Literal["feature", "channel", "all"]
TASKS = ("classification", "regression")
COARSEST = 2.0**-10  # of the spread: the steps between numbers that a feature can have
MOST_CLASSES = 10  # distinct whole numbers that are more likely labels than values
_EPS = torch.finfo(torch.float32).eps


def refuse_repeats(names: Iterable[str], where: str) -> None:
    """Refuse names that occur twice where things, such as columns, are found by name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    require(not repeated, where, "distinct names", f"repeated {', '.join(repeated)}")


@dataclass(frozen=True, eq=False)
class Dataset:
    """The train and test part of one data set, checked once, on the CPU.

    Inputs are not normalized. The model normalizes them, so that distances are in your own units.
    Single cells are the exception: their `preparation` repeats on new cells what was done to them.

    Parameters
    ----------
    name : str
        A short name for reports.
    train_x, test_x : Tensor (N, d) or (N, C, H, W)
        Vectors, or images within `bounds`. They are float32, or float64 where a feature varies too
        little around a large mean for float32.
    train_y, test_y : Tensor (N,)
        In classification, int64 indices into `classes`. In regression, values of the dtype of the
        inputs.
    task : "classification" or "regression"
        What the targets are.
    source : str
        Where the data comes from, with its license.
    classes : tuple of str
        The name of each class; empty for regression.
    bounds : (float, float), optional
        The lowest and highest legal input value, such as (0, 1) for pixels.
    feature_names : tuple of str, optional
        One name for each feature of a vector.
    preparation : CellPreparation or TableEncoding, optional
        What turned the raw rows into inputs, so that it can be repeated on new rows.
    train_names, test_names : tuple of str
        The name of each row, such as its file or its line in a table; empty if rows have none.

    Raises
    ------
    InputError
        If shapes, dtypes, labels, bounds or names do not fit together.

    Examples
    --------
    >>> import torch
    >>> from otad.data import Dataset
    >>> x, y = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> made = Dataset("mine", x[:4], y[:4], x[4:], y[4:], "classification", "drawn", ("no", "yes"))
    >>> made
    Dataset('mine', classification of 2 classes, 4 train and 2 test inputs (2,))
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
    preparation: Any = field(default=None, repr=False)
    train_names: tuple[str, ...] = field(default=(), repr=False)
    test_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.bounds is not None:
            check_bounds(self.bounds)
        labeled = check_choice(self.task, "task", TASKS) == "classification"
        enough = len(self.classes) > 1 if labeled else not self.classes
        expected = "two classes or more" if labeled else "no classes for regression"
        require(enough, self.name, expected, self.classes)
        self._check_part("train", self.train_x, self.train_y)
        self._check_part("test", self.test_x, self.test_y)
        test_shape = (len(self.test_x), *self.input_shape)
        check_shape(self.test_x, f"{self.name} test_x", test_shape, "to match train_x")
        check_alike(self.test_x, f"{self.name} test_x", self.train_x, "train_x")
        if labeled:
            first = int(self.train_y[0])
            several = bool((self.train_y != first).any())
            require(several, self.name, "two classes in the train part", repr(self.classes[first]))
        if self.feature_names is not None:
            shape, count = self.input_shape, len(self.feature_names)
            require((count,) == shape, self.name, f"one name for each feature {shape}", count)
            refuse_repeats(self.feature_names, f"{self.name} feature_names")
        refuse_repeats(self.classes, f"{self.name} classes")

    def __repr__(self) -> str:
        rows = f"{len(self.train_x):,} train and {len(self.test_x):,} test inputs"
        task = f"{self.task} of {len(self.classes)} classes" if self.classes else self.task
        return f"Dataset({self.name!r}, {task}, {rows} {self.input_shape})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (d,) or (C, H, W)."""
        return tuple(self.train_x.shape[1:])

    def fingerprint(self) -> str:
        """Return the SHA-256 of the contents, which is equal only for equal data."""
        about = [self.task, self.classes, self.bounds, self.feature_names]
        digest = hashlib.sha256(json.dumps(about).encode())
        for part in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()

    def _check_part(self, part: str, x: Tensor, y: Tensor) -> None:
        named_x, named_y = f"{self.name} {part}_x", f"{self.name} {part}_y"
        images = isinstance(x, Tensor) and x.dim() == 4
        check_tensor(x, named_x, "N,C,H,W" if images else "N,d")
        target = torch.int64 if self.task == "classification" else x.dtype
        check_tensor(y, named_y, "N", dtypes=(target,))
        require(len(x) == len(y), named_y, f"{len(x)} targets like {part}_x", len(y))
        names = getattr(self, f"{part}_names")
        known = len(names) in (0, len(x))
        require(known, f"{self.name} {part}_names", f"{len(x)} names, or none", len(names))
        limits = [(x, named_x, self.bounds)] if self.bounds is not None else []
        if self.task == "classification":
            limits.append((y, named_y, (0, len(self.classes) - 1)))
        for values, name, (low, high) in limits:
            least, most = values.min().item(), values.max().item()
            inside = low <= least and most <= high
            require(inside, name, f"values in [{low}, {high}]", f"[{least}, {most}]")


@dataclass(frozen=True, eq=False)
class Standardizer:
    """The map `(x - mean) / std`.

    Parameters
    ----------
    mean, std : Tensor
        They are broadcast against one input: (d,), (C, 1, 1) or (). `std` is positive.

    Examples
    --------
    >>> import torch
    >>> from otad.data import Standardizer
    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    >>> scaling = Standardizer.fit(x)
    >>> scaling(x)
    tensor([[-1., -1.],
            [ 1.,  1.]])
    >>> scaling.inverse(scaling(x))
    tensor([[ 1., 10.],
            [ 3., 30.]])
    """

    mean: Tensor
    std: Tensor
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_finite(self.mean, "mean")
        check_finite(self.std, "std")
        check_shape(self.std, "std", tuple(self.mean.shape), "like mean")
        check_alike(self.std, "std", self.mean, "mean")
        least = float(self.std.min())
        require(least > 0, "std", "positive values", least)

    @classmethod
    def fit(cls, x: Tensor, per: Per = "feature", names: Sequence[str] = ()) -> Standardizer:
        """Learn mean and standard deviation from x (N, ...): per feature, per channel, or over all.

        The standard deviation of a constant counts as 1. A warning names the features (by `names`,
        if given) that vary by less than the rounding of their dtype.
        """
        check_choice(per, "per", ("feature", "channel", "all"))
        any_axes = ",".join(["N", *(f"axis{k}" for k in range(1, x.ndim))])
        check_tensor(x, "x", "N,C,H,W" if per == "channel" else any_axes)
        mean, std, size = _statistics(x, per)
        coarse = ((std > 0) & (std <= torch.finfo(x.dtype).eps * size)).flatten().nonzero()[:, 0]
        if len(coarse) > 0:
            found = ", ".join(str(names[k] if len(names) else k) for k in coarse.tolist()[:5])
            warnings.warn(
                f"x: expected features that vary by more than the rounding of {x.dtype}, got "
                f"{len(coarse)} that do not: {found}; subtract an offset from them in float64",
                stacklevel=2,
            )
        # What float64 cannot resolve is constant, too.
        std = std.masked_fill(std <= torch.finfo(torch.float64).eps * size, 1.0)
        if per == "all":
            mean, std = mean.flatten(), std.flatten()
        return cls(mean[0].to(x.dtype), std[0].to(x.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def inverse(self, x: Tensor) -> Tensor:
        """Return `x * std + mean`, which undoes the standardization."""
        return x * self.std + self.mean


def usual_statistics(x: Tensor) -> Per:
    """One for each channel of images (N,C,H,W), else for each feature."""
    return "channel" if x.dim() == 4 else "feature"


def _statistics(x: Tensor, per: Per) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (0 where all values are equal) and largest size, in float64: 60,000 images add up
    to more digits than float32 holds."""
    axes = {"feature": (0,), "channel": (0, 2, 3), "all": tuple(range(x.dim()))}[per]
    double = x.double()
    least, most = double.amin(axes, keepdim=True), double.amax(axes, keepdim=True)
    std = double.std(axes, correction=0, keepdim=True).masked_fill(least == most, 0.0)
    return double.mean(axes, keepdim=True), std, torch.maximum(least.abs(), most.abs())


def is_coarse(mean: Any, std: Any) -> bool:
    """Whether the steps of float32 near one of these means are too long for its std, unless 0."""
    return bool(((std > 0) & (abs(mean) * _EPS > COARSEST * std)).any())


def in_working_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (N, ...) and targets (N,) in float32, or in float64 where float32 would round a
    feature or the target to more than a thousandth of its spread, as it does with the seconds of
    a clock; labels unchanged."""
    coarse = False
    for values in (x, y):
        if values.dtype != torch.float64 or values.numel() == 0:  # rounded already, or labels
            continue
        mean, std, _ = _statistics(values, usual_statistics(values))
        coarse |= is_coarse(mean, std)
    dtype = torch.float64 if coarse else torch.float32
    return x.to(dtype), y.to(dtype) if y.is_floating_point() else y


def warn_of_labels(values: Tensor, where: str, remedy: str, stacklevel: int) -> None:
    """Warn of targets that are taken as values, but look like labels: a few whole numbers, each
    twice or more on average."""
    if not values.is_floating_point() or bool((values != values.round()).any()):
        return
    distinct = values.unique()
    if len(distinct) <= min(MOST_CLASSES, len(values) // 2):
        shown = ", ".join(f"{value:g}" for value in distinct.tolist())
        warnings.warn(
            f"{where}: the floats {shown} are taken as values of a regression; {remedy}",
            stacklevel=stacklevel,
        )


def class_names(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values: in numeric order if all are whole numbers, else alphabetical."""
    distinct = set(values)
    if all(value.removeprefix("-").isdecimal() for value in distinct):
        return tuple(sorted(distinct, key=lambda value: (int(value), value)))
    return tuple(sorted(distinct))


def encode_labels(values: Sequence[Any], classes: Sequence[Any], where: str) -> Tensor:
    """int64 (N,) positions in `classes`; a value that is not there is refused."""
    codes = {name: code for code, name in enumerate(classes)}
    known = f"one of the labels {', '.join(map(str, classes))}"
    for row, value in enumerate(values):
        require(value in codes, where, known, f"{value!r} in row {row}")
    return torch.tensor([codes[value] for value in values], dtype=torch.int64)
