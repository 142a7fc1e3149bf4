"""The data sets that are known by name, and the folder that holds their files."""

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
    """A data file was not found; the message lists the paths tried and where to get the file.

    It is an `InputError` and a `FileNotFoundError`.

    Examples
    --------
    >>> from otad import data
    >>> try:
    ...     data.load_csv("missing.csv", "label")
    ... except data.MissingDataError as error:
    ...     print(error)
    CSV file not found. Looked for:
      ...missing.csv
    """


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it.

    Attributes
    ----------
    name, summary, source : str
        The name, one line about the contents, and where they come from, with the license.
    where : str
        Where to get the files.
    options : tuple of str
        The keyword arguments that `load` accepts for this data set.
    needs_folder : bool
        Whether the data set is read from files, so that `load` needs a data folder.
    build : callable
        The function that loads it.

    Examples
    --------
    >>> from otad import data
    >>> data.describe("digits").options
    ('test_fraction', 'seed')
    """

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
    """Make a loader known to `load` under a name; use it as a decorator.

    The loader returns a `Dataset`. It is called with the data folder (unless the data set is built
    in), with the options that the user gave, and with `name` and `source`.

    Parameters
    ----------
    name, summary, source : str
        What `describe` shows: the name, one line about the contents, and the origin.
    where : str
        Where to get the files. Without it, the data set is built in and needs no data folder.
    options_of : callable, optional
        The function whose keyword-only arguments are the options, if it is not the loader itself.

    Examples
    --------
    >>> import torch
    >>> from otad import data
    >>> @data.register_dataset("two_points", "Two points", source="drawn here")
    ... def two_points(*, gap: float = 1.0, name: str, source: str) -> data.Dataset:
    ...     x, y = torch.tensor([[0.0], [gap]]), torch.tensor([0, 1])
    ...     return data.Dataset(name, x, y, x, y, "classification", source, ("low", "high"))
    >>> data.load("two_points", gap=3.0).train_x
    tensor([[0.],
            [3.]])
    """

    def register(build: Build) -> Build:
        keywords = inspect.getfullargspec(options_of or build).kwonlyargs
        options = tuple(option for option in keywords if option not in ("name", "source"))
        _INFOS[name] = DatasetInfo(name, summary, source, where, options, where != BUILT_IN, build)
        return build

    return register


def names() -> tuple[str, ...]:
    """Return the names of all registered data sets.

    Examples
    --------
    >>> from otad import data
    >>> "digits" in data.names()
    True
    """
    return tuple(_INFOS)


def describe(name: str) -> DatasetInfo:
    """Return what is known about a data set: contents, license, origin of the files, options.

    Upper and lower case, hyphens and underscores in the name make no difference.

    Examples
    --------
    >>> from otad import data
    >>> data.describe("Digits").summary
    '1,797 digits, 1 x 8 x 8'
    """
    by_key = {known.lower(): info for known, info in _INFOS.items()}
    key = name.lower().replace("-", "_")
    require(key in by_key, "data", f"one of the data sets {', '.join(names())}", repr(name))
    return by_key[key]


def load(
    name: str, data_dir: str | Path | None = None, *, seed: int = 0, **options: Any
) -> Dataset:
    """Load a data set by name.

    Upper and lower case, hyphens and underscores in the name make no difference.

    Parameters
    ----------
    name : str
        One of `names()`.
    data_dir : str or Path, optional
        The folder that holds the files of all data sets. If None, the folder that the environment
        variable `OTAD_DATA` names. Nothing is downloaded. Built-in data sets need no folder.
    seed : int
        Determines the split, or the drawing, of a data set that has no official split.
    **options
        Further options of this data set; `describe(name).options` lists them.

    Raises
    ------
    MissingDataError
        If the files are not there. The message says where to get them.

    Examples
    --------
    >>> from otad import data
    >>> digits = data.load("digits")
    >>> digits
    Dataset('digits', classification of 10 classes, 1,437 train and 360 test inputs (1, 8, 8))
    >>> digits.train_x.shape, digits.bounds
    (torch.Size([1437, 1, 8, 8]), (0.0, 1.0))
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
    """Return the first path that exists. If there is none, the error lists all of them and the
    hint."""
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
