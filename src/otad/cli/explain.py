"""`otad explain`: the training points one prediction rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from otad.cli.console import remark
from otad.cli.inputs import open_inputs, training_inputs
from otad.cli.options import AsJson, DataDir, Device, Input, ModelDir, check_device
from otad.cli.outputs import files_of, refuse_overwriting
from otad.errors import InputError
from otad.explain import Explanation
from otad.explain import explain as explain_inputs
from otad.io.files import replacing
from otad.model import otad as defense

PICTURES = (".png", ".svg", ".pdf")


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

    The prediction is the net's linear reading of the weighted mean of their
    features: the weights are no guess about the model, they are its answer
    (with strong convexity 0).

    Example: otad explain digits-model test --row 3 --out why.png
    """
    if out is not None and out.suffix.lower() not in (*PICTURES, ".json"):
        raise InputError(f"out: expected a name that ends in {', '.join(PICTURES)} or .json")
    model = defense.load(model_dir, device=str(check_device(device)))
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
        _write(explanation, out, top)
        remark(f"wrote {out}")
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), allow_nan=False))
    else:
        Console().print(explanation.table(top=top))


def _write(explanation: Explanation, out: Path, top: int) -> None:
    kind = out.suffix.lower()
    if kind != ".json" and explanation.inputs.dim() == 1:
        raise InputError(f"out: expected a .json file, as only images can be drawn, got {out.name}")
    with replacing(out) as partial:
        if kind == ".json":
            text = json.dumps(explanation.to_dict(inputs=True), indent=2, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
        else:
            explanation.figure(top=top).savefig(partial, format=kind[1:], dpi=150)
