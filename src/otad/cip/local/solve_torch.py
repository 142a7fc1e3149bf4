"""Computes the multipliers of a batch from its inner products, step by step in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from otad.cip.judge import relative
from otad.cip.local.potentials import potentials_from_paths
from otad.cip.local.products import Gram, diagonal
from otad.cip.local.relax import Curvature, Relaxation
from otad.cip.local.simplex_qp import maximize_on_simplex
from otad.cip.solution import Status
from otad.errors import SolverError


@dataclass(eq=False)  # frozen would take longer to make
class DualSolution:
    """The solution of a batch before its features are assembled, so that everything has size K.

    `multipliers` and `potentials` (B,K) and `value` (B,) are in float64 or in the dtype of the
    query. `sensitivity` (B,K,K) is the derivative of the multipliers; it is empty or None if no
    gradient is needed. `smoothness` and `strong_convexity` (B,) belong to the potentials,
    `map_convexity` (B,) to the map. `active` is (B,K), `residual` and `status` are (B,)."""

    multipliers: Tensor
    sensitivity: Tensor | None
    value: Tensor
    potentials: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    map_convexity: Tensor
    active: Tensor
    residual: Tensor
    status: Tensor

    def overwrite(self, rows: Tensor, other: DualSolution) -> None:
        for name, mine in vars(self).items():
            if mine is not None:
                mine[rows] = getattr(other, name).to(mine.dtype)

    def with_failures_marked(
        self, on_failure: str, squared_distance: Tensor, requested_convexity: Tensor
    ) -> DualSolution:
        """Return the solution with NaN for everything that a failed row does not have.

        With `on_failure` "fallback", the neighbor of the least `squared_distance` (B,K) gets the
        multiplier 1."""
        failed = self.status >= int(Status.INFEASIBLE)
        if not bool(failed.any()):
            return self
        if on_failure == "raise":
            rows = failed.nonzero()[:, 0].tolist()
            listed = ", ".join(f"{row} ({Status(int(self.status[row])).name})" for row in rows[:5])
            more = ", ..." if len(rows) > 5 else ""
            raise SolverError(
                f"{len(rows)} of {len(failed)} rows have no solution: {listed}{more}. Set "
                "max_smoothness to leave out neighbors, or on_failure='abstain' or 'fallback'"
            )
        unknown = ("multipliers", "value", "potentials", "smoothness", "strong_convexity")
        marks = dict.fromkeys(unknown, torch.nan) | {"sensitivity": 0.0, "residual": torch.inf}
        parts: dict[str, Any] = {}
        for name, mark in marks.items():
            part = getattr(self, name)
            if part is not None:
                parts[name] = part.masked_fill(failed.view(-1, *[1] * (part.dim() - 1)), mark)
        if on_failure == "fallback":
            nearest = one_hot(squared_distance.argmin(1), squared_distance.shape[1])
            parts["multipliers"][failed] = nearest[failed].to(self.multipliers)
        low = torch.where(failed, requested_convexity, self.map_convexity)
        return replace(self, **parts, map_convexity=low)


def solve_torch(
    gram: Gram,
    smoothness: Tensor,
    convexity: Tensor,
    relax: Relaxation,
    rule: str,
    mode: str,
    *,
    sensitive: bool = True,
) -> DualSolution:
    """Return the solution for the requested curvature (B,).

    Failures are marked by `status` alone. `rule` and `mode` are the options `potential` and `mode`
    of `ExactCip`. Without `sensitive` the sensitivity has shape (B,0,0)."""
    with torch.inference_mode():  # in which hundreds of small operations cost the least
        finite = gram.is_finite
        if not bool(finite.all()):  # products overflowed, so these rows get harmless numbers
            gram = gram.changed(lambda part: part.masked_fill(~finite, 0.0))
        # Eq. (2): potentials (K,B) for the requested curvature, or for the nearest one with any.
        relaxed, longest, status = relax(gram, smoothness, convexity)
        active = relaxed.active
        levels = potentials_from_paths(longest, active, rule)
        violation = (longest + levels[None]).sub_(levels[:, None]).amax((0, 1))  # edges are paths
        levels = levels + gram.potential_shift(relaxed.strong_convexity)
        levels = levels - (levels * active).sum(0) / active.sum(0)

        # Eq. (3) for the curvature of the map: its dual over the simplex gives the multipliers.
        used = Curvature(smoothness, convexity, active) if mode == "paper" else relaxed
        cross, images = gram.shifted(used.strong_convexity)
        modulus = used.smoothness - used.strong_convexity
        line = levels - gram.potential_shift(used.strong_convexity)
        line = line - diagonal(cross) + diagonal(images) / (2 * modulus)
        slope = modulus * line
        best = maximize_on_simplex(images, slope, active, gram.noise, sensitive=sensitive)
        weight = best.weights
        pull = (images * weight[None]).sum(1)
        bound = line + ((weight * pull).sum(0) / 2 - pull) / modulus  # q_i(z')
        value = (weight * bound).sum(0)
        gap = (bound - value).masked_fill(~active, 0.0)
        offset_size, image_size = gram.sizes(used.strong_convexity, active)
        sizes = gram.center + image_size, offset_size, modulus
        gaps = gap.amax(0), violation, (weight * gap).abs().sum(0)
        exact = torch.zeros_like(value)  # z' is assembled from the multipliers
        residual = relative(gaps, exact, weight.mT, active.mT, *sizes)
        unsolved = ~finite | (~best.solved & (status < int(Status.INFEASIBLE)))
        status = status.masked_fill(unsolved, int(Status.UNSOLVED))
        sensitivity = (best.sensitivity * modulus).permute(2, 0, 1)
        potentials = levels.masked_fill(~active, torch.nan).mT
        curvature = relaxed.smoothness, relaxed.strong_convexity, used.strong_convexity
        dual = weight.mT, sensitivity, value, potentials
        found = DualSolution(*dual, *curvature, active.mT, residual, status)
    parts = vars(found).items()  # copied, because autograd cannot record inference tensors
    copies = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts}
    return DualSolution(**copies)
