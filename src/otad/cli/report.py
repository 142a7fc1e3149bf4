"""`otad report`: the report of a saved evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from otad.checks import require
from otad.cli import options as opt
from otad.cli.console import show
from otad.cli.evaluate import report_on
from otad.cli.inputs import open_examples
from otad.cli.outputs import STDOUT, check_out
from otad.cli.sources import module_of, open_model_or_net, refuse_overwriting, training_inputs
from otad.errors import InputError
from otad.evaluate.identity import Identity
from otad.evaluate.records import Evaluation
from otad.io.tensor_files import fingerprint, read_tensors
from otad.report.evaluation_report import evaluation_report

PAGES = (".html", ".md")
RECORD, FOUND = "evaluation.json", "adversarial.safetensors"


def report(
    record: Annotated[
        Path, opt.argument("EVALUATION", "evaluation.json of `otad evaluate`, or its folder.")
    ],
    out: Annotated[
        Path | None,
        opt.option(
            "File that ends in .html, or in .md for Markdown; - is stdout.",
            show_default="report.html beside the record",
            dir_okay=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, opt.option("Folder of the evaluated model, to show examples as well.")
    ] = None,
    input: Annotated[
        str, opt.option("With --model: the input that it was evaluated on.", **opt.among(("test",)))
    ] = "test",
    targets: opt.Targets = None,
    force: opt.Force = False,
    data_dir: opt.DataDir = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Write the report of a saved evaluation.

    The record is enough for all numbers and curves. With --model, the report also shows
    what a change of size eps looks like, and adversarial examples. The model and the
    input must be the ones that were evaluated.

    Example: otad report evaluation/evaluation.json --out report.html

    Example: otad report evaluation --model digits-model --force
    """
    path = record / RECORD if record.is_dir() else record
    absent = f"a folder without {RECORD}" if record.is_dir() else "no such file or folder"
    require(path.is_file(), str(record), f"{RECORD} of `otad evaluate`, or its folder", absent)
    place = path.parent / "report.html" if out is None else out
    named = place == STDOUT or place.suffix in PAGES
    require(named, "out", f"a name that ends in {' or '.join(PAGES)}", place)
    check_out(place, force, as_json)
    refuse_overwriting(place, path, path.parent / FOUND)
    evaluation = Evaluation.read(path)
    if model is None:
        page = evaluation_report(evaluation)
    else:
        given: dict[str, Any] = {"targets": targets, "data_dir": data_dir, "device": device}
        page = _with_examples(evaluation, path.parent, model, input, place, **given)
    if place == STDOUT:
        typer.echo(page.html())
        return
    page.write(place)
    facts = {"verdict": " ".join(page.verdict), "report": str(place)}
    shown = {"verdict": list(page.verdict), "report": str(place), "evaluation": str(path)}
    show(shown, as_json, title=f"Report on {path}", facts=facts)


def _with_examples(
    evaluation: Evaluation,
    folder: Path,
    model_dir: Path,
    source: str,
    out: Path,
    *,
    targets: str | None,
    data_dir: Path | None,
    device: str,
) -> Any:
    """Return the report with examples; refuse a model or examples that were not evaluated."""
    model = open_model_or_net(model_dir, device, data_dir, out, source, targets)
    found = Identity().model(module_of(model))["fingerprint"]
    known = evaluation.model.get("fingerprint", found)
    require(found == known, "model", f"the model that was evaluated, {known[:16]}", found[:16])
    options: dict[str, Any] = {"rows": evaluation.n, "seed": evaluation.seed}
    expected = f"the {evaluation.n} examples of the evaluation, which --input names"
    try:
        examples = open_examples(model, source, targets=targets, data_dir=data_dir, **options)
    except InputError as error:
        raise InputError(f"input: expected {expected}, got {source!r}: {error}") from error
    _, header = read_tensors(folder / FOUND)
    data = fingerprint({"x": examples.x, "y": examples.targets})
    same = header.get("data", data) == data
    require(same, "input", expected, f"others in {source!r}")
    title = f"How robust is {model_dir.resolve().name}?"
    train_x = training_inputs(model, data_dir, source)
    options = {"train_x": train_x, "title": title, "source": source}
    return report_on(evaluation, model, examples.x, examples.targets, folder, **options)
