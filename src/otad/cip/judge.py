"""Grades any solution of eqs. (2) and (3) of `otad.cip.problem` by its KKT residual."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.checks import require
from otad.cip.execution import blocks
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution

_WORKING_BYTES = 2**26  # float64 memory of one block of rows


def map_curvature(problem: RowProblem, solution: CipSolution) -> tuple[Tensor, Tensor]:
    """Return L and l (B,) of the map x' -> z': its Jacobian has eigenvalues in [l, L]."""
    source = problem if solution.mode == "paper" else solution
    return source.smoothness, source.strong_convexity


@torch.no_grad()
def kkt_residual(problem: RowProblem, solution: CipSolution) -> Tensor:
    """Return the largest violation of the optimality conditions of each row (B,), in float64.

    It is computed from the raw data and the solution alone, however the solution was found. The
    conditions are: the potentials obey (2) with the curvature that the solution used; v >= q_i(z');
    multipliers are at least 0, sum to 1, and are 0 for neighbors left out; multiplier times slack
    is 0; z' = sum_i lambda_i z~_i. Each violation is divided by the size of its terms (see
    `relative`). A row without a solution (NaN) has an infinite residual."""
    batch, count, dim = problem.shape
    shape = tuple(solution.multipliers.shape)
    require(shape == (batch, count), "solution", f"multipliers of shape {(batch, count)}", shape)
    chunk = max(1, _WORKING_BYTES // (32 * count * dim))
    return torch.cat([_grade(problem, solution, rows) for rows in blocks(batch, chunk)])


def _grade(problem: RowProblem, solution: CipSolution, rows: slice) -> Tensor:
    images = problem.images_of(rows).double()
    offset = problem.anchors_of(rows).double() - problem.query[rows].double()[:, None]
    map_smoothness, map_convexity = (part[rows] for part in map_curvature(problem, solution))
    found, active = solution.rows(rows), solution.active[rows]
    parts = found.image, found.value, found.multipliers, found.potentials
    point, value, weight, potential = (part.double() for part in parts)
    square = offset.square().sum(-1)

    def shifted(smoothness: Tensor, strong_convexity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = strong_convexity[:, None]
        level = (potential - low / 2 * square).masked_fill(~active, 0.0)
        return images - low[..., None] * offset, level, smoothness[:, None] - low

    # Eq. (2), with the curvature the potentials were found for.
    image, level, modulus = shifted(found.smoothness, found.strong_convexity)
    slope = image @ offset.mT  # slope[j, i] = <z~_j, a_i>
    drop = (slope - slope.diagonal(dim1=1, dim2=2)[..., None]).mT  # <z~_j, a_i - a_j> at [i, j]
    spread = torch.cdist(image, image, compute_mode="donot_use_mm_for_euclid_dist").square()
    excess = level[:, None, :] + drop + spread / (2 * modulus[..., None]) - level[:, :, None]
    pairs = active[:, :, None] & active[:, None, :]
    potential_gap = excess.masked_fill(~pairs, 0.0).amax((1, 2))

    # Eq. (3), with the curvature of the map.
    image, level, modulus = shifted(map_smoothness, map_convexity)
    distance = (point[:, None] - image).square().sum(-1)
    bound = level - (image * offset).sum(-1) + distance / (2 * modulus)
    slack = (value[:, None] - bound).masked_fill(~active, 0.0)
    offset_size, image_size = (
        part.norm(dim=-1).masked_fill(~active, 0.0).amax(1) for part in (offset, images)
    )
    value_gaps = potential_gap, (-slack).amax(1), (weight * slack).abs().sum(1)
    image_gap = (point - (weight[:, None] @ image)[:, 0]).norm(dim=-1)
    sizes = image_size + map_convexity.abs() * offset_size, offset_size, modulus[:, 0]
    return relative(value_gaps, image_gap, weight, active, *sizes)


def relative(
    gaps: tuple[Tensor, ...], image_gap: Tensor, weight: Tensor, active: Tensor, *sizes: Tensor
) -> Tensor:
    """Return one residual (B,) without a unit from the gaps (B,) and the multipliers (B,K).

    Gaps of the image are divided by s = |z_i| + |l a_i|, gaps of values by s |a_i| + s^2 / (2M).
    The `sizes` (B,) are the largest s, the largest |a_i|, and M."""
    image_size, offset_size, modulus = sizes
    tiny = torch.finfo(torch.float64).tiny
    value_size = image_size * offset_size + image_size.square() / (2 * modulus)
    violations = (
        torch.stack(gaps).amax(0) / value_size.clamp_min(tiny),
        image_gap / image_size.clamp_min(tiny),
        torch.where(active, -weight, weight.abs()).amax(1),
        (weight.sum(1) - 1).abs(),
    )
    return torch.stack(violations).amax(0).nan_to_num(nan=torch.inf)
