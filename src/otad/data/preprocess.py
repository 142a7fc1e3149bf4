"""Standardization, fitted on the train part only, and the integer codes of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from otad.checks import check_alike, check_choice, check_finite, check_shape, check_tensor, require

Per = Literal["feature", "channel", "all"]


@dataclass(frozen=True, eq=False)
class Standardizer:
    """(x - mean) / std, with mean and std broadcast against one input: (d,), (C,1,1), or ().

    A constant feature gets std 1, so it maps to zero instead of dividing by zero.
    """

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        check_finite(self.mean, "mean")
        check_finite(self.std, "std")
        check_shape(self.std, "std", tuple(self.mean.shape), "like mean")
        check_alike(self.std, "std", self.mean, "mean")
        least = float(self.std.min())
        require(least > 0, "std", "positive values", least)

    @classmethod
    def fit(cls, x: Tensor, per: Per = "feature") -> Standardizer:
        """Statistics of x (N, ...) for every feature, every image channel, or one for all."""
        check_choice(per, "per", ("feature", "channel", "all"))
        if per == "channel":
            check_tensor(x, "x", "N,C,H,W")
            axes: tuple[int, ...] = (0, 2, 3)
        else:
            check_tensor(x, "x", ",".join(["N", *(f"axis{k}" for k in range(1, x.ndim))]))
            axes = (0,) if per == "feature" else tuple(range(x.dim()))
        double = x.double()  # 60,000 images add up to more digits than float32 holds
        mean = double.mean(dim=axes, keepdim=True)
        std = double.std(dim=axes, correction=0, keepdim=True)
        # The rounding of a constant column leaves a std near 1e-17 of its size, not zero.
        constant = std <= 1e-12 * double.abs().amax(dim=axes, keepdim=True)
        std = torch.where(constant, torch.ones_like(std), std)
        if per == "all":
            return cls(mean.flatten()[0].to(x.dtype), std.flatten()[0].to(x.dtype))
        return cls(mean[0].to(x.dtype), std[0].to(x.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def inverse(self, x: Tensor) -> Tensor:
        return x * self.std + self.mean


def class_names(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values: in numeric order if all are whole numbers, else alphabetical."""
    distinct = set(values)
    if all(value.removeprefix("-").isdecimal() for value in distinct):
        return tuple(sorted(distinct, key=lambda value: (int(value), value)))
    return tuple(sorted(distinct))


def encode_classes(values: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """The class names of the values, and their int64 positions (N,) in these."""
    classes = class_names(values)
    return classes, encode_labels(values, classes, "labels")


def encode_labels(values: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """int64 (N,) positions in `classes`; a value that is not there is refused."""
    codes = {name: code for code, name in enumerate(classes)}
    known = f"one of the labels {', '.join(classes)}"
    for row, value in enumerate(values):
        require(value in codes, where, known, f"{value!r} in row {row}")
    return torch.tensor([codes[value] for value in values], dtype=torch.int64)
