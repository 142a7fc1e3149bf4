"""Potentials of lifted banks, by pairs alone: no sweeps, because no longer cycle can contradict.

A lifted bank has inputs (x_i, 0) and features (x_i, g_i) in R^(p + C). For curvature between
l = 1 - k and L = 1 + k, so M = 2k and z~_i = (k x_i, g_i), put u_i = |x_i|^2 / 2. Then

    u~_i - u~_j - <z~_j, x_i - x_j> - |z~_i - z~_j|^2 / 2M
        =  (k^2 |x_i - x_j|^2 - |g_i - g_j|^2) / 4k

which is not negative for any pair iff |g_i - g_j| <= k |x_i - x_j|. No other potential allows a
smaller k: the two inequalities of a pair sum up to the same condition whatever u is. So the least k
is the largest ratio |g_i - g_j| / |x_i - x_j|, and the lifted part of the map is a k-Lipschitz map
through all (x_i, g_i): an explicit form of Kirszbraun's theorem.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_count, check_shape, check_tensor
from otad.cip.whole_bank.contradictions import PairRatios, vertex_cover
from otad.cip.whole_bank.pairs import half_squares
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError, SolverError
from otad.search.confirmed_product import squared_distances

ROUNDING = 1e-14  # of a ratio in float64


@torch.no_grad()
def least_lipschitz(points: Tensor, answers: Tensor) -> float:
    """The largest |g_i - g_j| / |x_i - x_j| over all pairs of points (N,p) and answers (N,C).

    Infinite where equal points have different answers.
    """
    return PairSlopes(points, answers).largest()


@torch.no_grad()
def steep_pairs(points: Tensor, answers: Tensor, lipschitz: float) -> Tensor:
    """All pairs i < j (n,2) with |g_i - g_j| > k |x_i - x_j|."""
    return PairSlopes(points, answers).above(lipschitz, "lipschitz", lipschitz)


@torch.no_grad()
def lifted_potential(
    inputs: Tensor, features: Tensor, lift: int, lipschitz: float | None = None
) -> BankPotential:
    """The potential of a lifted bank (N,p+C) for l = 1 - k, L = 1 + k; `lift` is C.

    `lipschitz` is k, by default the least that all pairs allow (1 if all answers are equal). For a
    smaller one, points are left out until no pair is steeper.
    """
    points, answers = _split(inputs, features, lift)
    left_out = torch.zeros(0, dtype=torch.int64, device=inputs.device)
    if lipschitz is None:
        constant = least_lipschitz(points, answers) * (1 + 2 * ROUNDING) or 1.0
        if constant == math.inf:
            raise SolverError(
                "features: expected equal ones for equal inputs, got different ones, through which "
                "no map passes; with a `lipschitz` given, points are left out"
            )
    else:
        constant = float(lipschitz)
        if not 0 < constant < math.inf:
            raise InputError(f"lipschitz: expected a positive finite number, got {lipschitz!r}")
        left_out = vertex_cover(steep_pairs(points, answers, constant), len(inputs))
    levels = lifted_levels(points)
    included = torch.ones_like(levels, dtype=torch.bool).index_fill_(0, left_out, False)
    levels = (levels - levels[included].mean()).masked_fill(~included, math.nan)
    return BankPotential(levels, 1 + constant, 1 - constant, left_out, 0, 0.0)


def lifted_levels(points: Tensor) -> Tensor:
    """u_i = |x_i|^2 / 2 (N,) up to a constant, in float64."""
    center = points.mean(0, dtype=torch.float64)
    return half_squares(points.double() - center, center)


def _split(inputs: Tensor, features: Tensor, lift: int) -> tuple[Tensor, Tensor]:
    """x (N,p) and g (N,C) of a lifted bank."""
    check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES)
    check_tensor(features, "features", "N,d", dtypes=STORAGE_DTYPES)
    check_shape(features, "features", tuple(inputs.shape), "like the inputs")
    check_alike(features, "features", inputs, "inputs")
    if check_count(lift, "lift") >= inputs.shape[1]:
        raise InputError(f"lift: expected fewer than {inputs.shape[1]} coordinates, got {lift}")
    points = inputs[:, :-lift]
    if bool((inputs[:, -lift:] != 0).any()) or not torch.equal(points, features[:, :-lift]):
        raise InputError(
            f"inputs: expected 0 in the last {lift} coordinates, and features that differ from "
            "them in those alone, got a bank that is not lifted"
        )
    return points, features[:, -lift:]


class PairSlopes(PairRatios):
    """|g_i - g_j| / |x_i - x_j| of each pair; 0 for pairs that are equal in both."""

    def __init__(self, points: Tensor, answers: Tensor) -> None:
        check_tensor(points, "points", "N,p", dtypes=STORAGE_DTYPES)
        check_tensor(answers, "answers", "N,C", dtypes=STORAGE_DTYPES)
        check_shape(answers, "answers", (len(points), answers.shape[1]), "one for each point")
        super().__init__(len(points), points.shape[1] + answers.shape[1], points.device)
        self.parts = points, answers
        self.centers = tuple(part.mean(0, dtype=torch.float64) for part in self.parts)

    def read(self, rows: slice) -> tuple[Tensor, ...]:
        return tuple(
            (part[rows].double() - center).float()
            for part, center in zip(self.parts, self.centers, strict=True)
        )

    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """Infinite where float32 cannot separate the points."""
        run, run_error = squared_distances(own[0], other[0])
        rise, rise_error = squared_distances(own[1], other[1])
        squares: Tensor = (rise + rise_error) / (run - run_error).clamp_min_(0.0)
        return squares.clamp_min_(0.0).sqrt_().nan_to_num_(nan=torch.inf)

    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        run, rise = (
            (part[first].double() - part[second].double()).square().sum(1).sqrt()
            for part in self.parts
        )
        return torch.where(rise > 0, rise / run, 0.0)
