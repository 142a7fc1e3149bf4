"""Cycles of bank points: what contradicts a potential, and what it tells about the least L.

Point j asks u~_i - u~_j >= <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M). Summed around a cycle the
left side is 0, so M >= sum |z~_i - z~_j|^2 / 2 over - sum <z~_j, x_i - x_j>: every cycle bounds M
from below, and the least M is the largest of these bounds. Most often a cycle of two has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from otad.cip.execution import full_precision
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.vertex_cover import check_listed, fewest_points

PAIR_BLOCK = {"cpu": 2**12, "cuda": 2**13}  # points on each side of a block of pairs
PAIRS_AT_ONCE = 2**13  # whose differences are taken in float64
FINALISTS = 32  # pairs of a block that are looked at in float64
NEAR = 1e-4  # below this share of their squares, differences of images drown in float32


def cycles_of(parents: Tensor) -> tuple[Tensor, ...]:
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


def cycle_bound(pairs: Pairs, cycle: Tensor) -> float:
    """The least M that a cycle allows, where each point is raised by the next; may be infinite."""
    points, images = pairs.read(cycle)
    raiser_points, raiser_images = points.roll(-1, 0), images.roll(-1, 0)
    fall = float(((raiser_points - points) * raiser_images).sum())
    bend = float((images - raiser_images).square().sum()) / 2
    if bend == 0:
        return 0.0
    return bend / fall if fall > 0 else math.inf


def weightiest(pairs: Pairs, cycle: Tensor, modulus: float) -> int:
    """The point of a cycle without which the rest of it weighs least."""
    points, images = pairs.read(cycle)
    steps = points[:, None] - points[None]  # x_i - x_j
    bends = (images[:, None] - images[None]).square().sum(2) / (2 * modulus)
    weights = (steps * images[None]).sum(2) + bends  # of j raising i
    # cycle[k + 1] is the parent of cycle[k]: it raises it
    here = torch.arange(len(cycle), device=cycle.device)
    after, before = here.roll(-1), here.roll(1)
    relief = weights[here, after] + weights[before, here] - weights[before, after]
    return int(cycle[relief.argmax()])


def pair_bound(pairs: Pairs) -> float:
    """The largest bound on M from a cycle of two, |dz|^2 / <dz, dx>.

    Found in float32, so a pair that is nearly the largest may stand for it, and taken from the
    differences themselves in float64, so that it holds.
    """
    bound = 0.0
    for one, other, ratio in _pair_ratios(pairs):
        if float(ratio.max()) < bound:
            continue
        places = ratio.flatten().topk(min(FINALISTS, ratio.numel())).indices
        first, second = places // ratio.shape[1], places % ratio.shape[1]
        exact = _exact_ratios(pairs, first + one.start, second + other.start)
        bound = max(bound, float(exact.max()))
    return bound


def contradicting_points(pairs: Pairs, modulus: float) -> Tensor:
    """Points (n,) without which no pair asks for more than M: few, not always the fewest. Pairs
    that float32 cannot tell from sound ones may remain."""
    found, count = [], 0
    for one, other, ratio in _pair_ratios(pairs):
        first, second = (ratio > modulus).nonzero().unbind(1)
        first, second = first + one.start, second + other.start
        ratios = [
            _exact_ratios(pairs, *part)
            for part in zip(first.split(PAIRS_AT_ONCE), second.split(PAIRS_AT_ONCE), strict=True)
        ]
        true = torch.cat(ratios) > modulus if len(first) else first.bool()
        true &= first < second  # a block with itself names every pair twice
        found.append(torch.stack([first[true], second[true]], dim=1))
        count += len(found[-1])
        check_listed(count, "smoothness", pairs.bend + modulus)
    return fewest_points(torch.cat(found), len(pairs))


def _pair_ratios(pairs: Pairs) -> Iterator[tuple[slice, slice, Tensor]]:
    """All pairs by blocks, each once: |dz|^2 / <dz, dx> in float32, 0 where it means nothing."""
    blocks = list(pairs.blocks(PAIR_BLOCK.get(pairs.device.type, PAIR_BLOCK["cpu"])))
    for number, one in enumerate(blocks):
        own = [part.float() for part in pairs.read(one)]
        for other in blocks[number:]:
            with full_precision(pairs.device):
                ratio = _ratios(pairs, one, own, other)
            yield one, other, ratio


def _ratios(pairs: Pairs, one: slice, own: list[Tensor], other: slice) -> Tensor:
    points, images = own
    other_points, other_images = (part.float() for part in pairs.read(other))
    near, far = (pairs.image_squares[rows].float() for rows in (one, other))
    squares = near[:, None] + far
    bend = torch.addmm(squares, images, other_images.mT, alpha=-2)
    near, far = (pairs.products[rows].float() for rows in (one, other))
    rise = torch.addmm(near[:, None] + far, points, other_images.mT, alpha=-1)
    rise.addmm_(images, other_points.mT, alpha=-1)
    # A rise of 0 or less allows no M at all, if it is true of the differences in float64.
    ratio = bend / rise.clamp_min_(torch.finfo(torch.float32).tiny)
    return ratio.masked_fill_(bend <= squares.mul_(NEAR), 0.0)


def _exact_ratios(pairs: Pairs, first: Tensor, second: Tensor) -> Tensor:
    """The ratios of some pairs (n,) in float64, 0 for points left out."""
    points, images = (a - b for a, b in zip(pairs.read(first), pairs.read(second), strict=True))
    bend, rise = images.square().sum(1), (images * points).sum(1)
    ratio = torch.where(rise > 0, bend / rise, torch.inf).masked_fill(bend == 0, 0.0)
    return ratio.masked_fill(~(pairs.kept[first] & pairs.kept[second]), 0.0)
