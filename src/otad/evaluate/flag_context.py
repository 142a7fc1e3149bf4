"""All that a flag may look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.evaluate.clean import Clean
from otad.evaluate.identity import generator_for
from otad.evaluate.records import NOT_RUN, AttackRecord, CertificateRecord, Flag

SAMPLE = 64  # examples a flag runs something on


@dataclass(frozen=True, eq=False)
class Scene:
    """A model, examples x (n,*) with answers y (n,), and what the attacks have done to them.

    `remarks`: what attacks had to say about the model, by their name. `train_x`: the training
    inputs, where they were given.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: LpBall
    attacks: tuple[Attack, ...]
    records: tuple[AttackRecord, ...]
    clean: Clean
    certificate: CertificateRecord | None
    remarks: dict[str, list[str]]
    seed: int
    train_x: Tensor | None = None

    @property
    def task(self) -> str:
        return "regression" if self.y.is_floating_point() else "classification"

    def generator(self, flag: str) -> torch.Generator:
        """The randomness of a flag: always the same."""
        return generator_for(self.seed, "flag", flag)

    def sample(self, count: int = SAMPLE) -> tuple[Tensor, Tensor]:
        """Up to so many random examples that are right unattacked, and their answers."""
        rows = self.clean.right.nonzero()[:, 0]
        chosen = torch.randperm(len(rows), generator=self.generator("sample"))[:count]
        places = rows[chosen].sort().values.to(self.x.device)
        return self.x[places], self.y[places]


def not_run(name: str, reason: str, meaning: str) -> Flag:
    """A check that could not be made, and why: an open question, not a good sign."""
    return Flag(name, NOT_RUN, reason, meaning, "Nothing is known here; do not read it as PASS.")
