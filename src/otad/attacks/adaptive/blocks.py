"""Examples and a view of the bank, a block at a time: what all attacks on a bank work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.apgd import Apgd
from otad.attacks.base import Survivors, Target
from otad.model.otad import OTAD


@dataclass(frozen=True, eq=False)
class Block:
    """The examples `rows` (n,) int64 of an attack, and one view of the bank."""

    survivors: Survivors
    bank: Neighborhood
    rows: Tensor

    @property
    def target(self) -> Target:
        return self.survivors.target

    @property
    def x(self) -> Tensor:
        """The examples themselves (n,*)."""
        return self.survivors.x[self.rows]

    @property
    def y(self) -> Tensor:
        """Their right answers (n,)."""
        return self.target.targets(self.rows)

    @property
    def is_regression(self) -> bool:
        return self.target.y.is_floating_point()

    def __len__(self) -> int:
        return len(self.rows)

    def remaining(self) -> Block:
        """Without the examples that are broken."""
        return replace(self, rows=self.survivors.among(self.rows))

    def offer(self, moved: Tensor) -> None:
        """Ask the model about inputs (n,*) of the ball; see `Survivors.offer`."""
        self.survivors.offer(moved, self.rows)

    def try_point(self, embedded: Tensor) -> Tensor:
        """Offer embedded points (n,d) as inputs projected into the ball, which are returned."""
        moved = self.survivors.project(self.bank.inputs(embedded, self.x), self.rows)
        self.offer(moved)
        return moved


def blocks_of(survivors: Survivors, train_x: Tensor | None = None) -> Iterator[Block]:
    """For each view of the bank, all examples in blocks that fit in memory."""
    x = survivors.x
    for bank in Neighborhood.views(survivors.target.model, x, train_x):
        for rows in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
            yield Block(survivors, bank, rows)


def polish(survivors: Survivors, steps: int) -> Tensor:
    """`steps` of APGD with the model's own gradient from the best inputs found (B,*).

    Among the neighbors of x that gradient cannot see other points; among wrong ones it weighs them
    as the model does, which no attack on neighbors alone can. k-NN has no gradient.
    """
    found, target = survivors.inputs, survivors.target
    if steps == 0 or not isinstance(target.model, OTAD):
        return found
    return Apgd(steps=steps).climb_on(target, survivors.x, found, survivors.ball)
