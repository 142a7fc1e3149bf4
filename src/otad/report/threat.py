"""What was allowed to the attacker, and how to run the evaluation again."""

from __future__ import annotations

import math
from typing import Any

from otad.evaluate.records import Evaluation
from otad.report.blocks import Block, Facts, Section, Table
from otad.report.cost import duration, threads
from otad.report.formatting import flat

NORMS = {
    "l2": "l2: the Euclidean length of the whole change",
    "linf": "linf: the largest change of any feature",
}


def threat_section(evaluation: Evaluation, n_features: int | None = None) -> Section:
    """The threat model in words; `n_features` of an input, where it is known."""
    threat = evaluation.threat
    norm, eps = str(threat["norm"]), evaluation.headline_eps
    sizes = ", ".join(f"{size:g}" for size in evaluation.eps)
    facts = {
        "distance": NORMS.get(norm, norm),
        "headline eps": f"{eps:g}{_spread(norm, eps, n_features)}",
        "all eps": sizes or "none",
        "input scale": _scale(threat),
        "may change": _mutable(threat),
        "attacker knows": evaluation.attacker_knows,
        "examples": f"{evaluation.n:,}, seed {evaluation.seed}",
    }
    return Section(
        "threat",
        "Threat model",
        "What the attacker may do, and what the attacker knows. All figures below hold for this "
        "threat and no other.",
        [Facts(facts)],
    )


def _spread(norm: str, eps: float, n_features: int | None) -> str:
    if norm != "l2" or not n_features:
        return ""
    each = eps / math.sqrt(n_features)
    return f", that is {each:.3g} for each of {n_features:,} features if spread evenly"


def _scale(threat: dict[str, Any]) -> str:
    bounds = threat.get("bounds")
    known = "unbounded" if bounds is None else f"from {bounds[0]:g} to {bounds[1]:g}"
    scale = threat.get("scale")
    if scale is None:
        return known
    return f"{known}; each feature in its own unit, of {min(scale):.3g} to {max(scale):.3g}"


def _mutable(threat: dict[str, Any]) -> str:
    mutable = threat.get("mutable")
    if mutable is None:
        return "every feature"
    return f"{sum(mutable):,} of {len(mutable):,} features"


def repeat_section(evaluation: Evaluation) -> Section:
    """Where, when and with what it ran."""
    here = evaluation.environment
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
    settings = {record.attack: flat(record.settings) for record in evaluation.attacks}
    rows = [
        (name, ", ".join(f"{key} = {value}" for key, value in values.items()) or "none")
        for name, values in settings.items()
    ]
    card = {name: it for name, it in flat(evaluation.model).items() if name != "abstained"}
    blocks: list[Block] = [Facts(facts)]
    if card:
        blocks.append(
            Table(("model", "setting"), list(card.items()), folded="The model", prose=True)
        )
    if rows:
        blocks.append(
            Table(("attack", "settings"), rows, folded="Settings of the attacks", prose=True)
        )
    return Section(
        "repeat",
        "How to repeat it",
        "The same model, examples, threat, attacks and seed give the same record; "
        "evaluation.json holds all numbers of this page, row by row.",
        blocks,
    )
