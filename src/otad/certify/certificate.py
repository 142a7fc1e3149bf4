"""What is proved about inputs: certified radii of a classifier, and intervals of a regressor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_count, check_shape, require
from otad.model.conversion import ArrayLike, class_numbers
from otad.short_repr import counts_text, median_text


@dataclass(frozen=True, eq=False)
class Certificate:
    """Certified radii: no input closer than the radius changes the prediction of its example.

    Within the radius the model also answers: where it abstains at the example itself, the
    prediction is -1 and the radius is 0.

    Attributes
    ----------
    radius : Tensor (n,)
        Radii in float64, in the unit that was asked for (see `certify`). A radius of 0 means that
        nothing is proved.
    prediction : Tensor (n,)
        The predicted class of each example, int64.
    rules : tuple of str
        The certificate rule that gave the radius of each row, or "none". It is "unproved
        neighbors", with radius 0, where the search of neighbors stopped before they were proved.
    assumptions : tuple of str
        What the proof assumes, in whole sentences.
    kind : str
        Always "proved", in contrast to a statistical certificate.
    norm : str
        The norm of the radii: "l2", or "linf" for a network that is Lipschitz in l-infinity.
    within_bounds : bool
        The threat: False for every change shorter than the radius, True only for those that keep
        the input within the bounds of the model. Never compare radii of both kinds.
    classes : tuple
        The labels of the estimator, or the names of the classes of the model if it has any.

    Examples
    --------
    >>> import otad, torch
    >>> _ = torch.manual_seed(0)
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> found = otad.certify(model, digits.test_x[:4])
    >>> len(found), found.radius.shape, found.radius.dtype
    (4, torch.Size([4]), torch.float64)
    >>> bool((found.linf_radius(64) == found.radius / 8).all())
    True
    >>> 0 <= found.accuracy(digits.test_y[:4], eps=0.1) <= 1
    True
    """

    radius: Tensor
    prediction: Tensor
    rules: tuple[str, ...]
    assumptions: tuple[str, ...]
    kind: str = "proved"
    norm: str = "l2"
    within_bounds: bool = False
    classes: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.radius)

    def __repr__(self) -> str:
        radii = f"radius {median_text(self.radius)}" + " in linf" * (self.norm == "linf")
        radii += " within bounds" * self.within_bounds
        return f"Certificate({len(self)} inputs, {radii}; by rule {counts_text(self.rules)})"

    def holds(self, y: ArrayLike, eps: float) -> Tensor:
        """Return the rows (n,) whose prediction is `y` and cannot change within distance `eps`.

        For an estimator, y has labels like those it was fitted with. Otherwise y has class numbers,
        or names of classes if the model has any."""
        numbers = class_numbers(y, self.classes).astype(np.float64)
        right = torch.from_numpy(numbers).to(self.prediction.device)
        check_shape(right, "y", tuple(self.prediction.shape), "like the predictions")
        require(0 <= eps < math.inf, "eps", "a finite number of at least 0", eps)
        return (self.prediction == right) & (self.radius > eps)

    def accuracy(self, y: ArrayLike, eps: float) -> float:
        """Return the certified accuracy: the fraction of rows for which `holds` is true."""
        return float(self.holds(y, eps).double().mean())

    def linf_radius(self, n_mutable: int) -> Tensor:
        """Return radii (n,) in l-infinity against attackers who can change `n_mutable` features.

        A change of that many features is at most `sqrt(n_mutable)` times as long in l2 as in
        l-infinity. Both are measured in the same unit. Radii in l-infinity are returned as they
        are.
        """
        longest = math.sqrt(check_count(n_mutable, "n_mutable"))
        return self.radius if self.norm == "linf" else self.radius / longest


@dataclass(frozen=True, eq=False)
class Interval:
    """Bounds that hold for the answer to every input within l2 distance `eps` of its example.

    Attributes
    ----------
    low, high : Tensor (n,)
        The bounds, in units of the target. They are infinite where nothing is proved.
    eps : float
        The distance, in the unit that was asked for (see `certify`).
    assumptions : tuple of str
        What the proof assumes, in whole sentences.
    kind : str
        Always "proved".

    Examples
    --------
    >>> import otad
    >>> diabetes = otad.data.load("diabetes")
    >>> net = otad.nets.fc_resnet((10,), 1, task="regression", blocks=1, hidden=16)
    >>> model = otad.defend(net, diabetes.train_x[:100], diabetes.train_y[:100])
    >>> found = otad.certify_values(model, diabetes.test_x[:3], eps=0.1)
    >>> bool((found.low <= model(diabetes.test_x[:3])).all())
    True
    """

    low: Tensor
    high: Tensor
    eps: float
    assumptions: tuple[str, ...]
    kind: str = "proved"

    def __repr__(self) -> str:
        width = f"width {median_text(self.high - self.low)}"
        return f"Interval({len(self.low)} inputs, eps {self.eps:g}, {width})"
