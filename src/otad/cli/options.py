"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from otad.errors import InputError
from otad.training.config import check_seed

READING = "Reading the data"

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else there.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:1.")]
Scope = Annotated[
    str,
    typer.Option(
        help="local: each input by its nearest training points; global: one map through all "
        "training points, continuous and certified everywhere."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the registered data sets, by default the one in OTAD_DATA; and of data "
        "that was named by a path relative to it.",
        rich_help_panel=READING,
    ),
]
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


EmbeddingLipschitz = Annotated[
    float | None,
    typer.Option(
        help="Q, by which the embedding that neighbors are searched in stretches at most; needed "
        "for certificates where it does more than normalize."
    ),
]


def seed_option(help: str) -> Any:
    """A whole number that every generator takes."""
    return typer.Option(help=help, callback=check_seed)


def check_device(name: str) -> torch.device:
    """A device that is there and computes: a number comes back from it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    # torch asserts that it was built with CUDA, and imports what drives rarer devices
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device: expected one that is present, got {name!r}: {reason}") from error
    return device
