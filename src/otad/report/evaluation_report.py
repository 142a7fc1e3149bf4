"""The report of an evaluation: how robust a model is, what is proved, and what to check first."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from otad.evaluate.identity import MAJORITY
from otad.evaluate.records import FAIL, NOT_RUN, PASS, AttackRecord, CertificateRecord, Evaluation
from otad.report import plots
from otad.report.eps_picture import eps_blocks
from otad.report.examples import ReportContext, examples_section
from otad.report.formatting import Cell, as_text, duration, flat, interval, threads
from otad.report.model_report import TITLES, account_blocks
from otad.report.page import Block, Facts, Flags, Picture, Report, Section, Table, Text
from otad.report.plots import plot_uri, skips_broken
from otad.report.verdict import headline, verdict
from otad.scores import Score

NORMS = {
    "l2": "l2: the Euclidean length of the whole change",
    "linf": "linf: the largest change of any feature",
}
QUERIES = "Answers and gradients are numbers of computations per attacked example."


def evaluation_report(
    evaluation: Evaluation,
    *,
    title: str = "How robust is it?",
    examples: str = "examples",
    **known: Any,
) -> Report:
    """Return the report of an evaluation. The verdict calls the examples `examples`. With the model
    and the inputs (`known`, see `ReportContext`), the report also shows some of them."""
    context = ReportContext(evaluation, **known)
    sections = [section for make in SECTIONS if (section := make(context)) is not None]
    subtitle = "The worst case found by many attacks, what is proved, and which checks fail."
    here = evaluation.environment
    version = here.versions.get("otad") or "from source"
    footer = f"{here.started}; seed {evaluation.seed}; otad {version}"
    opening = verdict(evaluation, examples)
    return Report(title, subtitle, headline(evaluation), sections, footer, opening)


def threat_section(context: ReportContext) -> Section:
    evaluation, threat = context.evaluation, context.evaluation.threat
    norm, eps, size = str(threat["norm"]), evaluation.headline_eps, f"{evaluation.headline_eps:g}"
    if norm == "l2" and context.x is not None:
        flat = context.x[:1].flatten(1)
        n = len(context.ball(torch.Size([-1])).without_groups(flat).free_features(flat))
        if n:  # features that may change by any amount
            each = f"{eps / math.sqrt(n):.3g} for each of {n:,} features"
            size += f", that is {each} if spread evenly"
    inputs, changed = "unbounded", "every feature"
    if bounds := threat.get("bounds"):
        inputs = f"from {bounds[0]:g} to {bounds[1]:g}"
    if scale := threat.get("scale"):
        named = threat.get("unit_name") or "its own unit"
        inputs += f"; each feature in {named}, from {min(scale):.3g} to {max(scale):.3g}"
    if mutable := threat.get("mutable"):
        changed = f"{sum(mutable):,} of {len(mutable):,} features"
    if groups := threat.get("groups"):
        columns, most = sum(map(len, groups)), context.ball(torch.Size([-1])).n_switches
        switch = f"switch as a whole, up to {most} of them" if most else "cannot switch"
        changed += f"; {len(groups)} categories ({columns} columns) {switch}"
    facts = {
        "distance": NORMS.get(norm, norm),
        "headline eps": size,
        "all eps": ", ".join(f"{size:g}" for size in evaluation.eps) or "none",
        "input scale": inputs,
        "may change": changed,
        "attacker knows": evaluation.attacker_knows,
        "examples": f"{evaluation.n:,}, seed {evaluation.seed}",
    }
    lead = "What the attacker may do and knows. All numbers hold for this threat model only."
    return Section("threat", "Threat model", lead, [Facts(facts), *eps_blocks(context)])


def curves_section(context: ReportContext) -> Section:
    evaluation = context.evaluation
    caption = "A thin line counts its attack alone: each attack was run on all examples."
    if skips_broken(evaluation):
        caption = (
            "A thin line counts its attack and those before it in the legend: each attack was run "
            "only on examples that the earlier ones did not break."
        )
    is_classifier = evaluation.task == "classification"
    return (_accuracy_section if is_classifier else _error_section)(evaluation, caption)


def _accuracy_section(evaluation: Evaluation, caption: str) -> Section:
    if not evaluation.attacks:
        caption = "No attack was run: this is clean accuracy."
    caption += (
        " Dots mark the attacked eps. Between them an example counts as broken from the distance "
        "of the nearest adversarial example found."
    )
    lead = "Under the best possible attack, accuracy is at most the worst case found (bold red)"
    if evaluation.certificate is not None:
        lead += " and at least the certified share (green)"
        caption += " The true value is in the shaded gap."
    columns = ["eps", "worst case", "95% interval", "proved", "95% interval"]
    inside = evaluation.certificate_within_bounds is not None
    if inside:
        columns += ["proved within bounds", "95% interval"]
        caption += " Proved within bounds: only for inputs that stay within the legal values."
    if (alone := evaluation.undefended) is not None:
        columns += ["undefended", "95% interval"]
        caption += " Dotted: the undefended network on the same examples, under its own attacks."
    rows = []
    for eps in evaluation.eps:
        scores = [evaluation.worst_case(eps), evaluation.certified_accuracy(eps)]
        scores += [evaluation.certified_accuracy(eps, within_bounds=True)] if inside else []
        scores += [] if alone is None else [alone.worst_case(eps)]
        rows.append((f"{eps:g}", *(cell for it in scores for cell in (it, interval(it)))))
    alt = "accuracy against eps: the worst case, each attack, and certified accuracy below"
    picture = Picture(plot_uri(plots.accuracy_curves(evaluation)), alt, caption)
    table = Table(columns, rows, f"{evaluation.headline_eps:g}")
    return Section("curves", "Accuracy against eps", f"{lead}.", [picture, table])


def _error_section(evaluation: Evaluation, caption: str) -> Section:
    bounds = () if evaluation.certificate is None else evaluation.certificate.worst_errors
    rows: list[tuple[Cell, ...]] = []
    alone = evaluation.undefended
    for eps in (0.0, *evaluation.eps):
        errors = evaluation.worst_errors(eps)
        found = statistics.fmean(errors), statistics.fmean(it**2 for it in errors), max(errors)
        is_proved = bounds and eps == evaluation.headline_eps
        row = f"{eps:g}", *found, statistics.fmean(bounds) if is_proved else None
        rows.append(row if alone is None else (*row, statistics.fmean(alone.worst_errors(eps))))
    picture = Picture(
        plot_uri(plots.error_curves(evaluation)),
        "mean of the largest errors against eps, and each example at the headline eps",
        f"{caption} Right: the error of each example without attack (gray), the largest error "
        "found (red) and, if there is one, the proved bound (green).",
    )
    columns = ["eps", "mean |f - y|", "mean square", "largest", "proved mean"]
    columns += [] if alone is None else ["undefended mean"]
    note = "Statistics of the largest error found for each example."
    table = Table(columns, rows, f"{evaluation.headline_eps:g}", note)
    lead = "The largest error that any attack found for each example, and the proved bound on it."
    return Section("curves", "Error against eps", lead, [picture, table])


def flags_section(context: ReportContext) -> Section:
    flags = context.evaluation.checks
    lead = "No check fails. The checks look for signs that the attacks were too weak."
    if not flags:
        lead = "No check was run, so the numbers may be too good to be true."
    elif failed := sum(flag.verdict == FAIL for flag in flags):
        fail = "check fails: read it" if failed == 1 else "checks fail: read them"
        lead = f"{failed} {fail} before any number."
    elif len(flags) == 1:  # the check of the certificate is always made
        lead = "The strength of the attacks was not checked, so the numbers may be too good."
    shown = sorted(flags, key=lambda flag: (FAIL, NOT_RUN, PASS).index(flag.verdict))
    return Section("flags", "Can the numbers be trusted?", lead, [Flags(shown)] if shown else [])


def attacks_section(context: ReportContext) -> Section:
    evaluation = context.evaluation
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
    if (alone := evaluation.undefended) is not None:
        at = [it for it in alone.attacks if it.eps == alone.headline_eps]
        blocks.append(_attack_table(alone, at, "The undefended network"))
    if evaluation.missing:
        blocks.append(Table(("not run", "why"), list(evaluation.missing.items()), prose=True))
    lead = "Each example counts as broken once any attack has broken it"
    lead += ", and later attacks skip it." if skips_broken(evaluation) else "."
    if skipped := evaluation.skipped_proved:
        lead += f" Not run where a certificate already covers eps: {', '.join(skipped)}."
    abstained = {row for record in evaluation.attacks for row in record.abstained}
    if evaluation.task != "classification":
        lead = "Each attack searches the inputs within eps for the largest error of the model."
    elif abstained:
        lead += f" For {len(abstained):,} of them the model gave no answer, which counts as wrong."
    return Section("attacks", "Attack by attack", lead, blocks)


def _attack_table(evaluation: Evaluation, records: list[AttackRecord], summary: str = "") -> Table:
    """Return a table whose last row is the worst case, unless it is collapsed under a `summary`."""
    is_classifier, note = evaluation.task == "classification", QUERIES
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
        eps = f"{evaluation.headline_eps:g}"
        rows.append(("worst case", "", eps, n, broken, worst, "", "", f"{seconds:.1f}"))
        note += " The worst case also counts the examples that are wrong without attack."
    outcome = "broken", "accuracy left" if skips_broken(evaluation) else "accuracy"
    if not is_classifier:
        outcome = "mean |f - y|", "largest"
    columns = "attack", "family", "eps", "attacked", *outcome, "answers", "gradients", "seconds"
    return Table(columns, rows, "worst case", note, summary)


def _accuracy_after(evaluation: Evaluation, record: AttackRecord) -> Score:
    """Return the accuracy at its eps after all attacks up to this one, or after this one alone."""
    if not skips_broken(evaluation):
        return evaluation.accuracy_under([record.attack], record.eps)
    ran = evaluation.attacks[: evaluation.attacks.index(record) + 1]
    return replace(evaluation, attacks=ran).worst_case(record.eps)


def clean_section(context: ReportContext) -> Section:
    evaluation, clean = context.evaluation, context.evaluation.clean
    titles = dict(TITLES)
    if evaluation.task == "regression":
        titles[MAJORITY] = "mean value of the same neighbors"
    names = [name for name in dict.fromkeys((*titles, *clean)) if name in clean]
    rows = [(titles.get(name, name), clean[name], interval(clean[name])) for name in names]
    metric = clean[names[0]].metric if names else "score"
    strong = TITLES["otad"] if "otad" in clean else "model"
    abstained, note = evaluation.model.get("abstained"), ""
    if abstained is not None:
        note = f"The model gave no answer for {abstained:,} of the {evaluation.n:,} examples."
    return Section(
        "clean",
        "Before any attack",
        f"The same {evaluation.n:,} examples, unchanged. This shows what robustness costs in clean "
        "accuracy, and what the same neighbors would answer without convex integration.",
        [Table(("", metric, "95% interval"), rows, strong, note)],
    )


def certificate_section(context: ReportContext) -> Section:
    evaluation, certificate = context.evaluation, context.evaluation.certificate
    title, eps = "What is proved", f"{evaluation.headline_eps:g}"
    if certificate is None:
        reason = evaluation.missing.get("certificate", "no certificate was computed")
        return Section("certificate", title, f"Nothing is proved: {reason}.", [])
    if evaluation.task == "classification":
        blocks = _radii(evaluation, certificate)
        proved = as_text(evaluation.certified_accuracy(evaluation.headline_eps))
        lead = f"{proved} of the examples stay right under every change of size up to {eps}."
    else:
        errors = {
            "error without attack": evaluation.clean_errors,
            "largest error found": evaluation.worst_errors(),
            "proved bound": certificate.worst_errors,
        }
        rows = [(k, statistics.fmean(v), statistics.median(v), max(v)) for k, v in errors.items()]
        blocks = [Table(("", "mean", "median", "largest"), rows)]
        lead = f"No input within {eps} of an example has an error above its bound."
    assumed = "; ".join(certificate.assumptions)
    text = f"The proof assumes: {assumed}. " if assumed else ""
    blocks.append(Text(f"{text}All certificates took {duration(certificate.seconds)}."))
    return Section("certificate", title, lead, blocks)


def _radii(evaluation: Evaluation, certificate: CertificateRecord) -> list[Block]:
    by_rule: defaultdict[str, list[float]] = defaultdict(list)
    for rule, radius in zip(certificate.rules, certificate.radius, strict=False):
        by_rule[rule].append(radius)
    rows = [(rule, len(it), statistics.median(it), max(it)) for rule, it in by_rule.items()]
    pairs = zip(evaluation.distances(), certificate.radius, strict=True)
    inside = sum(0 < found < radius for found, radius in pairs)
    verdict = "No adversarial example was found inside a certified radius."
    if inside:
        verdict = f"{inside} adversarial examples are INSIDE a certified radius: a proof is wrong."
    picture = Picture(
        plot_uri(plots.radii_plots(evaluation)),
        "a histogram of the radii, and each radius beside the nearest adversarial example found",
        "The left panel shows the radii of the examples that are classified right. In the right "
        "panel each of them has a line. Its nearest wrong input is on the gray part, between the "
        f"proved radius (green) and the nearest adversarial example found (red, if any). {verdict}",
    )
    return [picture, Table(("rule", "examples", "median radius", "largest"), rows)]


def solver_section(context: ReportContext) -> Section | None:
    account, n = context.evaluation.solver, context.evaluation.n
    if account is None:
        return None
    title, lead = "How the solver found its answers", f"On the {n:,} examples without attack."
    return Section("solver", title, lead, account_blocks(account, n))


def cost_section(context: ReportContext) -> Section:
    evaluation, here = context.evaluation, context.evaluation.environment
    attacks = sum(record.seconds for record in evaluation.attacks)
    proofs = 0.0 if evaluation.certificate is None else evaluation.certificate.seconds
    alone = 0.0 if evaluation.undefended is None else evaluation.undefended.seconds
    rest = max(0.0, evaluation.seconds - attacks - proofs - alone)
    seconds = {
        "attacks": attacks,
        "certificates": proofs,
        "the undefended network": alone,
        "clean answers, flags and the rest": rest,
        "total": evaluation.seconds,
    }
    rows = [(name, duration(it)) for name, it in seconds.items()]
    blocks: list[Block] = [Table(("", "time"), rows, "total")]
    if evaluation.attacks:
        alt = "seconds of each attack over all eps"
        blocks.insert(0, Picture(plot_uri(plots.seconds_bars(evaluation)), alt, "Over all eps."))
    lead = f"On {here.device_name} with {threads(here.threads)}."
    return Section("attack-cost", "Cost of the evaluation", lead, blocks)


def repeat_section(context: ReportContext) -> Section:
    evaluation, here = context.evaluation, context.evaluation.environment
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
    blocks: list[Block] = [Facts(facts)]
    for name, rows in {"model": card, "attacks": attacks}.items():
        if rows:
            summary = f"Settings of the {name}"
            blocks.append(Table((name, "settings"), rows, summary=summary, prose=True))
    lead = (
        "The same model, examples, threat, attacks and seed give the same record; "
        "evaluation.json has all numbers of this page, row by row."
    )
    return Section("repeat", "How to repeat it", lead, blocks)


SECTIONS: list[Callable[[ReportContext], Section | None]] = [
    threat_section, curves_section, flags_section, attacks_section, clean_section,
    examples_section, certificate_section, solver_section, cost_section, repeat_section,
]  # fmt: skip
