"""Pixle (Pomponi et al. 2022): an attack that rearranges pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import cross_entropy
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

Share = tuple[float, float]


@register_attack
@dataclass(frozen=True, eq=False)
class Pixle(Attack):
    """Copies the pixels of small patches to other places of the image (B,C,H,W).

    Each iteration draws a patch of the original image and a place for each of its pixels, and
    writes them over the best image of the restarts before. The arrangement with the lowest
    probability of the right class is where the next restart begins; one that is answered
    wrongly ends the attack. In regression the error counts instead.

    The original knows no ball: give one that covers the bounds. Within a smaller one each
    arrangement is projected before it is judged.

    - `x_dimensions`, `y_dimensions`: least and largest side of a patch, as a share of the image's.
    - `restarts`, `max_iterations`: their product is the most answers asked for each example.
    """

    x_dimensions: Share = (0.03, 0.06)
    y_dimensions: Share = (0.03, 0.06)
    restarts: int = 20
    max_iterations: int = 10
    name = "pixle"
    family = "black-box"
    needs = Needs(images=True)

    def __post_init__(self) -> None:
        for name in ("x_dimensions", "y_dimensions"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise InputError(
                    f"{name}: expected two ascending shares of the image above 0 and up to 1, "
                    f"got {(low, high)!r}"
                )
        check_count(self.restarts, "restarts")
        check_count(self.max_iterations, "max_iterations")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        pixels = x.flatten(2)
        # origins[b, j]: the pixel of the original image b at place j.
        origins = torch.arange(pixels.shape[2]).repeat(len(x), 1)
        best = origins.clone()
        rows = survivors.rows
        lowest = _height(target(x), target.y)
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


def _spans(
    side: int, shares: Share, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random starts and lengths (B,) of patches along a side of the image, at least one pixel."""
    low, high = (max(1, round(side * share)) for share in shares)
    lengths = torch.randint(low, high + 1, (count,), generator=generator)
    starts = torch.rand(count, generator=generator, dtype=torch.float64) * (side - lengths + 1)
    return starts.long(), lengths


def _height(outputs: Tensor, y: Tensor) -> Tensor:
    """What the attack lowers (B,): the log-probability of the right class, or minus the error."""
    if y.is_floating_point():
        return -gain_of(outputs, y)
    return -cross_entropy(outputs, y)
