"""Threat models: the inputs an attacker may turn an input into."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from otad.checks import check_bounds, check_finite, check_shape, require

FIRST_SHRINK = 2.0**-22  # of a step that rounding has carried out of the ball
FILLINGS = 8  # rounds of giving the features that can still move what the others cannot use
BEYOND = 16.0  # times eps: so far off, a projection is of full length though bounds cut some of it


@dataclass(frozen=True, eq=False)
class LpBall(ABC):
    """{x + delta : |delta / scale|_p <= eps, delta = 0 where immutable, low <= x + delta <= high}.

    - `eps`: the radius, 0 allowed.
    - `bounds`: the lowest and highest legal input value, None for unbounded inputs.
    - `scale` (*input_shape): the unit each feature is measured in, all 1 by default; the l-infinity
      ball of a table then has its own eps for each feature, eps * scale.
    - `mutable` (*input_shape) bool: the features an attacker can change, all by default.
    """

    eps: float
    bounds: tuple[float, float] | None = None
    scale: Tensor | None = None
    mutable: Tensor | None = None
    norm: ClassVar[str]
    order: ClassVar[float]  # p

    def __post_init__(self) -> None:
        require(0 <= self.eps < math.inf, "eps", "a finite number of at least 0", repr(self.eps))
        # Plain numbers, as a record holds them, also where NumPy or torch gave them.
        object.__setattr__(self, "eps", float(self.eps))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", check_bounds(self.bounds))
        if self.scale is not None:
            check_finite(self.scale, "scale")
            expected = "positive values (features that cannot change belong in `mutable`)"
            least = self.scale.flatten().sort().values[:1].tolist()
            require(least and least[0] > 0, "scale", expected, least)
        if self.mutable is not None:
            require(self.mutable.dtype == torch.bool, "mutable", "dtype bool", self.mutable.dtype)

    def with_eps(self, eps: float) -> Self:
        return replace(self, eps=eps)

    def check_inputs(self, x: Tensor) -> None:
        """Refuse inputs (B,*input_shape) that the ball's own tensors or bounds do not fit."""
        for name, tensor in (("scale", self.scale), ("mutable", self.mutable)):
            if tensor is not None:
                check_shape(tensor, name, tuple(x.shape[1:]), "like one input")
        if self.bounds is not None:
            low, high = (float(value) for value in torch.aminmax(x.detach()))
            lowest, highest = x.new_tensor(self.bounds).tolist()  # 0.3 is another number in float32
            fits = lowest <= low and high <= highest
            require(fits, "x", f"values within {self.bounds}", f"values from {low} to {high}")

    def distance(self, moved: Tensor, x: Tensor) -> Tensor:
        """|(moved - x) / scale|_p (B,) in float64; infinite where an immutable feature changed."""
        step = _difference(moved.detach().double(), x.detach().double())
        found = self._length((step / self._scale(step)).flatten(1))
        if self.mutable is not None:
            frozen = ~self.mutable.to(step.device)
            found = found.masked_fill((step[:, frozen] != 0).any(1), math.inf)
        return found

    def project(self, moved: Tensor, x: Tensor) -> Tensor:
        """The points (B,*) of the ball, bounds included, nearest to `moved` in units of `scale`;
        their measured distance never exceeds eps. (Cutting a step to eps and then clipping it would
        leave only a fraction of it for images that are black or white nearly everywhere.)"""
        step, room = self._masked(_difference(moved, x)) / self._scale(x), None
        if self.bounds is not None:  # how far each feature can go in the direction of its step
            low, high = self.bounds
            room = torch.where(step < 0, x - low, high - x) / self._scale(x)
            room = room.clamp_min(0.0).flatten(1)
        step = self._shorten(step.flatten(1), room).view_as(x) * self._scale(x)
        shrink, result = FIRST_SHRINK, self._reached(x, step)
        while bool((outside := self.distance(result, x) > self.eps).any()):
            if shrink > 1:  # no step is left
                self.check_inputs(x)
            shrink *= 2
            step = torch.where(per_row(outside, x), step * max(0.0, 1 - shrink), step)
            result = self._reached(x, step)
        return result

    def clip(self, moved: Tensor, x: Tensor) -> Tensor:
        """`moved` (B,*) shortened to the ball and then clipped to the bounds, for training: a CUDA
        graph can capture it, as it reads nothing back from the GPU. It is not the nearest point
        where bounds cut the step, and may exceed eps by rounding."""
        step = self._masked(moved - x) / self._scale(x)
        moved = x + self._shorten(step.flatten(1), None).view_as(x) * self._scale(x)
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def inside(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Uniformly random points of the ball (B,*), as far as the bounds let them be."""
        return self.project(x + self.random_step(x, generator, torch.float64), x)

    def random_step(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Uniformly random steps (B,*) of the ball, bounds aside; `dtype`: of their lengths."""
        return self._masked(self._random(x, generator, dtype)) * self._scale(x)

    def surface(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random points (B,*) at distance eps, as far as the bounds let them be."""
        drawn = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        return self.project(x + BEYOND * self.eps * self.steepest(drawn), x)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The step of length 1 along which a function with this gradient (B,*) grows most."""
        scale = self._scale(gradient)
        scaled = self._masked(gradient) * scale
        return self._unit(scaled.flatten(1)).view_as(gradient) * scale

    def free_features(self, x: Tensor) -> Tensor:
        """The numbers (int64) of the features of a flat input that can change."""
        mutable = torch.ones_like(x[0]) if self.mutable is None else self.mutable.to(x.device)
        return mutable.flatten().nonzero()[:, 0]

    def describe(self) -> str:
        """The threat model in words."""
        parts = [f"{self.norm}, eps = {self.eps:g}"]
        parts.append("inputs unbounded" if self.bounds is None else f"inputs in {self.bounds}")
        if self.scale is not None:
            parts.append("each feature measured in its own unit")
        if self.mutable is not None:
            parts.append(f"{int((~self.mutable).sum())} features immutable")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON, for a record."""
        bounds = None if self.bounds is None else list(self.bounds)
        plain: dict[str, Any] = {"norm": self.norm, "eps": self.eps, "bounds": bounds}
        for name, tensor in (("scale", self.scale), ("mutable", self.mutable)):
            plain[name] = None if tensor is None else tensor.flatten().tolist()
        return plain

    def _scale(self, x: Tensor) -> Tensor:
        return x.new_ones(()) if self.scale is None else self.scale.to(x)

    def _masked(self, step: Tensor) -> Tensor:
        return step if self.mutable is None else step * self.mutable.to(step)

    def _reached(self, x: Tensor, step: Tensor) -> Tensor:
        """x + step within the bounds, each feature rounded towards x: where floating-point numbers
        are too far apart for its step it does not move, and others need not be shortened for it"""
        moved = x + step
        moved = torch.where((moved - x).abs() > step.abs(), moved.nextafter(x), moved)
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def _length(self, step: Tensor) -> Tensor:
        """|step|_p (B,) of rows (B,n)."""
        lengths: Tensor = torch.linalg.vector_norm(step, self.order, dim=1)
        return lengths

    @abstractmethod
    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        """The nearest step of the ball to each row (B,n), no feature moved further than `room`."""

    @abstractmethod
    def _unit(self, gradient: Tensor) -> Tensor:
        """The step (B,n) of length 1 with the largest product with each gradient; 0 for 0."""

    @abstractmethod
    def _random(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Uniformly random steps (B,*) of the ball in units of `scale`, before masking."""


class L2(LpBall):
    """Euclidean length."""

    norm, order = "l2", 2.0

    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        share = (self.eps / self._length(step).clamp_min(1e-30)).clamp_max(1.0)[:, None]
        if room is None:
            return step * share
        # Nearest is min(share * |step|, room) for the largest share <= 1 that fits. It is met from
        # below: features at their bound use less than their part, so the others may use more.
        size, at_bound = step.abs(), torch.zeros_like(step, dtype=torch.bool)
        for _ in range(FILLINGS):
            before, at_bound = at_bound, size * share >= room
            if torch.equal(before, at_bound):
                break
            left = self.eps**2 - (room * at_bound).square().sum(1, keepdim=True)
            free = (size * ~at_bound).square().sum(1, keepdim=True)
            filled = (left.clamp_min(0.0) / free.clamp_min(1e-30)).sqrt().clamp_max(1.0)
            share = torch.maximum(share, filled)
        return torch.minimum(size * share, room).copysign(step)

    def _unit(self, gradient: Tensor) -> Tensor:
        largest = gradient.abs().amax(1, keepdim=True)  # first, as squares of small numbers vanish
        scaled = gradient / largest.masked_fill(largest == 0, 1.0)
        return scaled / self._length(scaled).clamp_min(0.5)[:, None]

    def _random(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        drawn = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
        direction = self._unit(self._masked(drawn).flatten(1)).view_as(x)
        share = torch.rand(len(x), generator=generator, device=generator.device, dtype=dtype)
        count = x[0].numel() if self.mutable is None else int(self.mutable.sum())
        return direction * per_row((self.eps * share.pow(1 / max(1, count))).to(x), x)


class Linf(LpBall):
    """The largest change of any feature."""

    norm, order = "linf", math.inf

    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        return step.clamp(-self.eps, self.eps)  # what is beyond the bounds is cut off anyway

    def _unit(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def _random(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        drawn = torch.rand(x.shape, generator=generator, device=generator.device).to(x)
        return self.eps * (2 * drawn - 1)


NORMS: dict[str, type[LpBall]] = {ball.norm: ball for ball in (L2, Linf)}


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Values (n,) in the shape (n,1,...) that broadcasts over `like` (n,*)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _difference(moved: Tensor, x: Tensor) -> Tensor:
    check_shape(moved, "moved", tuple(x.shape), "like x")
    floating = moved.is_floating_point() and x.is_floating_point() and x.dim() > 1
    require(floating, "moved", "rows of floating-point numbers like x", (moved.dtype, x.dtype))
    return moved - x
