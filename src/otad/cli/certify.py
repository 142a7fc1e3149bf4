"""`otad certify`: what no attack can change, proved row by row."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from otad.certify import certify as certify_inputs
from otad.certify import certify_values
from otad.cli.attack import describe_score
from otad.cli.console import progress_bar, show
from otad.cli.examples import Examples, Rows, Targets, class_names_of, open_examples
from otad.cli.options import (
    AsJson,
    DataDir,
    Device,
    EmbeddingLipschitz,
    Input,
    ModelDir,
    check_device,
    seed_option,
)
from otad.cli.outputs import files_of, refuse_overwriting
from otad.cli.threat import Scale, Unit, radius_text, read_radii, threat_to
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.model import otad as defense
from otad.model.otad import OTAD
from otad.scores import Score, score_of, share_score

SCOPES = {
    "local": "local: each input by its neighbors (rules hull, cell)",
    "global": "global: one map for the whole bank (rule lipschitz)",
}
MetricLipschitz = Annotated[
    float | None,
    typer.Option(
        help="Q, by which the metric that neighbors are sought by stretches at most; needed for "
        "certificates where the metric has no constant of its own."
    ),
]
QUANTILES = {"least": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "most": 1.0}


@dataclass(frozen=True)
class _Finding:
    """What is proved: for the record, in words, and as lines of a CSV file (to the last digit: a
    rounded radius might be too large)."""

    record: dict[str, Any]
    facts: dict[str, str]
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    assumptions: tuple[str, ...]


def certify(
    model_dir: ModelDir,
    input: Input,
    eps: Annotated[
        str, typer.Option(help="Distances to certify at, separated by commas.")
    ] = "0.25,0.5,1",
    embedding_lipschitz: EmbeddingLipschitz = None,
    metric_lipschitz: MetricLipschitz = None,
    unit: Unit = None,
    scale: Scale = None,
    out: Annotated[
        Path | None, typer.Option(help="CSV file to write, with every row.", dir_okay=False)
    ] = None,
    targets: Targets = None,
    rows: Rows = None,
    seed: Annotated[int, seed_option("Of the rows --rows draws.")] = 0,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Prove how far each input can be moved in l2 without changing its answer.

    Classifiers: a radius for each row, and the share of rows that are right and
    stay so at each eps, where the right answers are known. Regression: an
    interval that holds all answers within each eps. The scope of the model
    decides by which rule; where a metric seeks the neighbors, by how much it
    stretches has to be known.

    Example: otad certify digits-model test --eps 0.5,1 --out radii.csv
    """
    radii = sorted(read_radii(eps))
    model = defense.load(model_dir, device=str(check_device(device)))
    refuse_overwriting(out, input, targets, scale, *files_of(model, model_dir, data_dir))
    examples = open_examples(model, input, targets=targets, data_dir=data_dir, rows=rows, seed=seed)
    options = {
        "unit": threat_to(model, "l2", 0.0, unit=unit, scale=scale).scale,
        "embedding_lipschitz": embedding_lipschitz,
        "metric_lipschitz": metric_lipschitz,
    }
    if model.backbone.task == "regression":
        finding = _certify_values(model, examples, radii, options)
    else:
        finding = _certify_classes(model, examples, radii, options)
    facts = finding.facts | {
        "scope": _scope(model),
        "rests on": "; ".join(finding.assumptions),
    }
    if out is not None:
        _write(out, finding)
        facts["rows"] = str(out)
    record = {
        "rows": len(examples),
        "scope": model.scope,
        "metric": None if model.metric is None else type(model.metric).__name__,
        **finding.record,
        "assumptions": list(finding.assumptions),
        "csv": None if out is None else str(out),
    }
    show(to_plain(record), as_json, title=f"Certified {len(examples)} rows", facts=facts)


def _scope(model: OTAD) -> str:
    if model.metric is None:
        return SCOPES[model.scope]
    return (
        f"local: each input by its neighbors among the keys of {type(model.metric).__name__} "
        "(rule hull; cell where the stretch of the embedding is known)"
    )


def _certify_classes(
    model: OTAD, examples: Examples, radii: list[float], options: dict[str, Any]
) -> _Finding:
    with progress_bar("certifying") as advance:
        found = certify_inputs(model, examples.x, progress=advance, **options)
    quantiles = _quantiles(found.radius)
    rules = dict(Counter(found.rules))
    certified: dict[str, Score] = {}
    if examples.y is not None:
        for eps in radii:
            standing = int(found.holds(examples.y, eps).sum())
            certified[radius_text(eps)] = share_score(standing, len(examples))
    facts = {
        **{f"certified at {eps}": describe_score(score) for eps, score in certified.items()},
        "radius": _spread(quantiles),
        "rules": ", ".join(f"{count} {rule}" for rule, count in rules.items()),
    }
    classes = class_names_of(model)
    lines: list[tuple[str, ...]] = [
        (name, classes[label], str(radius), rule)
        for name, label, radius, rule in zip(
            examples.names, found.prediction.tolist(), found.radius.tolist(), found.rules,
            strict=True,
        )
    ]  # fmt: skip
    return _Finding(
        {"certified": certified, "radius": quantiles, "rules": rules},
        facts,
        ("row", "prediction", "radius", "rule"),
        lines,
        found.assumptions,
    )


def _certify_values(
    model: OTAD, examples: Examples, radii: list[float], options: dict[str, Any]
) -> _Finding:
    record: dict[str, Any] = {"intervals": {}}
    facts: dict[str, str] = {}
    assumptions: dict[str, None] = {}  # by which some interval is proved, in order
    lines: list[tuple[str, ...]] = []
    with progress_bar("certifying") as advance:
        for done, eps in enumerate(radii):
            found = certify_values(model, examples.x, eps, **options)
            assumptions |= dict.fromkeys(found.assumptions)
            radius, width = radius_text(eps), _quantiles(found.high - found.low)
            record["intervals"][radius] = {"width": width}
            facts[f"width at {radius}"] = _spread(width)
            if examples.y is not None:
                worst = torch.maximum(
                    (found.low - examples.y).abs(), (found.high - examples.y).abs()
                )
                score = score_of(worst, torch.zeros_like(worst))
                record["intervals"][radius]["certified"] = score
                facts[f"mse at most, at {radius}"] = describe_score(score)
            for name, low, high in zip(
                examples.names, found.low.tolist(), found.high.tolist(), strict=True
            ):
                lines.append((name, radius, str(low), str(high)))
            advance(done + 1, len(radii))
    return _Finding(record, facts, ("row", "eps", "low", "high"), lines, tuple(assumptions))


def _quantiles(values: Tensor) -> dict[str, float]:
    marks = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    found = torch.quantile(values.detach().double().cpu(), marks, interpolation="lower")
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def _spread(quantiles: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {'infinite' if math.isinf(value) else format(value, '.4g')}"
        for name, value in quantiles.items()
    )


def _write(out: Path, finding: _Finding) -> None:
    with replacing(out) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(finding.columns)
        writer.writerows(finding.lines)
