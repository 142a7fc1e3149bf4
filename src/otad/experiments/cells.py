"""Numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from otad.model.diagnostics import Distribution
from otad.scores import Score

NONE = "-"
GIGABYTE = 1e9
_MET = {None: NONE, True: "yes", False: "NO"}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Nothing where there are no rows."""
    if not body:
        return ""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def heading(metric: str) -> str:
    return {"accuracy": "accuracy % (95 %)", "mse": "mean squared error (95 %)"}[metric]


def score(found: Score) -> str:
    digits = 2 if found.metric == "accuracy" else 3
    value, low, high = (f"{one:.{digits}f}" for one in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"


def value_of(found: Score) -> str:
    return f"{found.value:.2f}" if found.metric == "accuracy" else f"{found.value:.3f}"


def spread(found: Distribution | None) -> str:
    if found is None:
        return NONE
    marks = (found.least, found.median, found.quantile_90, found.quantile_99, found.most)
    return " / ".join(f"{mark:.3g}" for mark in marks)


def number(value: float | None, mark: str = "") -> str:
    return NONE if value is None else f"{value:g}{mark}"


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def met(is_met: bool | None) -> str:
    return _MET[is_met]


def listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def in_brackets(options: Mapping[str, object]) -> str:
    return f" ({listed(options)})" if options else ""
