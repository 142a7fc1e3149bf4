"""Where data lives on disk, and the error that says where it was looked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from otad.errors import InputError

FOLDER_VARIABLE = "OTAD_DATA"


class MissingDataError(InputError, FileNotFoundError):
    """A data file is not there; the message lists the paths tried and where to get it."""


def data_root(data_dir: str | Path | None) -> Path:
    """The data folder: the argument, else the environment variable OTAD_DATA."""
    chosen = data_dir if data_dir is not None else os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        raise MissingDataError(
            f"no data folder: pass data_dir (--data-dir) or set {FOLDER_VARIABLE} to the folder "
            "that holds the data sets"
        )
    root = Path(chosen).expanduser()
    if not root.is_dir():
        setting = "data_dir" if data_dir is not None else FOLDER_VARIABLE
        raise MissingDataError(f"{setting}: expected a folder, got {str(root.absolute())!r}")
    return root


def find_first(candidates: Sequence[Path], what: str, hint: str = "") -> Path:
    """The first candidate that exists, else an error with every path tried and the hint."""
    for path in candidates:
        if path.exists():
            return path
    tried = "".join(f"\n  {path.absolute()}" for path in candidates)
    source = f"\nWhere to get it: {hint}" if hint else ""
    raise MissingDataError(f"{what} not found. Looked for:{tried}{source}")
