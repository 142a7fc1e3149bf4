"""Records of an evaluation: which attack broke which rows, at which distance and cost."""

from __future__ import annotations

import math
from collections import Counter
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
    """What an attack did to some examples, which are numbered from 0: see `AttackRecord`."""

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
    """One attack at one eps: which examples it broke, and at what cost.

    Attributes
    ----------
    attack, family : str
        The name of the attack, and its family such as "white-box".
    eps : float
        The radius.
    settings : dict
        The options of the attack.
    attacked, broken, abstained : tuple of int
        The examples that it was run on, those that it broke, and those of them for which the model
        gives no answer.
    distances : tuple of float
        The distance of each broken example.
    errors : tuple of float
        In regression, `|f - y|` of the attacked examples.
    forwards, backwards, seconds
        How many answers and gradients were computed, and the time.

    Examples
    --------
    >>> from otad.evaluate import AttackRecord
    >>> record = AttackRecord(
    ...     attack="pgd", family="white-box", eps=0.5, settings={"steps": 20},
    ...     attacked=(0, 1, 2), broken=(1,), distances=(0.31,),
    ... )
    >>> record.broken
    (1,)
    """

    attack: str
    family: str
    eps: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class CertificateRecord:
    """The certified radii of all examples of an evaluation.

    Attributes
    ----------
    radius : tuple of float
        The certified radius of each example.
    rules, assumptions : tuple of str
        The certificate rule of each example, and what the proofs assume.
    worst_errors : tuple of float
        In regression, proved bounds on `|f - y|` within the eps of the threat.
    seconds : float
        The time.

    Examples
    --------
    >>> from otad.evaluate import CertificateRecord
    >>> record = CertificateRecord((0.4, 0.0), ("hull", "none"), assumptions=(), worst_errors=())
    >>> record.radius
    (0.4, 0.0)
    """

    radius: tuple[float, ...]
    rules: tuple[str, ...]
    assumptions: tuple[str, ...]
    worst_errors: tuple[float, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Flag:
    """A check of an evaluation, and what it found.

    Attributes
    ----------
    name : str
        What is checked.
    verdict : str
        "PASS", "FAIL" or "NOT RUN".
    found : str
        What was measured.
    meaning, advice : str
        What the verdict means, and what to do about it.

    Examples
    --------
    >>> from otad.evaluate import Flag
    >>> flag = Flag("certificate check", "PASS", "no contradiction", "No attack broke a proof.", "")
    >>> flag.verdict
    'PASS'
    """

    name: str
    verdict: str
    found: str
    meaning: str
    advice: str


SolverRecord = SolverAccount
QUANTILES = ("least", "median", "quantile_90", "quantile_99", "most")


@dataclass(frozen=True)
class Evaluation:
    """The result of `otad.evaluate`: the evaluation of a model on n examples.

    Attributes
    ----------
    task : str
        "classification" or "regression".
    n, seed : int
        The number of examples, and the seed.
    model : dict
        What the model is, as plain values.
    threat : dict
        `LpBall.to_dict()` of the threat, with its eps.
    eps : tuple of float
        All radii that were attacked, ascending.
    attacker_knows : str
        What the attacker knows, in words.
    environment : Environment
        The versions and the machine.
    clean : dict of str to Score
        Scores without attack: "otad" is the defended model, "net" its network, "knn_majority" and
        "knn_mean_feature" two nearest-neighbor baselines, and "model" any other model.
    clean_right : tuple of int
        The examples that are answered right without attack; in regression all.
    clean_errors : tuple of float
        In regression, `|f - y|` without attack.
    attacks : tuple of AttackRecord
        What each attack did at each eps.
    certificate : CertificateRecord or None
        The certified radii.
    flags : tuple of Flag
        Checks of the attacks, and what they found.
    solver : SolverRecord or None
        How the solver found its answers.
    seconds : float
        The time, with the batches that an earlier run had finished.
    missing : dict of str to str
        Attacks that were not run, and why.
    skipped_proved : tuple of str
        Attacks that skipped examples with a sufficient certified radius.
    undefended : Evaluation or None
        The same for the network inside the model, alone.
    undefended_reason : str
        Why there is no undefended network, if there is none.
    certificate_within_bounds : CertificateRecord or None
        Radii that hold for inputs within the bounds, if they were asked for.
    names : tuple of str
        The row, line or file of each example in the input of `otad evaluate`; else empty.

    Examples
    --------
    >>> import otad
    >>> from otad.evaluate import Evaluation
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> x, y = digits.test_x[:4], digits.test_y[:4]
    >>> found = otad.evaluate(model, x, y, otad.L2(0.5), attacks=["pgd", "noise"], flags=False)
    >>> found.is_sound, list(found.per_attack)
    (True, ['pgd', 'noise'])
    >>> found.worst_case_accuracy <= found.clean["otad"].value / 100
    True
    >>> found.write("evaluation.json")
    >>> Evaluation.read("evaluation.json").n
    4
    """

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
    certificate_within_bounds: CertificateRecord | None = None
    names: tuple[str, ...] = ()
    format: str = FORMAT

    def __repr__(self) -> str:
        eps, alone, right = self.headline_eps, self.undefended, self.task == "classification"
        what, form = ("clean", ".1%") if right else ("mean error", ".4g")
        found = f"{what} {self._clean():{form}}, worst case {self._worst(eps):{form}}"
        found += "" if alone is None else f" (undefended {alone._worst(eps):{form}})"
        if (proved := self._proved(eps)) is not None:
            found += f", certified {proved:{form}}"
        sizes = f"{self.n} examples, {self.threat['norm']} eps {self.headline_eps:g}"
        bounds = self.threat.get("bounds")
        sizes += ", inputs {}".format("in [{:g}, {:g}]".format(*bounds) if bounds else "unbounded")
        count, attacks = self.verdicts, len({one.attack for one in self.attacks})
        failed = [one.name for one in self.checks if one.verdict == FAIL]
        flags = f"{len(failed)} of {count[PASS] + len(failed)} flags failed"
        flags += f" ({', '.join(failed)})" if failed else ""
        flags += f", {count[NOT_RUN]} not run" if count[NOT_RUN] else ""
        return f"Evaluation({sizes}: {found}; {attacks} attacks, {flags})"

    @property
    def headline_eps(self) -> float:
        """The eps of the threat."""
        return float(self.threat["eps"])

    @property
    def checks(self) -> list[Flag]:
        """The flags of the model, and of the attacks on its undefended network."""
        return [*self.flags, *(() if self.undefended is None else self.undefended.flags)]

    @property
    def verdicts(self) -> Counter[str]:
        """How many checks have each verdict: "PASS", "FAIL" or "NOT RUN"."""
        return Counter(one.verdict for one in self.checks)

    @property
    def is_sound(self) -> bool:
        """Whether no attack contradicts a certificate."""
        return (CERTIFICATE_CHECK, FAIL) not in {(one.name, one.verdict) for one in self.flags}

    @property
    def worst_case_accuracy(self) -> float:
        """The worst-case accuracy at the eps of the threat, from 0 to 1; see `worst_case`."""
        return self.worst_case().value / 100

    @property
    def per_attack(self) -> dict[str, float]:
        """The accuracy under each attack alone, at the eps of the threat, from 0 to 1.

        Examples that an attack skipped count as right. It is therefore the strength of the attack
        only with `survivors_only=False`.
        """
        names = dict.fromkeys(record.attack for record in self.attacks)
        return {name: self.accuracy_under([name], self.headline_eps).value / 100 for name in names}

    def worst_case(self, eps: float | None = None) -> Score:
        """Return the accuracy under all attacks: examples that no attack broke within eps."""
        return self.accuracy_under(None, self._attacked(eps))

    def accuracy_under(self, attacks: Sequence[str] | None, eps: float) -> Score:
        """Return the accuracy within eps when only these attacks count, or all of them if None."""
        require(self.task == "classification", "accuracy", "a classifier", self.task)
        distances, limit = self.distances(attacks), self._attacked(eps)
        return share_score(sum(distances[row] > limit for row in self.clean_right), self.n)

    def distances(self, attacks: Sequence[str] | None = None) -> list[float]:
        """Return the shortest distance at which each example is known to be answered wrongly.

        It is 0 where the answer is wrong without attack, and infinite where no attack broke the
        example.
        """
        found = [0.0] * self.n
        for row in self.clean_right:
            found[row] = math.inf
        for record in self.attacks:
            if attacks is None or record.attack in attacks:
                for row, distance in zip(record.broken, record.distances, strict=True):
                    found[row] = min(found[row], distance)
        return found

    def worst_errors(self, eps: float | None = None) -> list[float]:
        """Return the largest `|f - y|` that attacks found within eps (regression only)."""
        found, limit = list(self.clean_errors), self._attacked(eps)
        for record in self.attacks:
            if record.eps <= limit:
                for row, error in zip(record.attacked, record.errors, strict=True):
                    found[row] = max(found[row], error)
        return found

    def _attacked(self, eps: float | None) -> float:
        eps, most = self.headline_eps if eps is None else eps, max(self.eps)
        require(0 <= eps <= most, "eps", f"0 to {most:g}, the largest that was attacked", eps)
        return eps

    def certified_accuracy(self, eps: float, *, within_bounds: bool = False) -> Score | None:
        """Return the accuracy that is proved within eps; None without such a certificate."""
        proof = self.certificate_within_bounds if within_bounds else self.certificate
        if proof is None or self.task != "classification":
            return None
        return share_score(sum(proof.radius[row] > eps for row in self.clean_right), self.n)

    def figures(self, model: str) -> Figures:
        """Return the figures for the model card of the model with this digest."""
        alone, count = self.undefended, self.verdicts
        return Figures(
            model=model,
            measure="accuracy" if self.task == "classification" else "mean absolute error",
            rows=self.n,
            norm=str(self.threat["norm"]),
            unit=str(self.threat.get("unit_name", "")),
            eps=self.eps,
            clean=self._clean(),
            worst=tuple(map(self._worst, self.eps)),
            undefended=() if alone is None else tuple(map(alone._worst, alone.eps)),
            proved=() if self.certificate is None else tuple(map(self._proved, self.eps)),
            attacks=tuple(dict.fromkeys(one.attack for one in self.attacks)),
            checks=count[PASS] + count[FAIL],
            failed_checks=count[FAIL],
        )

    def _clean(self) -> float:
        """The accuracy from 0 to 1 or, in regression, the mean error, as in the next two."""
        right = self.task == "classification"
        return len(self.clean_right) / self.n if right else fmean(self.clean_errors)

    def _worst(self, eps: float) -> float:
        right = self.task == "classification"
        return self.worst_case(eps).value / 100 if right else fmean(self.worst_errors(eps))

    def _proved(self, eps: float) -> float | None:
        if (share := self.certified_accuracy(eps)) is not None:
            return share.value / 100
        bounds = None if self.certificate is None else self.certificate.worst_errors
        return fmean(bounds) if bounds and eps == self.headline_eps else None

    def write(self, path: Path) -> None:
        """Write the evaluation to a JSON file."""
        write_json(path, to_plain(self))

    @staticmethod
    def read(path: Path) -> Evaluation:
        """Read an evaluation from a JSON file, also one that an earlier version wrote."""
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
