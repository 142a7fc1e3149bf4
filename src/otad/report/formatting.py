"""Numbers of a record as text for a reader."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from otad.scores import Score

TIMES = " \N{MULTIPLICATION SIGN} "
SUPERSCRIPTS = str.maketrans("-0123456789", "\N{SUPERSCRIPT MINUS}⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(score: Score) -> str:
    return f"{score.value:.1f}%"


def interval(score: Score) -> str:
    if score.metric == "accuracy":
        return f"{score.low:.1f} to {score.high:.1f}%"
    return f"{score.low:.4g} to {score.high:.4g}"


def distance(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def scientific(value: float) -> str:
    """One digit times a power of ten."""
    digit, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(SUPERSCRIPTS)
    return "0" if value == 0 else f"{digit}{TIMES}10{raised}"


def duration(seconds: float) -> str:
    """Three digits and a suitable unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def threads(count: int) -> str:
    return "one CPU thread" if count == 1 else f"{count} CPU threads"


def flat(values: dict[str, Any], longest: int = 100) -> dict[str, str]:
    """Nested plain values as one level of short texts, with dotted names."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": text for inner, text in flat(value, longest).items()}
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            found[name] = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return found


def unanswered(errors: Iterable[float]) -> str:
    """Added to a mean error that is infinite: for how many examples the model abstained."""
    count = sum(map(math.isinf, errors))
    return f"; no answer to {count:,} of them" if count else ""
