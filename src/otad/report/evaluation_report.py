"""The report on an evaluation: how robust a model is, what is proved, and what to check first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation, Flag
from otad.report import attack_sections
from otad.report.blocks import Facts, Flags, KeyNumber, Section, Table
from otad.report.examples import Subject, examples_section
from otad.report.formatting import as_text, duration, flat, interval, threads, unanswered
from otad.report.model_report import account_blocks
from otad.report.page import Report

NORMS = {
    "l2": "l2: the Euclidean length of the whole change",
    "linf": "linf: the largest change of any feature",
}


def evaluation_report(
    evaluation: Evaluation, *, title: str = "How robust is it?", **known: Any
) -> Report:
    """The report on an evaluation. What else is `known` shows examples: see `Subject`."""
    subject = Subject(evaluation, **known)
    made = (make(subject) for make in SECTIONS)
    environment = evaluation.environment
    return Report(
        title,
        f"{evaluation.n:,} examples under attack in {evaluation.threat['norm']} up to "
        f"eps = {evaluation.headline_eps:g}, by an attacker who knows everything: the worst case "
        "found, what is proved, and which checks failed.",
        headline(evaluation),
        [section for section in made if section is not None],
        footer=f"{environment.started}; seed {evaluation.seed}; "
        f"otad {environment.versions.get('otad') or 'from source'}",
    )


def headline(evaluation: Evaluation) -> list[KeyNumber]:
    """The key numbers."""
    is_classifier = evaluation.task == "classification"
    numbers = _accuracies(evaluation) if is_classifier else _errors(evaluation)
    if not evaluation.attacks:
        numbers[0] = KeyNumber("not attacked", numbers[0].name, "no attack was run", alarm=True)
    failed, passed, left = (count_of(evaluation.flags, it) for it in (FAIL, PASS, NOT_RUN))
    value = f"{failed} of {len(evaluation.flags)}" if evaluation.flags else "none run"
    remark = f"{passed} pass, {left} not run"
    return [*numbers, KeyNumber(value, "red flags fail", remark, alarm=failed > 0)]


def _accuracies(evaluation: Evaluation) -> list[KeyNumber]:
    at, n = f"at eps = {evaluation.headline_eps:g}", evaluation.n
    worst, proved = evaluation.worst_case(), evaluation.certified_accuracy(evaluation.headline_eps)
    remark = f"{at}, n = {n:,}; 95% interval {interval(worst)}"
    numbers = [KeyNumber(as_text(worst), "worst-case accuracy", remark)]
    if proved is not None:
        remark = f"{at}; 95% interval {interval(proved)}"
        numbers.append(KeyNumber(as_text(proved), "certified accuracy", remark))
    share = 100 * len(evaluation.clean_right) / n
    return [*numbers, KeyNumber(f"{share:.1f}%", "clean accuracy", f"of the same {n:,} examples")]


def _errors(evaluation: Evaluation) -> list[KeyNumber]:
    at = f"|f - y| at eps = {evaluation.headline_eps:g}, n = {evaluation.n:,}"
    worst, clean = evaluation.worst_errors(), evaluation.clean_errors
    means = [("mean worst error", worst, f"{at}{unanswered(worst)}")]
    if evaluation.certificate is not None:
        means.append(
            ("mean certified bound", list(evaluation.certificate.worst_errors), f"on {at}")
        )
    means.append(("mean clean error", list(clean), f"|f - y| without attack{unanswered(clean)}"))
    return [KeyNumber(f"{statistics.fmean(it):.4g}", name, remark) for name, it, remark in means]


def count_of(flags: tuple[Flag, ...], verdict: str) -> int:
    return sum(flag.verdict == verdict for flag in flags)


def threat_section(subject: Subject) -> Section:
    """What the attacker may do."""
    evaluation, threat = subject.evaluation, subject.evaluation.threat
    norm, eps = str(threat["norm"]), evaluation.headline_eps
    size, bounds, scale, mutable = (
        f"{eps:g}",
        *(threat.get(k) for k in ("bounds", "scale", "mutable")),
    )
    if norm == "l2" and subject.x is not None:
        n = subject.x[0].numel()
        size += f", that is {eps / math.sqrt(n):.3g} for each of {n:,} features if spread evenly"
    inputs = "unbounded" if bounds is None else f"from {bounds[0]:g} to {bounds[1]:g}"
    if scale is not None:
        inputs += f"; each feature in its own unit, of {min(scale):.3g} to {max(scale):.3g}"
    facts = {
        "distance": NORMS.get(norm, norm),
        "headline eps": size,
        "all eps": ", ".join(f"{size:g}" for size in evaluation.eps) or "none",
        "input scale": inputs,
        "may change": "every feature"
        if mutable is None
        else f"{sum(mutable):,} of {len(mutable):,} features",
        "attacker knows": evaluation.attacker_knows,
        "examples": f"{evaluation.n:,}, seed {evaluation.seed}",
    }
    lead = (
        "What the attacker may do and what the attacker knows. All numbers below are for this "
        "threat model only."
    )
    return Section("threat", "Threat model", lead, [Facts(facts)])


def flags_section(subject: Subject) -> Section:
    """The checks, failed ones first."""
    flags = subject.evaluation.flags
    if not flags:
        lead = "No check was run, so nothing warns of numbers that are too good to be true."
    elif failed := count_of(flags, FAIL):
        lead = f"{failed} of {len(flags)} checks fail: read them before any number."
    else:
        lead = "No check fails. The checks search for the ways in which an attack can be too weak."
    shown = sorted(flags, key=lambda flag: (FAIL, NOT_RUN, PASS).index(flag.verdict))
    return Section("flags", "Can the numbers be trusted?", lead, [Flags(shown)] if shown else [])


def solver_section(subject: Subject) -> Section | None:
    """How the solver found the clean answers; None if the model has no solver."""
    evaluation = subject.evaluation
    if evaluation.solver is None:
        return None
    blocks = account_blocks(evaluation.solver, evaluation.n)
    lead = f"On the {evaluation.n:,} examples without attack."
    return Section("solver", "How the solver found its answers", lead, blocks)


def repeat_section(subject: Subject) -> Section:
    """Environment and settings of the evaluation."""
    evaluation, here = subject.evaluation, subject.evaluation.environment
    versions = [f"{name} {version}" for name, version in here.versions.items() if version]
    facts = {
        "started": here.started,
        "took": duration(evaluation.seconds),
        "seed": str(evaluation.seed),
        "commit": here.commit or "unknown",
        "versions": f"Python {here.python}, {', '.join(versions)}",
        "device": f"{here.device_name}, {threads(here.threads)}",
        "platform": here.platform,
    }
    card = [it for it in flat(evaluation.model).items() if it[0] != "abstained"]
    settings = {record.attack: flat(record.settings) for record in evaluation.attacks}
    attacks = [
        (name, ", ".join(f"{key} = {value}" for key, value in values.items()) or "none")
        for name, values in settings.items()
    ]
    tables = (
        Table(("model", "setting"), card, summary="The model", prose=True),
        Table(("attack", "settings"), attacks, summary="Settings of the attacks", prose=True),
    )
    lead = (
        "The same model, examples, threat, attacks and seed give the same record; "
        "evaluation.json has all numbers of this page, row by row."
    )
    blocks = [Facts(facts), *(table for table in tables if table.rows)]
    return Section("repeat", "How to repeat it", lead, blocks)


SECTIONS: list[Callable[[Subject], Section | None]] = [
    threat_section,
    attack_sections.curves_section,
    flags_section,
    attack_sections.attacks_section,
    attack_sections.clean_section,
    examples_section,
    attack_sections.certificate_section,
    solver_section,
    attack_sections.cost_section,
    repeat_section,
]
