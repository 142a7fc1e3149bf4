"""No command writes over what it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from otad.cli.data_choice import DataChoice
from otad.cli.inputs import data_card
from otad.errors import InputError
from otad.model.folder import CARD
from otad.model.otad import OTAD


def refuse_overwriting(out: Path | None, *inputs: str | Path | None) -> None:
    """Refuse an `out` that is one of the inputs, or lies in a folder of images that is one, which
    would no longer be read as before. The word test is no file; nor is what is not there, such as
    the name of a column."""
    if out is None:
        return
    for given in inputs:
        if given in (None, "test") or not os.path.exists(given):
            continue
        if out.exists() and out.samefile(given):
            raise InputError(
                f"out: expected another place than that of an input, got {out}, "
                f"which would overwrite {given}"
            )
        is_model = (Path(given) / CARD).is_file()  # others may lie in its folder
        if not is_model and Path(given).resolve() in out.resolve().parents:
            raise InputError(
                f"out: expected another place than the folder of an input, got {out}, "
                f"which would be read as part of {given}"
            )


def files_of(model: OTAD, model_dir: Path, data_dir: Path | None) -> Iterator[Path]:
    """The files of a model, and those it was made from where they are the user's own."""
    yield model_dir / CARD
    yield from model_dir.glob("*.safetensors")
    if card := data_card(model):
        path = DataChoice.from_json(card["choice"]).path_from(data_dir)
        if path is not None:
            yield path
