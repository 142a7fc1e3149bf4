"""Black-box attacks by random draws: random points, random search over features or over square
windows of images, and rearranged pixels."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import cross_entropy
from otad.attacks.projection import ascended
from otad.attacks.row_graphs import row_wise
from otad.attacks.target import Survivors, Target, gain_of
from otad.checks import check_count, require
from otad.threat import LpBall

GROWTH = 1.5  # factor of the step after a success; four failures undo it (the one-fifth rule)
LONGEST = 2.0  # the longest step, in units of eps: across the ball
SHORTEST = {"l2": 2.0**-10, "linf": LONGEST}  # in linf always the longest: corners are best
# Of Square: the first window has this share of the pixels. It is halved after so many of the
# queries, in units of a 10,000th of all.
WINDOW = 0.8
HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
TINY = 1e-30  # in place of eps if it is less, so that nothing is divided by 0
NUMBERS = 5  # drawn for a window and another one, and for their direction; then one a channel

Share = tuple[float, float]


def _check_share(share: Share, name: str) -> None:
    low, high = share
    expected = "two ascending shares of the image above 0 and up to 1"
    require(0 < low <= high <= 1, name, expected, repr((low, high)))


@register_attack
@dataclass(frozen=True, eq=False)
class RandomNoise(Attack):
    """The best of many random points of the ball, alternately on its surface and within it.

    Parameters
    ----------
    draws : int
        The number of points.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model, x, y = torch.nn.Identity().eval(), torch.eye(3), torch.arange(3)
    >>> attack = otad.attacks.RandomNoise(draws=10)
    >>> attack(model, x, y, otad.L2(0.5), generator=torch.Generator().manual_seed(0)).accuracy
    1.0
    """

    draws: int = option(100, check_count)
    name = "noise"
    family = "random"
    version = 2

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, generator = Survivors(target, x, ball), on_device(generator, x)
        for draw in range(self.draws):
            rows = survivors.rows
            if not len(rows):
                break
            points = ball.inside(x, generator) if draw % 2 else ball.surface(x, generator)
            survivors.ask(points[rows], rows)
        return survivors.inputs


@register_attack
@dataclass(frozen=True, eq=False)
class RandomSearch(Attack):
    """Random search: each query changes a few features of the best input so far.

    The change is kept if it is better. The number of changed features is log-uniform between one
    and all. In l2 each example adapts the length of its steps by the one-fifth rule. In l-infinity
    a step goes from one face of the ball to the other.

    Parameters
    ----------
    queries : int
        How many answers are asked for each example.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model, x, y = torch.nn.Identity().eval(), torch.eye(3), torch.arange(3)
    >>> attack = otad.attacks.RandomSearch(queries=100)
    >>> attack(model, x, y, otad.Linf(1.0), generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    queries: int = option(2000, check_count, least=2)
    name = "random_search"
    family = "black-box"
    version = 2

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        free = ball.free_features(x)
        if not len(free):
            return x
        survivors, generator = Survivors(target, x, ball), on_device(generator, x)
        rows, moved, length = survivors.rows, x, x.new_full((len(x),), ball.eps)
        for _ in range(self.queries):
            before = survivors.gain[rows]
            alive = survivors.ask(moved, rows)
            length[rows] = _adapted(length[rows], before, survivors.gain[rows], ball=ball)
            rows = rows[alive]
            if not len(rows):
                break
            drawn = _sparse_draw(x[rows], free, generator)
            best = survivors.inputs[rows]
            moved = ascended(x[rows], best, length[rows], drawn, ball=ball)
        return survivors.inputs


def _adapted(length: Tensor, before: Tensor, after: Tensor, *, ball: LpBall) -> Tensor:
    """Return the lengths of the next steps (n,), from the gain (n,) before and after the last."""
    longer = length * torch.where(after > before, GROWTH, GROWTH**-0.25).to(length)
    return longer.clamp(SHORTEST[ball.norm] * ball.eps, LONGEST * ball.eps)


def _sparse_draw(x: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal numbers (B,*) for a random choice of at least one of the free features.

    All other features are 0."""
    count = len(x)
    place: dict[str, Any] = {"generator": generator, "device": x.device}
    share = len(free) ** -torch.rand(count, 1, **place)
    values, chances = (draw(count, len(free), **place) for draw in (torch.randn, torch.rand))
    certain = torch.randint(len(free), (count, 1), **place)
    drawn = values * (chances < share).scatter(1, certain, True)
    if len(free) < x[0].numel():
        drawn = drawn.new_zeros(count, x[0].numel()).index_copy_(1, free, drawn)
    return drawn.view(x.shape).to(x)


def on_device(generator: torch.Generator, x: Tensor) -> torch.Generator:
    """Return the generator if x is on the CPU, otherwise one on the device of x, seeded by it.

    A GPU draws millions of numbers in the time that their transfer alone would take."""
    if x.device.type == "cpu":
        return generator
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator(x.device).manual_seed(seed)


@register_attack
@dataclass(frozen=True, eq=False)
class Square(Attack):
    """Square (Andriushchenko et al. 2020): random search over square windows of images.

    Each query changes the best image so far within a window at a random place, and is kept if the
    logit of a wrong class gains on the right one, or in regression if the error grows. In
    l-infinity each channel of the window goes to a random face of the ball. In l2 the window gets
    two opposite bumps and what another window has changed, so that the change keeps its length.
    Windows become smaller with the queries.

    Parameters
    ----------
    queries : int
        How many answers are asked for each example.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = torch.nn.Flatten().eval()
    >>> x, y = 0.5 + torch.eye(16).view(16, 1, 4, 4) / 10, torch.arange(16)
    >>> attack, generator = otad.attacks.Square(queries=300), torch.Generator().manual_seed(0)
    >>> attack(model, x, y, otad.Linf(0.1, bounds=(0.0, 1.0)), generator=generator).accuracy
    0.0
    """

    queries: int = option(2000, check_count, least=2)
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True)
    version = 2

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, generator = Survivors(target, x, ball), on_device(generator, x)
        start = _tiles if ball.norm == "l2" else _stripes
        rows, (height, width) = survivors.rows, x.shape[2:]
        length = x.new_full((len(x),), ball.eps)
        moved = ascended(x, x, length, start(x, generator), ball=ball)
        for query in range(1, self.queries + 1):
            rows = rows[survivors.ask(moved, rows)]
            if not len(rows):
                break
            share = WINDOW / 2 ** bisect_left(HALVED_AFTER, 10_000 * query / self.queries)
            side = max(1, round((share * height * width) ** 0.5))
            here = x[rows], survivors.inputs[rows], length[rows]
            drawn = torch.rand(
                len(rows), NUMBERS + x.shape[1], generator=generator, device=generator.device
            )
            moved = _with_window(*here, drawn.to(x), ball=ball, side=side)
        return survivors.inputs


@row_wise
def _with_window(
    x: Tensor, best: Tensor, length: Tensor, drawn: Tensor, *, ball: LpBall, side: int
) -> Tensor:
    """Return the best images (n,C,H,W) changed within a window of a side."""
    changed = _with_bumps if ball.norm == "l2" else _with_corner
    return ascended(x, x, length, changed((best - x) / max(ball.eps, TINY), side, drawn), ball=ball)


def _stripes(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (B,C,H,W) of random signs, one for each column of a channel."""
    count, channels, _, width = x.shape
    return _signs((count, channels, 1, width), x, generator).expand_as(x)


def _tiles(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (B,C,H,W) of tiles, each a pair of bumps with a random sign.

    A tile has a fifth of the height."""
    count, channels, *sides = x.shape
    tile = max(1, sides[0] // 5)
    down, right = (-(-side // tile) for side in sides)
    signs = _signs((count, channels, down, right), x, generator)
    pattern = signs.repeat_interleave(tile, 2).repeat_interleave(tile, 3)
    pattern = pattern * bumps(tile, x.device).to(x).repeat(down, right)
    return pattern[:, :, : sides[0], : sides[1]]


def _with_corner(change: Tensor, side: int, drawn: Tensor) -> Tensor:
    """Give each channel of a window of changes (n,C,H,W) a random sign."""
    places = _window(change, min(side, *change.shape[2:]), drawn[:, :2])
    signs = _sign_of(drawn[:, NUMBERS:, None]).expand(places.shape)
    return change.flatten(2).scatter(2, places, signs).view_as(change)


def _with_bumps(change: Tensor, side: int, drawn: Tensor) -> Tensor:
    """Change a window of changes (n,C,H,W) by bumps. It takes over the squared length that another
    window loses, and what is left of 1."""
    side = min(max(3, side | 1), *change.shape[2:])  # an odd number
    here, there = (_window(change, side, two) for two in (drawn[:, :2], drawn[:, 2:4]))
    flat = change.flatten(2)
    old, rest = flat.gather(2, here), flat.scatter(2, there, 0.0).scatter(2, here, 0.0)
    left = (1 - flat.square().sum((1, 2), keepdim=True)).clamp_min(0.0) / flat.shape[1]
    left = left + (flat - rest).square().sum(2, keepdim=True)
    shape = bumps(side, change.device).to(change)
    is_turned = drawn[:, 4, None, None] < 0.5
    shape = torch.where(is_turned, shape.mT.flatten(), shape.flatten())
    new = _sign_of(drawn[:, NUMBERS:, None]) * shape
    new = new + old / torch.linalg.vector_norm(old, dim=2, keepdim=True).clamp_min(1e-12)
    new = new * (left / new.square().sum(2, keepdim=True).clamp_min(1e-24)).sqrt()
    return rest.scatter(2, here, new).view_as(change)


def _window(change: Tensor, side: int, drawn: Tensor) -> Tensor:
    """Return the pixels (n,C,side*side) of a window of images (n,C,H,W), as int64.

    Two numbers `drawn` (n,2) between 0 and 1 say where it is."""
    height, width = change.shape[2:]
    top = (drawn[:, 0] * (height - side + 1)).long()
    start = (drawn[:, 1] * (width - side + 1)).long()
    corner = (top * width + start)[:, None, None]
    return (corner + _inside(side, width, change.device)).expand(-1, change.shape[1], -1)


@cache  # and never forgotten, as graphs read them
def _inside(side: int, width: int, device: torch.device) -> Tensor:
    """Return the places of all pixels of a window relative to its corner, in rows of `width`."""
    steps = torch.arange(side, device=device)
    return (steps[:, None] * width + steps).flatten()


@cache  # and never forgotten, as graphs read them
def bumps(side: int, device: torch.device) -> Tensor:
    """Return a window (side,side) of length 1: a bump above a negative one.

    A bump is a pile of nested squares, of which square k reaches k pixels from the middle and is
    1 / (k + 1)^2 high."""
    upper, across = side // 2, torch.arange(side) - side // 2
    heights = 1 / torch.arange(1, upper + 2).square()
    heights = heights.flip(0).cumsum(0).flip(0)
    parts = []
    for rows, sign in ((upper, 1), (side - upper, -1)):
        down = torch.arange(rows) - rows // 2
        bump = heights[torch.maximum(down[:, None].abs(), across.abs())]
        parts.append(sign * bump / bump.norm().clamp_min(1e-12))
    both = torch.cat(parts)
    window: Tensor = both / both.norm()
    return window.to(device)


def _signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(shape, generator=generator, device=generator.device)
    return _sign_of(drawn.to(like))


def _sign_of(drawn: Tensor) -> Tensor:
    """Return -1 or 1 for numbers between 0 and 1, with the same probability."""
    return torch.where(drawn < 0.5, -1.0, 1.0).to(drawn)


@register_attack
@dataclass(frozen=True, eq=False)
class Pixle(Attack):
    """Pixle (Pomponi et al. 2022): copies pixels of small patches to other places of an image.

    Each iteration draws a patch of the original image and a new place for each of its pixels, and
    writes them over the best image of the previous restarts. The next restart begins from the image
    with the lowest probability of the right class, or in regression with the largest error. A wrong
    answer ends the attack. The original attack has no ball, so use one that covers the bounds;
    within a smaller ball each image is projected before the model answers it.

    Parameters
    ----------
    x_dimensions, y_dimensions : (float, float)
        The least and the largest side of a patch, as shares of the width and of the height.
    restarts, max_iterations : int
        Their product is the largest number of answers asked for each example.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = torch.nn.Flatten().eval()
    >>> x, y = torch.eye(4).view(4, 1, 2, 2), torch.arange(4)
    >>> attack = otad.attacks.Pixle(restarts=5, max_iterations=5)
    >>> generator = torch.Generator().manual_seed(0)
    >>> result = attack(model, x, y, otad.L2(2.0, bounds=(0.0, 1.0)), generator=generator)
    >>> result.inputs.unique().tolist()
    [0.0, 1.0]
    """

    x_dimensions: Share = option((0.03, 0.06), _check_share)
    y_dimensions: Share = option((0.03, 0.06), _check_share)
    restarts: int = option(20, check_count)
    max_iterations: int = option(10, check_count)
    name = "pixle"
    family = "black-box"
    needs = Needs(images=True)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        pixels = x.flatten(2)
        # origins[b, j]: which pixel of the original image b is at place j.
        origins = torch.arange(pixels.shape[2], device=x.device).repeat(len(x), 1)
        best, rows, lowest = origins.clone(), survivors.rows, _height(target(x), target.y)
        for _ in range(self.restarts):
            for _ in range(self.max_iterations):
                tried = self._rearranged(origins[rows], x.shape[2:], generator)
                places = tried[:, None].expand_as(pixels[rows])
                moved = survivors.project(pixels[rows].gather(2, places).view_as(x[rows]), rows)
                outputs = target(moved, rows)
                height = _height(outputs, target.targets(rows))
                better = height < lowest[rows]
                lowest[rows] = torch.where(better, height, lowest[rows])
                best[rows] = torch.where(better[:, None], tried, best[rows])
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    return survivors.inputs
            origins = best.clone()
        return survivors.inputs

    def _rearranged(self, origins: Tensor, sides: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the origins (B,HW) after copying one patch of each image to random places."""
        (height, width), count = sides, len(origins)
        top, rows = _spans(height, self.y_dimensions, count, generator)
        left, columns = _spans(width, self.x_dimensions, count, generator)
        copies = []
        for down, right in itertools.product(range(int(rows.max())), range(int(columns.max()))):
            inside = (down < rows) & (right < columns)
            source = ((top + down) * width + left + right).masked_fill(~inside, -1)
            copies.append((source, torch.randint(height * width, (count,), generator=generator)))
        result, images = origins.clone(), torch.arange(count, device=origins.device)
        for source, place in torch.stack([torch.stack(pair) for pair in copies]).to(images.device):
            at = images, place
            result[at] = torch.where(source >= 0, source, result[at])
        return result


def _spans(side: int, shares: Share, count: int, generator: torch.Generator) -> list[Tensor]:
    """Draw starts and lengths (B,) of patches along a side of the image, at least one pixel."""
    low, high = (max(1, round(side * share)) for share in shares)
    lengths = torch.randint(low, high + 1, (count,), generator=generator)
    starts = torch.rand(count, generator=generator, dtype=torch.float64) * (side - lengths + 1)
    return [starts.long(), lengths]


def _height(outputs: Tensor, y: Tensor) -> Tensor:
    """Return what the attack lowers (B,): the log-probability of the right class or -error."""
    return -(gain_of if y.is_floating_point() else cross_entropy)(outputs, y)
