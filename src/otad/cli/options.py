"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from otad.checks import check_choice
from otad.errors import InputError
from otad.io.codec import read_json
from otad.model.otad import OTAD
from otad.threat import NORMS, LpBall
from otad.training.config import check_seed

READING, THREAT, TRAINING = "Reading the data", "Changes of an input", "Network and training"
UNITS = ("1", "std")


def panel_option(panel: str, help: str, *names: str, **more: Any) -> Any:
    """An option that the help shows in a panel of its own."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def seed_option(help: str) -> Any:
    """A whole number that every generator accepts."""
    return typer.Option(help=help, callback=check_seed)


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:1.")]
BatchSize = Annotated[int, typer.Option(help="Rows at a time.", min=1)]
ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="Model folder written by `otad defend`.")
]
Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="CSV, NPZ (array x), image folder or .h5ad; or the word test, for the test part of "
        "the data the model was made from.",
    ),
]
DataDir = Annotated[
    Path | None,
    panel_option(
        READING,
        "Folder of the registered data sets, by default the one in OTAD_DATA; and of data that was "
        "named by a path relative to it.",
    ),
]
Targets = Annotated[
    str | None,
    panel_option(
        READING,
        "Where the targets are: a column of the CSV, an obs column of the .h5ad, an array of the "
        "NPZ, or another CSV or NPZ file with one target per row. By default those the model was "
        "trained on: the target column, the array y, the folder of each image.",
    ),
]
Rows = Annotated[
    int | None, typer.Option(help="Use only this many rows, drawn at random by --seed.", min=1)
]
EmbeddingLipschitz = Annotated[
    float | None,
    typer.Option(
        help="Lipschitz constant of the embedding in which neighbors are searched; certificates "
        "need it where the embedding does more than normalize."
    ),
]
MetricLipschitz = Annotated[
    float | None,
    typer.Option(
        help="Lipschitz constant of the metric by which neighbors are searched; certificates need "
        "it where the metric does not know its own."
    ),
]
Norm = Annotated[str, panel_option(THREAT, "How a change is measured: l2 or linf.")]
Immutable = Annotated[
    list[str] | None,
    panel_option(THREAT, 'Features that cannot change, such as "age,sex". Repeatable.'),
]
Unit = Annotated[
    str | None,
    panel_option(
        THREAT,
        "1 measures the change of every feature as it is, which is the default; std in units of "
        "the standard deviation of the feature in the training data.",
    ),
]
Scale = Annotated[
    Path | None,
    panel_option(
        THREAT,
        'JSON file with the unit of each feature, {"alcohol": 0.5, ...}: with linf, a feature may '
        "change by eps times its unit.",
        dir_okay=False,
    ),
]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def check_device(name: str) -> torch.device:
    """A device that is present and computes: a number comes back from it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    # torch asserts that it was built with CUDA, and imports the drivers of rarer devices
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device: expected one that is present, got {name!r}: {reason}") from error
    return device


def read_radii(text: str) -> tuple[float, ...]:
    """Numbers of at least 0, separated by commas, in the given order."""
    try:
        radii = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"eps: expected numbers such as 0.5,1,2, got {text!r}") from error
    if len(set(radii)) < len(radii):
        raise InputError(f"eps: expected distinct numbers, got {text!r}")
    if not all(0 <= eps < float("inf") for eps in radii):
        raise InputError(f"eps: expected finite numbers of at least 0, got {text!r}")
    return radii


def radius_text(eps: float) -> str:
    """Short but not rounded: 0.5, but 0.7142857142857143, as nothing is proved beyond it."""
    short = f"{eps:g}"
    return short if float(short) == eps else repr(eps)


def threat_to(
    model: OTAD,
    norm: str,
    eps: float,
    *,
    immutable: Sequence[str] | None = None,
    unit: str | None = None,
    scale: Path | None = None,
) -> LpBall:
    """The ball around inputs of the model, within the bounds that it declares."""
    ball = NORMS[check_choice(norm, "norm", tuple(NORMS))]
    if unit is not None and scale is not None:
        raise InputError("scale: expected either --unit or --scale, got both")
    device, mutable, units, frozen = model.backbone.mean.device, None, None, []
    if immutable:
        names = _feature_names(model, "immutable")
        for text in immutable:  # a name with commas must be given alone
            frozen += [text] if text in names else [part.strip() for part in text.split(",")]
        _refuse_unknown(frozen, names, "immutable")
        mutable = torch.tensor([name not in frozen for name in names], device=device)
        if not bool(mutable.any()):
            raise InputError("immutable: expected at least one feature to be left, got all of them")
    if scale is not None:
        units = _read_scale(model, scale, frozen)
    elif unit is not None and check_choice(unit, "unit", UNITS) == "std":
        units = model.backbone.std.detach().clone()
    return ball(eps, bounds=model.backbone.bounds, scale=units, mutable=mutable)


def _read_scale(model: OTAD, path: Path, frozen: Sequence[str]) -> Tensor:
    """The unit of every feature that can change."""
    names, content = _feature_names(model, "scale"), read_json(path)
    if not isinstance(content, dict) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in content.values()
    ):
        raise InputError(f'{path}: expected a number for each feature, {{"name": 0.5, ...}}')
    _refuse_unknown(list(content), names, str(path))
    missing = [name for name in names if name not in content and name not in frozen]
    if missing:
        raise InputError(
            f"{path}: expected a unit for every feature that can change, "
            f"got none for {', '.join(missing)}"
        )
    units = [float(content.get(name, 1.0)) for name in names]
    return torch.tensor(units, device=model.backbone.mean.device)


def _feature_names(model: OTAD, option: str) -> list[str]:
    shape = model.backbone.input_shape
    if len(shape) != 1:
        raise InputError(f"{option}: expected a model of tables, got one of inputs {shape}")
    return list(map(str, model.notes.get("feature_names") or range(shape[0])))


def _refuse_unknown(asked: Sequence[str], names: Sequence[str], option: str) -> None:
    for name in asked:
        if name not in names:
            raise InputError(
                f"{option}: unknown feature {name!r}, expected one of {', '.join(names)}"
            )
