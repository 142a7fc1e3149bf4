"""The potential of the global map: values u_i at all N bank points, found by sweeps over all pairs.

Let z~ = z - l x, u~ = u - (l/2) |x|^2 and M = L - l. The pairs (x_i, z_i) belong to the gradient of
an l-strongly convex, L-smooth function if and only if

    u~_i >= u~_j + <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M)      for all i, j.

A sweep raises every u~_i to the largest right side. With q_i = x_i - z~_i / M and
s_j = u~_j - <z~_j, x_j> + |z~_j|^2 / (2M) this is max_j (s_j + <z~_j, q_i>) + |z~_i|^2 / (2M), one
matrix product. Sweeps are the Bellman-Ford relaxation of a longest path. They end, at the least
solution above the start, if and only if no cycle of pairs has positive weight. The points that last
raised each other reveal such a cycle as soon as it is closed. After a sweep over all pairs, only
the points that rose can raise others. So the next sweeps use only these, and the last one uses all
points again.

If the program has several processes (`otad.processes`), each one raises its share of the blocks of
points, and then all get the values of all points. Blocks are the same for any number of processes,
so the values are too, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import require
from otad.cip.execution import full_precision, run_parts
from otad.cip.whole_bank import contradictions
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.pricing import Prices
from otad.errors import SolverError
from otad.processes import Processes
from otad.short_repr import short_repr

ROUNDING = 1e-13  # the rounding error of a rise, relative to the numbers it is a difference of
FLATTEST = 1e-6  # L - l if nothing requires more
STEEPEST = 1e6  # no larger L - l is tried
MOST_LEFT_OUT = 0.5  # the largest share of the points of a bank that may be left out
Progress = Callable[[int, float], None]
"""Called after each sweep with the number of sweeps and the largest rise of a value in the last."""


@dataclass(frozen=True, eq=False)
class BankPotential:
    """The potential of a bank.

    `levels` (N,) are the values u_i in float64, with mean zero, and NaN at the points `left_out`
    (n,), through which the map does not pass. `smoothness` is L and `strong_convexity` is l.
    `sweeps` is how many sweeps it took, and `violation` is the largest amount by which a pair of
    included points violates its inequality."""

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


@torch.no_grad()
def integrate_most(
    inputs: Tensor,
    features: Tensor,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    progress: Progress | None = None,
) -> BankPotential:
    """Return a potential through as many pairs of inputs and features (N,d) as possible.

    Among points that contradict each other in pairs, the point in most such pairs is left out. Then
    the point that contributes most is left out of each longer cycle. If that would be more than
    half of all points, `SolverError` is raised."""
    prices = _prices(inputs, features, smoothness, strong_convexity)
    pairs, modulus = prices.pairs, smoothness - strong_convexity
    limit = int(MOST_LEFT_OUT * len(pairs))

    def leave_out(points: Tensor) -> None:
        pairs.included[points] = False
        if (gone := int((~pairs.included).sum())) > limit:
            expected = f"one for which at most {limit} of {len(pairs)} points contradict the others"
            got = f"{smoothness}, for which {gone} do so far"
            raise SolverError(f"smoothness: expected {expected}, got {got}")

    steep = contradictions.PairCurvatures(pairs, prices.bounds_of_pairs()).above(
        modulus, "smoothness", smoothness
    )
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
    """Return the potential of the least L, up to a relative `tolerance`.

    The first trial is slightly above the largest bound of all pairs, which is most often the least
    L. If a trial fails, its cycle gives a larger bound for the next one. If such bounds grow too
    slowly, trials are farther above them."""
    prices = _prices(inputs, features, strong_convexity + 1.0, strong_convexity)
    pairs, reach = prices.pairs, tolerance / 2
    best: BankPotential | None = None
    low = contradictions.PairCurvatures(pairs, prices.bounds_of_pairs()).largest()
    # The smallest M that L = l + M can express, or any number if the features allow every M.
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
        low = max(trial, *(contradictions.cycle_bound(pairs, one) for one in found))
        if low < (1 + 4 * reach) * before:
            reach *= 4
    return best


def _prices(inputs: Tensor, features: Tensor, smoothness: float, strong_convexity: float) -> Prices:
    expected = f"a finite value above strong_convexity ({strong_convexity})"
    is_above = -math.inf < strong_convexity < smoothness < math.inf
    require(is_above, "smoothness", expected, smoothness)
    pairs = Pairs(inputs, features, strong_convexity)
    # Also the same bits: otherwise processes would end after different numbers of sweeps.
    given = pairs.squares, pairs.image_squares, pairs.products, str((smoothness, strong_convexity))
    Processes.joined(pairs.device).require_same(given, "inputs, features and smoothness")
    return Prices(pairs)


def _sweep(
    prices: Prices,
    smoothness: float,
    start: Tensor | None = None,
    progress: Progress | None = None,
    leave_out: Callable[[Tensor], None] | None = None,
) -> BankPotential | tuple[Tensor, ...]:
    """Sweep from the levels `start` (N,), by default <x_i, z_i> / 2, until nothing rises.

    Return the potential, or cycles of points that no such function can pass through. If a function
    `leave_out` is given, it is called with points on cycles, and the sweeps go on without them."""
    pairs = prices.pairs
    modulus = smoothness - pairs.strong_convexity
    levels = pairs.products / 2 if start is None else start - pairs.offsets()
    itself = torch.arange(len(pairs), device=levels.device)
    parents, risen = itself, None  # None: all points may raise others
    longest = float(pairs.image_squares.max().sqrt())
    reach = float(pairs.squares.max().sqrt()) + longest / modulus
    for sweep in range(1, 2 * len(pairs) + 3):  # this many sweeps are always enough
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
                    return cycles
                gone = [contradictions.heaviest_point(pairs, one, modulus) for one in cycles]
                leave_out(torch.tensor(gone, device=levels.device))
                # No point may have a parent that is left out.
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
            risen = None  # nothing rises any more, so all pairs are checked once more
    got = f"a rise of {most:.3g} in the last"
    raise SolverError(f"features: expected values that settle within {sweep} sweeps, got {got}")


def _raised(
    prices: Prices, levels: Tensor, modulus: float, by: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the largest right side (N,) for every point, or its level, and the point j it is from.

    If `by` is given, j is one of these points."""
    pairs, processes = prices.pairs, Processes.joined(levels.device)
    lines, blocks = _lines(pairs, levels, modulus), pairs.blocks()
    bends = pairs.image_squares / (2 * modulus)
    floors = (levels - bends).masked_fill(~pairs.included, math.inf)
    prices.bounds_of_pairs()  # made once, before several threads need it

    def raised(rows: slice) -> tuple[Tensor, Tensor]:
        return prices.raised(rows, modulus, lines, floors[rows], by)

    found = [(levels[:0], levels[:0].long())]
    with full_precision(levels.device):  # here, as it is a setting of all threads
        found += run_parts(processes.share(blocks), raised, levels.device)
    best, source = (torch.cat(parts) for parts in zip(*found, strict=True))
    if processes.count > 1:
        ends = [0, *itertools.accumulate(processes.sizes(len(blocks)))]
        sizes = [
            sum(rows.stop - rows.start for rows in blocks[i:j]) for i, j in itertools.pairwise(ends)
        ]
        both = torch.stack([best, source.double()], dim=1)  # 16 bytes a point, in one message
        best, source = (part.contiguous() for part in processes.gather(both, sizes).unbind(1))
        source = source.long()
    return best + bends, source


def potential_lines(pairs: Pairs, potential: BankPotential) -> Tensor:
    """Return s_i (N,) in centered coordinates, -inf at points left out."""
    return _lines(pairs, potential.levels.to(pairs.device) - pairs.offsets(), potential.modulus)


def _lines(pairs: Pairs, levels: Tensor, modulus: float) -> Tensor:
    lines = levels - pairs.products + pairs.image_squares / (2 * modulus)
    return lines.masked_fill(~pairs.included, -math.inf)
