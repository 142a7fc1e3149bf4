"""From the inner products of a batch to its multipliers, step by step in torch.

`find_potentials` is eq. (2), relaxed where it must be, and `solve_qp` is eq. (3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.cip.judge import relative
from otad.cip.local.dual_solution import DualSolution
from otad.cip.local.potentials import potentials_from_paths
from otad.cip.local.products import Gram
from otad.cip.local.relax import Curvature, Relaxation
from otad.cip.local.simplex_qp import maximize_on_simplex
from otad.cip.solution import Status


@dataclass(frozen=True)
class Potentials:
    """`values` (K,B): u_i, mean zero over the active neighbors; `violation` (B,): the most by which
    they violate eq. (2); `requested` and `used`: the curvature; `status` (B,)."""

    values: Tensor
    violation: Tensor
    requested: Curvature
    used: Curvature
    status: Tensor


def solve_torch(
    gram: Gram,
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
) -> DualSolution:
    """The solution for the requested curvature (B,); failures are marked by `status` alone.

    `rule` and `mode`: `potential` and `mode` of `ExactCip`.
    """
    with torch.inference_mode():  # where hundreds of small operations cost the least
        finite = gram.is_finite
        if not bool(finite.all()):  # products overflowed: give these rows harmless numbers
            gram = gram.zeroed(~finite)
        found = find_potentials(gram, smoothness, strong_convexity, relaxation, rule)
        solution = solve_qp(gram, found, mode)
        status = torch.where(finite, solution.status, int(Status.UNSOLVED))
    return replace(solution, status=status).outside_inference_mode()


def find_potentials(
    gram: Gram, smoothness: Tensor, strong_convexity: Tensor, relaxation: Relaxation, rule: str
) -> Potentials:
    """Eq. (2): potentials for the requested curvature, or for the nearest that has any."""
    used, longest, status = relaxation(gram, smoothness, strong_convexity)
    active = used.active
    shifted = potentials_from_paths(longest, active, rule)
    violation = (longest + shifted[None] - shifted[:, None]).amax((0, 1))  # paths bound their edges
    values = shifted + gram.potential_shift(used.strong_convexity)
    mean = (values * active).sum(0) / active.sum(0)
    requested = Curvature(smoothness, strong_convexity, active)
    return Potentials(values - mean, violation, requested, used, status)


def solve_qp(gram: Gram, potentials: Potentials, mode: str) -> DualSolution:
    """Eq. (3): the multipliers, by its dual over the simplex; value, sensitivity and residual."""
    used = potentials.requested if mode == "paper" else potentials.used
    active = used.active
    shifted = gram.shifted(used.strong_convexity)
    modulus = used.smoothness - used.strong_convexity
    line = potentials.values - gram.potential_shift(used.strong_convexity)
    line = line - shifted.self_cross + shifted.image_square / (2 * modulus)
    best = maximize_on_simplex(shifted.images, modulus * line, active, gram.noise)
    weight = best.weights
    pull = (shifted.images * weight[None]).sum(1)
    bound = line + ((weight * pull).sum(0) / 2 - pull) / modulus  # q_i(z')
    value = (weight * bound).sum(0)
    gap = (bound - value).masked_fill(~active, 0.0)
    offset_size, image_size = gram.sizes(used.strong_convexity, active)
    residual = relative(
        value_gap=torch.maximum(gap.amax(0), potentials.violation),
        complementarity=(weight * gap).abs().sum(0),
        stationarity=torch.zeros_like(value),  # z' is assembled from the multipliers
        multipliers=weight.mT,
        active=active.mT,
        image_size=gram.center + image_size,
        offset_size=offset_size,
        modulus=modulus,
    )
    unsolved = ~best.solved & (potentials.status < int(Status.INFEASIBLE))
    return DualSolution(
        multipliers=weight.mT,
        sensitivity=(best.sensitivity * modulus).permute(2, 0, 1),
        value=value,
        potentials=potentials.values.masked_fill(~active, torch.nan).mT,
        smoothness=potentials.used.smoothness,
        strong_convexity=potentials.used.strong_convexity,
        map_convexity=used.strong_convexity,
        active=active.mT,
        residual=residual,
        status=torch.where(unsolved, int(Status.UNSOLVED), potentials.status),
    )
