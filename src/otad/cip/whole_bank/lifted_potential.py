"""Potentials of lifted banks, by pairs alone: no sweeps, because no cycle can contradict.

A lifted bank holds inputs (x_i, 0) and features (x_i, g_i) in R^(p + C). Ask for curvature between
l = 1 - k and L = 1 + k, so M = 2k and z~_i = (k x_i, g_i), and put u_i = |x_i|^2 / 2. Then

    u~_i - u~_j - <z~_j, x_i - x_j> - |z~_i - z~_j|^2 / 2M
        =  (k^2 |x_i - x_j|^2 - |g_i - g_j|^2) / 4k

which is not negative for any pair iff |g_i - g_j| <= k |x_i - x_j|. No other potential does with a
smaller k: the two inequalities of a pair sum up to the same condition whatever u is. So the least k
is the largest ratio |g_i - g_j| / |x_i - x_j|, and the lifted part of the map is a k-Lipschitz map
through all (x_i, g_i): an explicit form of Kirszbraun's theorem.

Ratios are bounded from above by float32 products with their worst error, and every pair that may
count is looked at in float64, by its own differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_count, check_shape, check_tensor
from otad.cip.execution import full_precision
from otad.cip.whole_bank.pairs import half_squares
from otad.cip.whole_bank.potential import BankPotential
from otad.cip.whole_bank.vertex_cover import check_listed, fewest_points
from otad.errors import InputError, SolverError

BLOCK = {"cpu": 2**11, "cuda": 2**14}  # points on each side of a block of pairs
READ_AT_ONCE = 2**26  # numbers of the pairs that are looked at in float64
FINALISTS = 64  # pairs of a block that are looked at before the others
UNIT = 2.0**-24  # relative error of one float32 operation
ROUNDING = 1e-14  # of a ratio in float64
Measured = tuple[tuple[Tensor, Tensor], ...]
"""Points and answers of some rows, each with its lengths."""


@torch.no_grad()
def least_lipschitz(points: Tensor, answers: Tensor) -> float:
    """The largest |g_i - g_j| / |x_i - x_j| over all pairs of points (N,p) and answers (N,C).

    Infinite where equal points have different answers.
    """
    pairs, least = _Ratios(points, answers), 0.0
    for first, second, bounds in pairs.blocks():
        places = bounds.flatten().topk(min(FINALISTS, bounds.numel())).indices
        width = bounds.shape[1]
        least = max(least, pairs.largest(places // width + first, places % width + second))
        one, other = (bounds > least).nonzero().unbind(1)
        least = max(least, pairs.largest(one + first, other + second))
    return least


@torch.no_grad()
def steep_pairs(points: Tensor, answers: Tensor, lipschitz: float) -> Tensor:
    """All pairs i < j (n,2) with |g_i - g_j| > k |x_i - x_j|."""
    pairs, found, count = _Ratios(points, answers), [], 0
    for first, second, bounds in pairs.blocks():
        one, other = (bounds > lipschitz).nonzero().unbind(1)
        listed = torch.stack([one + first, other + second], dim=1)
        for some in listed.split(pairs.at_once):
            found.append(some[pairs.ratios(*some.unbind(1)) > lipschitz])
            count += len(found[-1])
        check_listed(count, "lipschitz", lipschitz)
    return torch.cat(found)


@torch.no_grad()
def lifted_potential(
    inputs: Tensor,
    features: Tensor,
    lift: int,
    lipschitz: float | None = None,
    *,
    leave_out: bool = True,
) -> BankPotential:
    """The potential of a lifted bank (N,p+C) for l = 1 - k, L = 1 + k; `lift` is C.

    `lipschitz` is k, by default the least that all pairs allow (1 if all answers are equal). For a
    smaller one, points are left out until no pair is steeper; or none is (`leave_out` false), and
    the map, k-Lipschitz all the same, does not pass through those that contradict each other: see
    `violation`.
    """
    points, answers = _parts(inputs, features, lift)
    gone = torch.zeros(0, dtype=torch.int64, device=inputs.device)
    violation = 0.0
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
        steep = steep_pairs(points, answers, constant)
        if leave_out:
            gone = fewest_points(steep, len(inputs))
        else:
            violation = _Ratios(points, answers).violation(steep, constant)
    levels = lifted_levels(points)
    kept = torch.ones(len(points), dtype=torch.bool, device=points.device).index_fill_(0, gone, 0)
    levels = (levels - levels[kept].mean()).masked_fill(~kept, math.nan)
    return BankPotential(levels, 1 + constant, 1 - constant, gone, 0, violation)


def lifted_levels(points: Tensor) -> Tensor:
    """u_i = |x_i|^2 / 2 (N,) up to a constant, in float64."""
    center = points.mean(0, dtype=torch.float64)
    return half_squares(points.double() - center, center)


def _parts(inputs: Tensor, features: Tensor, lift: int) -> tuple[Tensor, Tensor]:
    """x (N,p) and g (N,C) of a bank that is lifted indeed."""
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


class _Ratios:
    """|g_i - g_j| / |x_i - x_j| of the pairs of a bank."""

    def __init__(self, points: Tensor, answers: Tensor) -> None:
        check_tensor(points, "points", "N,p", dtypes=STORAGE_DTYPES)
        check_tensor(answers, "answers", "N,C", dtypes=STORAGE_DTYPES)
        check_shape(answers, "answers", (len(points), answers.shape[1]), "one for each point")
        self.parts = points, answers
        self.centers = tuple(part.mean(0, dtype=torch.float64) for part in self.parts)
        self.at_once = max(1, READ_AT_ONCE // (points.shape[1] + answers.shape[1]))

    def blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """The first points of a block of pairs, and upper bounds of their ratios, -1 for pairs that
        are told elsewhere."""
        device = self.parts[0].device.type
        starts = range(0, len(self.parts[0]), width := BLOCK.get(device, BLOCK["cpu"]))
        for start in starts:
            own = self._read(slice(start, start + width))
            for other in starts[start // width :]:
                with full_precision(self.parts[0].device):
                    bounds = _bounds(own, self._read(slice(other, other + width)))
                if start == other:
                    bounds = torch.where(torch.ones_like(bounds).triu(1) > 0, bounds, -1.0)
                yield start, other, bounds

    def ratios(self, first: Tensor, second: Tensor) -> Tensor:
        """Of some pairs (n,), in float64; 0 for pairs that are equal in all, or the same point."""
        run, rise = (self._apart(part, first, second).sqrt() for part in self.parts)
        return torch.where(rise > 0, rise / run, 0.0)

    def largest(self, first: Tensor, second: Tensor) -> float:
        chunks = zip(first.split(self.at_once), second.split(self.at_once), strict=True)
        return max((float(self.ratios(*some).max()) for some in chunks if len(some[0])), default=0)

    def violation(self, pairs: Tensor, constant: float) -> float:
        """The most that pairs (n,2) violate their inequality by."""
        worst = [pairs.new_zeros(1, dtype=torch.float64)]
        for some in pairs.split(self.at_once):
            run, rise = (self._apart(part, *some.unbind(1)) for part in self.parts)
            worst.append((rise - constant**2 * run) / (4 * constant))
        return float(torch.cat(worst).max())

    def _apart(self, part: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (part[first].double() - part[second].double()).square().sum(1)

    def _read(self, rows: slice) -> Measured:
        """Centered points and answers in float32, each with its lengths."""
        centered = (
            (part[rows].double() - center).float()
            for part, center in zip(self.parts, self.centers, strict=True)
        )
        return tuple((part, torch.linalg.vector_norm(part, dim=1)) for part in centered)


def _bounds(own: Measured, other: Measured) -> Tensor:
    """Upper bounds of the ratios of all pairs (n,m): infinite where float32 cannot tell."""
    squares, errors = [], []
    for (one, lengths), (two, other_lengths) in zip(own, other, strict=True):
        sums = lengths.square()[:, None] + other_lengths.square()
        squares.append(torch.addmm(sums, one, two.mT, alpha=-2))
        # Sums of n terms, the rounding of what was centered, and lengths: all of them generously.
        errors.append(4 * (one.shape[1] + 8) * UNIT * sums)
    run = (squares[0] - errors[0]).clamp_min_(0.0)
    return ((squares[1] + errors[1]) / run).clamp_min_(0.0).sqrt_().nan_to_num_(nan=torch.inf)
