"""What an attacker may change, from options of the command line to a ball."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from otad.checks import check_choice
from otad.errors import InputError
from otad.io.codec import read_json
from otad.model.otad import OTAD
from otad.threat import NORMS, LpBall

UNITS = ("1", "std")
THREAT = "Changes of an input"

Norm = Annotated[
    str, typer.Option(help="How a change is measured: l2 or linf.", rich_help_panel=THREAT)
]
Immutable = Annotated[
    list[str] | None,
    typer.Option(
        help='Features nobody can change, such as "age,sex". Repeatable.', rich_help_panel=THREAT
    ),
]
Unit = Annotated[
    str | None,
    typer.Option(
        help="1 measures the change of every feature as it is, which is the default; std by the "
        "standard deviation of the feature in the training data.",
        rich_help_panel=THREAT,
    ),
]
Scale = Annotated[
    Path | None,
    typer.Option(
        help='JSON file with the unit each change is measured in, {"alcohol": 0.5, ...}: with '
        "linf, a feature may change by eps times its unit.",
        dir_okay=False,
        rich_help_panel=THREAT,
    ),
]


def read_radii(text: str) -> tuple[float, ...]:
    """Numbers of at least 0, separated by commas, in the order given."""
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
    """Short, and no other radius: 0.5, but 0.7142857142857143, as nothing is proved beyond it."""
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
    """The ball around inputs of the model, within the bounds it declares."""
    ball = NORMS[check_choice(norm, "norm", tuple(NORMS))]
    if unit is not None and scale is not None:
        raise InputError("scale: expected either --unit or --scale, got both")
    frozen = _named_features(model, immutable or ())
    units = None
    if scale is not None:
        units = _read_scale(model, scale, frozen)
    elif unit is not None and check_choice(unit, "unit", UNITS) == "std":
        units = model.backbone.std.detach().clone()
    return ball(eps, bounds=model.backbone.bounds, scale=units, mutable=_mutable(model, frozen))


def _feature_names(model: OTAD, option: str) -> list[str]:
    shape = model.backbone.input_shape
    if len(shape) != 1:
        raise InputError(f"{option}: expected a model of tables, got one of inputs {shape}")
    return list(map(str, model.notes.get("feature_names") or range(shape[0])))


def _named_features(model: OTAD, given: Sequence[str]) -> list[str]:
    """A name that holds commas may be given alone."""
    if not given:
        return []
    names = _feature_names(model, "immutable")
    asked = [
        name
        for text in given
        for name in ([text] if text in names else map(str.strip, text.split(",")))
    ]
    _refuse_unknown(asked, names, "immutable")
    return asked


def _mutable(model: OTAD, frozen: Sequence[str]) -> Tensor | None:
    if not frozen:
        return None
    names = _feature_names(model, "immutable")
    free = torch.tensor([name not in frozen for name in names])
    if not bool(free.any()):
        raise InputError("immutable: expected at least one feature to be left, got all of them")
    return free.to(model.backbone.mean.device)


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


def _refuse_unknown(asked: Sequence[str], names: Sequence[str], option: str) -> None:
    for name in asked:
        if name not in names:
            raise InputError(
                f"{option}: unknown feature {name!r}, expected one of {', '.join(names)}"
            )
