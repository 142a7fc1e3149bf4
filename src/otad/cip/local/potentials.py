"""The potentials of eq. (2), a system of difference constraints, for a whole batch.

u_i - u_j >= w_ij has a solution if and only if the complete digraph with weights w has no positive
cycle. The max-plus closure D (the longest path from j to i) decides that, and gives the potentials:
column j of D is the lowest potential that vanishes at j, and minus row j is the highest one. With
w = s + t/M, the least M is a minimum-ratio-cycle problem, which Newton's method on 1/M solves
exactly. Arrays are (K,K,B) with the batch last, and inactive neighbors have weight -inf."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip.local.products import Gram, diagonal, products_of
from otad.cip.protocols import RowProblem

POTENTIALS = ("canonical", "lowest", "highest")
_MOST_NEWTON_STEPS = 100


@dataclass(frozen=True)
class Constraints:
    """The constraints u_i - u_j >= rise_ij + bend_ij * flatness, flatness = 1 / M, of a batch.

    Weights are lowered by the rounding errors (B,) of both, so that rounding makes no cycle
    positive."""

    rise: Tensor
    bend: Tensor
    active: Tensor
    rise_error: Tensor
    bend_error: Tensor

    @staticmethod
    def of(gram: Gram, strong_convexity: Tensor, active: Tensor) -> Constraints:
        cross, images = gram.shifted(strong_convexity)
        rise, square = cross.transpose(0, 1) - diagonal(cross)[None], diagonal(images)
        bend = (square[:, None] + square[None]).div_(2).sub_(images).clamp_min_(0.0)
        offset, image = gram.sizes(strong_convexity, active)
        noise = 2 * gram.noise  # two products make a difference
        return Constraints(rise, bend, active, noise * image * offset, noise * image.square())

    def weights(self, flatness: Tensor, *, exact: bool = False) -> Tensor:
        """Return w (K,K,B) with a diagonal of 0; if `exact`, without allowance for rounding."""
        weights = (self.bend * flatness).add_(self.rise)
        if not exact:
            weights -= self.rise_error + self.bend_error * flatness.abs()
        weights = _between_active(weights, self.active, -torch.inf)
        weights.diagonal(dim1=0, dim2=1).zero_()
        return weights

    def columns(self, rows: Tensor) -> Constraints:
        return Constraints(*(part[..., rows] for part in vars(self).values()))

    def least_modulus(self) -> Tensor:
        """Return the least M (B,) without a positive cycle, infinite if there is none."""
        flatness = greatest_flatness(self)
        return torch.where(flatness > 0, 1 / flatness, torch.inf)


def _between_active(values: Tensor, active: Tensor, fill: float) -> Tensor:
    """Return values (K,K,B) with `fill` where one of the two neighbors is left out."""
    if bool(active.all()):
        return values
    return values.masked_fill(~(active[:, None] & active[None]), fill)


def closure(weights: Tensor) -> Tensor:
    """Return the longest paths D (K,K,B), D_ij = max over paths from j to i, in O(K^3) per row."""
    longest, path = weights.clone(), torch.empty_like(weights)  # new memory would cost the most
    for reach, onward in zip(longest.split(1, dim=1), longest.split(1), strict=True):
        torch.maximum(longest, torch.add(reach, onward, out=path), out=longest)
    return longest


def has_positive_cycle(longest: Tensor) -> Tensor:
    """Return which rows (B,) of a closure have a positive cycle."""
    return longest.diagonal(dim1=0, dim2=1).amax(1) > 0


def potentials_from_paths(longest: Tensor, active: Tensor, rule: str) -> Tensor:
    """Return feasible potentials (K,B) with mean zero over active neighbors, 0 elsewhere.

    They are the lowest (the mean column of D), the highest (minus the mean row), or the canonical
    one in the middle of both."""
    count = active.sum(0)
    longest = _between_active(longest, active, 0.0)
    if rule == "lowest":
        chosen = longest.sum(1) / count
    elif rule == "highest":
        chosen = longest.sum(0) / -count
    else:
        chosen = (longest.sum(1) - longest.sum(0)) / (2 * count)
    return torch.where(active, chosen - chosen.sum(0) / count, 0.0)


def greatest_flatness(constraints: Constraints) -> Tensor:
    """Return the largest 1/M (B,) without a positive cycle.

    It is infinite if every M > 0 works, and at most 0 if none does. Newton's method starts from
    above: a closed walk of value s(C) + t(C)/M > 0 proves that 1/M is at most -s(C)/t(C), and the
    closure gives the longest such walk."""
    bend, active = constraints.bend, constraints.active
    # Cycles of two neighbors give the first bound.
    rise2, bend2 = (m + m.transpose(0, 1) for m in (constraints.rise, bend))
    ratio = (-rise2 / bend2).masked_fill(bend2 <= 2 * constraints.bend_error, torch.inf)
    flatness = _between_active(ratio, active, torch.inf).amin((0, 1))
    todo = flatness.isfinite().nonzero()[:, 0]
    for _ in range(_MOST_NEWTON_STEPS):
        if len(todo) == 0:
            break
        bound = _walk_bound(constraints.columns(todo), flatness[todo])
        better = bound < flatness[todo]
        todo = todo[better]
        flatness[todo] = bound[better]
    return flatness


def _walk_bound(constraints: Constraints, flatness: Tensor) -> Tensor:
    """Return the best bound on 1/M (B,) from the longest closed walks through each neighbor."""
    longest = constraints.weights(flatness)
    slope = constraints.bend.clone()
    slope.diagonal(dim1=0, dim2=1).zero_()
    ways = (part.split(1, dim=side) for part in (longest, slope) for side in (1, 0))
    for reach, onward, reach_slope, onward_slope in zip(*ways, strict=True):
        path = reach + onward
        longer = path > longest
        torch.where(longer, reach_slope + onward_slope, slope, out=slope)
        torch.where(longer, path, longest, out=longest)
    gain, rate = diagonal(longest), diagonal(slope)
    positive = (gain > 0) & (rate > 0)
    return (flatness - gain / rate).masked_fill(~positive, torch.inf).amin(0)


def critical(constraints: Constraints) -> Tensor:
    """Return the neighbors (K,B) on the cycle that forbids a larger flatness."""
    flatness = greatest_flatness(constraints)
    # Different images of one anchor forbid any flatness above 0, so a scale comes from the errors.
    tiny = torch.finfo(flatness.dtype).tiny
    size = constraints.rise_error / constraints.bend_error.clamp_min(tiny)
    beyond = flatness + 1e-7 * torch.maximum(flatness.abs(), 1e-3 * size)
    gain = diagonal(closure(constraints.weights(beyond, exact=True)))
    # Only that cycle is positive there, and only slightly. A walk of the closure runs around it at
    # most 2^K times, so its neighbors gain at least 2^-K of the largest gain. Less is rounding.
    return constraints.active & (gain > 0) & (gain >= gain.amax(0) * 2.0 ** -len(gain))


@torch.no_grad()
def least_smoothness(problem: RowProblem) -> Tensor:
    """Return the least L for which a potential with the problem's strong convexity l exists.

    Parameters
    ----------
    problem : CipProblem or BankProblem
        The problem. Its own smoothness does not matter.

    Returns
    -------
    Tensor (B,) of float64
        The least L of each row. It equals l if every L above l works, as for one neighbor or for
        equal images, and is infinite if no L works.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> anchors = torch.tensor([[[0.0], [1.0]]])
    >>> problem = otad.cip.CipProblem(torch.zeros(1, 1), anchors, 3 * anchors, smoothness=1.0)
    >>> round(otad.cip.least_smoothness(problem).item(), 4)
    3.0
    """
    low, with_offsets = problem.strong_convexity, problem.has_strong_convexity
    # In float64, because the least L may depend on differences that cancel.
    gram = products_of(problem.in_double(), None, with_offsets=with_offsets).gram()
    active = torch.ones_like(gram.tilt, dtype=torch.bool)
    return low + Constraints.of(gram, low, active).least_modulus()
