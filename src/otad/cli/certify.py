"""`otad certify`: what no attack can change, proved row by row."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from otad.certify import certify as certify_inputs
from otad.certify import certify_values
from otad.certify.input_reach import check_bounds
from otad.checks import require
from otad.cli import console
from otad.cli import options as opt
from otad.cli.inputs import Examples, open_examples
from otad.cli.outputs import check_out
from otad.cli.sources import open_model
from otad.model.names import class_names_of
from otad.model.otad import OTAD
from otad.progress import progress_bar
from otad.scores import score_of, share_score

QUANTILES = {"least": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "most": 1.0}

# For the record, in words, and as lines of a CSV file with all digits, so none is rounded up.
Proved = tuple[dict[str, Any], dict[str, str], list[tuple[str, ...]]]


def certify(
    model_dir: opt.ModelDir,
    input: opt.Input,
    eps: Annotated[str, opt.option("Radii, separated by commas.")] = "0.25,0.5,1",
    embedding_lipschitz: opt.EmbeddingLipschitz = None,
    metric_lipschitz: opt.MetricLipschitz = None,
    within_bounds: opt.WithinBounds = False,
    unit: opt.Unit = None,
    scale: opt.Scale = None,
    out: Annotated[
        Path | None, opt.option("CSV file with one line for each row; - is stdout.", dir_okay=False)
    ] = None,
    force: opt.Force = False,
    targets: opt.Targets = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    batch_size: Annotated[
        int | None,
        opt.option("Number of rows to process at once.", min=1, show_default="what memory allows"),
    ] = None,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    jobs: opt.Jobs = 1,
    cluster: opt.Cluster = None,
    as_json: opt.AsJson = False,
) -> None:
    """Prove how far each input can change in l2 without changing its prediction.

    A classifier gets a certified radius for each row and, if the targets of all rows are
    known, the certified accuracy at each eps. A regressor gets an interval that contains all
    predictions within each eps. The scope of the model decides which rule applies. If
    the model searches neighbors with a metric, the Lipschitz constant of the metric
    must be known. With --jobs or --cluster, a smaller --batch-size gives every process
    some rows.

    Example: otad certify digits-model test --eps 0.5,1 --out radii.csv
    """
    options = opt.given(locals(), ("embedding_lipschitz", "metric_lipschitz", "batch_size"))
    radii = sorted(opt.read_radii(eps))
    model = open_model(model_dir, device, data_dir, out, input, targets, scale)
    check_out(out, force, as_json)
    reading: dict[str, Any] = {"targets": targets, "data_dir": data_dir, "rows": rows, "seed": seed}
    examples = open_examples(model, input, **reading, needs_targets=False)
    ball = opt.threat_to(model, "l2", 0.0, unit=unit, scale=scale)
    options["unit"] = ball.scale
    if model.backbone.task == "regression":
        require(not within_bounds, "--within-bounds", "a classifier", "a regressor")
        prove = _prove_values
    else:
        check_bounds(model.backbone, within_bounds)
        prove = partial(_prove_classes, threats=(False, True)[: 1 + within_bounds])
    with opt.executor_of(jobs, cluster, device) as executor:
        record, facts, lines = prove(model, examples, radii, options | {"executor": executor})
    metric = None if model.metric is None else type(model.metric).__name__
    keys = "" if metric is None else f", searched with the keys of {metric}"
    facts["unit"] = record["unit"] = ball.unit_name or "the units of the inputs"
    facts["scope"] = model.answerer.summary(model.n_neighbors) + keys
    facts["assumptions"] = "; ".join(record["assumptions"])
    if out is not None:
        console.write_csv(out, lines)
        facts["rows"] = str(out)
    record = {"rows": len(examples), "scope": model.scope, "metric": metric, **record}
    record["csv"] = None if out is None else str(out)
    title = f"Certified {len(examples)} rows"
    console.show(record, as_json, title=title, facts=facts, out=out)


def _prove_classes(
    model: OTAD,
    examples: Examples,
    radii: list[float],
    options: dict[str, Any],
    threats: tuple[bool, ...],
) -> Proved:
    record: dict[str, Any] = {}
    facts: dict[str, str] = {}
    names, columns = class_names_of(model), [("row", *examples.names)]
    assumptions: dict[str, None] = {}  # of both threats, in order
    options["progress"] = console.usual_progress()
    for within in threats:
        found = certify_inputs(model, examples.x, within_bounds=within, **options)
        where = " within bounds" if within else ""
        certified = {}
        if examples.y is not None:
            for eps in radii:
                right = int(found.holds(examples.y, eps).sum())
                certified[opt.radius_text(eps)] = share_score(right, len(examples))
        quantiles, rules = _quantiles(found.radius), dict(Counter(found.rules))
        proved = {"certified": certified, "radius": quantiles, "rules": rules}
        record |= {"within_bounds": proved} if within else proved
        for text, score in certified.items():
            facts[f"certified at {text}{where}"] = console.describe_score(score)
        facts[f"radius{where}"] = console.describe_quantiles(quantiles)
        facts[f"rules{where}"] = console.describe_counts(rules)
        assumptions |= dict.fromkeys(found.assumptions)
        if not within:
            # as in `otad predict`, empty where the model abstains
            labels = (names[label] if label >= 0 else "" for label in found.prediction.tolist())
            columns.append(("prediction", *labels))
        mark = where.replace(" ", "_")
        columns.append((f"radius{mark}", *map(str, found.radius.tolist())))
        columns.append((f"rule{mark}", *found.rules))
    record["assumptions"] = list(assumptions)
    return record, facts, list(zip(*columns, strict=True))


def _prove_values(
    model: OTAD, examples: Examples, radii: list[float], options: dict[str, Any]
) -> Proved:
    intervals: dict[str, dict[str, Any]] = {}
    facts: dict[str, str] = {}
    assumptions: dict[str, None] = {}  # of all intervals, in order
    lines: list[tuple[str, ...]] = [("row", "eps", "low", "high")]
    with progress_bar("certifying", console.usual_progress()) as advance:
        for done, eps in enumerate(radii, 1):
            found = certify_values(model, examples.x, eps, **options)
            assumptions |= dict.fromkeys(found.assumptions)
            radius, width = opt.radius_text(eps), _quantiles(found.high - found.low)
            intervals[radius] = {"width": width}
            facts[f"width at {radius}"] = console.describe_quantiles(width)
            if examples.y is not None:
                worst = (found.low - examples.y).abs().maximum((found.high - examples.y).abs())
                score = score_of(worst, torch.zeros_like(worst))
                intervals[radius]["certified"] = score
                facts[f"certified mse at {radius}"] = console.describe_score(score)
            bounds = zip(examples.names, found.low.tolist(), found.high.tolist(), strict=True)
            lines += [(name, radius, str(low), str(high)) for name, low, high in bounds]
            advance(done, len(radii))
    return {"intervals": intervals, "assumptions": list(assumptions)}, facts, lines


def _quantiles(values: Tensor) -> dict[str, float]:
    marks = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    found = torch.quantile(values.detach().double().cpu(), marks, interpolation="lower")
    return dict(zip(QUANTILES, found.tolist(), strict=True))
