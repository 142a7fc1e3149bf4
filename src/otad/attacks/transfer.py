"""Attacks that transfer: what breaks one network is tried on another."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.pgd import Pgd
from otad.attacks.target import Survivors, Target, check_outputs
from otad.checks import check_count, check_evaluation
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class Transfer(Attack):
    """An attack on another network, whose results are then tried on the model.

    The model under attack is asked about each result only. In regression, with `Pgd` as the inner
    attack, this is the OTAD paper's non-adaptive white-box attack.

    Parameters
    ----------
    source : nn.Module
        The network that is attacked, usually the undefended one.
    inner : Attack
        The attack on the source, by default `Pgd()`.
    starts : int
        How often the inner attack is run.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> source = torch.nn.Identity().eval()
    >>> model, x, y = torch.nn.Tanh().eval(), torch.eye(3), torch.arange(3)
    >>> attack = otad.attacks.Transfer(source=source, inner=otad.attacks.Pgd(steps=10))
    >>> attack(model, x, y, otad.L2(1.0), generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    source: nn.Module = field(metadata={"known": "network"})
    inner: Attack = field(default_factory=Pgd)
    starts: int = option(1, check_count)
    name = "transfer"
    version = 2
    family = "black-box"
    needs = Needs(network=True)

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
            # Not breakable: an input that barely breaks the source seldom breaks another model.
            source = Target(self.source, target.targets(rows), breakable=False)
            examples = x[rows]
            found = self.inner.run(source, examples, ball, generator).detach()
            target.blind[rows] |= source.blind
            moved = torch.where(found.isfinite(), found, examples)
            survivors.ask(survivors.project(moved, rows), rows)
        return survivors.inputs
