"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from otad.checks import check_choice, require
from otad.data.encoding import TableEncoding
from otad.errors import InputError
from otad.io.codec import read_json
from otad.model.names import Described
from otad.threat import NORMS, LpBall
from otad.training.config import check_seed

Names = list[str] | None
STANDARD_DEVIATIONS = "standard deviations of the training data"
READING, THREAT, TRAINING = "Reading the data", "Changes of an input", "Network and training"
WORKERS = "Several processes"


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


def among(choices: Iterable[str]) -> dict[str, Any]:
    """Let the shell complete these names; other values are allowed."""
    names = tuple(choices)

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return {"autocompletion": complete}


AsJson = Annotated[bool, option("Print one JSON object to stdout, and nothing else.", "--json")]
Seed = Annotated[int, option("Seed of all random numbers.", callback=check_seed)]
Device = Annotated[str, option("Where to compute: cpu, cuda or cuda:1.", **among(("cpu", "cuda")))]
BatchSize = Annotated[int, option("Number of rows to process at once.", min=1, max=2**31)]
Jobs = Annotated[
    int, option("Number of processes on this machine. Results are the same.", min=1, panel=WORKERS)
]
Cluster = Annotated[
    str | None,
    option(
        "Compute on a Ray cluster: auto for that of this machine, or ray://HOST:10001.",
        panel=WORKERS,
        **among(("auto",)),
    ),
]
Force = Annotated[bool, option("Replace results that exist in --out.", "--force")]
OutFolder = Annotated[Path, option("Folder to write all results to.", file_okay=False)]
MaxSeconds = Annotated[float | None, option("Stop after this time. The same command resumes.")]
ModelDir = Annotated[Path, argument("MODEL_DIR", "Model folder written by `otad defend`.")]
ModelOrNet = Annotated[
    Path, argument("MODEL_DIR", "Model folder of `otad defend`, or network folder of `otad train`.")
]
Input = Annotated[
    str,
    argument(
        "INPUT",
        "CSV, NPZ (array x), image folder or .h5ad; or test: the test part of the model's data.",
        **among(("test",)),
    ),
]
DataDir = Annotated[
    Path | None,
    option(
        "Folder of the data sets, and of relative paths.", show_default="OTAD_DATA", panel=READING
    ),
]
Targets = Annotated[
    str | None,
    option(
        "Where the right answers are: a column of the CSV, an obs column of the .h5ad, an array of "
        "the NPZ, or another CSV or NPZ file. By default the column that the model was trained on, "
        "the array y, or the folder of each image.",
        panel=READING,
    ),
]
Rows = Annotated[int | None, option("Use only this many rows, chosen at random.", min=1)]
EmbeddingLipschitz = Annotated[
    float | None, option("Lipschitz constant of an embedding that does more than normalize.")
]
MetricLipschitz = Annotated[
    float | None, option("Lipschitz constant of a metric that has no proved one.")
]
WithinBounds = Annotated[
    bool,
    option(
        "Also prove radii for changes that keep inputs within the bounds of the model, listed "
        "separately.",
        "--within-bounds",
    ),
]
Norm = Annotated[str, option("Norm of a change: l2 or linf.", panel=THREAT, **among(NORMS))]
Immutable = Annotated[
    Names,
    option('Features that an attacker cannot change, such as "age,sex". Repeatable.', panel=THREAT),
]
Unit = Annotated[
    str | None,
    option(
        "Unit of each feature: 1, or std for its standard deviation in the training data.",
        show_default="std for tables that the network standardizes, else 1",
        panel=THREAT,
    ),
]
Scale = Annotated[
    Path | None,
    option(
        'JSON file with the unit of each feature: {"pH": 0.5, ...}.', panel=THREAT, dir_okay=False
    ),
]


def given(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the named options that were given."""
    return {name: options[name] for name in names if options[name] not in (None, [])}


@contextmanager
def executor_of(jobs: int, cluster: str | None, device: str) -> Iterator[Executor | int]:
    """Yield who computes: processes of this machine, or a Ray cluster."""
    if cluster is None:
        yield jobs
        return
    require(jobs == 1, "--jobs", "no number with --cluster, which has its own", jobs)
    expected = "cpu or cuda with --cluster, where each task has a GPU of its own"
    require(device in ("cpu", "cuda"), "--device", expected, device)
    from otad.cluster import RayExecutor

    with RayExecutor(cluster, num_gpus=int(device == "cuda")) as executor:
        yield executor


def read_numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"{option}: expected numbers such as 0.5,1, got {text!r}") from error


def read_radii(text: str) -> tuple[float, ...]:
    radii = read_numbers(text, "eps")
    odd = radii[0] == 0 and (len(radii) == 2 or [*radii] != sorted(radii))
    expected = "a decimal point, as in 0.5, because commas separate several eps; 0.0 means eps 0"
    require("." in text or not odd, "eps", expected, repr(text))
    valid = len({*radii}) == len(radii) and all(0 <= eps < float("inf") for eps in radii)
    require(valid, "eps", "distinct finite numbers of at least 0", repr(text))
    return radii


def radius_text(eps: float) -> str:
    """Return a short text that is not rounded, because nothing is proved beyond the radius."""
    return f"{eps:g}" if float(f"{eps:g}") == eps else repr(eps)


def threat_to(
    model: Described,
    norm: str,
    eps: float,
    *,
    immutable: Sequence[str] | None = None,
    unit: str | None = None,
    scale: Path | None = None,
) -> LpBall:
    """Return the ball around inputs of the model, within the bounds that the model declares. Text
    columns are groups of which one category is switched or none. Indicators of missing numbers
    cannot change."""
    ball = NORMS[check_choice(norm, "norm", tuple(NORMS))]
    require(unit is None or scale is None, "scale", "either --unit or --scale", "both")
    shape, device = model.backbone.input_shape, model.backbone.mean.device
    for name, value in (("immutable", immutable), ("scale", scale)):
        require(not value or len(shape) == 1, name, "a model of tables", f"one of inputs {shape}")
    places = columns_of(model)
    names, encoding = list(places), TableEncoding.of(model.notes)
    groups = None if encoding is None else encoding.groups
    frozen: list[str] = []
    for text in immutable or ():  # a name with commas must be given alone
        frozen += [text] if text in names else [part.strip() for part in text.split(",")]
    _refuse_unknown(frozen, names, "immutable")
    left = len(names) > len({*frozen})
    require(left, "immutable", "at least one feature to be left", "all of them")
    fixed = [place for name in frozen for place in places[name]]
    fixed += () if encoding is None else encoding.indicators
    standardized = bool((model.backbone.std != 1).any())
    usual = "std" if len(shape) == 1 and standardized else "1"
    unit = check_choice(unit or usual, "unit", ("1", "std"))
    expected = "1, because the network takes inputs as they are; --scale names other units"
    require(unit == "1" or standardized, "unit", expected, repr(unit))
    units = model.backbone.std.detach().clone() if unit == "std" else None
    if scale is not None:
        texts = [] if encoding is None else [it.name for it in encoding.columns if it.categories]
        read = _read_scale(scale, names, [*frozen, *texts])
        spread = [read[name] for name, columns in places.items() for _ in columns]
        units = torch.tensor(spread, device=device)
    mutable = None
    if fixed:
        mutable = torch.ones(shape, dtype=torch.bool, device=device)
        mutable[fixed] = False
    named = STANDARD_DEVIATIONS if unit == "std" else ""
    named = named if scale is None else f"units of {scale.name}"
    return ball(eps, model.backbone.bounds, units, mutable, groups, named)


def columns_of(model: Described) -> dict[str, tuple[int, ...]]:
    """Return the columns of the table that a model was trained on, or the numbers of its features,
    each with the positions of the features that it became."""
    if (encoding := TableEncoding.of(model.notes)) is not None:
        return encoding.positions()
    known = model.notes.get("feature_names") or range(model.backbone.input_shape[0])
    return {str(name): (place,) for place, name in enumerate(known)}


def _read_scale(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, float]:
    """Return the unit of every feature; optional features have the unit 1 by default."""
    content = read_json(path)
    numbers = isinstance(content, dict) and all(type(v) in (int, float) for v in content.values())
    require(numbers, str(path), 'a number for each feature, {"name": 0.5, ...}', content)
    _refuse_unknown(content, names, str(path))
    missing = [name for name in names if name not in content and name not in optional]
    expected = "a unit for every feature that can change"
    require(not missing, str(path), expected, f"none for {', '.join(missing)}")
    return {name: float(content.get(name, 1.0)) for name in names}


def _refuse_unknown(asked: Iterable[str], names: Sequence[str], option: str) -> None:
    for name in asked:
        require(name in names, option, f"features out of {', '.join(names)}", repr(name))
