"""The base of all threat models: an lp ball around each input, within bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from otad.arguments import check_options
from otad.checks import check_bounds, check_broadcast, check_finite, check_shape, refusing, require
from otad.threat.one_hot import check_groups, is_one_hot, switched

FIRST_SHRINK = 2.0**-22  # of a step that rounding has carried out of the ball
BEYOND = 16.0  # times eps: so far off, a projection is of full length though bounds cut some of it
FURTHEST = 2.0**16  # times eps: so far off, a projection is where a linear function is largest


@dataclass(frozen=True, eq=False)
class LpBall(ABC):
    """A threat model: the inputs that an attacker may turn an input x into.

    These are all `x + delta` with `|delta / scale|_p <= eps` whose features are within `bounds`,
    where `delta` is 0 for features that are not `mutable`. Use `L2` or `Linf`.

    Parameters
    ----------
    eps : float
        The radius, at least 0.
    bounds : (float, float), optional
        The lowest and highest legal input value. If None, inputs are unbounded.
    scale : array (*input_shape), optional
        The unit in which each feature is measured, by default 1. In l-infinity, each feature of a
        table then has its own radius, `eps * scale`. Other shapes are broadcast: (C, 1, 1) has a
        unit for each channel of an image.
    mutable : array (*input_shape) of bool, optional
        The features that an attacker can change, by default all.
    groups : sequence of sequences of int, optional
        For each categorical feature, the positions of its one-hot columns in a flat input. Exactly
        one column of a group is 1 and the others are 0. A switch to another category changes two
        columns by 1: in units of 1 its length is `sqrt(2)` in l2 and 1 in l-infinity. A smaller
        ball allows no switch. All columns of groups have the same unit.
    unit_name : str
        The units of `scale` in words, for reports, such as "standard deviations".

    Examples
    --------
    >>> import otad, torch
    >>> ball = otad.L2(1.0, scale=torch.tensor([1.0, 10.0]), unit_name="standard deviations")
    >>> isinstance(ball, otad.LpBall)
    True
    >>> ball.project(torch.tensor([[0.0, 40.0]]), torch.zeros(1, 2))
    tensor([[ 0., 10.]])
    """

    eps: float
    bounds: tuple[float, float] | None = None
    scale: Any = None  # becomes a tensor, like mutable
    mutable: Any = None
    groups: Sequence[Sequence[int]] | None = None
    unit_name: str = ""
    norm: ClassVar[str]
    order: ClassVar[float]  # p

    def __post_init__(self) -> None:
        require(0 <= self.eps < math.inf, "eps", "a finite number of at least 0", repr(self.eps))
        # Plain numbers, as a record holds them, also where NumPy or torch gave them.
        object.__setattr__(self, "eps", float(self.eps))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", check_bounds(self.bounds))
        for name in ("scale", "mutable"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_tensor(values, name))
        if self.scale is not None:
            check_finite(self.scale, "scale")
            expected = "positive values (features that cannot change belong in `mutable`)"
            least = self.scale.flatten().sort().values[:1].tolist()
            require(least and least[0] > 0, "scale", expected, least)
        if self.mutable is not None:
            require(self.mutable.dtype == torch.bool, "mutable", "dtype bool", self.mutable.dtype)
        if self.groups is not None:
            object.__setattr__(self, "groups", check_groups(self.groups) or None)
        if self.groups is not None:
            units = {self._group_unit(column) for group in self.groups for column in group}
            require(len(units) == 1, "scale", "the same unit for all columns of groups", units)

    def with_eps(self, eps: float) -> Self:
        """Return the same threat model with another radius."""
        return replace(self, eps=eps)

    def check_inputs(self, x: Tensor) -> None:
        """Refuse inputs (n, *input_shape) that do not fit the bounds, the units or the groups."""
        if self.scale is not None:
            check_broadcast(self.scale, "scale", x.shape[1:])
        if self.mutable is not None:
            check_shape(self.mutable, "mutable", tuple(x.shape[1:]), "like one input")
        if self.bounds is not None:
            low, high = (float(value) for value in torch.aminmax(x.detach()))
            lowest, highest = x.new_tensor(self.bounds).tolist()  # 0.3 is another number in float32
            fits = lowest <= low and high <= highest
            require(fits, "x", f"values within {self.bounds}", f"values from {low} to {high}")
        for group in self.groups or ():
            last, size = max(group), x[0].numel()
            require(last < size, "groups", f"positions below {size}, as in x", last)
            values = x.flatten(1)[:, list(group)]
            wrong = values[~is_one_hot(values)][:1].tolist()
            require(not wrong, "x", f"exactly one 1, else 0, in the columns {group}", wrong)

    def allows_everything(self, x: Tensor) -> bool:
        """Return whether every change of inputs like x (n, *input_shape) within the bounds is
        allowed, so that `eps` limits nothing. Immutable features stay as they are."""
        if self.bounds is None:
            return False
        longest = torch.full_like(x[:1], self.bounds[1] - self.bounds[0], dtype=torch.float64)
        length = float(self._length(self._in_units(self._masked(longest), x).flatten(1)))
        return 0 < length <= self.eps

    def distance(self, moved: Tensor, x: Tensor) -> Tensor:
        """Return the distance (n,) of each `moved` input from x, in units of `scale`.

        It is float64. It is infinite where an immutable feature changed, or where a group has not
        exactly one category.
        """
        step = _difference(moved.detach().double(), x.detach().double())
        found = self._length(self._in_units(step, step).flatten(1))
        if self.mutable is not None:
            frozen = ~self.mutable.to(step.device)
            found = found.masked_fill((step[:, frozen] != 0).any(1), math.inf)
        for group in self.groups or ():
            found = found.masked_fill(
                ~is_one_hot(moved.detach().flatten(1)[:, list(group)]), math.inf
            )
        return found

    def project(self, moved: Tensor, x: Tensor) -> Tensor:
        """Return the points (n, *input_shape) of the ball around x that are nearest to `moved`.

        Nearest means in units of `scale`, and within the bounds. The measured distance from x never
        exceeds `eps`. (Cutting a step to `eps` and then clipping it to the bounds would leave only
        a fraction of it for images that are black or white nearly everywhere.)
        """
        if self.groups is not None:
            return self._project_groups(moved, x)
        step, room = self._in_units(self._masked(_difference(moved, x)), x), None
        if self.bounds is not None:  # how far each feature can go in the direction of its step
            low, high = self.bounds
            room = self._in_units(torch.where(step < 0, x - low, high - x), x)
            room = room.clamp_min(0.0).flatten(1)
        step = self._of_units(self._shorten(step.flatten(1), room).view_as(x), x)
        shrink, result = FIRST_SHRINK, self._reached(x, step)
        while bool((outside := self.distance(result, x) > self.eps).any()):
            if shrink > 1:  # no step is left
                self.check_inputs(x)
            shrink *= 2
            step = torch.where(per_row(outside, x), step * max(0.0, 1 - shrink), step)
            result = self._reached(x, step)
        return result

    def clip(self, moved: Tensor, x: Tensor) -> Tensor:
        """Shorten `moved` to the ball and then clip it to the bounds; for training only.

        It reads nothing back from the GPU, so a CUDA graph can capture it. It is not the nearest
        point where bounds cut the step, it may exceed `eps` by rounding, and it ignores groups.
        """
        step = self._in_units(self._masked(moved - x), x)
        moved = x + self._of_units(self._shorten(step.flatten(1), None).view_as(x), x)
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def inside(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return uniformly random points of the ball around x, projected to the bounds.

        With groups, the number of switches is drawn first, then which groups, then the other
        features.
        """
        if self.groups is not None:
            return self._inside_groups(x, generator)
        return self.project(x + self.random_step(x, generator, torch.float64), x)

    def random_step(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return uniformly random steps of the ball, bounds aside; lengths are drawn in `dtype`."""
        return self._of_units(self._masked(self._random(x, generator, dtype)), x)

    def surface(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return random points at distance `eps` from x, or as far as the bounds allow."""
        drawn = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        return self.project(x + BEYOND * self.eps * self.steepest(drawn), x)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Return the step of length 1 along which a function with this gradient grows most."""
        if self.groups is not None and self.n_switches == 0:
            return self.without_groups(gradient).steepest(gradient)
        scaled = self._masked(gradient)
        if self.scale is not None:  # relative units, as scale * gradient could be inf or 0
            scaled = scaled * (self.scale / self.scale.max()).to(gradient)
        return self._of_units(self._unit(scaled.flatten(1)).view_as(gradient), gradient)

    def furthest(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the points of the ball around x where a linear function with this gradient is
        largest."""
        return self.project(x + FURTHEST * self.eps * self.steepest(gradient), x)

    def free_features(self, x: Tensor) -> Tensor:
        """Return the positions (int64) of the features of a flat input that can change."""
        if self.groups is not None and self.n_switches == 0:
            return self.without_groups(x).free_features(x)
        mutable = torch.ones_like(x[0]) if self.mutable is None else self.mutable.to(x.device)
        return mutable.flatten().nonzero()[:, 0]

    def describe(self) -> str:
        """Return the threat model in words."""
        parts = [f"{self.norm}, eps = {self.eps:g}" + (f" {self.unit_name}".rstrip())]
        parts.append("inputs unbounded" if self.bounds is None else f"inputs in {self.bounds}")
        if self.scale is not None and not self.unit_name:
            parts.append("each feature measured in its own unit")
        if self.mutable is not None:
            parts.append(f"{int((~self.mutable).sum())} features immutable")
        if self.groups is not None:
            most = f"up to {self.n_switches} can switch" if self.n_switches else "none can switch"
            parts.append(f"{len(self.groups)} categorical features of which {most}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the threat model as plain JSON values, for a record."""
        bounds = None if self.bounds is None else list(self.bounds)
        plain: dict[str, Any] = {"norm": self.norm, "eps": self.eps, "bounds": bounds}
        for name, tensor in (("scale", self.scale), ("mutable", self.mutable)):
            plain[name] = None if tensor is None else tensor.flatten().tolist()
        if self.groups is not None:
            plain["groups"] = [list(group) for group in self.groups]
        if self.unit_name:
            plain["unit_name"] = self.unit_name
        return plain

    @property
    def n_switches(self) -> int:
        """How many groups can have another category at the same time."""
        if self.groups is None:
            return 0
        frozen: set[int] = set()
        if self.mutable is not None:
            frozen = {*(~self.mutable).flatten().nonzero()[:, 0].tolist()}
        free = sum(len({*group} - frozen) > 1 for group in self.groups)
        steps = torch.full((1, 2 * free), 1 / self._group_unit(self.groups[0][0]))
        counts = range(free, 0, -1)
        fits = (k for k in counts if float(self._length(steps.double()[:, : 2 * k])) <= self.eps)
        return next(fits, 0)

    def without_groups(self, x: Tensor, switches: int = 0) -> Self:
        """Return the ball of the other features around inputs like x after so many switches.

        It has the part of `eps` that the switches leave, and the columns of groups are immutable.
        """
        mutable = torch.ones(x.shape[1:], dtype=torch.bool, device=x.device)
        if self.mutable is not None:
            mutable &= self.mutable.to(x.device)
        columns = [column for group in self.groups or () for column in group]
        mutable.view(-1)[columns] = False
        return replace(self, eps=self._left(switches), mutable=mutable, groups=None)

    def _project_groups(self, moved: Tensor, x: Tensor) -> Tensor:
        """For each number of switches, take those that come nearest and the nearest point of what
        they leave of the ball; return the nearest of all these points."""
        self.check_inputs(x)
        _difference(moved, x)
        aims, gains = self._switches(moved.flatten(1), x.flatten(1))
        rank = gains.argsort(1, descending=True).argsort(1)
        result, least = x, x.new_full((len(x),), math.inf, dtype=torch.float64)
        most = self.n_switches
        for count in range(most + 1) if self.norm == "l2" else (most,):
            start = switched(x, self.groups or (), aims, (rank < count) & (gains > 0))
            point = self.without_groups(x, count).project(moved, start)
            step = self._in_units((moved - point).double(), x)
            off = step.flatten(1).square().sum(1)
            result = torch.where(per_row(off < least, x), point, result)
            least = torch.minimum(off, least)
        return result

    def _switches(self, moved: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return for flat `moved` (B,n) the position of its largest column in each group (B,G), and
        how much larger this column is than the column of the category of x. The difference is
        -inf where x cannot leave its category."""
        aims, gains = [], []
        free = torch.ones_like(x[0], dtype=torch.bool)
        if self.mutable is not None:
            free = self.mutable.to(x.device).flatten()
        for group in self.groups or ():
            columns = list(group)
            own = x[:, columns].argmax(1, keepdim=True)
            allowed = moved[:, columns].masked_fill(~free[columns], -math.inf)
            largest, aim = allowed.max(1, keepdim=True)
            gain = largest - moved[:, columns].gather(1, own)
            gains.append(gain.masked_fill(~free[columns][own], -math.inf))
            aims.append(aim)
        return torch.cat(aims, 1), torch.cat(gains, 1)

    def _inside_groups(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self.check_inputs(x)

        def drawn(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=generator.device).to(x)

        others = drawn(len(x), x[0].numel()).clamp_min(1e-6) - 2 * x.flatten(1)
        aims, gains = self._switches(others, x.flatten(1))
        rank = drawn(*gains.shape).masked_fill(gains <= 0, 2.0).argsort(1).argsort(1)
        most = (gains > 0).sum(1).clamp_max(self.n_switches)
        counts = (drawn(len(x)) * (most + 1)).long().minimum(most)
        result = x
        for count in range(self.n_switches + 1):
            start = switched(x, self.groups or (), aims, (rank < count) & (gains > 0))
            point = self.without_groups(x, count).inside(start, generator)
            result = torch.where(per_row(counts == count, x), point, result)
        return result

    def _group_unit(self, column: int) -> float:
        if self.scale is None:
            return 1.0
        size = self.scale.numel()
        require(column < size, "groups", f"positions below {size}, as in scale", column)
        return float(self.scale.flatten()[column])

    def _in_units(self, step: Tensor, x: Tensor) -> Tensor:
        return step if self.scale is None else step / self.scale.to(x)

    def _of_units(self, step: Tensor, x: Tensor) -> Tensor:
        return step if self.scale is None else step * self.scale.to(x)

    def _masked(self, step: Tensor) -> Tensor:
        return step if self.mutable is None else step * self.mutable.to(step)

    def _reached(self, x: Tensor, step: Tensor) -> Tensor:
        """Return x + step within the bounds, each feature rounded towards x. Where floating-point
        numbers are too far apart for the step of a feature, it does not move, and no other step
        is shortened for it."""
        moved = x + step
        moved = torch.where((moved - x).abs() > step.abs(), moved.nextafter(x), moved)
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def _length(self, step: Tensor) -> Tensor:
        """|step|_p (B,) of rows (B,n)."""
        lengths: Tensor = torch.linalg.vector_norm(step, self.order, dim=1)
        return lengths

    @abstractmethod
    def _left(self, switches: int) -> float:
        """Return the part of eps that so many switches leave for the other features."""

    @abstractmethod
    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        """The nearest step of the ball to each row (B,n), no feature moved further than `room`."""

    @abstractmethod
    def _unit(self, gradient: Tensor) -> Tensor:
        """The step (B,n) of length 1 with the largest product with each gradient; 0 for 0."""

    @abstractmethod
    def _random(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Uniformly random steps (B,*) of the ball in units of `scale`, before masking."""


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return values (n,) in the shape (n,1,...), which broadcasts over `like` (n,*)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _as_tensor(values: Any, name: str) -> Tensor:
    with refusing(f"{name}: expected an array of numbers or booleans"):
        found = values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
    check_options({name: Tensor}, {name: found})
    return found


def _difference(moved: Tensor, x: Tensor) -> Tensor:
    check_shape(moved, "moved", tuple(x.shape), "like x")
    floating = moved.is_floating_point() and x.is_floating_point() and x.dim() > 1
    require(floating, "moved", "rows of floating-point numbers like x", (moved.dtype, x.dtype))
    return moved - x
