"""From what a user names (a registered data set, a file, a folder) to a `Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad import data
from otad.data import Dataset
from otad.data.npz import load_npz
from otad.data.registry import find_first
from otad.errors import InputError


@dataclass(frozen=True)
class _Kind:
    """A kind of data on disk: how to read it, by which options."""

    title: str
    read: Callable[..., Dataset]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


_CSV = _Kind("a CSV file", data.load_csv, ("target", "task"), ("features",))
_FOLDER = _Kind("an image folder", data.load_image_folder, ("size",), ("resize",))
_KINDS = {
    ".csv": _CSV,
    ".tsv": _CSV,
    ".h5ad": _Kind("an AnnData file", data.load_h5ad, ("label",), ("drop", "genes", "normalize")),
    ".npz": _Kind("an NPZ file", load_npz, (), ("task",)),
}
_ALWAYS = ("test_fraction",)
_RELATIVE = (
    "relative paths start from the current folder or from --data-dir, and those that a net or a "
    "model notes from the folder it was made in"
)


@dataclass(frozen=True)
class DataChoice:
    """A data set as the user named it, and the options it is read by.

    `data` is a registered name or a path. `options` holds those given: target, task, features,
    label, drop, genes, normalize, size, resize, test_fraction; one that has no meaning for the
    data is refused.
    """

    data: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path | None:
        """Where the user keeps it; None for a registered name."""
        known = (name.lower() for name in data.names())
        return None if self.data.lower().replace("-", "_") in known else Path(self.data)

    def path_from(self, data_dir: Path | None) -> Path | None:
        """The same path; from `data_dir` if it is relative and leads nowhere from here."""
        return next((path for path in self._places(data_dir) if path.exists()), self.path)

    def _places(self, data_dir: Path | None) -> list[Path]:
        """Where a path may lead, each once."""
        if (path := self.path) is None:
            return []
        return list(dict.fromkeys((path, path if data_dir is None else data_dir / path)))

    def load(self, data_dir: Path | None = None) -> Dataset:
        """Read it. `data_dir` is the folder of the registered sets, None for that in OTAD_DATA, and
        of a relative path that leads nowhere from here."""
        path = self.path_from(data_dir)
        if path is None:
            return data.load(self.data, data_dir, seed=self.seed, **self.options)
        kind = _FOLDER if path.is_dir() else _KINDS.get(path.suffix.lower())
        if kind is None:
            raise InputError(
                f"data: expected a registered name ({', '.join(data.names())}) or the path of an "
                f"image folder or of a file that ends in {', '.join(_KINDS)}, got {self.data!r}"
                f"{'' if path.exists() else f', which is not there: {_RELATIVE}'}"
            )
        for name in kind.needs:
            if name not in self.options:
                raise InputError(f"{path}: {_flag(name)} is needed to read {kind.title}")
        for name in self.options:
            if name not in (*kind.needs, *kind.takes, *_ALWAYS):
                raise InputError(f"{path}: {_flag(name)} has no meaning for {kind.title}")
        find_first(self._places(data_dir), kind.title.partition(" ")[2], _RELATIVE)
        return kind.read(path, seed=self.seed, **self.options)

    def to_json(self) -> dict[str, Any]:
        return {"data": self.data, "seed": self.seed, "options": dict(self.options)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataChoice:
        return cls(record["data"], record["seed"], record["options"])


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def bank_part(
    dataset: Dataset, per_class: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the train part that a bank is made of: all, or so many random ones of
    each class."""
    x, y = dataset.train_x, dataset.train_y
    if per_class is None:
        return x, y
    if dataset.task == "regression":
        raise InputError(
            "per_class: expected only for data with classes, got a regression, which has none"
        )
    rows = data.subset_per_class(y, per_class, torch.Generator().manual_seed(seed))
    return x[rows], y[rows]


def describe_data(dataset: Dataset, choice: DataChoice) -> dict[str, Any]:
    """What a net or a model must remember of its data, in plain JSON."""
    return {
        "data": {
            "name": dataset.name,
            "source": dataset.source,
            "fingerprint": dataset.fingerprint(),
            "train_rows": len(dataset.train_x),
            "test_rows": len(dataset.test_x),
            "choice": choice.to_json(),
        },
        "task": dataset.task,
        "input_shape": list(dataset.input_shape),
        "bounds": None if dataset.bounds is None else list(dataset.bounds),
        "classes": list(dataset.classes),
        "feature_names": None if dataset.feature_names is None else list(dataset.feature_names),
    }
