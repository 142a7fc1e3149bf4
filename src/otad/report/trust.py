"""Whether the numbers can be trusted: red flags, and how the solver came to its answers."""

from __future__ import annotations

from otad.evaluate.records import FAIL, NOT_RUN, PASS, Evaluation, Flag
from otad.report.blocks import Block, Flags, Section, Table, Text
from otad.report.sections import FLOAT32_ROUNDOFF, STATUS_MEANINGS, scientific

ORDER = (FAIL, NOT_RUN, PASS)
QUANTILES = ("least", "median", "90%", "99%", "largest")


def count_of(flags: tuple[Flag, ...], verdict: str) -> int:
    return sum(flag.verdict == verdict for flag in flags)


def flags_section(evaluation: Evaluation) -> Section:
    """Failed checks first."""
    failed = count_of(evaluation.flags, FAIL)
    if not evaluation.flags:
        lead = "No check was run, so nothing warns where a number above is too good to be true."
    elif failed:
        lead = f"{failed} of {len(evaluation.flags)} checks fail: read them before any number."
    else:
        lead = "No check fails. They look for the ways in which an attack can be too weak."
    shown = sorted(evaluation.flags, key=lambda flag: ORDER.index(flag.verdict))
    blocks: list[Block] = [Flags(shown)] if shown else []
    return Section("flags", "Can the numbers be trusted?", lead, blocks)


def solver_section(evaluation: Evaluation) -> Section | None:
    """None where the model has no solver."""
    solver = evaluation.solver
    if solver is None:
        return None
    rows = [
        (f"{name}: {STATUS_MEANINGS.get(name, '')}".rstrip(": "), f"{share:.1%}")
        for name, share in solver.statuses.items()
        if share > 0
    ]
    tables: list[Block] = [Table(("status", "share"), rows)]
    if (used := solver.smoothness) is not None:  # none where a network estimates the answers
        marks = used.least, used.median, used.quantile_90, used.quantile_99, used.most
        row = ("L used", *(f"{value:.3g}" for value in marks))
        tables.append(Table(("", *QUANTILES), [row]))
    graded = "No row has a solution to grade"
    if solver.residual is not None:
        graded = (
            f"The largest residual, graded in double precision, is {scientific(solver.residual)}"
        )
    text = f"{graded}; the rounding of float32 is {scientific(FLOAT32_ROUNDOFF)}."
    if solver.changed_by_potential is not None:
        text += (
            " The potential through the neighbors is not unique and the model fixes one: "
            f"{solver.changed_by_potential:.1%} of the predictions differ between the two extremes."
        )
    return Section(
        "solver",
        "How the solver came to its answers",
        f"On the {evaluation.n:,} unattacked examples.",
        [*tables, Text(text)],
    )
