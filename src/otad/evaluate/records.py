"""Records of an evaluation: which attack broke which rows, at which distance and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from otad.checks import require
from otad.io.codec import from_plain, read_json, to_plain, write_json
from otad.io.environment import Environment
from otad.model.account import SolverAccount
from otad.model.model_card import Figures
from otad.scores import Score, share_score

FORMAT = "otad-evaluation-1"
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
CERTIFICATE_CHECK = "certificate check"  # the flag whose failure is a bug


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an attack did to some examples: numbers of rows, from 0.

    `attacked`: all it was run on; `broken`: those it broke, at these `distances`; `abstained`: the
    broken ones where the model gives no answer. `errors`: |f - y| of the attacked rows of a
    regression, where nothing is broken. `forwards`, `backwards`: answers and gradients computed."""

    attacked: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    distances: tuple[float, ...] = ()
    abstained: tuple[int, ...] = ()
    errors: tuple[float, ...] = ()
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AttackRecord(Findings):
    """One attack at one eps."""

    attack: str
    family: str
    eps: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class CertificateRecord:
    """Certified radii of all rows; in regression, bounds on |f - y| at the eps of the threat."""

    radius: tuple[float, ...]
    rules: tuple[str, ...]
    assumptions: tuple[str, ...]
    worst_errors: tuple[float, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Flag:
    """A red-flag check: its verdict, what was found, what it means and what to do about it."""

    name: str
    verdict: str
    found: str
    meaning: str
    advice: str


SolverRecord = SolverAccount
QUANTILES = ("least", "median", "quantile_90", "quantile_99", "most")


@dataclass(frozen=True)
class Evaluation:
    """The whole evaluation of a model on n examples.

    `threat` is `LpBall.to_dict()` with the headline eps; `eps` all radii attacked, ascending.
    `clean`: scores without attack, by predictor ("net", "otad", "knn_majority",
    "knn_mean_feature", or "model" for any other one). `clean_right`: rows answered right without
    attack (regression: all). `clean_errors`: |f - y| without attack (regression only). `seconds`:
    with those of batches that an earlier run had finished. `missing`: attacks that were not run,
    and why. `skipped_proved`: attacks that skipped rows with a certificate of that radius.
    `undefended`: the same of the network inside a defended model, alone: the same examples and eps,
    its own attacks. None where it was not evaluated, `undefended_reason` where it cannot be."""

    task: str
    n: int
    seed: int
    model: dict[str, Any]
    threat: dict[str, Any]
    eps: tuple[float, ...]
    attacker_knows: str
    environment: Environment
    clean: dict[str, Score]
    clean_right: tuple[int, ...]
    clean_errors: tuple[float, ...]
    attacks: tuple[AttackRecord, ...]
    certificate: CertificateRecord | None
    flags: tuple[Flag, ...]
    solver: SolverAccount | None
    seconds: float
    missing: dict[str, str] = field(default_factory=dict)
    skipped_proved: tuple[str, ...] = ()
    undefended: Evaluation | None = None
    undefended_reason: str = ""
    format: str = FORMAT

    def __repr__(self) -> str:
        if self.task == "classification":
            found = f"worst case {self.worst_case_accuracy:.1%}"
            if self.undefended is not None:
                found += f" (undefended {self.undefended.worst_case_accuracy:.1%})"
            if (proved := self.certified_accuracy(self.headline_eps)) is not None:
                found += f", certified {proved.value:.1f}%"
        else:
            found = f"mean worst error {sum(self.worst_errors()) / self.n:.4g}"
        sizes = f"{self.n} examples, {self.threat['norm']} eps {self.headline_eps:g}"
        failed = sum(one.verdict == FAIL for one in self.flags)
        attacks, flags = len({one.attack for one in self.attacks}), len(self.flags)
        ran = f"{attacks} attacks, {failed} of {flags} flags failed"
        return f"Evaluation({sizes}: {found}; {ran})"

    @property
    def headline_eps(self) -> float:
        return float(self.threat["eps"])

    @property
    def checks(self) -> list[Flag]:
        """The red flags of the model, and of the attacks on its undefended network."""
        return [*self.flags, *(() if self.undefended is None else self.undefended.flags)]

    @property
    def is_sound(self) -> bool:
        """No attack contradicts a certificate."""
        return (CERTIFICATE_CHECK, FAIL) not in {(one.name, one.verdict) for one in self.flags}

    @property
    def worst_case_accuracy(self) -> float:
        """At the eps of the threat; see `worst_case`."""
        return self.worst_case().value / 100

    @property
    def per_attack(self) -> dict[str, float]:
        """Accuracy at the eps of the threat when only this attack counts. Rows that it skipped
        count as right, so it is the attack's own strength only with `survivors_only=False`."""
        names = dict.fromkeys(record.attack for record in self.attacks)
        return {name: self.accuracy_under([name], self.headline_eps).value / 100 for name in names}

    def worst_case(self, eps: float | None = None) -> Score:
        """The share of examples that are right and that no attack broke within eps."""
        return self.accuracy_under(None, self.headline_eps if eps is None else eps)

    def accuracy_under(self, attacks: Sequence[str] | None, eps: float) -> Score:
        """The same with only these attacks counted, or all."""
        require(self.task == "classification", "accuracy", "a classifier", self.task)
        distances = self.distances(attacks)
        return share_score(sum(distances[row] > eps for row in self.clean_right), self.n)

    def distances(self, attacks: Sequence[str] | None = None) -> list[float]:
        """The shortest distance at which each row is known to be wrong: 0 where it is so without
        attack, infinite where no attack (of these) broke it."""
        found = [0.0] * self.n
        for row in self.clean_right:
            found[row] = math.inf
        for record in self.attacks:
            if attacks is None or record.attack in attacks:
                for row, distance in zip(record.broken, record.distances, strict=True):
                    found[row] = min(found[row], distance)
        return found

    def worst_errors(self, eps: float | None = None) -> list[float]:
        """Regression: the largest |f - y| any attack of size at most eps found for each row."""
        limit = self.headline_eps if eps is None else eps
        found = list(self.clean_errors)
        for record in self.attacks:
            if record.eps <= limit:
                for row, error in zip(record.attacked, record.errors, strict=True):
                    found[row] = max(found[row], error)
        return found

    def certified_accuracy(self, eps: float) -> Score | None:
        """The share of examples that are right and proved to stay so within eps."""
        if self.certificate is None or self.task != "classification":
            return None
        radius = self.certificate.radius
        return share_score(sum(radius[row] > eps for row in self.clean_right), self.n)

    def figures(self, model: str) -> Figures:
        """What the model card of the model with this digest says of it."""
        alone = self.undefended
        right = self.task == "classification"
        checks = self.checks
        return Figures(
            model=model,
            measure="accuracy" if right else "mean absolute error",
            rows=self.n,
            norm=str(self.threat["norm"]),
            unit=str(self.threat.get("unit_name", "")),
            eps=self.eps,
            clean=len(self.clean_right) / self.n if right else fmean(self.clean_errors),
            worst=self._worst_figures(),
            undefended=() if alone is None else alone._worst_figures(),
            proved=self._proved_figures(),
            attacks=tuple(dict.fromkeys(one.attack for one in self.attacks)),
            checks=len(checks),
            failed_checks=sum(one.verdict == FAIL for one in checks),
        )

    def _worst_figures(self) -> tuple[float, ...]:
        if self.task == "classification":
            return tuple(self.worst_case(eps).value / 100 for eps in self.eps)
        return tuple(fmean(self.worst_errors(eps)) for eps in self.eps)

    def _proved_figures(self) -> tuple[float | None, ...]:
        if self.certificate is None:
            return ()
        if self.task == "classification":
            scores = [self.certified_accuracy(eps) for eps in self.eps]
            return tuple(None if one is None else one.value / 100 for one in scores)
        bound = fmean(self.certificate.worst_errors) if self.certificate.worst_errors else None
        return tuple(bound if eps == self.headline_eps else None for eps in self.eps)

    def write(self, path: Path) -> None:
        write_json(path, to_plain(self))

    @staticmethod
    def read(path: Path) -> Evaluation:
        content = read_json(path)
        kind = content.get("format") if isinstance(content, dict) else None
        require(kind == FORMAT, str(path), f"an evaluation of format {FORMAT}", kind)
        if "spared_proved" in content:  # the name in older files
            content["skipped_proved"] = content.pop("spared_proved")
        for flag in content.get("flags", ()):
            if flag.get("name") == "certificate sandwich":  # likewise
                flag["name"] = CERTIFICATE_CHECK
        solver = content.get("solver") or {}
        if isinstance(used := solver.get("smoothness"), list):  # quantiles alone, in older files
            whole = dict(zip(QUANTILES, used, strict=False))
            solver["smoothness"] = whole | {"count": content["n"], "mean": "nan"} if used else None
        record: Evaluation = from_plain(Evaluation, content, path.name)
        return record
