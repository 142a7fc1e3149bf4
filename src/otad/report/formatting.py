"""Numbers of a record as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from otad.scores import Score


def percent(score: Score) -> str:
    return f"{score.value:.1f}%"


def interval(score: Score) -> str:
    if score.metric == "accuracy":
        return f"{score.low:.1f} to {score.high:.1f}%"
    return f"{score.low:.4g} to {score.high:.4g}"


def distance(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.3g}"


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
    """What to add where errors are told: for how many examples there was no answer, if any."""
    count = sum(map(math.isinf, errors))
    return f"; no answer to {count:,} of them" if count else ""
