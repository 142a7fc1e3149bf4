"""One potential for a whole bank: values u_i at all N points, found by sweeps over all pairs.

With z~ = z - l x and u~ = u - (l/2) |x|^2 the pairs (x_i, z_i) are those of an l-strongly convex,
L-smooth function iff, with M = L - l,

    u~_i >= u~_j + <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M)      for all i, j.

A sweep raises every u~_i to the largest right side. Written with q_i = x_i - z~_i / M and
s_j = u~_j - <z~_j, x_j> + |z~_j|^2 / (2M), that is max_j (s_j + <z~_j, q_i>) + |z~_i|^2 / (2M): one
matrix product. Sweeps are Bellman and Ford's relaxation of a longest path: they end, at the least
solution above where they started, iff no cycle of pairs has positive weight; and the points that
last raised each other tell such a cycle as soon as it is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_count, check_shape, check_tensor
from otad.errors import InputError, SolverError

ROUNDING = 1e-13  # of a raise, against the size of the numbers it is the difference of
BLOCK_BYTES = 2**28
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


class Pairs:
    """A bank in float64 coordinates about its center, read by blocks; `kept` (N,) take part."""

    def __init__(self, inputs: Tensor, features: Tensor, strong_convexity: float) -> None:
        check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES)
        check_tensor(features, "features", "N,d", dtypes=STORAGE_DTYPES)
        check_shape(features, "features", tuple(inputs.shape), "like the inputs")
        check_alike(features, "features", inputs, "inputs")
        self.inputs, self.features, self.bend = inputs, features, strong_convexity
        self.center = _mean(inputs)
        self.image_center = _mean(features) - strong_convexity * self.center
        self.kept = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        sizes = [
            (points.square().sum(1), images.square().sum(1), (points * images).sum(1))
            for points, images in (self.read(rows) for rows in self.blocks())
        ]
        self.squares, self.image_squares, self.products = (
            torch.cat(parts) for parts in zip(*sizes, strict=True)
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Centered x and z~ (n,d) of some points."""
        points = self.inputs[rows].double() - self.center
        images = self.features[rows].double() - self.bend * self.inputs[rows].double()
        return points, images - self.image_center

    def blocks(self) -> Iterator[slice]:
        """Runs of points whose pairs with as many others fit in memory."""
        width = max(1, math.isqrt(BLOCK_BYTES // 8))
        width = min(width, max(1, BLOCK_BYTES // (16 * self.inputs.shape[1])))
        for start in range(0, len(self), width):
            yield slice(start, min(start + width, len(self)))

    def raised(self, levels: Tensor, modulus: float) -> tuple[Tensor, Tensor]:
        """The largest right side (N,) for every point, and the point j it comes from."""
        lines = levels - self.products + self.image_squares / (2 * modulus)
        lines = lines.masked_fill(~self.kept, -math.inf)
        best = torch.full_like(levels, -math.inf)
        source = torch.arange(len(self), device=levels.device)
        for own in self.blocks():
            points, images = self.read(own)
            asked = points - images / modulus
            for other in self.blocks():
                values = torch.addmm(lines[other], asked, self.read(other)[1].mT)
                top, place = values.max(1)
                better = top > best[own]
                best[own] = torch.where(better, top, best[own])
                source[own] = torch.where(better, place + other.start, source[own])
        return best + self.image_squares / (2 * modulus), source

    def roundoff(self, levels: Tensor, modulus: float) -> float:
        """What a raise may owe to rounding."""
        longest = float(self.image_squares.max().sqrt())
        asked = float(self.squares.max().sqrt()) + longest / modulus
        return ROUNDING * math.sqrt(self.inputs.shape[1]) * (
            longest * asked + float(levels.abs().max())
        )  # fmt: skip


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
    linear guess <x_i, z_i> / 2. `max_sweeps`: N are always enough, and the default.
    """
    pairs = _pairs(inputs, features, smoothness, strong_convexity)
    return _sweep(pairs, smoothness, start, max_sweeps, progress)


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

    It is the one that contributes most to its cycle. More than `max_left_out` (default: half of
    them) is a `SolverError`.
    """
    pairs = _pairs(inputs, features, smoothness, strong_convexity)
    limit = len(pairs) // 2 if max_left_out is None else max_left_out
    while isinstance(found := _sweep(pairs, smoothness, start, None, progress), Contradiction):
        for cycle in found.cycles:
            pairs.kept[_culprit(pairs, cycle, smoothness - strong_convexity)] = False
        if (gone := int((~pairs.kept).sum())) > limit:
            raise SolverError(
                f"smoothness: expected one for which at most {limit} of {len(pairs)} bank points "
                f"contradict the others, got {smoothness}, for which {gone} do so far"
            )
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
    """The potential of least L, to a relative `tolerance`, by bisection.

    Each trial starts from the levels of the last success; L doubles until there is one.
    """
    pairs = _pairs(inputs, features, strong_convexity + 1.0, strong_convexity)
    low, best = 0.0, None
    modulus, start = 1.0, None
    while best is None:
        found = _sweep(pairs, strong_convexity + modulus, start, None, progress)
        if isinstance(found, BankPotential):
            best = found
        elif modulus > highest:
            raise SolverError(
                f"features: expected some that a smoothness below {highest} can follow, got none; "
                "equal inputs with different features have no map"
            )
        else:
            low, modulus = modulus, 2 * modulus
    while best.modulus - low > tolerance * best.modulus:
        middle = (low + best.modulus) / 2
        found = _sweep(pairs, strong_convexity + middle, best.levels, None, progress)
        if isinstance(found, BankPotential):
            best = found
        else:
            low = middle
    return best


def _pairs(inputs: Tensor, features: Tensor, smoothness: float, strong_convexity: float) -> Pairs:
    if not -math.inf < strong_convexity < smoothness < math.inf:
        raise InputError(
            "smoothness: expected a finite value above strong_convexity "
            f"({strong_convexity}), got {smoothness}"
        )
    return Pairs(inputs, features, strong_convexity)


def _sweep(
    pairs: Pairs,
    smoothness: float,
    start: Tensor | None,
    max_sweeps: int | None,
    progress: Progress | None,
) -> BankPotential | Contradiction:
    modulus = smoothness - pairs.bend
    levels = pairs.products / 2 if start is None else _shifted(pairs, start)
    limit = len(pairs) + 1 if max_sweeps is None else check_count(max_sweeps, "max_sweeps")
    parents = torch.arange(len(pairs), device=levels.device)
    for sweep in range(1, limit + 1):
        target, source = pairs.raised(levels, modulus)
        gain = (target - levels).masked_fill(~pairs.kept, 0.0)
        slack = pairs.roundoff(levels, modulus)
        moved = gain > slack
        if progress is not None:
            progress(sweep, float(gain.max()))
        if not bool(moved.any()):
            return _finished(pairs, levels, smoothness, sweep, max(0.0, float(gain.max())))
        levels = torch.where(moved, target, levels)
        parents = torch.where(moved, source, parents)
        if cycles := _cycles(parents):
            return Contradiction(cycles, sweep)
    raise SolverError(
        f"max_sweeps: expected enough to settle {len(pairs)} points, got {limit}, after which "
        f"values still rise by {float(gain.max()):.3g}"
    )


def potential_lines(pairs: Pairs, potential: BankPotential) -> Tensor:
    """s_i (N,) in centered coordinates; -inf at points left out."""
    lines = potential.levels - _offsets(pairs) - pairs.products
    lines = lines + pairs.image_squares / (2 * potential.modulus)
    return lines.masked_fill(~pairs.kept, -math.inf)


def _shifted(pairs: Pairs, levels: Tensor) -> Tensor:
    """u~ in centered coordinates, from u; the reverse of what `_finished` does."""
    check_tensor(levels, "start", "N", dtypes=(torch.float64,), finite=False)
    check_shape(levels, "start", (len(pairs),), "with one level per bank point")
    guess = levels - _offsets(pairs)
    return torch.where(guess.isfinite(), guess, pairs.products / 2)


def _finished(
    pairs: Pairs, levels: Tensor, smoothness: float, sweeps: int, violation: float
) -> BankPotential:
    whole = levels + _offsets(pairs)
    whole = (whole - whole[pairs.kept].mean()).masked_fill(~pairs.kept, math.nan)
    left_out = (~pairs.kept).nonzero()[:, 0]
    return BankPotential(whole, smoothness, pairs.bend, left_out, sweeps, violation)


def _offsets(pairs: Pairs) -> Tensor:
    """u - u~ (N,) up to a constant: the tilt that centering z~ took away, and (l/2) |x|^2."""
    parts = []
    for rows in pairs.blocks():
        points, _ = pairs.read(rows)
        square = (points + pairs.center).square().sum(1)
        parts.append(points @ pairs.image_center + pairs.bend / 2 * square)
    return torch.cat(parts)


def _cycles(parents: Tensor) -> tuple[Tensor, ...]:
    """The cycles of the map i -> parents[i], but for points that are their own parents."""
    ancestor = parents
    for _ in range(max(1, math.ceil(math.log2(len(parents))))):
        ancestor = ancestor[ancestor]  # now at least N steps up: at a root, or on a cycle
    entries = ancestor[parents[ancestor] != ancestor].unique().tolist()
    found, seen = [], set()
    for entry in entries:
        cycle, point = [], entry
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = int(parents[point])
        if cycle:
            found.append(torch.tensor(cycle, device=parents.device))
    return tuple(found)


def _culprit(pairs: Pairs, cycle: Tensor, modulus: float) -> int:
    """The point of a cycle without which the rest of it weighs least."""
    points, images = pairs.read(cycle)
    steps = points[:, None] - points[None]  # x_i - x_j
    bends = (images[:, None] - images[None]).square().sum(2) / (2 * modulus)
    weights = (steps * images[None]).sum(2) + bends  # of j raising i
    # cycle[k + 1] is the parent of cycle[k]: it raises it
    after, before = torch.arange(len(cycle)).roll(-1), torch.arange(len(cycle)).roll(1)
    here = torch.arange(len(cycle))
    relief = weights[here, after] + weights[before, here] - weights[before, after]
    return int(cycle[relief.argmax()])


def _mean(points: Tensor) -> Tensor:
    return points.mean(0, dtype=torch.float64)
