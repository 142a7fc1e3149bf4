"""Attack by attack: what it broke and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from otad.evaluate.records import AttackRecord, Evaluation
from otad.report.attack_order import families, spares_the_broken
from otad.report.blocks import Block, Picture, Section, Table, Text
from otad.report.cost import duration, threads
from otad.report.cost_plot import seconds_bars
from otad.report.formatting import interval, percent
from otad.report.pictures import plot_uri
from otad.report.sections import TITLES
from otad.scores import Score

ASKED = "Answers and gradients: how often the model was asked for one, per attacked example."


def clean_section(evaluation: Evaluation) -> Section:
    """All predictors on the same examples, unattacked."""
    names = [name for name in TITLES if name in evaluation.clean]
    names += [name for name in evaluation.clean if name not in names]
    rows = []
    for name in names:
        score = evaluation.clean[name]
        value = percent(score) if score.metric == "accuracy" else f"{score.value:.4g}"
        rows.append((TITLES.get(name, name), value, interval(score)))
    metric = next((score.metric for score in evaluation.clean.values()), "score")
    strong = next((names.index(name) for name in ("otad", "model") if name in names), None)
    return Section(
        "clean",
        "Before any attack",
        f"The same {evaluation.n:,} examples, unchanged. Robustness bought with clean accuracy "
        "shows here, and so does what the plain neighbors would have answered.",
        [
            Table(
                ("", metric, "95% interval"),
                rows,
                strong,
                note=_abstentions(evaluation),
            )
        ],
    )


def _abstentions(evaluation: Evaluation) -> str:
    count = evaluation.model.get("abstained")
    if count is None:
        return ""
    return f"The model gave no answer for {count:,} of the {evaluation.n:,} examples."


def attacks_section(evaluation: Evaluation) -> Section:
    """A row for each attack at the headline eps, the other eps folded, and what did not run."""
    blocks: list[Block] = []
    headline = [it for it in evaluation.attacks if it.eps == evaluation.headline_eps]
    others = [it for it in evaluation.attacks if it.eps != evaluation.headline_eps]
    if headline:
        blocks.append(_table(evaluation, headline))
    if others:
        sizes = ", ".join(f"{eps:g}" for eps in sorted({it.eps for it in others}))
        blocks.append(_table(evaluation, others, folded=f"The same at eps = {sizes}"))
    if not evaluation.attacks:
        blocks.append(Text("No attack was run: nothing here says how robust the model is."))
    if evaluation.missing:
        rows = [(name, reason) for name, reason in evaluation.missing.items()]
        blocks.append(Table(("not run", "why"), rows, prose=True))
    abstained = {row for record in evaluation.attacks for row in record.abstained}
    lead = "Each example counts as broken once any attack has broken it"
    lead += ", and is spared the attacks after." if spares_the_broken(evaluation) else "."
    if spared := evaluation.spared_proved:
        lead += f" Not run where a certificate reaches as far as eps: {', '.join(spared)}."
    if evaluation.task != "classification":
        lead = "Each attack looks for the input within eps at which the model errs most."
    elif abstained:
        lead += f" For {len(abstained):,} of them the model gave no answer, which counts as wrong."
    return Section("attacks", "Attack by attack", lead, blocks)


def _table(evaluation: Evaluation, records: Sequence[AttackRecord], folded: str = "") -> Table:
    asked = ("answers", "gradients", "seconds")
    if evaluation.task != "classification":
        columns = ("attack", "family", "eps", "attacked", "mean |f - y|", "largest", *asked)
        errors = [
            (f"{statistics.fmean(it.errors):.4g}", f"{max(it.errors):.4g}") if it.errors
            else ("-", "-")
            for it in records
        ]  # fmt: skip
        rows = [
            (it.attack, it.family, f"{it.eps:g}", f"{len(it.attacked):,}", *found, *_cost(it))
            for it, found in zip(records, errors, strict=True)
        ]
        return Table(columns, rows, note=ASKED, folded=folded)
    rows = []
    for it in records:
        left = percent(_accuracy_after(evaluation, it))
        broken = f"{len(it.attacked):,}", f"{len(it.broken):,}", left
        rows.append((it.attack, it.family, f"{it.eps:g}", *broken, *_cost(it)))
    if not folded:
        eps, n = evaluation.headline_eps, evaluation.n
        worst = evaluation.worst_case()
        fallen = n - round(worst.value * n / 100)
        seconds = f"{sum(it.seconds for it in records):.1f}"
        all_of_them = (f"{eps:g}", f"{n:,}", f"{fallen:,}", percent(worst), "", "", seconds)
        rows.append(("worst case", "", *all_of_them))
    left = "accuracy left" if spares_the_broken(evaluation) else "accuracy"
    columns = ("attack", "family", "eps", "attacked", "broken", left, *asked)
    strong = None if folded else len(rows) - 1
    note = ASKED
    if not folded:
        note += " The worst case also counts the examples that are wrong unattacked."
    return Table(columns, rows, strong, note=note, folded=folded)


def _accuracy_after(evaluation: Evaluation, record: AttackRecord) -> Score:
    """What stands at its eps after all that ran up to it; after it alone where none is spared."""
    if not spares_the_broken(evaluation):
        return evaluation.accuracy_under([record.attack], record.eps)
    ran = evaluation.attacks[: evaluation.attacks.index(record) + 1]
    return replace(evaluation, attacks=ran).worst_case(record.eps)


def _cost(record: AttackRecord) -> tuple[str, str, str]:
    rows = max(1, len(record.attacked))
    asked = f"{record.forwards / rows:,.0f}", f"{record.backwards / rows:,.0f}"
    return *asked, f"{record.seconds:.1f}"


def cost_section(evaluation: Evaluation) -> Section:
    """Where the time went."""
    seconds = dict.fromkeys(families(evaluation), 0.0)
    for record in evaluation.attacks:
        seconds[record.attack] += record.seconds
    total = sum(seconds.values())
    proofs = 0.0 if evaluation.certificate is None else evaluation.certificate.seconds
    rest = max(0.0, evaluation.seconds - total - proofs)
    rows = [
        ("attacks", duration(total)),
        ("certificates", duration(proofs)),
        ("clean answers, flags and the rest", duration(rest)),
        ("in all", duration(evaluation.seconds)),
    ]
    blocks: list[Block] = [Table(("", "time"), rows, len(rows) - 1)]
    if seconds:
        alt = "seconds spent by each attack over all eps"
        picture = Picture(plot_uri(seconds_bars(evaluation, seconds)), alt, "Over all eps.")
        blocks.insert(0, picture)
    here = evaluation.environment
    where = f"On {here.device_name} with {threads(here.threads)}."
    return Section("attack-cost", "Cost of the evaluation", where, blocks)
