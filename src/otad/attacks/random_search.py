"""Black-box attacks by random draws: points, search from the best one, and rearranged pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import cross_entropy
from otad.checks import check_count, require
from otad.threat import LpBall, per_row

GROWTH = 1.5  # of the step after a success; four failures undo it (the one-fifth rule)
LONGEST = 2.0  # step, in units of eps: across the ball
SHORTEST = {"l2": 2.0**-10, "linf": LONGEST}  # the best points of a cube are its corners

Share = tuple[float, float]


def _check_share(share: Share, name: str) -> None:
    low, high = share
    expected = "two ascending shares of the image above 0 and up to 1"
    require(0 < low <= high <= 1, name, expected, repr((low, high)))


@register_attack
@dataclass(frozen=True, eq=False)
class RandomNoise(Attack):
    """The best of `draws` random points, in turn on the surface of the ball and within it."""

    draws: int = option(100, check_count)
    name = "noise"
    family = "random"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
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
    """Each of `queries` changes a few features of the best input so far, and stays if it is better.

    How many features: log-uniform from one to all. The change is a random step in the ball's own
    norm: in l2 of a length that each example adapts by the one-fifth rule, in l-infinity from one
    face of the ball to the other."""

    queries: int = option(2000, check_count, least=2)
    name = "random_search"
    family = "black-box"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        free = ball.free_features(x).cpu()
        if not len(free):
            return x
        survivors = Survivors(target, x, ball)
        rows, moved, length = survivors.rows, x, x.new_full((len(x),), ball.eps)
        for _ in range(self.queries):
            before = survivors.gain[rows]
            alive = survivors.ask(moved, rows)
            better = survivors.gain[rows] > before
            length[rows] *= torch.where(better, GROWTH, GROWTH**-0.25).to(x)
            length.clamp_(SHORTEST[ball.norm] * ball.eps, LONGEST * ball.eps)
            rows = rows[alive]
            if not len(rows):
                break
            drawn = _sparse_draw(x[rows], free, generator)
            step = per_row(length[rows], x) * ball.steepest(drawn)
            moved = survivors.project(survivors.inputs[rows] + step, rows)
        return survivors.inputs


def _sparse_draw(x: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers (B,*) at a random choice of the free features, at least one, 0 elsewhere."""
    count = len(x)
    share = len(free) ** -torch.rand(count, 1, generator=generator)
    values = torch.randn(count, len(free), generator=generator)
    chosen = torch.rand(count, len(free), generator=generator) < share
    chosen[torch.arange(count), torch.randint(len(free), (count,), generator=generator)] = True
    drawn = torch.zeros(count, x[0].numel())
    drawn[:, free] = values * chosen
    return drawn.view(x.shape).to(x)


@register_attack
@dataclass(frozen=True, eq=False)
class Pixle(Attack):
    """Pixle (Pomponi et al. 2022) copies the pixels of small patches to other places of (B,C,H,W).

    Each iteration draws a patch of the original image and a place for each of its pixels, and
    writes them over the best image of the restarts before. The arrangement with the lowest
    probability of the right class (in regression, the largest error) is where the next restart
    begins; a wrong answer ends the attack. The original knows no ball: give one that covers the
    bounds. Within a smaller one each arrangement is projected before it is judged.

    - `x_dimensions`, `y_dimensions`: least and largest side of a patch, as a share of the image's.
    - `restarts`, `max_iterations`: their product is the most answers asked for each example."""

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
        # origins[b, j]: the pixel of the original image b at place j.
        origins = torch.arange(pixels.shape[2]).repeat(len(x), 1)
        best, rows, lowest = origins.clone(), survivors.rows, _height(target(x), target.y)
        for _ in range(self.restarts):
            for _ in range(self.max_iterations):
                chosen = rows.cpu()
                tried = self._rearranged(origins[chosen], x.shape[2:], generator)
                places = tried.to(x.device)[:, None].expand_as(pixels[rows])
                moved = survivors.project(pixels[rows].gather(2, places).view_as(x[rows]), rows)
                outputs = target(moved, rows)
                height = _height(outputs, target.targets(rows))
                better = height < lowest[rows]
                lowest[rows[better]] = height[better]
                best[chosen[better.cpu()]] = tried[better.cpu()]
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    return survivors.inputs
            origins = best.clone()
        return survivors.inputs

    def _rearranged(self, origins: Tensor, sides: torch.Size, generator: torch.Generator) -> Tensor:
        """Origins (B,HW) with the pixels of one patch of each image at random new places."""
        height, width = sides
        top, rows = _spans(height, self.y_dimensions, len(origins), generator)
        left, columns = _spans(width, self.x_dimensions, len(origins), generator)
        result = origins.clone()
        for down in range(int(rows.max())):
            for right in range(int(columns.max())):
                inside = (down < rows) & (right < columns)
                source = ((top + down) * width + left + right).masked_fill(~inside, 0)
                places = torch.randint(height * width, (len(origins),), generator=generator)
                result[inside.nonzero()[:, 0], places[inside]] = source[inside]
        return result


def _spans(side: int, shares: Share, count: int, generator: torch.Generator) -> list[Tensor]:
    """Random starts and lengths (B,) of patches along a side of the image, at least one pixel."""
    low, high = (max(1, round(side * share)) for share in shares)
    lengths = torch.randint(low, high + 1, (count,), generator=generator)
    starts = torch.rand(count, generator=generator, dtype=torch.float64) * (side - lengths + 1)
    return [starts.long(), lengths]


def _height(outputs: Tensor, y: Tensor) -> Tensor:
    """What the attack lowers (B,): the log-probability of the right class, or minus the error."""
    return -(gain_of if y.is_floating_point() else cross_entropy)(outputs, y)
