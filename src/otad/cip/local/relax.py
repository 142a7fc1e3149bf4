"""Relaxes the curvature of rows for which eq. (2) has no potentials.

The smoothness is raised to the exact least value, or by the paper's steps, L + t delta1 and
l - t delta2 for the first t that works. If that would exceed `max_smoothness`, a neighbor on the
violating cycle is left out, and a spare takes its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip.local.potentials import Constraints, closure, critical, has_positive_cycle
from otad.cip.local.products import Gram
from otad.cip.solution import Status

_MOST_CLIMB = 2**20  # steps; rows that need more count as infeasible


@dataclass(frozen=True)
class Curvature:
    """L and l (B,) of a batch, with its active neighbors (K,B)."""

    smoothness: Tensor
    strong_convexity: Tensor
    active: Tensor

    def columns(self, rows: Tensor) -> Curvature:
        return Curvature(self.smoothness[rows], self.strong_convexity[rows], self.active[:, rows])

    def constraints(self, gram: Gram) -> Constraints:
        return Constraints.of(gram, self.strong_convexity, self.active)

    def closure(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """Return the longest paths (K,K,B), and whether potentials exist (B,).

        Rounding is allowed for only if a cycle is positive otherwise, so that the map passes
        through the anchors."""
        flatness = 1 / (self.smoothness - self.strong_convexity)
        constraints = self.constraints(gram)
        longest = closure(constraints.weights(flatness, exact=True))
        positive = has_positive_cycle(longest)
        if bool(positive.any()):
            doubtful = positive.nonzero()[:, 0]
            weights = constraints.columns(doubtful).weights(flatness[doubtful])
            longest[..., doubtful] = closure(weights)
            positive = has_positive_cycle(longest)
        return longest, ~positive

    def feasible(self, gram: Gram) -> Tensor:
        return self.closure(gram)[1]


@dataclass(frozen=True)
class Relaxation:
    """How curvature is relaxed.

    `climb` is (delta1, delta2), or None for the exact least smoothness. `max_smoothness` is the
    largest one allowed. The last `spares` neighbors of a row are used only if another one is left
    out."""

    climb: tuple[float, float] | None
    max_smoothness: float
    spares: int

    def __call__(
        self, gram: Gram, smoothness: Tensor, strong_convexity: Tensor
    ) -> tuple[Curvature, Tensor, Tensor]:
        """Return curvature and neighbors with potentials, their closure, and a `Status` per row."""
        requested = self.start(gram, smoothness, strong_convexity)
        longest, feasible = requested.closure(gram)
        status = torch.full_like(smoothness, int(Status.SOLVED), dtype=torch.int64)
        if bool(feasible.all()):
            return requested, longest, status
        found = self._relax(gram, requested, (~feasible).nonzero()[:, 0], status)
        changed = (status != int(Status.SOLVED)).nonzero()[:, 0]
        longest[..., changed] = found.columns(changed).closure(gram.columns(changed))[0]
        return found, longest, status

    def start(self, gram: Gram, smoothness: Tensor, strong_convexity: Tensor) -> Curvature:
        active = torch.ones_like(gram.tilt, dtype=torch.bool)
        active[len(gram.tilt) - self.spares :] = False
        return Curvature(smoothness, strong_convexity, active)

    def _relax(self, gram: Gram, requested: Curvature, todo: Tensor, status: Tensor) -> Curvature:
        """Return curvature and neighbors for which the rows `todo` have potentials.

        Their `status` is filled in."""
        regular, dropped = len(gram.tilt) - self.spares, torch.zeros_like(status)
        high, low = requested.smoothness.clone(), requested.strong_convexity.clone()
        found = Curvature(high, low, requested.active)
        while len(todo):
            part, at = gram.columns(todo), found.columns(todo)
            raised = self._raised(part, at)
            good = (raised.smoothness <= self.max_smoothness) & raised.smoothness.isfinite()
            rows = todo[good]
            found.smoothness[rows] = raised.smoothness[good]
            found.strong_convexity[rows] = raised.strong_convexity[good]
            status[rows] = torch.where(dropped[rows] > 0, int(Status.REPAIRED), int(Status.RAISED))
            todo, part, at = todo[~good], part.columns(~good), at.columns(~good)
            if self.max_smoothness == torch.inf:
                status[todo] = int(Status.INFEASIBLE)
                break
            found.active[self._violator(part, at), todo] = False
            spare = regular + dropped[todo]  # spares are used in order, each of them once
            dropped[todo] += 1
            exists = spare < len(gram.tilt)
            found.active[spare[exists], todo[exists]] = True
            feasible = found.columns(todo).feasible(part)
            status[todo[feasible]] = int(Status.REPAIRED)
            todo = todo[~feasible]
        return found

    def _raised(self, gram: Gram, at: Curvature) -> Curvature:
        """Return the nearest curvature that works, with infinite smoothness if none does."""
        if self.climb is not None:
            return self._climbed(gram, at)
        least = at.constraints(gram).least_modulus()
        # Slightly above the least, so that rounding does not leave a cycle positive.
        least = at.strong_convexity + least * (1 + 16 * gram.noise)
        return Curvature(torch.maximum(least, at.smoothness), at.strong_convexity, at.active)

    def _step(self, at: Curvature, steps: Tensor) -> Curvature:
        up, down = self.climb or (0.0, 0.0)
        # The last step may reach the cap up to rounding: see `_last_step`.
        smoothness = (at.smoothness + steps * up).clamp_max(self.max_smoothness)
        return Curvature(smoothness, at.strong_convexity - steps * down, at.active)

    def _last_step(self, at: Curvature) -> Tensor:
        """Return the largest number of steps (B,) that keeps the smoothness within the limit."""
        up = self.climb[0] if self.climb else 0.0
        if up == 0:
            return torch.full_like(at.smoothness, _MOST_CLIMB)
        room = (self.max_smoothness - at.smoothness) / up
        return (room + 1e-9).floor().clamp_max(_MOST_CLIMB)

    def _climbed(self, gram: Gram, at: Curvature) -> Curvature:
        """Return the curvature of the first feasible step, by doubling and then bisection.

        This is possible because every step only adds functions."""
        last = self._last_step(at)
        low, high = torch.zeros_like(at.smoothness), torch.ones_like(at.smoothness).minimum(last)
        works = self._step(at, high).feasible(gram)
        while bool((grow := ~works & (high < last)).any()):
            rows = grow.nonzero()[:, 0]
            low[rows] = high[rows]
            high[rows] = torch.minimum(2 * high, last)[rows]
            works[rows] = self._step(at.columns(rows), high[rows]).feasible(gram.columns(rows))
        while bool((split := works & (high - low > 1)).any()):
            rows = split.nonzero()[:, 0]
            middle = ((low + high) / 2).floor()[rows]
            fine = self._step(at.columns(rows), middle).feasible(gram.columns(rows))
            high[rows] = torch.where(fine, middle, high[rows])
            low[rows] = torch.where(fine, low[rows], middle)
        found = self._step(at, high)
        smoothness = torch.where(works, found.smoothness, torch.inf)
        return Curvature(smoothness, found.strong_convexity, at.active)

    def _violator(self, gram: Gram, at: Curvature) -> Tensor:
        """Return the neighbor (B,) to leave out: the farthest one on the critical cycle."""
        last = self._step(at, self._last_step(at)) if self.climb else at
        cycle = critical(last.constraints(gram))
        cycle = torch.where(cycle.any(0), cycle, at.active)  # rounding may hide the cycle
        return gram.squared_distance.masked_fill(~cycle, -torch.inf).argmax(0)
