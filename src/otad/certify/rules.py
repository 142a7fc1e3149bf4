"""Certificate rules, and what they share: the model, how far its queries move, and its votes.

A rule is a class in a file of its own, registered under its name. The model's answerer lists the
rules that can apply to it; the best of them counts, row by row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from otad.certify.bisectors import BankBisectors
from otad.certify.input_reach import InputReach, Query
from otad.certify.votes import Votes
from otad.errors import InputError
from otad.model.otad import OTAD, Trace

PRECISION = "matrix products of the head keep full float32 precision (no TF32, no autocast)"


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is certified, and how far a change of the input moves its queries."""

    model: OTAD
    reach: InputReach

    @cached_property
    def votes(self) -> Votes:
        return Votes(self.model, self.reach.embedded)


class Batch:
    """Some inputs (B,*) with their queries and their trace."""

    def __init__(self, subject: Subject, x: Tensor) -> None:
        self.subject = subject
        self.query: Query = subject.reach.query(x)
        self.trace: Trace = subject.model.trace(x)
        outputs = self.trace.outputs
        bad = ~outputs.isfinite().reshape(len(outputs), -1).all(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise InputError(f"model: expected finite outputs, got {outputs[row].tolist()}")

    @property
    def prediction(self) -> Tensor:
        """The predicted classes (B,)."""
        return self.trace.outputs.argmax(1)

    @cached_property
    def bisectors(self) -> BankBisectors:
        stretch = self.subject.reach.keys.stretch
        return BankBisectors(self.query.keys.double(), self.subject.model.bank_points, stretch)


class Rule(ABC):
    """Proves what cannot change while the query moves by u, |u| bounded (see `Reach`).

    `if_used`: assumptions that are stated where the rule gave a bound.
    """

    name: ClassVar[str]
    if_used: ClassVar[tuple[str, ...]] = ()

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

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
