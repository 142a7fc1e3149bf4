"""Lifted banks: potentials by pairs alone, and Lipschitz maps differentiable in the bank itself.

A lifted bank has inputs (x_i, 0) and features (x_i, g_i) in R^(p + C). For curvature between
l = 1 - k and L = 1 + k, so M = 2k and z~_i = (k x_i, g_i), put u_i = |x_i|^2 / 2. Then

    u~_i - u~_j - <z~_j, x_i - x_j> - |z~_i - z~_j|^2 / 2M
        =  (k^2 |x_i - x_j|^2 - |g_i - g_j|^2) / 4k

which is at least 0 for all pairs if and only if |g_i - g_j| <= k |x_i - x_j|. For any u, the two
inequalities of a pair sum up to this condition. So the least k is the largest ratio
|g_i - g_j| / |x_i - x_j|, and the lifted part of the map is a k-Lipschitz map through all
(x_i, g_i). This makes Kirszbraun's theorem explicit.

The map gives a query x' the value sum_i lambda_i g_i. With y_i = k (x_i - x'), lambda minimizes
over the simplex the dual of the global map, without the terms that are the same for all i:

    |sum_i lambda_i y_i|^2 + |sum_i lambda_i g_i|^2 + sum_i lambda_i (|y_i|^2 - |g_i|^2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import STORAGE_DTYPES, check_alike, check_count, check_shape, check_tensor, require
from otad.cip.whole_bank.contradictions import PairRatios, vertex_cover
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.pairs import check_bank, half_squares
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import SolverError
from otad.processes import Processes
from otad.search.confirmed_product import squared_distances

ROUNDING = 1e-14  # the relative rounding error of a ratio in float64
STEADY = 1e-10  # added to the diagonal of a nearly singular system, in units of its largest entry


@torch.no_grad()
def least_lipschitz(points: Tensor, answers: Tensor) -> float:
    """Return the largest |g_i - g_j| / |x_i - x_j| of all pairs of points (N,p), answers (N,C).

    It is infinite if equal points have different answers."""
    return PairSlopes(points, answers).largest()


@torch.no_grad()
def steep_pairs(points: Tensor, answers: Tensor, lipschitz: float) -> Tensor:
    """Return all pairs i < j (n,2) with |g_i - g_j| > k |x_i - x_j|."""
    return PairSlopes(points, answers).above(lipschitz, "lipschitz", lipschitz)


@torch.no_grad()
def lifted_potential(
    inputs: Tensor, features: Tensor, lift: int, lipschitz: float | None = None
) -> BankPotential:
    """Return the potential of a lifted bank (N,p+C) for l = 1 - k and L = 1 + k; `lift` is C.

    `lipschitz` is k, by default the least that all pairs allow (1 if all answers are equal). For a
    smaller k, points are left out until no pair is steeper."""
    check_bank(inputs, features)
    width = inputs.shape[1]
    require(check_count(lift, "lift") < width, "lift", f"fewer than {width} coordinates", lift)
    points, answers = inputs[:, :-lift], features[:, -lift:]
    is_lifted = not inputs[:, -lift:].any() and torch.equal(points, features[:, :-lift])
    expected = f"0 in the last {lift} coordinates, the only ones in which features differ"
    require(is_lifted, "inputs", expected, "a bank that is not lifted")
    left_out = torch.zeros(0, dtype=torch.int64, device=inputs.device)
    if lipschitz is None:
        constant = least_lipschitz(points, answers) * (1 + 2 * ROUNDING) or 1.0
        if constant == math.inf:
            expected = "equal ones for equal inputs, or a lipschitz for which points are left out"
            raise SolverError(f"features: expected {expected}, got different ones")
    else:
        constant = _positive(lipschitz)
        left_out = vertex_cover(steep_pairs(points, answers, constant), len(inputs))
    levels = lifted_levels(points)
    included = torch.ones_like(levels, dtype=torch.bool).index_fill_(0, left_out, False)
    levels = (levels - levels[included].mean()).masked_fill(~included, math.nan)
    return BankPotential(levels, 1 + constant, 1 - constant, left_out, 0, 0.0)


def lifted_levels(points: Tensor) -> Tensor:
    """Return u_i = |x_i|^2 / 2 (N,) up to a constant, in float64."""
    center = points.mean(0, dtype=torch.float64)
    return half_squares(points.double() - center, center)


def _positive(lipschitz: float) -> float:
    fits = 0 < lipschitz < math.inf
    require(fits, "lipschitz", "a positive finite number", repr(lipschitz))
    return float(lipschitz)


class PairSlopes(PairRatios):
    """The ratio |g_i - g_j| / |x_i - x_j| of each pair, 0 for pairs that are equal in both."""

    proves_bounds = True

    def __init__(self, points: Tensor, answers: Tensor) -> None:
        check_tensor(points, "points", "N,p", dtypes=STORAGE_DTYPES)
        check_tensor(answers, "answers", "N,C", dtypes=STORAGE_DTYPES)
        check_shape(answers, "answers", (len(points), answers.shape[1]), "one for each point")
        super().__init__(len(points), points.shape[1] + answers.shape[1], points.device)
        self.parts = points, answers
        self.centers = tuple(part.mean(0, dtype=torch.float64) for part in self.parts)
        Processes.joined(points.device).require_same(self.centers, "points and answers")

    def read(self, rows: slice) -> tuple[Tensor, ...]:
        centered = zip(self.parts, self.centers, strict=True)
        return tuple((part[rows].double() - center).float() for part, center in centered)

    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """Return bounds that are infinite where float32 cannot separate the points."""
        run, run_error = squared_distances(own[0], other[0])
        rise, rise_error = squared_distances(own[1], other[1])
        squares: Tensor = (rise + rise_error) / (run - run_error).clamp_min_(0.0)
        return squares.clamp_min_(0.0).sqrt_().nan_to_num_(nan=torch.inf)

    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        gaps = (part[first].double() - part[second].double() for part in self.parts)
        run, rise = (gap.square().sum(1).sqrt() for gap in gaps)
        return torch.where(rise > 0, rise / run, 0.0)


def lifted_map(query: Tensor, points: Tensor, answers: Tensor, lipschitz: float = 1.0) -> Tensor:
    """Return the values (B,C) at queries (B,p) of the k-Lipschitz map of points and answers.

    Points are (N,p) and answers (N,C). The map passes through the pairs if `least_lipschitz` is at
    most k, and is k-Lipschitz in any case. Gradients reach the query, the points and the answers.
    """
    check_tensor(query, "query", "B,p")
    for name, part in (("points", points), ("answers", answers)):
        check_tensor(part, name, "N,C")
        check_alike(part, name, query, "query")
    lift, k = answers.shape[1], _positive(lipschitz)
    check_shape(points, "points", (len(points), query.shape[1]), "like the queries")
    check_shape(answers, "answers", (len(points), lift), "one for each point")
    with torch.no_grad():  # the points (B,W) with weight, and which of them have it
        nothing = torch.zeros(0, dtype=torch.int64, device=query.device)
        potential = BankPotential(lifted_levels(points), 1 + k, 1 - k, nothing, 0, 0.0)
        bank = functional.pad(points, (0, lift)), torch.cat([points, answers], dim=1)
        found = WholeBank(*bank, potential)(functional.pad(query, (0, lift)))
        active = (found.solution.multipliers > 0).double()
    steps = k * (points[found.indices].double() - query.double()[:, None])
    values = answers[found.indices].double()
    weights = _weights(steps, values, active)
    return (weights[:, :, None] * values).sum(1).to(query.dtype)


def _weights(steps: Tensor, values: Tensor, active: Tensor) -> Tensor:
    """Return lambda (B,W) on its support, which is the same for nearby queries.

    It solves 2 Q lambda + c = mu with sum lambda = 1, where Q are the products of all (y_i, g_i),
    with 1 on the diagonal for points without weight."""
    gram = (steps @ steps.mT + values @ values.mT) * active[:, :, None] * active[:, None]
    slope = steps.square().sum(2) - values.square().sum(2)
    largest = gram.detach().diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
    eye = torch.eye(active.shape[1], dtype=gram.dtype, device=gram.device)
    system = 2 * gram + torch.diag_embed(1 - active) + STEADY * largest * eye
    system = torch.cat([system, active[:, :, None]], dim=2)
    last = functional.pad(active, (0, 1))[:, None]
    right = functional.pad(-slope * active, (0, 1), value=1.0)
    solved = torch.linalg.solve(torch.cat([system, last], dim=1), right[:, :, None])
    weights: Tensor = solved[:, :-1, 0] * active
    return weights
