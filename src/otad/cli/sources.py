"""What commands work on: data as the user names it, trained nets; and that none is overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad import data
from otad.attacks.adaptive.neighborhood import knows_inputs
from otad.checks import check_device, require
from otad.data import Dataset
from otad.data.registry import find_first
from otad.errors import InputError
from otad.io.codec import to_plain, write_json
from otad.io.tensor_files import read_tensors, write_tensors
from otad.model.folder import CARD
from otad.model.otad import OTAD, check_training_inputs, load
from otad.nets import Backbone, build
from otad.nets.inputs import restored

NET_FILE = "net.safetensors"
RECORD_FILE = "training.json"


# Kinds of data on disk: the reader, and the options that it needs and accepts.
_CSV = ("a CSV file", data.load_csv, ("target", "task"), ("features",))
_FOLDER = ("an image folder", data.load_image_folder, ("size",), ("resize",))
_KINDS: dict[str, tuple[str, Callable[..., Dataset], tuple[str, ...], tuple[str, ...]]] = {
    ".csv": _CSV,
    ".tsv": _CSV,
    ".h5ad": ("an AnnData file", data.load_h5ad, ("label",), ("drop", "genes", "normalize")),
    ".npz": ("an NPZ file", data.load_npz, (), ("task",)),
}
_RELATIVE = "relative paths, as a net or a model notes them, start from here or from --data-dir"


@dataclass(frozen=True)
class DataChoice:
    """A registered name or a path, with the options of `otad train` for reading it."""

    data: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def path_from(self, data_dir: Path | None) -> Path | None:
        """None for a registered name. A path that does not exist here is one from `data_dir`."""
        places = self._places(data_dir)
        return next((path for path in places if path.exists()), places[0] if places else None)

    def _places(self, data_dir: Path | None) -> list[Path]:
        if self.data.lower().replace("-", "_") in (name.lower() for name in data.names()):
            return []
        path = Path(self.data)
        return list(dict.fromkeys((path, path if data_dir is None else data_dir / path)))

    def load(self, data_dir: Path | None = None) -> Dataset:
        path = self.path_from(data_dir)
        if path is None:
            return data.load(self.data, data_dir, seed=self.seed, **self.options)
        absent = "" if path.exists() else f", which does not exist: {_RELATIVE}"
        readable = path.is_dir() or path.suffix.lower() in _KINDS
        names, ends = ", ".join(data.names()), ", ".join(_KINDS)
        expected = f"a registered name ({names}), an image folder or a file that ends in {ends}"
        require(readable, "data", expected, f"{self.data!r}{absent}")
        title, read, needs, accepts = _FOLDER if path.is_dir() else _KINDS[path.suffix.lower()]
        for name in needs:
            require(name in self.options, str(path), f"--{name} for {title}", "none")
        for name in self.options:
            known = name in (*needs, *accepts, "test_fraction")
            require(known, str(path), f"only options of {title}", f"--{name}")
        find_first(self._places(data_dir), title.partition(" ")[2], _RELATIVE)
        return read(path, seed=self.seed, **self.options)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataChoice:
        return cls(record["data"], record["seed"], record["options"])


def describe_data(dataset: Dataset, choice: DataChoice) -> dict[str, Any]:
    """What a net or a model stores about its data, in plain JSON."""
    names = ("task", "input_shape", "bounds", "classes", "feature_names")
    of_data = {
        "name": dataset.name,
        "source": dataset.source,
        "fingerprint": dataset.fingerprint(),
        "train_rows": len(dataset.train_x),
        "test_rows": len(dataset.test_x),
        "choice": asdict(choice),
    }
    return {"data": of_data} | {name: to_plain(getattr(dataset, name)) for name in names}


def data_card(model: OTAD) -> dict[str, Any]:
    """What `otad defend` stored about the data; empty for a model saved from Python."""
    card = model.notes.get("data")
    return card if isinstance(card, dict) and "choice" in card else {}


def bank_part(
    dataset: Dataset, per_class: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """All inputs and targets of the train part, or `per_class` random ones of each class."""
    x, y = dataset.train_x, dataset.train_y
    if per_class is None:
        return x, y
    require(dataset.classes, "per_class", "data with classes", "a regression")
    rows = data.subset_per_class(y, per_class, torch.Generator().manual_seed(seed))
    return x[rows], y[rows]


def training_inputs(model: OTAD, data_dir: Path | None) -> Tensor | None:
    """From the data the model was made of, where its bank does not have them; None without it."""
    card = data_card(model)
    if knows_inputs(model, None) or not card:
        return None
    try:
        dataset = DataChoice.from_json(card["choice"]).load(data_dir)
        return check_training_inputs(model, bank_part(dataset, **card.get("kept", {}))[0])
    except InputError:
        return None


@dataclass(frozen=True, eq=False)
class TrainedNet:
    """A net and what `describe_data` says of its data."""

    net: Backbone
    about: dict[str, Any]

    def write(self, folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
        """Returns the paths of the net with its config and of the record."""
        header = {"config": self.net.config(), "about": self.about}
        write_tensors(folder / NET_FILE, self.net.state_dict(), header)
        write_json(folder / RECORD_FILE, record)
        return {"net": str(folder / NET_FILE), "record": str(folder / RECORD_FILE)}

    @staticmethod
    def read(folder: Path) -> TrainedNet:
        path = folder / NET_FILE
        require(path.is_file(), str(folder), "a folder written by `otad train`", f"no {NET_FILE}")
        tensors, header = read_tensors(path)
        try:
            net, about = restored(build, header["config"], tensors), dict(header["about"])
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{path}: expected a net with its config, got: {error}") from error
        return TrainedNet(net, about)


def refuse_overwriting(out: Path | None, *inputs: str | Path | None) -> None:
    """Refuses an `out` that is one of the inputs, or is in an input folder of images, which would
    be read differently afterwards. The word test and names of columns are not files."""
    expected = "another place than that of an input"
    for given in inputs:
        if out is None or given in (None, "test") or not os.path.exists(given):
            continue
        same = out.exists() and out.samefile(given)
        require(not same, "out", expected, f"{out}, which would overwrite {given}")
        is_model = (Path(given) / CARD).is_file()  # its folder may contain other files
        inside = not is_model and Path(given).resolve() in out.resolve().parents
        require(not inside, "out", expected, f"{out}, which would be read as part of {given}")


def open_model(
    folder: Path, device: str, data_dir: Path | None, out: Path | None, *inputs: str | Path | None
) -> OTAD:
    """Refuses an `out` that is a file of the model or of its data, or one of the `inputs`."""
    model = load(folder, device=str(check_device(device)))
    files = [*inputs, folder / CARD, *folder.glob("*.safetensors")]
    if card := data_card(model):
        files.append(DataChoice.from_json(card["choice"]).path_from(data_dir))
    refuse_overwriting(out, *files)
    return model
