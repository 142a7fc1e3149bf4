"""What a report on an evaluation opens with: the verdict in two sentences, and the key numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from otad.evaluate.identity import NET
from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation
from otad.report.formatting import as_text, interval, unanswered
from otad.report.page import KeyNumber
from otad.scores import Score

UNDEFENDED = "undefended network"
NOTHING = "Nothing is proved"


def verdict(evaluation: Evaluation, examples: str = "examples") -> list[str]:
    """Return two sentences: the defended model and its undefended network under attack; what is
    proved, and whether to trust it."""
    if not evaluation.attacks:
        return ["No attack was run, so nothing is known about the robustness.", _trust(evaluation)]
    if evaluation.task == "classification":
        found = (
            f"Of {evaluation.n:,} {examples}, {percent(evaluation.worst_case())} are still "
            f"classified correctly under every attack we ran within {_ball(evaluation)}"
        )
    else:
        found = (
            f"On {evaluation.n:,} {examples}, the attacks we ran within {_ball(evaluation)} drive "
            f"the mean error from {mean(evaluation.clean_errors)} to "
            f"{mean(evaluation.worst_errors())}"
        )
    beside = _beside(evaluation)
    return [f"{found}; {beside}." if beside else f"{found}.", _trust(evaluation)]


def _beside(evaluation: Evaluation) -> str:
    alone = evaluation.undefended
    if alone is None:
        is_bare = evaluation.model.get("kind") == NET
        return "this network has no defense" if is_bare else evaluation.undefended_reason
    if evaluation.task == "classification":
        return f"the undefended network keeps {percent(alone.worst_case())}"
    errors = f"from {mean(alone.clean_errors)} to {mean(alone.worst_errors())}"
    return f"the mean error of the undefended network rises {errors}"


def _trust(evaluation: Evaluation) -> str:
    """What is proved, and what the checks of the attacks say."""
    if not evaluation.is_sound:
        return "An attack contradicts a certificate, which is a bug: trust none of these numbers."
    proved, certificate = NOTHING, evaluation.certificate
    if (score := evaluation.certified_accuracy(evaluation.headline_eps)) is not None:
        proved = f"{percent(score)} are proved to stay right under any attack of this size"
    elif certificate is not None and evaluation.task == "regression":
        bound = mean(certificate.worst_errors)
        proved = f"No attack of this size can drive the mean error above {bound} (proved)"
    count = evaluation.verdicts
    failed, run, left = count[FAIL], count[PASS] + count[FAIL], count[NOT_RUN]
    if count.total() <= 1:  # the check of the certificate is always there
        return f"{proved}, and the strength of the attacks was not checked."
    if failed:
        fail = "fails: read it" if failed == 1 else "fail: read them"
        but = "and" if proved == NOTHING else "but"
        return f"{proved}, {but} {failed} of {run} checks of the attacks {fail} first."
    open_ = f"; {left} {'was' if left == 1 else 'were'} not run" if left else ""
    return f"{proved}, and none of the {run} checks of the attacks fails{open_}."


def _ball(evaluation: Evaluation) -> str:
    unit = evaluation.threat.get("unit_name", "")
    return f"{evaluation.threat['norm']} {evaluation.headline_eps:g} {unit}".rstrip()


def percent(score: Score) -> str:
    return f"{score.value:.1f}".removesuffix(".0") + "%"


def mean(errors: Sequence[float]) -> str:
    return f"{statistics.fmean(errors):.3g}"


def headline(evaluation: Evaluation) -> list[KeyNumber]:
    is_classifier = evaluation.task == "classification"
    numbers = _accuracies(evaluation) if is_classifier else _errors(evaluation)
    if not evaluation.attacks:
        numbers[0] = KeyNumber("not attacked", numbers[0].name, "no attack was run", alarm=True)
    count = evaluation.verdicts
    run = count[PASS] + count[FAIL]
    value = f"{count[FAIL]} of {run}" if run else "none run"
    remark = f"{count[PASS]} pass, {count[NOT_RUN]} not run"
    return [*numbers, KeyNumber(value, "flags fail", remark, alarm=count[FAIL] > 0)]


def _accuracies(evaluation: Evaluation) -> list[KeyNumber]:
    at, n = f"at eps = {evaluation.headline_eps:g}", evaluation.n
    worst, proved = evaluation.worst_case(), evaluation.certified_accuracy(evaluation.headline_eps)
    remark = f"{at}, n = {n:,}; 95% interval {interval(worst)}"
    numbers = [KeyNumber(as_text(worst), "worst-case accuracy", remark)]
    if evaluation.undefended is not None:
        alone = evaluation.undefended.worst_case()
        remark = f"its worst case {at}; 95% interval {interval(alone)}"
        numbers.append(KeyNumber(as_text(alone), UNDEFENDED, remark, plain=True))
    if proved is not None:
        remark = f"{at}; 95% interval {interval(proved)}"
        numbers.append(KeyNumber(as_text(proved), "certified accuracy", remark))
    share, remark = 100 * len(evaluation.clean_right) / n, f"of the same {n:,} examples"
    if (net := evaluation.clean.get(NET)) is not None and evaluation.model.get("kind") != NET:
        remark = f"without attack; the network alone {as_text(net)}"
    return [*numbers, KeyNumber(f"{share:.1f}%", "clean accuracy", remark)]


def _errors(evaluation: Evaluation) -> list[KeyNumber]:
    at = f"|f - y| at eps = {evaluation.headline_eps:g}, n = {evaluation.n:,}"
    worst, clean = evaluation.worst_errors(), evaluation.clean_errors
    means: list[tuple[str, Sequence[float], str]] = [
        ("mean worst error", worst, f"{at}{unanswered(worst)}"),
        ("mean clean error", clean, f"|f - y| without attack{unanswered(clean)}"),
    ]
    if evaluation.certificate is not None:
        bounds = evaluation.certificate.worst_errors
        means.insert(1, ("mean certified bound", bounds, f"on {at}"))
    if evaluation.undefended is not None:
        alone = evaluation.undefended.worst_errors()
        means.insert(1, (UNDEFENDED, alone, f"its mean worst {at}{unanswered(alone)}"))
    return [
        KeyNumber(f"{statistics.fmean(it):.4g}", name, remark, plain=name == UNDEFENDED)
        for name, it, remark in means
    ]
