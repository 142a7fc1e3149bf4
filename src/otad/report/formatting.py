"""Numbers of a record as text for a reader."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from otad.scores import Score

TIMES = " \N{MULTIPLICATION SIGN} "
SUPERSCRIPTS = str.maketrans("-0123456789", "\N{SUPERSCRIPT MINUS}⁰¹²³⁴⁵⁶⁷⁸⁹")
LONGEST = 100  # letters of a setting
Cell = str | float | Score | None


def as_text(value: Cell) -> str:
    """A cell of a table: counts in full, other numbers with four digits."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if isinstance(value, Score):
        return f"{value.value:.1f}%" if value.metric == "accuracy" else f"{value.value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "infinite" if math.isinf(value) else f"{value:.4g}"


def interval(score: Score | None) -> str | None:
    if score is None:
        return None
    low, high = (as_text(replace(score, value=end)) for end in (score.low, score.high))
    return f"{low.rstrip('%')} to {high}"


def scientific(value: float) -> str:
    """One digit times a power of ten."""
    digit, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(SUPERSCRIPTS)
    return "0" if value == 0 else f"{digit}{TIMES}10{raised}"


def duration(seconds: float) -> str:
    """Three digits and a suitable unit."""
    sizes = (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")
    size, unit = next((it for it in sizes if seconds >= it[0]), sizes[-1])
    return f"{seconds / size:.3g} {unit}"


def threads(count: int) -> str:
    return "one CPU thread" if count == 1 else f"{count} CPU threads"


def flat(values: dict[str, Any]) -> dict[str, str]:
    """Nested plain values as one level of short texts, with dotted names."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": text for inner, text in flat(value).items()}
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            found[name] = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return found


def unanswered(errors: Iterable[float]) -> str:
    """Added to a mean error that is infinite: for how many examples the model abstained."""
    count = sum(map(math.isinf, errors))
    return f"; no answer to {count:,} of them" if count else ""
