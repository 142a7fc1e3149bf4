"""Red flags: checks whether the figures of an evaluation can be trusted.

A check is a function of a `FlagContext` that says whether all is well, and what it found; it raises
`NotRunError` where it does not apply. `check` gives it a name, a meaning and advice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.evaluate.identity import generator_for
from otad.evaluate.records import FAIL, NOT_RUN, PASS, AttackRecord, CertificateRecord, Flag

SAMPLE = 64  # examples a check uses


@dataclass(frozen=True, eq=False)
class FlagContext:
    """A model, examples x (n,*) with answers y (n,), and what the attacks did to them.

    `right` (n,): answered right unattacked (regression: all). `train_x`: the training inputs, where
    they were given.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: LpBall
    right: Tensor
    attacks: tuple[Attack, ...] = ()
    records: tuple[AttackRecord, ...] = ()
    certificate: CertificateRecord | None = None
    seed: int = 0
    train_x: Tensor | None = None

    @property
    def is_regression(self) -> bool:
        return self.y.is_floating_point()

    def generator(self, flag: str) -> torch.Generator:
        return generator_for(self.seed, "flag", flag)

    def sample(self, count: int = SAMPLE) -> tuple[Tensor, Tensor]:
        """At most `count` random examples that are answered right unattacked, and their answers."""
        rows = self.right.nonzero()[:, 0]
        if not len(rows):
            raise NotRunError("no example is right unattacked")
        chosen = torch.randperm(len(rows), generator=self.generator("sample"))[:count]
        places = rows[chosen].sort().values.to(self.x.device)
        return self.x[places], self.y[places]


class NotRunError(Exception):
    """The reason why a check was not made: an open question, not a good sign."""


Check = Callable[[FlagContext], Flag]
CHECKS: list[Check] = []


def check(
    name: str, meaning: str, advice: str
) -> Callable[[Callable[[FlagContext], tuple[bool, str]]], Check]:
    """Registers a function that returns whether all is well, and what was found."""

    def decorated(function: Callable[[FlagContext], tuple[bool, str]]) -> Check:
        @functools.wraps(function)
        def checked(context: FlagContext) -> Flag:
            try:
                is_well, found = function(context)
            except NotRunError as reason:
                unknown = "Nothing is known here; do not read it as PASS."
                return Flag(name, NOT_RUN, str(reason), meaning, unknown)
            if is_well:
                return Flag(name, PASS, found, meaning, "Nothing to do.")
            return Flag(name, FAIL, found, meaning, advice)

        CHECKS.append(checked)
        return checked

    return decorated


def remark_flag(attack: str, remarks: list[str]) -> Flag:
    """What an attack itself, such as AutoAttack, remarked about the model."""
    return Flag(
        f"{attack} has remarks on the model",
        FAIL,
        " ".join(remarks),
        "The attack noticed something about the model under which its own figure may be too "
        "optimistic. For a nearest-neighbor defense, zero gradients are expected where the "
        "answer rests on one bank point, and its search by gradient is blind there.",
        "Read its figure together with the attacks that move the neighbors; the worst case "
        "over all of them is what counts.",
    )
