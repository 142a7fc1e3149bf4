"""How accuracy, or error, goes with the size of the attack."""

from __future__ import annotations

import statistics

from otad.evaluate.records import Evaluation
from otad.report.attack_order import families, spares_the_broken
from otad.report.blocks import Block, Picture, Section, Table
from otad.report.curve_plots import accuracy_curves, error_curves, mean_worst_error
from otad.report.formatting import interval, percent
from otad.report.pictures import plot_uri

BEFORE = (
    "A thin line counts its attack and all attacks before it, in the order of the legend: each was "
    "run only on what those had left."
)
ALONE = "A thin line counts its attack alone: each was run on all examples."


def curves_section(evaluation: Evaluation) -> Section:
    if evaluation.task == "classification":
        return _accuracy_section(evaluation)
    return _error_section(evaluation)


def _accuracy_section(evaluation: Evaluation) -> Section:
    proved = evaluation.certificate is not None
    alone = BEFORE if spares_the_broken(evaluation) else ALONE
    caption = [alone] if families(evaluation) else ["No attack was run: this is clean accuracy."]
    caption.append(
        "Dots: the eps that were attacked; between them an example counts as broken from where its "
        "adversarial example, drawn back as far as it stays wrong, was found."
    )
    lead = "Under the best possible attack, accuracy is at most the worst case found (bold red)"
    lead += " and at least the share proved (green)." if proved else "."
    if proved:
        caption.append("The truth lies in the shaded gap.")
    rows = []
    for eps in evaluation.eps:
        certified = evaluation.certified_accuracy(eps)
        worst = evaluation.worst_case(eps)
        cells = [percent(worst), interval(worst)]
        cells += [percent(certified), interval(certified)] if certified else ["-", "-"]
        rows.append((f"{eps:g}", *cells))
    columns = ("eps", "worst case", "95% interval", "proved", "95% interval")
    picture = Picture(
        plot_uri(accuracy_curves(evaluation)),
        "accuracy against eps: the worst case, each attack, and the certified share beneath",
        " ".join(caption),
    )
    return Section(
        "curves",
        "Accuracy against eps",
        lead,
        [picture, Table(columns, rows, _headline_row(evaluation.eps, evaluation.headline_eps))],
    )


def _error_section(evaluation: Evaluation) -> Section:
    bounds = None if evaluation.certificate is None else evaluation.certificate.worst_errors
    rows = []
    for eps in (0.0, *evaluation.eps):
        errors = evaluation.worst_errors(eps)
        proved = "-"
        if bounds and eps == evaluation.headline_eps:
            proved = f"{statistics.fmean(bounds):.4g}"
        mean_square = statistics.fmean(error**2 for error in errors)
        mean = mean_worst_error(evaluation, eps)
        cells = f"{mean:.4g}", f"{mean_square:.4g}", f"{max(errors):.4g}", proved
        rows.append((f"{eps:g}", *cells))
    caption = (
        "Right: each example with its error unattacked (gray), the largest found (red) and, where "
        "there is one, the bound that is proved (green)."
    )
    alone = BEFORE if spares_the_broken(evaluation) else ALONE
    blocks: list[Block] = [
        Picture(
            plot_uri(error_curves(evaluation)),
            "mean of the largest errors against eps, and each example at the headline eps",
            f"{alone} {caption}",
        ),
        Table(
            ("eps", "mean |f - y|", "mean square", "largest", "proved mean"),
            rows,
            _headline_row((0.0, *evaluation.eps), evaluation.headline_eps),
            note="Of the largest error found for each example.",
        ),
    ]
    lead = "For each example the largest error any attack found, and the largest that can be."
    return Section("curves", "Error against eps", lead, blocks)


def _headline_row(eps: tuple[float, ...], headline: float) -> int | None:
    return eps.index(headline) if headline in eps else None
