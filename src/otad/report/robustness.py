"""The report of an evaluation: how robust a model is, what is proved, what to be wary of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torch import Tensor, nn

from otad.errors import InputError
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation
from otad.report.adversarial import Adversarial
from otad.report.attack_tables import attacks_section, clean_section, cost_section
from otad.report.blocks import KeyNumber
from otad.report.certified import certificate_section
from otad.report.curves import curves_section
from otad.report.examples import examples_section
from otad.report.formatting import interval, percent, unanswered
from otad.report.page import Report
from otad.report.threat import repeat_section, threat_section
from otad.report.trust import count_of, flags_section, solver_section


def evaluation_report(
    evaluation: Evaluation,
    *,
    model: nn.Module | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    adversarial: Adversarial | None = None,
    classes: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    train_x: Tensor | None = None,
    title: str = "How robust is it?",
) -> Report:
    """The report of an evaluation.

    With the `model`, the examples `x` (n,*input_shape), their answers `y` (n,) and the
    `adversarial` examples found (rows (m,) and inputs (m,*input_shape)) it shows some of them.
    `classes` and `feature_names` name what is numbered else; `train_x`: see `otad.explain`.
    """
    if x is not None and len(x) != evaluation.n:
        raise InputError(f"x: expected the {evaluation.n} examples of the record, got {len(x)}")
    sections = [
        threat_section(evaluation, None if x is None else x[0].numel()),
        curves_section(evaluation),
        flags_section(evaluation),
        attacks_section(evaluation),
        clean_section(evaluation),
    ]
    if model is not None and x is not None and y is not None and adversarial is not None:
        sections.append(
            examples_section(
                evaluation, model, x, y, adversarial,
                classes=classes, feature_names=feature_names, train_x=train_x,
            )
        )  # fmt: skip
    sections.append(certificate_section(evaluation))
    if (solver := solver_section(evaluation)) is not None:
        sections.append(solver)
    sections += [cost_section(evaluation), repeat_section(evaluation)]
    return Report(
        title,
        f"{evaluation.n:,} examples under attack in {evaluation.threat['norm']} up to "
        f"eps = {evaluation.headline_eps:g}, by an attacker who knows everything: the worst case "
        "found, what is proved, and what to be wary of.",
        headline(evaluation),
        sections,
        footer=f"{evaluation.environment.started}; seed {evaluation.seed}; "
        f"otad {evaluation.environment.versions.get('otad') or 'from source'}",
    )


def headline(evaluation: Evaluation) -> list[KeyNumber]:
    """The numbers to see first."""
    if evaluation.task == "classification":
        numbers = _accuracies(evaluation)
    else:
        numbers = _errors(evaluation)
    failed = count_of(evaluation.flags, FAIL)
    passed, left = (count_of(evaluation.flags, verdict) for verdict in (PASS, NOT_RUN))
    value = f"{failed} of {len(evaluation.flags)}" if evaluation.flags else "none run"
    remark = f"{passed} pass, {left} not run"
    return [*numbers, KeyNumber(value, "red flags fail", remark, alarm=failed > 0)]


def _accuracies(evaluation: Evaluation) -> list[KeyNumber]:
    at, n = f"at eps = {evaluation.headline_eps:g}", evaluation.n
    worst = evaluation.worst_case()
    remark = f"{at}, n = {n:,}; 95% interval {interval(worst)}"
    first = KeyNumber(percent(worst), "worst-case accuracy", remark)
    if not evaluation.attacks:
        first = KeyNumber("not attacked", "worst-case accuracy", "no attack was run", alarm=True)
    numbers = [first]
    proved = evaluation.certified_accuracy(evaluation.headline_eps)
    if proved is not None:
        numbers.append(
            KeyNumber(
                percent(proved), "certified accuracy", f"{at}; 95% interval {interval(proved)}"
            )
        )
    share = 100 * len(evaluation.clean_right) / n
    numbers.append(KeyNumber(f"{share:.1f}%", "clean accuracy", f"of the same {n:,} examples"))
    return numbers


def _errors(evaluation: Evaluation) -> list[KeyNumber]:
    at = f"at eps = {evaluation.headline_eps:g}, n = {evaluation.n:,}"
    worst = evaluation.worst_errors()
    remark = f"|f - y| {at}{unanswered(worst)}"
    first = KeyNumber(f"{statistics.fmean(worst):.4g}", "mean worst error", remark)
    if not evaluation.attacks:
        first = KeyNumber("not attacked", "mean worst error", "no attack was run", alarm=True)
    numbers = [first]
    if evaluation.certificate is not None:
        bound = statistics.fmean(evaluation.certificate.worst_errors)
        numbers.append(KeyNumber(f"{bound:.4g}", "mean certified bound", f"on |f - y| {at}"))
    clean = evaluation.clean_errors
    remark = f"|f - y| unattacked{unanswered(clean)}"
    return [*numbers, KeyNumber(f"{statistics.fmean(clean):.4g}", "mean clean error", remark)]
