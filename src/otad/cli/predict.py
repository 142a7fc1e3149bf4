"""`otad predict` and `otad explain`: predictions, and the training points they rest on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from otad.cip import Status
from otad.cli.console import describe_counts, progress_bar, remark, show, write_csv
from otad.cli.inputs import InputRows, open_inputs
from otad.cli.options import AsJson, BatchSize, DataDir, Device, Input, ModelDir, check_device
from otad.cli.sources import files_of, refuse_overwriting, training_inputs
from otad.errors import InputError
from otad.explain import Explanation
from otad.explain import explain as explain_inputs
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.model import otad as models
from otad.model.otad import OTAD, Trace
from otad.scores import abstained, is_right, squared_errors
from otad.training.supervised import METRICS

COLUMNS = ("row", "prediction", "probability", "nearest", "distance", "smoothness", "status")
PICTURES = (".png", ".svg", ".pdf")


def predict(
    model_dir: ModelDir,
    input: Input,
    out: Annotated[Path, typer.Option(help="CSV file to write.", dir_okay=False)],
    data_dir: DataDir = None,
    batch_size: BatchSize = 1000,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Predict every row of an input, and report what each prediction rests on.

    A CSV may have more columns than the model was trained on, in any order. The
    output has: row (its number or file), prediction (empty where the model
    abstains), probability (empty in regression), nearest (training point, by its
    place in the bank), its distance, smoothness (the L used) and status (solved,
    raised, ...). For a model of global scope nearest is the training point of
    largest weight.

    Example: otad predict digits-model test --out predictions.csv

    Example: otad predict wine-model new-wines.csv --out predictions.csv
    """
    model = models.load(model_dir, device=str(check_device(device)))
    refuse_overwriting(out, input, *files_of(model, model_dir, data_dir))
    rows = open_inputs(model, input, data_dir)
    targets = rows.targets(None) if input == "test" else None
    record = write_predictions(model, rows, targets, out, batch_size)
    metrics = (metric for metric in METRICS.values() if metric in record)
    facts = {metric: f"{record[metric]:.4f}" for metric in metrics}
    facts |= {"rows": describe_counts(record["status"]), "predictions": str(out)}
    show(to_plain(record), as_json, title=f"Predicted {record['rows']} rows", facts=facts)


def write_predictions(
    model: OTAD, rows: InputRows, targets: Tensor | None, out: Path, batch_size: int
) -> dict[str, Any]:
    """Writes the CSV file; returns how many rows have which status, and the score of the
    predictions where targets are given, in plain JSON."""
    counts: Counter[str] = Counter()
    total = 0.0

    def lines() -> Iterator[list[str]]:
        nonlocal total
        with progress_bar("predicting") as advance, torch.no_grad():
            for part, x in rows.batches(batch_size):
                trace = model.trace(x.to(model.backbone.mean.device))
                outputs = trace.outputs.cpu()
                if targets is not None:
                    judge = is_right if outputs.dim() == 2 else squared_errors
                    total += float(judge(outputs, targets[part]).sum())
                for line in _lines(trace, rows.names[part], model.notes.get("classes") or ()):
                    counts[line[-1]] += 1
                    yield line
                advance(part.stop, len(rows))

    write_csv(out, COLUMNS, lines())
    record = {"predictions": str(out), "rows": len(rows), "status": dict(counts)}
    if targets is not None:
        record[METRICS[model.backbone.task]] = total / len(rows)
    return record


def _lines(trace: Trace, names: Sequence[str], classes: Sequence[str]) -> Iterator[list[str]]:
    if trace.outputs.dim() == 2:
        largest, labels = trace.outputs.softmax(1).max(1)
        predictions = [str(classes[code]) if classes else str(code) for code in labels.tolist()]
        probabilities = [f"{value:.6f}" for value in largest.tolist()]
    else:
        predictions = [f"{value:.7g}" for value in trace.outputs.tolist()]
        probabilities = [""] * len(predictions)
    for row in abstained(trace.outputs).nonzero()[:, 0].tolist():
        predictions[row] = probabilities[row] = ""
    for name, *cells, smoothness, status in zip(
        names,
        predictions,
        probabilities,
        trace.neighbors.indices[:, 0].tolist(),
        (f"{value:.6g}" for value in trace.neighbors.distances[:, 0].tolist()),
        trace.solution.smoothness.tolist(),
        trace.solution.status.tolist(),
        strict=True,
    ):
        used = "" if math.isnan(smoothness) else f"{smoothness:.6g}"
        yield [name, *map(str, cells), used, Status(status).name.lower()]


def explain(
    model_dir: ModelDir,
    input: Input,
    row: Annotated[int, typer.Option(help="Which row, counted from 0.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write a picture (.png, .svg, .pdf; images only) or all numbers (.json).",
            dir_okay=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many training points to show.", min=1)] = 5,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Show the training points a prediction rests on, with weight, label and distance.

    The prediction is the linear output of the weighted mean of their features: the
    weights do not approximate the model, they define its prediction (with strong
    convexity 0).

    Example: otad explain digits-model test --row 3 --out why.png
    """
    if out is not None and out.suffix.lower() not in (*PICTURES, ".json"):
        raise InputError(f"out: expected a name that ends in {', '.join(PICTURES)} or .json")
    model = models.load(model_dir, device=str(check_device(device)))
    refuse_overwriting(out, input, *files_of(model, model_dir, data_dir))
    x = open_inputs(model, input, data_dir).row(row).to(device)
    explanation = explain_inputs(
        model,
        x,
        classes=model.notes.get("classes") or None,
        feature_names=model.notes.get("feature_names"),
        train_x=None if out is None else training_inputs(model, data_dir),
    )[0]
    if out is not None:
        _write_explanation(explanation, out, top)
        remark(f"wrote {out}")
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), allow_nan=False))
    else:
        Console().print(explanation.table(top=top))


def _write_explanation(explanation: Explanation, out: Path, top: int) -> None:
    kind = out.suffix.lower()
    if kind != ".json" and explanation.inputs.dim() == 1:
        raise InputError(f"out: expected a .json file, as only images can be drawn, got {out.name}")
    with replacing(out) as partial:
        if kind == ".json":
            text = json.dumps(explanation.to_dict(inputs=True), indent=2, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
        else:
            explanation.figure(top=top).savefig(partial, format=kind[1:], dpi=150)
