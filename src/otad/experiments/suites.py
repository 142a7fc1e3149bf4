"""A row under the whole suite: the evaluation, its report, and a summary for the record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from otad.attacks import L2
from otad.evaluate import Evaluation
from otad.evaluate.runner import evaluate
from otad.experiments.attack_records import WORST, Goal, SuiteCost, SuiteLine, SuiteRecord
from otad.experiments.attacked import inputs_of_bank, made_attack, points_of
from otad.experiments.certified import certified_shares
from otad.experiments.kept import alone
from otad.experiments.specs import EvaluateSpec, name_of
from otad.experiments.study import Study
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial
from otad.scores import Score


def run_suites(study: Study, spec: EvaluateSpec, out: Path, stem: str) -> tuple[SuiteRecord, ...]:
    """Evaluate the rows of `spec`, each as `run_suite` does."""
    return tuple(run_suite(study, own, out, folder) for own, folder in suites_of(spec, stem))


def suites_of(spec: EvaluateSpec, stem: str) -> Iterator[tuple[EvaluateSpec, str]]:
    """What is asked of each row, and the name of its folder: `stem`, for rows beside the first
    with a number after it. Those are certified too where anything is."""
    yield replace(spec, beside=()), stem
    for place, row in enumerate(spec.beside, start=2):
        certify = (row,) if spec.certify else ()
        own = replace(spec, row=row, beside=(), certify=certify, at_most={}, at_least={})
        yield own, f"{stem}-{place}"


def run_suite(study: Study, spec: EvaluateSpec, out: Path, stem: str) -> SuiteRecord:
    """Evaluate one row; the whole evaluation and its report go to the folder `out`/`stem`.

    Batches are kept in the work folder, so that a killed run goes on where it stopped. A second
    process that asks for the same waits for the first, and takes what that found.
    """
    work = study.work / "suites" / stem
    with alone(work):
        return _run_alone(study, spec, out, stem, work)


def _run_alone(study: Study, spec: EvaluateSpec, out: Path, stem: str, work: Path) -> SuiteRecord:
    row = study.experiment.rows[spec.row]
    data, base = study.net(row.net).data, study.bank(row.net)
    model = study.defended(spec.row)
    device = base.backbone.mean.device
    chosen = points_of(len(data.test_x), spec.points, study.seed)
    x, y = data.test_x[chosen].to(device), data.test_y[chosen].to(device)
    train_x = inputs_of_bank(base, study.bank_rows(row), data)
    label = f"suite on {spec.row}"
    found = evaluate(
        model,
        x,
        y,
        L2(spec.headline),
        eps=spec.eps,
        attacks=[made_attack(name, model, how, train_x) for name, how in spec.attacks.items()]
        or spec.preset,
        spare_proved=spec.spare_proved,
        train_x=train_x,
        flags=spec.flags,
        seed=study.seed,
        batch_size=spec.batch_size,
        folder=work,
        progress=lambda attack, done, total, worst: study.report(label, done, total),
    )
    study.seconds[label] = found.seconds
    found.write(out / stem / "evaluation.json")
    report = evaluation_report(
        found,
        model=model,
        x=x,
        y=y,
        adversarial=Adversarial.read(work / "adversarial.safetensors"),
        classes=data.classes,
        train_x=train_x,
    )
    report.write(out / stem / "report.html")
    certified = {key: _certified(study, spec, key, x, y) for key in spec.certify}
    return summary(spec, found, certified, stem)


def summary(
    spec: EvaluateSpec, found: Evaluation, certified: dict[str, dict[str, Score]], folder: str
) -> SuiteRecord:
    """What the record of the experiment says; `certified` is by row and radius."""
    names = list(dict.fromkeys(one.attack for one in found.attacks))
    bounds = found.threat["bounds"]
    threat = L2(found.headline_eps, bounds=None if bounds is None else tuple(bounds))
    return SuiteRecord(
        row=spec.row,
        threat=threat.describe(),
        attacker_knows=found.attacker_knows,
        clean=found.clean,
        lines=tuple(_line(spec, found, certified, radius) for radius in spec.eps),
        costs=tuple(_cost(found, name) for name in names),
        flags=found.flags,
        folder=folder,
        seconds=found.seconds,
        missing=found.missing,
    )


def _line(
    spec: EvaluateSpec, found: Evaluation, certified: dict[str, dict[str, Score]], radius: float
) -> SuiteLine:
    key = name_of(radius)
    goals = {WORST: Goal(spec.at_most[key], at_most=True)} if key in spec.at_most else {}
    for row, asked in spec.at_least.items():
        if key in asked:
            goals[row] = Goal(asked[key], at_most=False)  # `WORST` among the rows
    return SuiteLine(
        eps=radius,
        worst=found.worst_case(radius),
        certified={row: scores[key] for row, scores in certified.items()},
        goals=goals,
        seconds=sum(one.seconds for one in found.attacks if one.eps == radius),
    )


def _cost(found: Evaluation, name: str) -> SuiteCost:
    """One attack over all radii; a point that it met at several counts each time."""
    records = [one for one in found.attacks if one.attack == name]
    return SuiteCost(
        attack=name,
        family=records[0].family,
        attacked=sum(len(one.attacked) for one in records),
        broken=sum(len(one.broken) for one in records),
        forwards=sum(one.forwards for one in records),
        backwards=sum(one.backwards for one in records),
        seconds=sum(one.seconds for one in records),
    )


def _certified(
    study: Study, spec: EvaluateSpec, key: str, x: Tensor, y: Tensor
) -> dict[str, Score]:
    label, started = f"certificates of {key}", time.perf_counter()
    report = partial(study.report, label)
    found = certified_shares(study.defended(key), x, y, spec.eps, report)
    study.seconds[label] = time.perf_counter() - started
    return found
