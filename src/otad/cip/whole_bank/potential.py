"""One potential for a whole bank: values u_i at all N points, found by sweeps over all pairs.

With z~ = z - l x and u~ = u - (l/2) |x|^2 the pairs (x_i, z_i) are those of an l-strongly convex,
L-smooth function iff, with M = L - l,

    u~_i >= u~_j + <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M)      for all i, j.

A sweep raises every u~_i to the largest right side. Written with q_i = x_i - z~_i / M and
s_j = u~_j - <z~_j, x_j> + |z~_j|^2 / (2M), that is max_j (s_j + <z~_j, q_i>) + |z~_i|^2 / (2M): one
matrix product. Sweeps are Bellman and Ford's relaxation of a longest path: they end, at the least
solution above where they started, iff no cycle of pairs has positive weight; and the points that
last raised each other tell such a cycle as soon as it is closed. After a sweep over all pairs only
the points it raised can raise others, so the next ones look at those, and the last at all again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import check_count, check_shape, check_tensor
from otad.cip.whole_bank.cycles import (
    contradicting_points,
    cycle_bound,
    cycles_of,
    pair_bound,
    weightiest,
)
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.pricing import Prices
from otad.errors import InputError, SolverError

ROUNDING = 1e-13  # of a raise, against the size of the numbers it is the difference of
FLATTEST = 1e-6  # L - l where nothing asks for more
Progress = Callable[[int, float], None]
"""Told after each sweep: how many were done, and by how much the last raised a value at most."""


@dataclass(frozen=True, eq=False)
class BankPotential:
    """`levels` (N,) float64: u_i, mean zero, NaN at points that were left out.

    `smoothness` L and `strong_convexity` l of the function; `left_out` (n,): the bank points that
    it does not pass through; `sweeps`: how many it took; `violation`: the most any pair of the
    others violates its inequality by, measured by one more sweep.
    """

    levels: Tensor
    smoothness: float
    strong_convexity: float
    left_out: Tensor
    sweeps: int
    violation: float

    @property
    def modulus(self) -> float:
        """M = L - l."""
        return self.smoothness - self.strong_convexity


@dataclass(frozen=True, eq=False)
class Contradiction:
    """Cycles of bank points (each a tensor of indices) that no such function passes through."""

    cycles: tuple[Tensor, ...]
    sweeps: int


@torch.no_grad()
def integrate_bank(
    inputs: Tensor,
    features: Tensor,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    start: Tensor | None = None,
    max_sweeps: int | None = None,
    progress: Progress | None = None,
) -> BankPotential | Contradiction:
    """A potential through all pairs of inputs and features (N,d), or why there is none.

    `start` (N,): levels to begin from, such as those for a slightly larger L; by default the
    linear guess <x_i, z_i> / 2. `max_sweeps`: by default 2 N + 2, which are always enough.
    """
    prices = _prices(inputs, features, smoothness, strong_convexity)
    return _sweep(prices, smoothness, start, max_sweeps, progress)


@torch.no_grad()
def integrate_most(
    inputs: Tensor,
    features: Tensor,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    start: Tensor | None = None,
    max_left_out: int | None = None,
    progress: Progress | None = None,
) -> BankPotential:
    """A potential through as many pairs as can be kept: of every contradiction one point goes.

    First pairs that contradict each other, then longer cycles; it is the one in most such pairs, or
    that contributes most to its cycle. More than `max_left_out` (default: half of them) is a
    `SolverError`.
    """
    prices = _prices(inputs, features, smoothness, strong_convexity)
    pairs = prices.pairs
    limit = len(pairs) // 2 if max_left_out is None else max_left_out
    modulus = smoothness - strong_convexity

    def leave_out(points: Tensor) -> None:
        pairs.kept[points] = False
        if (gone := int((~pairs.kept).sum())) > limit:
            raise SolverError(
                f"smoothness: expected one for which at most {limit} of {len(pairs)} bank points "
                f"contradict the others, got {smoothness}, for which {gone} do so far"
            )

    leave_out(contradicting_points(pairs, modulus))
    found = _sweep(prices, smoothness, start, None, progress, leave_out)
    assert isinstance(found, BankPotential)  # what contradicts has been left out
    return found


@torch.no_grad()
def least_bank_smoothness(
    inputs: Tensor,
    features: Tensor,
    strong_convexity: float = 0.0,
    *,
    tolerance: float = 1e-4,
    highest: float = 1e6,
    progress: Progress | None = None,
) -> BankPotential:
    """The potential of least L, to a relative `tolerance`.

    No L below the bounds of `cycles` will do. So a trial is made a hair above the largest bound of
    all pairs, most often the least L itself. Where it fails, the cycle it fails by gives a larger
    bound, for the next trial; it lies farther above where such bounds grow too slowly.
    """
    prices = _prices(inputs, features, strong_convexity + 1.0, strong_convexity)
    pairs, reach = prices.pairs, tolerance / 2
    best: BankPotential | None = None
    low = pair_bound(pairs)
    # What L = l + M can tell from l; and any number where the features leave it open.
    flattest = FLATTEST * max(abs(strong_convexity), float(low == 0))
    while best is None or best.modulus - low > tolerance * best.modulus:
        if best is None and low > highest:
            raise SolverError(
                f"features: expected some that a smoothness below {highest} can follow, got none; "
                "equal inputs with different features have no map, nor have features that move "
                f"apart by less than strong_convexity ({strong_convexity}) times their inputs"
            )
        trial = max((1 + reach) * low, flattest)
        if best is not None:
            trial = min(trial, (low + best.modulus) / 2)
        start = None if best is None else best.levels
        found = _sweep(prices, strong_convexity + trial, start, None, progress)
        if isinstance(found, BankPotential):
            if trial == flattest:
                return found
            best, reach = found, tolerance / 2
            continue
        before = low
        low = max(trial, *(cycle_bound(pairs, cycle) for cycle in found.cycles))
        if low < (1 + 4 * reach) * before:
            reach *= 4
    return best


def _prices(inputs: Tensor, features: Tensor, smoothness: float, strong_convexity: float) -> Prices:
    if not -math.inf < strong_convexity < smoothness < math.inf:
        raise InputError(
            "smoothness: expected a finite value above strong_convexity "
            f"({strong_convexity}), got {smoothness}"
        )
    return Prices(Pairs(inputs, features, strong_convexity))


def _sweep(
    prices: Prices,
    smoothness: float,
    start: Tensor | None,
    max_sweeps: int | None,
    progress: Progress | None,
    leave_out: Callable[[Tensor], None] | None = None,
) -> BankPotential | Contradiction:
    """With `leave_out`, points on cycles are given to it and the sweeps go on without them."""
    pairs = prices.pairs
    modulus = smoothness - pairs.bend
    levels = pairs.products / 2 if start is None else _shifted(pairs, start)
    limit = 2 * len(pairs) + 2 if max_sweeps is None else check_count(max_sweeps, "max_sweeps")
    parents = torch.arange(len(pairs), device=levels.device)
    risen: Tensor | None = None  # only these can ask more of others than before
    for sweep in range(1, limit + 1):
        target, source = _raised(prices, levels, modulus, risen)
        gain = (target - levels).masked_fill(~pairs.kept, 0.0)
        most = max(0.0, float(gain.max()))
        moved = gain > _roundoff(pairs, levels, modulus)
        if progress is not None:
            progress(sweep, most)
        if bool(moved.any()):
            levels = torch.where(moved, target, levels)
            parents = torch.where(moved, source, parents)
            if cycles := cycles_of(parents):
                if leave_out is None:
                    return Contradiction(cycles, sweep)
                gone = [weightiest(pairs, cycle, modulus) for cycle in cycles]
                leave_out(torch.tensor(gone, device=levels.device))
                roots = ~pairs.kept | ~pairs.kept[parents]  # nobody is raised by who is gone
                parents = torch.where(roots, torch.arange(len(pairs)).to(parents), parents)
            moved &= pairs.kept
            risen = moved.nonzero()[:, 0] if bool(moved.any()) else None
        elif risen is None:
            return _finished(pairs, levels, smoothness, sweep, most)
        else:
            risen = None  # settled: all pairs have the last word
    raise SolverError(
        f"max_sweeps: expected enough to settle {len(pairs)} points, got {limit}, after which "
        f"values still rise by {most:.3g}"
    )


def _raised(
    prices: Prices, levels: Tensor, modulus: float, by: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The largest right side (N,) for every point, and the point j it comes from.

    `by` (n,): only these points j; by default all.
    """
    pairs = prices.pairs
    lines = levels - pairs.products + pairs.image_squares / (2 * modulus)
    lines = lines.masked_fill(~pairs.kept, -math.inf)
    found = []
    for rows in pairs.blocks():
        points, images = pairs.read(rows)
        asked = points - images / modulus
        if by is None or 4 * len(by) > len(pairs):
            found.append(prices.largest(asked, lines))
        else:
            found.append(prices.largest_of(by, asked, lines))
    best, source = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best + pairs.image_squares / (2 * modulus), source


def _roundoff(pairs: Pairs, levels: Tensor, modulus: float) -> float:
    """What a raise may owe to rounding."""
    longest = float(pairs.image_squares.max().sqrt())
    asked = float(pairs.squares.max().sqrt()) + longest / modulus
    terms = longest * asked + float(levels.abs().max())
    return ROUNDING * math.sqrt(pairs.dim) * terms


def potential_lines(pairs: Pairs, potential: BankPotential) -> Tensor:
    """s_i (N,) in centered coordinates; -inf at points left out."""
    lines = potential.levels.to(pairs.device) - pairs.offsets() - pairs.products
    lines = lines + pairs.image_squares / (2 * potential.modulus)
    return lines.masked_fill(~pairs.kept, -math.inf)


def _shifted(pairs: Pairs, levels: Tensor) -> Tensor:
    """u~ in centered coordinates, from u; the reverse of what `_finished` does."""
    check_tensor(levels, "start", "N", dtypes=(torch.float64,), finite=False)
    check_shape(levels, "start", (len(pairs),), "with one level per bank point")
    guess = levels - pairs.offsets()
    return torch.where(guess.isfinite(), guess, pairs.products / 2)


def _finished(
    pairs: Pairs, levels: Tensor, smoothness: float, sweeps: int, violation: float
) -> BankPotential:
    whole = levels + pairs.offsets()
    whole = (whole - whole[pairs.kept].mean()).masked_fill(~pairs.kept, math.nan)
    left_out = (~pairs.kept).nonzero()[:, 0]
    return BankPotential(whole, smoothness, pairs.bend, left_out, sweeps, violation)
