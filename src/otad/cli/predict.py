"""`otad predict` and `otad explain`: predictions, and the training points they rest on."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from otad.attacks.adaptive.neighborhood import knows_inputs
from otad.checks import require
from otad.cip import Status
from otad.cli import options as opt
from otad.cli.console import describe_counts, remark, show, usual_progress, write_csv
from otad.cli.inputs import InputRows, open_inputs
from otad.cli.outputs import STDOUT, check_out
from otad.cli.sources import open_model, training_inputs
from otad.explain import explain as explain_inputs
from otad.explain.explaining import names_of_points
from otad.io.codec import write_json
from otad.io.files import replacing
from otad.model.otad import OTAD
from otad.model.trace import Trace
from otad.progress import progress_bar
from otad.scores import abstained, is_right, score_text, squared_errors
from otad.training.supervised import METRICS
from otad.workers import working

COLUMNS = ("row", "prediction", "probability", "nearest", "distance", "smoothness", "status")
PICTURES = (".png", ".svg", ".pdf")


def predict(
    model_dir: opt.ModelDir,
    input: opt.Input,
    out: Annotated[Path, opt.option("CSV file to write; - is stdout.", dir_okay=False)],
    force: opt.Force = False,
    data_dir: opt.DataDir = None,
    batch_size: opt.BatchSize = 1000,
    device: opt.Device = "cpu",
    jobs: opt.Jobs = 1,
    cluster: opt.Cluster = None,
    as_json: opt.AsJson = False,
) -> None:
    """Predict every row of an input, and list the training point behind each prediction.

    A CSV file may have more columns than the model was trained on, in any order. The
    output has the columns row (its line in a CSV file, where the header is line 1, its
    image file, its obs name in an .h5ad, else its number from 0), prediction (empty
    where the model abstains), probability (empty in regression), nearest (the nearest
    training point, named in the same way, or its row in the bank), distance (to this
    point), smoothness (the L used) and status (solved, raised, ...). In global scope,
    nearest is the training point with the largest weight.

    Example: otad predict digits-model test --out predictions.csv

    Example: otad predict wine-model new-wines.csv --out predictions.csv
    """
    model = open_model(model_dir, device, data_dir, out, input)
    check_out(out, force, as_json)
    rows = open_inputs(model, input, data_dir)
    targets = rows.targets(None) if input == "test" else None
    with opt.executor_of(jobs, cluster, device) as executor:
        record = write_predictions(model, rows, targets, out, batch_size, executor)
    known = [metric for metric in METRICS.values() if metric in record]
    facts = {metric: score_text(metric, record[metric]) for metric in known}
    facts |= {"rows": describe_counts(record["status"]), "predictions": str(out)}
    show(record, as_json, title=f"Predicted {record['rows']} rows", facts=facts, out=out)


def write_predictions(
    model: OTAD,
    rows: InputRows,
    targets: Tensor | None,
    out: Path,
    batch_size: int,
    executor: Executor | int | None = None,
) -> dict[str, Any]:
    """Write the predictions; return the number of rows of each status, and the score if targets
    are given."""
    counts: Counter[str] = Counter()
    total = 0.0
    parts: deque[slice] = deque()

    def tasks() -> Iterator[tuple[Tensor, Sequence[str]]]:
        for part, x in rows.batches(batch_size):
            parts.append(part)
            yield x, rows.names[part]

    def lines() -> Iterator[Sequence[str]]:
        nonlocal total
        yield COLUMNS
        shown = progress_bar("predicting", usual_progress())
        with shown as advance, working(executor) as workers:
            for outputs, found in workers.in_order(_answer, (model,), tasks()):
                part = parts.popleft()
                if targets is not None:
                    judge = is_right if outputs.dim() == 2 else squared_errors
                    total += float(judge(outputs, targets[part]).sum())
                for line in found:
                    counts[line[-1]] += 1
                    yield line
                advance(part.stop, len(rows))

    write_csv(out, lines())
    record = {"predictions": str(out), "rows": len(rows), "status": dict(counts)}
    if targets is not None:
        record[METRICS[model.backbone.task]] = total / len(rows)
    return record


@torch.no_grad()
def _answer(model: OTAD, x: Tensor, names: Sequence[str]) -> tuple[Tensor, list[list[str]]]:
    """Return the outputs and the lines of one batch."""
    trace = model.trace(x.to(model.backbone.mean.device))
    classes, points = model.notes.get("classes") or (), names_of_points(model)
    return trace.outputs.cpu(), [*_lines(trace, names, classes, points)]


def _lines(
    trace: Trace, names: Sequence[str], classes: Sequence[str], points: Sequence[str] | None
) -> Iterator[list[str]]:
    outputs, nearest, solution = trace.outputs, trace.neighbors, trace.solution
    if outputs.dim() == 2:
        largest, labels = outputs.softmax(1).max(1)
        predictions = [str(classes[code]) if classes else str(code) for code in labels.tolist()]
        probabilities = [f"{value:.6f}" for value in largest.tolist()]
    else:
        digits = 7 if outputs.dtype == torch.float32 else 16
        predictions = [f"{value:.{digits}g}" for value in outputs.tolist()]
        probabilities = [""] * len(predictions)
    for row in abstained(outputs).nonzero()[:, 0].tolist():
        predictions[row] = probabilities[row] = ""
    found = nearest.indices[:, 0], nearest.distances[:, 0], solution.smoothness, solution.status
    columns = zip(names, predictions, probabilities, *(c.tolist() for c in found), strict=True)
    for *answer, index, distance, smoothness, status in columns:
        used = "" if math.isnan(smoothness) else f"{smoothness:.6g}"
        point = points[index] if points else str(index)
        yield [*answer, point, f"{distance:.6g}", used, Status(status).name.lower()]


def explain(
    model_dir: opt.ModelDir,
    input: opt.Input,
    row: Annotated[
        str | None,
        opt.option(
            'The row to explain, as `otad predict` names it: 3, "line 3" or a file.',
            show_default="the first",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        opt.option("Picture (.png, .svg, .pdf) or JSON file (.json); - is stdout.", dir_okay=False),
    ] = None,
    force: opt.Force = False,
    top: Annotated[int, opt.option("Number of training points to show.", min=1)] = 5,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Show how much each training point contributes to a prediction.

    The model predicts from a weighted mean of the features of training points, so the
    weights do not approximate the model: they define its prediction. The margin is the
    logit of the predicted class minus the logit of the runner-up. A training point
    contributes its weight times the margin that it would give alone (in regression,
    times its value), and all contributions sum to the margin. A class with less weight
    can therefore win. Features are listed from the one that differs most.

    Example: otad explain digits-model test --row 3 --out why.png

    Example: otad explain wine-model new-wines.csv --row "line 3"
    """
    kind = ".json" if out in (None, STDOUT) else Path(out or "").suffix.lower()
    ends = f"a name that ends in {', '.join(PICTURES)} or .json"
    require(kind in (*PICTURES, ".json"), "out", ends, out)
    model = open_model(model_dir, device, data_dir, out, input)
    check_out(out, force, as_json)
    drawn = kind == ".json" or len(model.backbone.input_shape) > 1
    require(drawn, "out", "a .json file, as only images can be drawn", out)
    rows = open_inputs(model, input, data_dir)
    number = 0 if row is None else rows.number_of(row)
    x = rows.row(number).to(device)
    known: dict[str, Any] = {}
    if rows.names[number] != str(number):  # a line, a file or a cell
        known["names"] = [rows.names[number]]
    known["train_x"] = None if out is None else training_inputs(model, data_dir, input)
    drawn = kind == ".json" or knows_inputs(model, known["train_x"])
    require(drawn, "out", "a .json file, as the model does not have its training images", out)
    (explanation,) = explain_inputs(model, x, **known)
    if out == STDOUT:
        typer.echo(json.dumps(explanation.to_dict(inputs=True), allow_nan=False))
        return
    if out is not None:
        if kind == ".json":
            write_json(out, explanation.to_dict(inputs=True))
        else:
            with replacing(out) as partial:
                explanation.figure(top=top).savefig(partial, format=kind[1:], dpi=150)
        remark(f"wrote {out}")
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), allow_nan=False))
    else:
        Console().print(explanation.table(top=top))
