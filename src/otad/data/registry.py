"""The data sets known by name, and the folder that holds their files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otad.checks import require
from otad.data.dataset import Dataset
from otad.errors import InputError

FOLDER_VARIABLE = "OTAD_DATA"
BUILT_IN = "nothing to get: it comes with the installation"
Build = Callable[..., Dataset]


class MissingDataError(InputError, FileNotFoundError):
    """A data file was not found; the message lists the paths tried and where to get it."""


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    summary: str
    source: str
    where: str
    options: tuple[str, ...]
    needs_folder: bool
    build: Build = field(repr=False)


_INFOS: dict[str, DatasetInfo] = {}


def register_dataset(
    name: str, summary: str, *, source: str, where: str = BUILT_IN, options_of: Build | None = None
) -> Callable[[Build], Build]:
    """Make a loader known to `load`. It is called with the data folder (unless the data set is
    built in), the options given, and the `name` and `source` of the data set. Its options are its
    keyword-only arguments, or those of `options_of`. `where` says where to get the files."""

    def register(build: Build) -> Build:
        keywords = inspect.getfullargspec(options_of or build).kwonlyargs
        options = tuple(option for option in keywords if option not in ("name", "source"))
        _INFOS[name] = DatasetInfo(name, summary, source, where, options, where != BUILT_IN, build)
        return build

    return register


def names() -> tuple[str, ...]:
    return tuple(_INFOS)


def describe(name: str) -> DatasetInfo:
    """Summary, source and license, where to get the files, and the options of `load`."""
    by_key = {known.lower(): info for known, info in _INFOS.items()}
    key = name.lower().replace("-", "_")
    require(key in by_key, "data", f"one of the data sets {', '.join(names())}", repr(name))
    return by_key[key]


def load(
    name: str, data_dir: str | Path | None = None, *, seed: int = 0, **options: Any
) -> Dataset:
    """A data set by name (upper or lower case, hyphen or underscore).

    Its files are read from `data_dir`, or else from the folder named by OTAD_DATA; nothing is
    downloaded. `seed` determines the split (or the draw) of a set without an official split.
    """
    info = describe(name)
    usable = [option for option in info.options if option != "seed"]
    expected = f"options out of {', '.join(usable)}" if usable else "no options"
    for option in options:
        require(option in usable, info.name, expected, repr(option))
    if "seed" in info.options:
        options["seed"] = seed
    folder = (_data_root(data_dir),) if info.needs_folder else ()
    try:
        return info.build(*folder, **options, name=info.name, source=info.source)
    except MissingDataError as error:
        raise MissingDataError(f"{error}\nWhere to get it: {info.where}") from error


def find_first(candidates: Sequence[Path], what: str, hint: str = "") -> Path:
    """The first candidate that exists, or else an error with every path tried and the hint."""
    for path in candidates:
        if path.exists():
            return path
    tried = [f"  {path.absolute()}" for path in candidates]
    raise MissingDataError("\n".join([f"{what} not found. Looked for:", *tried, hint]).rstrip())


def _data_root(data_dir: str | Path | None) -> Path:
    chosen = data_dir if data_dir is not None else os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        hint = f"pass data_dir (--data-dir) or set {FOLDER_VARIABLE} to the folder of the data sets"
        raise MissingDataError(f"no data folder: {hint}")
    root = Path(chosen).expanduser()
    if not root.is_dir():
        setting = "data_dir" if data_dir is not None else FOLDER_VARIABLE
        raise MissingDataError(f"{setting}: expected a folder, got {str(root.absolute())!r}")
    return root
