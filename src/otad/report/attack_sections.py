"""Sections on an evaluation's numbers: clean scores, curves, attacks, certificates and cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from otad.evaluate.records import AttackRecord, CertificateRecord, Evaluation
from otad.report import plots
from otad.report.blocks import Block, Picture, Section, Table, Text
from otad.report.examples import Subject
from otad.report.formatting import Cell, as_text, duration, interval, threads
from otad.report.model_report import TITLES
from otad.report.pictures import plot_uri
from otad.report.plots import skips_broken
from otad.scores import Score

QUERIES = "Answers and gradients: how many the attack computed per attacked example."


def clean_section(subject: Subject) -> Section:
    """All predictors on the same examples without attack."""
    evaluation = subject.evaluation
    names = [name for name in TITLES if name in evaluation.clean]
    names += [name for name in evaluation.clean if name not in names]
    scores = [(TITLES.get(name, name), evaluation.clean[name]) for name in names]
    rows = [(title, score, interval(score)) for title, score in scores]
    metric = scores[0][1].metric if scores else "score"
    strong = next((names.index(name) for name in ("otad", "model") if name in names), None)
    abstained, note = evaluation.model.get("abstained"), ""
    if abstained is not None:
        note = f"The model gave no answer for {abstained:,} of the {evaluation.n:,} examples."
    return Section(
        "clean",
        "Before any attack",
        f"The same {evaluation.n:,} examples, unchanged. This shows what robustness costs in clean "
        "accuracy, and what the same neighbors would answer without convex integration.",
        [Table(("", metric, "95% interval"), rows, strong, note=note)],
    )


def curves_section(subject: Subject) -> Section:
    """Accuracy, or error, against the size of the attack."""
    if subject.evaluation.task == "classification":
        return _accuracy_section(subject.evaluation)
    return _error_section(subject.evaluation)


def _line_meaning(evaluation: Evaluation) -> str:
    if not skips_broken(evaluation):
        return "A thin line counts its attack alone: each attack was run on all examples."
    return (
        "A thin line counts its attack and all attacks before it, in the order of the legend: each "
        "attack was run only on examples that the earlier ones did not break."
    )


def _accuracy_section(evaluation: Evaluation) -> Section:
    proved = evaluation.certificate is not None
    caption = _line_meaning(evaluation)
    if not evaluation.attacks:
        caption = "No attack was run: this is clean accuracy."
    caption += (
        " Dots mark the attacked eps. Between them an example counts as broken from the distance "
        "of its adversarial example, which was moved towards it for as long as it stayed wrong."
    )
    lead = "Under the best possible attack, accuracy is at most the worst case found (bold red)"
    lead += " and at least the certified share (green)." if proved else "."
    caption += " The true value is in the shaded gap." if proved else ""
    rows = []
    for eps in evaluation.eps:
        worst, certified = evaluation.worst_case(eps), evaluation.certified_accuracy(eps)
        rows.append((f"{eps:g}", worst, interval(worst), certified, interval(certified)))
    columns = ("eps", "worst case", "95% interval", "proved", "95% interval")
    alt = "accuracy against eps: the worst case, each attack, and certified accuracy below"
    blocks = [
        Picture(plot_uri(plots.accuracy_curves(evaluation)), alt, caption),
        Table(columns, rows, _headline_row(evaluation.eps, evaluation)),
    ]
    return Section("curves", "Accuracy against eps", lead, blocks)


def _error_section(evaluation: Evaluation) -> Section:
    bounds = () if evaluation.certificate is None else evaluation.certificate.worst_errors
    sizes, rows = (0.0, *evaluation.eps), []
    for eps in sizes:
        errors = evaluation.worst_errors(eps)
        found = statistics.fmean(errors), statistics.fmean(it**2 for it in errors), max(errors)
        is_proved = bounds and eps == evaluation.headline_eps
        rows.append((f"{eps:g}", *found, statistics.fmean(bounds) if is_proved else None))
    picture = Picture(
        plot_uri(plots.error_curves(evaluation)),
        "mean of the largest errors against eps, and each example at the headline eps",
        f"{_line_meaning(evaluation)} Right: the error of each example without attack (gray), the "
        "largest error found (red) and, if there is one, the proved bound (green).",
    )
    columns = ("eps", "mean |f - y|", "mean square", "largest", "proved mean")
    note = "Statistics of the largest error found for each example."
    table = Table(columns, rows, _headline_row(sizes, evaluation), note=note)
    lead = "The largest error that any attack found for each example, and the proved bound on it."
    return Section("curves", "Error against eps", lead, [picture, table])


def _headline_row(sizes: Sequence[float], evaluation: Evaluation) -> int | None:
    headline = evaluation.headline_eps
    return sizes.index(headline) if headline in sizes else None


def attacks_section(subject: Subject) -> Section:
    """One row per attack at the headline eps, the other eps collapsed, and what did not run."""
    evaluation = subject.evaluation
    blocks: list[Block] = []
    headline = [it for it in evaluation.attacks if it.eps == evaluation.headline_eps]
    others = [it for it in evaluation.attacks if it.eps != evaluation.headline_eps]
    if headline:
        blocks.append(_attack_table(evaluation, headline))
    if others:
        sizes = ", ".join(f"{eps:g}" for eps in sorted({it.eps for it in others}))
        blocks.append(_attack_table(evaluation, others, f"The same at eps = {sizes}"))
    if not evaluation.attacks:
        blocks.append(Text("No attack was run, so robustness is unknown."))
    if evaluation.missing:
        blocks.append(Table(("not run", "why"), list(evaluation.missing.items()), prose=True))
    lead = "Each example counts as broken once any attack has broken it"
    lead += ", and later attacks skip it." if skips_broken(evaluation) else "."
    if skipped := evaluation.spared_proved:
        lead += f" Not run where a certificate already covers eps: {', '.join(skipped)}."
    abstained = {row for record in evaluation.attacks for row in record.abstained}
    if evaluation.task != "classification":
        lead = "Each attack searches the inputs within eps for the largest error of the model."
    elif abstained:
        lead += f" For {len(abstained):,} of them the model gave no answer, which counts as wrong."
    return Section("attacks", "Attack by attack", lead, blocks)


def _attack_table(
    evaluation: Evaluation, records: Sequence[AttackRecord], summary: str = ""
) -> Table:
    """With the worst case as its last row, unless it is collapsed under a `summary`."""
    is_classifier, strong, note = evaluation.task == "classification", None, QUERIES
    rows: list[tuple[Cell, ...]] = []
    for it in records:
        n = max(1, len(it.attacked))
        found: tuple[Cell, Cell] = None, None
        if is_classifier:
            found = len(it.broken), _accuracy_after(evaluation, it)
        elif it.errors:
            found = statistics.fmean(it.errors), max(it.errors)
        queries = round(it.forwards / n), round(it.backwards / n), f"{it.seconds:.1f}"
        rows.append((it.attack, it.family, f"{it.eps:g}", len(it.attacked), *found, *queries))
    if is_classifier and not summary:
        n, worst = evaluation.n, evaluation.worst_case()
        broken, seconds = n - round(worst.value * n / 100), sum(it.seconds for it in records)
        eps, strong = f"{evaluation.headline_eps:g}", len(rows)
        rows.append(("worst case", "", eps, n, broken, worst, "", "", f"{seconds:.1f}"))
        note += " The worst case also counts the examples that are wrong without attack."
    outcome = "broken", "accuracy left" if skips_broken(evaluation) else "accuracy"
    if not is_classifier:
        outcome = "mean |f - y|", "largest"
    columns = "attack", "family", "eps", "attacked", *outcome, "answers", "gradients", "seconds"
    return Table(columns, rows, strong, note, summary)


def _accuracy_after(evaluation: Evaluation, record: AttackRecord) -> Score:
    """Accuracy at its eps after all attacks up to this one; after it alone if none are skipped."""
    if not skips_broken(evaluation):
        return evaluation.accuracy_under([record.attack], record.eps)
    ran = evaluation.attacks[: evaluation.attacks.index(record) + 1]
    return replace(evaluation, attacks=ran).worst_case(record.eps)


def certificate_section(subject: Subject) -> Section:
    """What is proved, by which rules, under which assumptions."""
    evaluation, certificate = subject.evaluation, subject.evaluation.certificate
    title, eps = "What is proved", f"{evaluation.headline_eps:g}"
    if certificate is None:
        reason = evaluation.missing.get("certificate", "no certificate was computed")
        return Section("certificate", title, f"Nothing: {reason}.", [])
    proved = evaluation.certified_accuracy(evaluation.headline_eps)
    if evaluation.task == "classification":
        blocks = _radii(evaluation, certificate)
        lead = (
            f"{as_text(proved)} of the examples are classified right, and stay so under every "
            f"change of size up to {eps}."
        )
    else:
        blocks = _bounds(evaluation, certificate)
        lead = f"No input within {eps} of an example has an error above its bound."
    assumed = "; ".join(certificate.assumptions)
    text = f"The proof assumes: {assumed}. " if assumed else ""
    blocks.append(Text(f"{text}All certificates took {duration(certificate.seconds)}."))
    return Section("certificate", title, lead, blocks)


def _radii(evaluation: Evaluation, certificate: CertificateRecord) -> list[Block]:
    by_rule: dict[str, list[float]] = {}
    for rule, radius in zip(certificate.rules, certificate.radius, strict=False):
        by_rule.setdefault(rule, []).append(radius)
    rows = [(rule, len(it), statistics.median(it), max(it)) for rule, it in by_rule.items()]
    pairs = zip(evaluation.distances(), certificate.radius, strict=True)
    inside = sum(0 < found < radius for found, radius in pairs)
    verdict = "No adversarial example was found inside a certified radius."
    if inside:
        verdict = f"{inside} adversarial examples are INSIDE a certified radius: a proof is wrong."
    picture = Picture(
        plot_uri(plots.radii_plots(evaluation)),
        "histogram of the certified radii, and for each example its certified radius below "
        "the distance of the nearest adversarial example found",
        "Left: the radii of the examples that are classified right. Right: each of them, sorted. "
        "The distance to its nearest wrong input is on the gray line between the proved radius "
        "(green) and the nearest adversarial example found (red; without a red dot none was "
        f"found). {verdict}",
    )
    return [picture, Table(("rule", "examples", "median radius", "largest"), rows)]


def _bounds(evaluation: Evaluation, certificate: CertificateRecord) -> list[Block]:
    errors = {
        "error without attack": evaluation.clean_errors,
        "largest error found": evaluation.worst_errors(),
        "proved bound": certificate.worst_errors,
    }
    rows = [
        (name, statistics.fmean(it), statistics.median(it), max(it)) for name, it in errors.items()
    ]
    rules = ", ".join(dict.fromkeys(certificate.rules))
    note = f"Rules: {rules}." if rules else ""
    return [Table(("", "mean", "median", "largest"), rows, note=note)]


def cost_section(subject: Subject) -> Section:
    """The time of the evaluation and of each attack."""
    evaluation = subject.evaluation
    attacks = sum(record.seconds for record in evaluation.attacks)
    proofs = 0.0 if evaluation.certificate is None else evaluation.certificate.seconds
    rest = max(0.0, evaluation.seconds - attacks - proofs)
    rows = [
        ("attacks", duration(attacks)),
        ("certificates", duration(proofs)),
        ("clean answers, flags and the rest", duration(rest)),
        ("total", duration(evaluation.seconds)),
    ]
    blocks: list[Block] = [Table(("", "time"), rows, len(rows) - 1)]
    if evaluation.attacks:
        alt = "seconds of each attack over all eps"
        blocks.insert(0, Picture(plot_uri(plots.seconds_bars(evaluation)), alt, "Over all eps."))
    here = evaluation.environment
    where = f"On {here.device_name} with {threads(here.threads)}."
    return Section("attack-cost", "Cost of the evaluation", where, blocks)
