"""Certificate rules, and the batches they work on.

A rule is a class in a file of its own in this folder, registered by `register`. The model's
answerer names the rules that can apply to it; the best of them counts, row by row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from otad.certify.bisectors import BankBisectors
from otad.certify.input_reach import InputReach
from otad.checks import require
from otad.cip import Status
from otad.model.otad import OTAD

PRECISION = "matrix products of the head keep full float32 precision (no TF32, no autocast)"


class Batch:
    """Inputs x (B,*) with `embedded` (B,d), `keys` (B,m), their trace, `prediction` (B,) and
    whether they were `solved` (B,)."""

    @torch.no_grad()
    def __init__(self, reach: InputReach, x: Tensor) -> None:
        model = reach.model
        self.stretch, self.points = reach.keys.stretch, model.bank_points
        self.embedded = model.backbone.embed(x)
        self.keys = self.embedded if model.metric is None else model.query_keys(x)
        self.sides = reach.sides(x, self.embedded, self.keys)
        self.trace = model.trace(x)
        outputs = self.trace.outputs
        bad = ~outputs.isfinite().reshape(len(outputs), -1).all(1)
        require(not bool(bad.any()), "model", "finite outputs", outputs[bad][:1].tolist())
        self.solved = self.trace.solution.status == int(Status.SOLVED)

    @property
    def prediction(self) -> Tensor:
        return self.trace.outputs.argmax(1)

    @cached_property
    def bisectors(self) -> BankBisectors:
        return BankBisectors(self.keys.double(), self.points, self.stretch)

    def to_input(self, radius: Tensor) -> Tensor:
        """The largest r (B,) for which |u| stays within `radius` (B,) in both spaces."""
        return torch.stack([side.to_input(radius, size) for side, size in self.sides]).amin(0)

    def from_input(self, eps: float) -> Tensor:
        """The largest |u| (B,) of both spaces for inputs within eps."""
        return torch.stack([side.from_input(eps, size) for side, size in self.sides]).amax(0)


class Rule(ABC):
    """Proves what cannot change while the query moves by u, |u| bounded (see `Reach`).

    `if_used`: assumptions that are stated where the rule gave a bound.
    """

    name: ClassVar[str]
    if_used: ClassVar[tuple[str, ...]] = ()

    def __init__(self, reach: InputReach) -> None:
        self.reach, self.model = reach, reach.model

    @classmethod
    def applies(cls, reach: InputReach) -> bool:
        """Whether all that the rule needs is known."""
        return True

    @staticmethod
    @abstractmethod
    def rows_at_once(model: OTAD) -> int:
        """How many queries fit into the working memory."""

    def assumptions(self) -> tuple[str, ...]:
        """What the rule rests on, in words."""
        return ()

    @abstractmethod
    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        """|u| (B,) within which predictions cannot change. Need not be found where it is no larger
        than `known` (B,)."""

    @abstractmethod
    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        """Regression: the least and the largest answer (B,) while |u| <= `reached` (B,)."""


RULES: dict[str, type[Rule]] = {}


def register(rule: type[Rule]) -> type[Rule]:
    RULES[rule.name] = rule
    return rule
