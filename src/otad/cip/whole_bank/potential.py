"""The potential of the global map: values u_i at all N bank points, found by sweeps over all pairs.

With z~ = z - l x and u~ = u - (l/2) |x|^2 the pairs (x_i, z_i) are those of an l-strongly convex,
L-smooth function iff, with M = L - l,

    u~_i >= u~_j + <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M)      for all i, j.

A sweep raises every u~_i to the largest right side. Written with q_i = x_i - z~_i / M and
s_j = u~_j - <z~_j, x_j> + |z~_j|^2 / (2M), that is max_j (s_j + <z~_j, q_i>) + |z~_i|^2 / (2M): one
matrix product. Sweeps are the Bellman-Ford relaxation of a longest path: they end, at the least
solution above the start, iff no cycle of pairs has positive weight; and the points that last raised
each other reveal such a cycle as soon as it is closed. After a sweep over all pairs only the points
it raised can raise others, so the next sweeps use those alone, and the last one uses all again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from otad.checks import require
from otad.cip.whole_bank import contradictions
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.pricing import Prices
from otad.errors import SolverError
from otad.short_repr import short_repr

ROUNDING = 1e-13  # of a raise, against the size of the numbers it is the difference of
FLATTEST = 1e-6  # L - l where nothing requires more
STEEPEST = 1e6  # no larger L - l is tried
MOST_LEFT_OUT = 0.5  # share of the points of a bank
Progress = Callable[[int, float], None]
"""Called after each sweep with their number and the largest rise of a value in the last one."""


@dataclass(frozen=True, eq=False)
class BankPotential:
    """`levels` (N,) float64: u_i, mean zero, NaN at the points `left_out` (n,), which the function
    does not pass through; its `smoothness` L and `strong_convexity` l; `sweeps`: how many it took;
    `violation`: the most by which any pair of included points violates its inequality."""

    levels: Tensor
    smoothness: float
    strong_convexity: float
    left_out: Tensor
    sweeps: int
    violation: float
    __repr__ = short_repr

    @property
    def modulus(self) -> float:
        return self.smoothness - self.strong_convexity


class Contradiction(NamedTuple):
    """Cycles of bank points (each a tensor of indices) that no such function passes through."""

    cycles: tuple[Tensor, ...]


@torch.no_grad()
def integrate_bank(
    inputs: Tensor, features: Tensor, smoothness: float, strong_convexity: float = 0.0
) -> BankPotential | Contradiction:
    """A potential through all pairs of inputs and features (N,d), or why there is none."""
    return _sweep(_prices(inputs, features, smoothness, strong_convexity), smoothness)


@torch.no_grad()
def integrate_most(
    inputs: Tensor,
    features: Tensor,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    progress: Progress | None = None,
) -> BankPotential:
    """A potential through as many pairs as possible: of pairs that contradict each other the point
    in most such pairs is left out, then of longer cycles the one that contributes most. More than
    half of all points is a `SolverError`."""
    prices = _prices(inputs, features, smoothness, strong_convexity)
    pairs, modulus = prices.pairs, smoothness - strong_convexity
    limit = int(MOST_LEFT_OUT * len(pairs))

    def leave_out(points: Tensor) -> None:
        pairs.included[points] = False
        if (gone := int((~pairs.included).sum())) > limit:
            expected = f"one for which at most {limit} of {len(pairs)} points contradict the others"
            got = f"{smoothness}, for which {gone} do so far"
            raise SolverError(f"smoothness: expected {expected}, got {got}")

    steep = contradictions.PairCurvatures(pairs).above(modulus, "smoothness", smoothness)
    leave_out(contradictions.vertex_cover(steep, len(pairs)))
    found = _sweep(prices, smoothness, progress=progress, leave_out=leave_out)
    assert isinstance(found, BankPotential)  # every contradiction has been resolved
    return found


@torch.no_grad()
def least_bank_smoothness(
    inputs: Tensor,
    features: Tensor,
    strong_convexity: float = 0.0,
    *,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> BankPotential:
    """The potential of least L, to a relative `tolerance`. The first trial is slightly above the
    largest bound of all pairs, most often the least L. Where a trial fails, its cycle gives a
    larger bound for the next, which is farther above where such bounds grow too slowly."""
    prices = _prices(inputs, features, strong_convexity + 1.0, strong_convexity)
    pairs, reach = prices.pairs, tolerance / 2
    best: BankPotential | None = None
    low = contradictions.PairCurvatures(pairs).largest()
    # The smallest M that L = l + M can express; any number where the features leave it open.
    flattest = FLATTEST * max(abs(strong_convexity), float(low == 0))
    while best is None or best.modulus - low > tolerance * best.modulus:
        if best is None and low > STEEPEST:
            raise SolverError(
                f"features: expected some that a smoothness below {STEEPEST} can follow, got none; "
                "equal inputs with different features have no map, nor have features that move "
                f"apart by less than strong_convexity ({strong_convexity}) times their inputs"
            )
        trial = max((1 + reach) * low, flattest)
        if best is not None:
            trial = min(trial, (low + best.modulus) / 2)
        start = None if best is None else best.levels
        found = _sweep(prices, strong_convexity + trial, start, progress)
        if isinstance(found, BankPotential):
            if trial == flattest:
                return found
            best, reach = found, tolerance / 2
            continue
        before = low
        low = max(trial, *(contradictions.cycle_bound(pairs, one) for one in found.cycles))
        if low < (1 + 4 * reach) * before:
            reach *= 4
    return best


def _prices(inputs: Tensor, features: Tensor, smoothness: float, strong_convexity: float) -> Prices:
    expected = f"a finite value above strong_convexity ({strong_convexity})"
    is_above = -math.inf < strong_convexity < smoothness < math.inf
    require(is_above, "smoothness", expected, smoothness)
    return Prices(Pairs(inputs, features, strong_convexity))


def _sweep(
    prices: Prices,
    smoothness: float,
    start: Tensor | None = None,
    progress: Progress | None = None,
    leave_out: Callable[[Tensor], None] | None = None,
) -> BankPotential | Contradiction:
    """Sweeps from the levels `start` (N,), by default <x_i, z_i> / 2; points on cycles are given to
    `leave_out`, if any, and the sweeps continue without them."""
    pairs = prices.pairs
    modulus = smoothness - pairs.strong_convexity
    levels = pairs.products / 2 if start is None else start - pairs.offsets()
    itself = torch.arange(len(pairs), device=levels.device)
    parents, risen = itself, None  # only points that have risen can raise others
    longest = float(pairs.image_squares.max().sqrt())
    reach = float(pairs.squares.max().sqrt()) + longest / modulus
    for sweep in range(1, 2 * len(pairs) + 3):  # which are always enough
        target, source = _raised(prices, levels, modulus, risen)
        gain = (target - levels).masked_fill(~pairs.included, 0.0)
        most = max(0.0, float(gain.max()))
        # The largest rise that may be due to rounding.
        terms = longest * reach + float(levels.abs().max())
        moved = gain > ROUNDING * math.sqrt(pairs.dim) * terms
        if progress is not None:
            progress(sweep, most)
        if bool(moved.any()):
            levels = torch.where(moved, target, levels)
            parents = torch.where(moved, source, parents)
            if cycles := contradictions.cycles_of(parents):
                if leave_out is None:
                    return Contradiction(cycles)
                gone = [contradictions.heaviest_point(pairs, one, modulus) for one in cycles]
                leave_out(torch.tensor(gone, device=levels.device))
                # No point has a parent that is left out.
                roots = ~pairs.included | ~pairs.included[parents]
                parents = torch.where(roots, itself, parents)
            moved &= pairs.included
            risen = moved.nonzero()[:, 0] if bool(moved.any()) else None
        elif risen is None:
            out, levels = ~pairs.included, levels + pairs.offsets()
            levels = (levels - levels[~out].mean()).masked_fill(out, math.nan)
            left_out, low = out.nonzero()[:, 0], pairs.strong_convexity
            return BankPotential(levels, smoothness, low, left_out, sweep, most)
        else:
            risen = None  # settled: check all pairs once more
    got = f"a rise of {most:.3g} in the last"
    raise SolverError(f"features: expected values that settle within {sweep} sweeps, got {got}")


def _raised(
    prices: Prices, levels: Tensor, modulus: float, by: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The largest right side (N,) for every point, and the point j it comes from, one of `by`."""
    pairs, found = prices.pairs, []
    lines = _lines(pairs, levels, modulus)
    for rows in pairs.blocks():
        points, images = pairs.read(rows)
        queries = points - images / modulus
        if by is None or 4 * len(by) > len(pairs):
            found.append(prices.largest(queries, lines))
        else:
            found.append(prices.largest_of(by, queries, lines))
    best, source = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best + pairs.image_squares / (2 * modulus), source


def potential_lines(pairs: Pairs, potential: BankPotential) -> Tensor:
    """s_i (N,) in centered coordinates; -inf at points left out."""
    return _lines(pairs, potential.levels.to(pairs.device) - pairs.offsets(), potential.modulus)


def _lines(pairs: Pairs, levels: Tensor, modulus: float) -> Tensor:
    lines = levels - pairs.products + pairs.image_squares / (2 * modulus)
    return lines.masked_fill(~pairs.included, -math.inf)
