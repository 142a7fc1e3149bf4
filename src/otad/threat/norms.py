"""The balls of the two norms: L2 and Linf."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.threat.ball import LpBall, per_row

FILLINGS = 8  # rounds of giving the features that can still move what the others cannot use


class L2(LpBall):
    """A threat model in the Euclidean norm: the length of the change is at most `eps`.

    The parameters are those of `LpBall`.

    Examples
    --------
    >>> import otad, torch
    >>> ball = otad.L2(0.5, bounds=(0.0, 1.0))
    >>> ball.describe()
    'l2, eps = 0.5, inputs in (0.0, 1.0)'
    >>> x, moved = torch.tensor([[0.2, 0.2]]), torch.tensor([[0.5, 0.6]])
    >>> ball.distance(moved, x)
    tensor([0.5000], dtype=torch.float64)
    """

    norm, order = "l2", 2.0

    def _left(self, switches: int) -> float:
        if not switches or self.groups is None:
            return self.eps
        used = 2 * switches / self._group_unit(self.groups[0][0]) ** 2
        return math.sqrt(max(0.0, self.eps**2 * (1 - 2.0**-40) - used))  # rounding stays within

    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        if self.eps < torch.finfo(step.dtype).tiny:
            return torch.zeros_like(step)
        relative = step / self.eps  # first, as squares of very large or small numbers are inf or 0
        share = 1 / self._length(relative).clamp_min(1.0)[:, None]
        if room is None:
            return step * share
        # Nearest is min(share * |step|, room) for the largest share <= 1 that fits. It is met from
        # below: features at their bound use less than their part, so the others may use more.
        size, at_bound = step.abs(), torch.zeros_like(step, dtype=torch.bool)
        size_squares = relative.square()
        room_squares = (room / self.eps).clamp_max(1.0).square()  # none at a bound is above eps
        for _ in range(FILLINGS):
            before, at_bound = at_bound, size * share >= room
            if torch.equal(before, at_bound):
                break
            left = 1 - (room_squares * at_bound).sum(1, keepdim=True)
            free = size_squares.masked_fill(at_bound, 0.0).sum(1, keepdim=True)
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
    """A threat model in the maximum norm: no feature changes by more than `eps`.

    The parameters are those of `LpBall`.

    Examples
    --------
    >>> import otad, torch
    >>> ball = otad.Linf(8 / 255, bounds=(0.0, 1.0))
    >>> ball.project(torch.ones(1, 2), torch.tensor([[0.0, 0.2]])).mul(255).round()
    tensor([[ 8., 59.]])
    """

    norm, order = "linf", math.inf

    def _left(self, switches: int) -> float:
        return self.eps

    def _shorten(self, step: Tensor, room: Tensor | None) -> Tensor:
        return step.clamp(-self.eps, self.eps)  # what is beyond the bounds is cut off anyway

    def _unit(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def _random(self, x: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        drawn = torch.rand(x.shape, generator=generator, device=generator.device).to(x)
        return self.eps * (2 * drawn - 1)


NORMS: dict[str, type[LpBall]] = {ball.norm: ball for ball in (L2, Linf)}
