"""Attack one model, and test the result on another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, Survivors, Target, check_outputs, register_attack
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.pgd import Pgd
from otad.checks import check_count, check_evaluation
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class Transfer(Attack):
    """Run the `inner` attack on `source` (the undefended network, say), `starts` times.

    The attacked model is asked for its answer to each result, and for nothing else.

    In regression, with `Pgd` as the inner attack, this is the OTAD paper's non-adaptive white-box
    attack: it maximizes the error of the network, and the defense is tested on the result.
    """

    source: nn.Module
    inner: Attack = field(default_factory=Pgd)
    starts: int = 1
    name = "transfer"
    family = "black-box"
    needs = Needs(network=True)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        return super().for_model(known, **{"source": known.network} | options)

    def __post_init__(self) -> None:
        check_count(self.starts, "starts")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        check_evaluation(self.source, "source")
        self.inner.check_inputs(x, target.y, ball)
        with torch.no_grad():
            check_outputs(self.source(x), target.y, "source")
        survivors = Survivors(target, x, ball)
        for _ in range(self.starts):
            rows = survivors.rows
            if not len(rows):
                break
            source = Unbreakable(self.source, target.targets(rows))
            examples = x[rows]
            found = self.inner.run(source, examples, ball, generator).detach()
            moved = ball.project(torch.where(found.isfinite(), found, examples), examples)
            survivors.ask(moved, rows)
        return survivors.inputs


class Unbreakable(Target):
    """A source is pushed as far as it goes: what just breaks it seldom breaks another model."""

    def is_broken(self, outputs: Tensor, rows: Tensor | None = None) -> Tensor:
        return torch.zeros(len(outputs), dtype=torch.bool, device=outputs.device)

    def is_done(self, gain: Tensor) -> Tensor:
        return torch.zeros_like(gain, dtype=torch.bool)
