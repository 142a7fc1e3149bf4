"""`otad predict`: from inputs to a CSV of predictions and what each rests on."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from otad.cip import Status
from otad.cli.console import progress_bar, show
from otad.cli.inputs import InputRows, open_inputs
from otad.cli.options import AsJson, DataDir, Device, Input, ModelDir, check_device
from otad.cli.outputs import files_of, refuse_overwriting
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.model import otad as defense
from otad.model.otad import OTAD, Trace
from otad.scores import abstained, is_right, squared_errors
from otad.training.supervised import METRICS

COLUMNS = ("row", "prediction", "probability", "nearest", "distance", "smoothness", "status")


def predict(
    model_dir: ModelDir,
    input: Input,
    out: Annotated[Path, typer.Option(help="CSV file to write.", dir_okay=False)],
    data_dir: DataDir = None,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.", min=1)] = 1000,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Predict every row of an input, and tell what each prediction rests on.

    A CSV may hold more columns than the model was trained on, in any order.
    Written are: row (its number or file), prediction (empty where the model
    abstains), probability (empty in regression), nearest (training point, by its
    place in the bank), its distance, smoothness (the L used) and status (solved,
    raised, ...). For a model of global scope nearest is the training point of
    most weight.

    Example: otad predict digits-model test --out predictions.csv

    Example: otad predict wine-model new-wines.csv --out predictions.csv
    """
    model = defense.load(model_dir, device=str(check_device(device)))
    refuse_overwriting(out, input, *files_of(model, model_dir, data_dir))
    record = write_predictions(model, open_inputs(model, input, data_dir), out, batch_size)
    facts = {
        "rows": ", ".join(f"{count} {name}" for name, count in record["status"].items()),
        "predictions": str(out),
    }
    for metric in METRICS.values():
        if metric in record:
            facts = {metric: f"{record[metric]:.4f}"} | facts
    show(to_plain(record), as_json, title=f"Predicted {record['rows']} rows", facts=facts)


def write_predictions(
    model: OTAD, rows: InputRows, out: Path, batch_size: int = 1000
) -> dict[str, Any]:
    """Write the CSV, whole or not at all; how many rows have which status, in plain JSON.

    Where targets are known, the score of the predictions is told too.
    """
    counts: Counter[str] = Counter()
    total = 0.0
    with replacing(out) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        with progress_bar("predicting") as advance, torch.no_grad():
            for part, x in rows.batches(batch_size):
                trace = model.trace(x.to(model.backbone.mean.device))
                lines = list(_lines(trace, rows.names[part], model.notes.get("classes") or ()))
                writer.writerows(lines)
                counts.update(line[-1] for line in lines)
                if rows.targets is not None:
                    total += _total_score(trace.outputs.cpu(), rows.targets[part])
                advance(part.stop, len(rows))
    record = {"predictions": str(out), "rows": len(rows), "status": dict(counts)}
    if rows.targets is not None:
        record[METRICS[model.backbone.task]] = total / len(rows)
    return record


def _lines(trace: Trace, names: Sequence[str], classes: Sequence[str]) -> Iterator[list[str]]:
    solution = trace.solution
    if trace.outputs.dim() == 2:
        sure, chosen = trace.outputs.softmax(1).max(1)
        answers = [str(classes[code]) if classes else str(code) for code in chosen.tolist()]
        probabilities = [f"{value:.6f}" for value in sure.tolist()]
    else:
        answers = [f"{value:.7g}" for value in trace.outputs.tolist()]
        probabilities = [""] * len(answers)
    for row in abstained(trace.outputs).nonzero()[:, 0].tolist():
        answers[row] = probabilities[row] = ""
    for name, *cells, smoothness, status in zip(
        names,
        answers,
        probabilities,
        trace.neighbors.indices[:, 0].tolist(),
        (f"{value:.6g}" for value in trace.neighbors.distances[:, 0].tolist()),
        solution.smoothness.tolist(),
        solution.status.tolist(),
        strict=True,
    ):
        used = "" if math.isnan(smoothness) else f"{smoothness:.6g}"
        yield [name, *map(str, cells), used, Status(status).name.lower()]


def _total_score(outputs: Tensor, targets: Tensor) -> float:
    """The right answers counted, or the squared errors summed."""
    judge = is_right if outputs.dim() == 2 else squared_errors
    return float(judge(outputs, targets).sum())
