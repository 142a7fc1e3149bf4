"""From the inner products of a batch to its answer: potentials, multipliers, value, residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip.judge import relative
from otad.cip.local.answer import Answer
from otad.cip.local.feasibility import potentials
from otad.cip.local.gram import Gram
from otad.cip.local.relax import Curvature, Relaxation
from otad.cip.local.simplex import maximize_on_simplex
from otad.cip.solution import Status


@dataclass(frozen=True)
class SmallStage:
    """Everything of size K. `mode`, `potential`: see `ExactCip`; `relaxation`: where no potential
    exists for the curvature asked for."""

    mode: str
    potential: str
    relaxation: Relaxation

    def __call__(self, gram: Gram, smoothness: Tensor, strong_convexity: Tensor) -> Answer:
        """The answer for the curvature (B,) asked for, failures told by `status` alone."""
        with torch.inference_mode():  # where hundreds of small operations cost the least
            answer = self._answer(gram, smoothness, strong_convexity)
        return answer.ordinary()

    def _answer(self, gram: Gram, smoothness: Tensor, strong_convexity: Tensor) -> Answer:
        finite = gram.is_finite
        if not bool(finite.all()):  # products overflowed: park these rows on harmless numbers
            gram = gram.zeroed(~finite)
        found, longest, status = self.relaxation(gram, smoothness, strong_convexity)
        active = found.active
        level, level_gap = self._levels(gram, found, longest)
        used = found
        if self.mode == "paper":
            used = Curvature(smoothness, strong_convexity, active)

        shifted = gram.shifted(used.strong_convexity)
        modulus = used.smoothness - used.strong_convexity
        line = level - gram.shift_of_levels(used.strong_convexity)
        line = line - shifted.self_cross + shifted.image_square / (2 * modulus)
        best = maximize_on_simplex(shifted.images, modulus * line, active, gram.noise)
        weight = best.weights
        pull = (shifted.images * weight[None]).sum(1)
        bound = line + ((weight * pull).sum(0) / 2 - pull) / modulus  # q_i(z')
        value = (weight * bound).sum(0)
        gap = (bound - value).masked_fill(~active, 0.0)
        offset_size, image_size = gram.sizes(used.strong_convexity, active)
        residual = relative(
            value_gap=torch.maximum(gap.amax(0), level_gap),
            complementarity=(weight * gap).abs().sum(0),
            stationarity=torch.zeros_like(value),  # z' is assembled from the multipliers
            multipliers=weight.mT,
            active=active.mT,
            image_size=gram.center + image_size,
            offset_size=offset_size,
            modulus=modulus,
        )
        unsolved = ~finite | (~best.solved & (status < int(Status.INFEASIBLE)))
        return Answer(
            weight=weight.mT,
            sensitivity=(best.sensitivity * modulus).permute(2, 0, 1),
            value=value,
            level=level.masked_fill(~active, torch.nan).mT,
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
            map_convexity=used.strong_convexity,
            active=active.mT,
            residual=residual,
            status=torch.where(unsolved, int(Status.UNSOLVED), status),
        )

    def _levels(self, gram: Gram, found: Curvature, longest: Tensor) -> tuple[Tensor, Tensor]:
        """u_i (K,B), mean zero, in the problem's own coordinates; how far they violate (2) (B,)."""
        shifted = potentials(longest, found.active, self.potential)
        gap = (longest + shifted[None] - shifted[:, None]).amax((0, 1))  # paths bound their edges
        level = shifted + gram.shift_of_levels(found.strong_convexity)
        mean = (level * found.active).sum(0) / found.active.sum(0)
        return level - mean, gap
