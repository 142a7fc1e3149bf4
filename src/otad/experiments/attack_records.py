"""What attacks leave in the record of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from otad.evaluate import Flag
from otad.model.diagnostics import Distribution
from otad.scores import Score

WORST = "worst"


@dataclass(frozen=True)
class AttackedScore:
    """What is left of a row's score under attack, on `score.n` test points.

    `clean`: the score on the same points unattacked. `metrics`: further measures of a regression
    (see `otad.experiments.shifts`). `distance`: how far off the inputs lie that turned a right
    answer wrong; in regression, all. `eps`: None for the whole box. `forwards` and `backwards`:
    answers and gradients asked for, summed over the points.
    """

    label: str
    score: Score
    clean: Score
    metrics: dict[str, float]
    distance: Distribution | None
    eps: float | None
    threat: str
    settings: dict[str, Any]
    forwards: int
    backwards: int
    seconds: float


@dataclass(frozen=True)
class Goal:
    """A number asked for: `value` in percent, at most or at least."""

    value: float
    at_most: bool

    def is_met(self, score: Score) -> bool:
        return score.value <= self.value if self.at_most else score.value >= self.value


@dataclass(frozen=True)
class SuiteLine:
    """One radius: the worst case over all attacks and the certified accuracy of some rows.

    `goals` are by row, `WORST` for the worst case. `seconds`: of the attacks at this radius.
    """

    eps: float
    worst: Score
    certified: dict[str, Score]
    goals: dict[str, Goal]
    seconds: float


@dataclass(frozen=True)
class SuiteCost:
    """An attack over all radii: the points it was run on, those it broke, and what it asked."""

    attack: str
    family: str
    attacked: int
    broken: int
    forwards: int
    backwards: int
    seconds: float


@dataclass(frozen=True)
class SuiteRecord:
    """The summary of an evaluation by the whole suite; all of it is in `folder`, beside the record.

    `clean`: scores by predictor without attack, on the same points; the evaluated one is "otad".
    """

    row: str
    threat: str
    attacker_knows: str
    clean: dict[str, Score]
    lines: tuple[SuiteLine, ...]
    costs: tuple[SuiteCost, ...]
    flags: tuple[Flag, ...]
    folder: str
    seconds: float
    missing: dict[str, str] = field(default_factory=dict)
