"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from otad.checks import check_choice, require
from otad.errors import InputError
from otad.io.codec import read_json
from otad.model.otad import OTAD
from otad.threat import NORMS, LpBall
from otad.training.config import check_seed

READING, THREAT, TRAINING = "Reading the data", "Changes of an input", "Network and training"
UNITS = ("1", "std")


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option of a command, in a panel of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


AsJson = Annotated[bool, option("Print one JSON object to stdout, and nothing else.", "--json")]
Seed = Annotated[int, option("Seed of everything that is drawn at random.", callback=check_seed)]
Device = Annotated[str, option("Where to compute: cpu, cuda or cuda:1.")]
BatchSize = Annotated[int, option("Rows at a time.", min=1)]
OutFolder = Annotated[Path, option("Folder for everything that is written.", file_okay=False)]
ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="Model folder written by `otad defend`.")
]
Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="CSV, NPZ (array x), image folder or .h5ad; or test: the test part of its data.",
    ),
]
DataDir = Annotated[
    Path | None,
    option("Folder of the data sets and of relative paths.  [default: OTAD_DATA]", panel=READING),
]
Targets = Annotated[
    str | None,
    option(
        "Column of the CSV, obs column of the .h5ad, array of the NPZ, or another CSV or NPZ file "
        "with the targets. By default the column trained on, array y, the folder of each image.",
        panel=READING,
    ),
]
Rows = Annotated[int | None, option("Use only this many random rows.", min=1)]
EmbeddingLipschitz = Annotated[
    float | None,
    option("Lipschitz constant of the embedding; needed where it does more than normalize."),
]
MetricLipschitz = Annotated[
    float | None,
    option("Lipschitz constant of the metric; needed where the metric does not know its own."),
]
Norm = Annotated[str, option("How a change is measured: l2 or linf.", panel=THREAT)]
Immutable = Annotated[
    list[str] | None,
    option('Features that cannot change, such as "age,sex". Repeatable.', panel=THREAT),
]
Unit = Annotated[
    str | None,
    option("1, or std: standard deviations of the training data.  [default: 1]", panel=THREAT),
]
Scale = Annotated[
    Path | None,
    option(
        'JSON file with the unit of each feature, {"alcohol": 0.5, ...}.',
        panel=THREAT,
        dir_okay=False,
    ),
]


def given(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the named options that were given."""
    return {name: options[name] for name in names if options[name] not in (None, [])}


def read_numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"{option}: expected numbers such as 0.5,1, got {text!r}") from error


def read_radii(text: str) -> tuple[float, ...]:
    """Distinct finite numbers of at least 0, in the given order."""
    radii = read_numbers(text, "eps")
    require(len(set(radii)) == len(radii), "eps", "distinct numbers", repr(text))
    valid = all(0 <= eps < float("inf") for eps in radii)
    require(valid, "eps", "finite numbers of at least 0", repr(text))
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
    require(unit is None or scale is None, "scale", "either --unit or --scale", "both")
    device, mutable, units, frozen = model.backbone.mean.device, None, None, []
    if immutable:
        names = _feature_names(model, "immutable")
        for text in immutable:  # a name with commas must be given alone
            frozen += [text] if text in names else [part.strip() for part in text.split(",")]
        _refuse_unknown(frozen, names, "immutable")
        mutable = torch.tensor([name not in frozen for name in names], device=device)
        require(mutable.any(), "immutable", "at least one feature to be left", "all of them")
    if scale is not None:
        units = torch.tensor(_read_scale(model, scale, frozen), device=device)
    elif unit is not None and check_choice(unit, "unit", UNITS) == "std":
        units = model.backbone.std.detach().clone()
    return ball(eps, bounds=model.backbone.bounds, scale=units, mutable=mutable)


def _read_scale(model: OTAD, path: Path, frozen: Sequence[str]) -> list[float]:
    """The unit of every feature, 1 for those that cannot change."""
    names, content = _feature_names(model, "scale"), read_json(path)
    if not isinstance(content, dict) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in content.values()
    ):
        raise InputError(f'{path}: expected a number for each feature, {{"name": 0.5, ...}}')
    _refuse_unknown(list(content), names, str(path))
    missing = [name for name in names if name not in content and name not in frozen]
    expected = "a unit for every feature that can change"
    require(not missing, str(path), expected, f"none for {', '.join(missing)}")
    return [float(content.get(name, 1.0)) for name in names]


def _feature_names(model: OTAD, option: str) -> list[str]:
    shape = model.backbone.input_shape
    require(len(shape) == 1, option, "a model of tables", f"one of inputs {shape}")
    return list(map(str, model.notes.get("feature_names") or range(shape[0])))


def _refuse_unknown(asked: Sequence[str], names: Sequence[str], option: str) -> None:
    for name in asked:
        require(name in names, option, f"features out of {', '.join(names)}", repr(name))
