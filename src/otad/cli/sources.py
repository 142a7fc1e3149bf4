"""What commands read: data as the user names it, trained networks and models; none of these files
is ever overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad import data
from otad.attacks.adaptive.neighborhood import knows_inputs
from otad.checks import check_device, refusing, require
from otad.cli.console import remark
from otad.cli.outputs import STDOUT
from otad.data import Dataset
from otad.data.encoding import TableEncoding
from otad.data.registry import find_first
from otad.errors import InputError
from otad.io.codec import from_plain, to_plain, write_json
from otad.io.tensor_files import read_tensors, write_tensors
from otad.model.folder import CARD
from otad.model.loading import load
from otad.model.names import Described, check_names, interface_of
from otad.model.otad import OTAD
from otad.model.training_inputs import check_training_inputs
from otad.nets import Backbone, build
from otad.nets.files import NET_FILE
from otad.nets.inputs import restored
from otad.training.config import check_seed

RECORD_FILE = "training.json"


# Kinds of data files: the reader, and the options that it needs and accepts.
_CSV = ("a CSV file", data.load_csv, ("target", "task"), ("features",))
_FOLDER = ("an image folder", data.load_image_folder, (), ("size", "resize"))
_KINDS: dict[str, tuple[str, Callable[..., Dataset], tuple[str, ...], tuple[str, ...]]] = {
    ".csv": _CSV,
    ".tsv": _CSV,
    ".h5ad": ("an AnnData file", data.load_h5ad, ("label",), ("drop", "genes", "normalize")),
    ".npz": ("an NPZ file", data.load_npz, (), ("task",)),
}
_RELATIVE = "relative paths start from the current folder or from --data-dir"


@dataclass(frozen=True)
class DataChoice:
    """A registered name or a path, with the options of `otad train` for reading it."""

    data: str
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def path_from(self, data_dir: Path | None) -> Path | None:
        """Return None for a registered name. A path that does not exist is one in `data_dir`."""
        places = self._places(data_dir)
        return next((path for path in places if path.exists()), places[0] if places else None)

    def _places(self, data_dir: Path | None) -> list[Path]:
        if self.data.lower().replace("-", "_") in (name.lower() for name in data.names()):
            return []
        path = Path(self.data)
        return list(dict.fromkeys((path, path if data_dir is None else data_dir / path)))

    def load(
        self, data_dir: Path | None = None, trained: Mapping[str, Any] | None = None
    ) -> Dataset:
        """Load the data; with the notes of a network or a model (`trained`), as they read it."""
        path = self.path_from(data_dir)
        if path is None:
            return data.load(self.data, data_dir, seed=self.seed, **self.options)
        absent = "" if path.exists() else f", which does not exist: {_RELATIVE}"
        readable = path.is_dir() or path.suffix.lower() in _KINDS
        names, ends = ", ".join(data.names()), ", ".join(_KINDS)
        expected = f"a registered name ({names}), an image folder or a file that ends in {ends}"
        require(readable, "data", expected, f"{self.data!r}{absent}")
        title, read, needs, accepts = _FOLDER if path.is_dir() else _KINDS[path.suffix.lower()]
        missing = [f"--{name}" for name in needs if name not in self.options]
        known = (*needs, *accepts, "test_fraction")
        unknown = [f"--{name.replace('_', '-')}" for name in self.options if name not in known]
        wrong = [f"no {name}" for name in missing] + unknown
        expected = " and ".join([*(f"--{name}" for name in needs), "only options"])
        require(not wrong, str(path), f"{expected} of {title}", ", ".join(wrong))
        find_first(self._places(data_dir), title.partition(" ")[2], _RELATIVE)
        regular = path.is_dir() or path.is_file()
        require(regular, str(path), title, "a device, a pipe or a socket")
        more: dict[str, Any] = {}
        if read is data.load_csv:
            more["encoding"] = TableEncoding.of(trained or {})
        elif path.is_dir() and trained is not None:
            more["channels"] = trained["input_shape"][0]
        elif (card := (trained or {}).get("preparation")) and "counts" not in card:
            more["normalize"] = True  # cells of an earlier version, which had this default
        return read(path, seed=self.seed, **more | self.options)


@dataclass(frozen=True)
class Kept:
    """Which rows of the train part are in the bank; see `bank_part`."""

    per_class: int | None = None
    seed: int = 0


ALL_ROWS = Kept()


@dataclass(frozen=True)
class DataNote:
    """What a network or a model notes about its data, as far as commands use it."""

    choice: DataChoice
    fingerprint: str
    kept: Kept = ALL_ROWS

    @staticmethod
    def of(notes: Mapping[str, Any]) -> DataNote:
        """From the notes of `otad train` or `otad defend`."""
        card = notes["data"]
        known = {one.name: card[one.name] for one in fields(DataNote) if one.name in card}
        found: DataNote = from_plain(DataNote, known, "notes.data")
        return found


def data_note(model: Described) -> DataNote | None:
    """Return what `otad defend` noted about the data; None for a model saved from Python."""
    card = model.notes.get("data")
    return DataNote.of(model.notes) if isinstance(card, dict) and "choice" in card else None


def describe_data(dataset: Dataset, choice: DataChoice) -> dict[str, Any]:
    """Return what a network or a model stores about its data, in plain JSON."""
    names = ("task", "input_shape", "bounds", "classes", "feature_names")
    of_data = {
        "name": dataset.name,
        "source": dataset.source,
        "fingerprint": dataset.fingerprint(),
        "train_rows": len(dataset.train_x),
        "test_rows": len(dataset.test_x),
        "choice": asdict(choice),
    }
    described = {"data": of_data} | {name: to_plain(getattr(dataset, name)) for name in names}
    if isinstance(dataset.preparation, TableEncoding):
        described["preparation"] = dataset.preparation.to_json()
    return described


def bank_part(dataset: Dataset, kept: Kept) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return inputs, targets and names (if rows have any) of the train part, or of `per_class`
    random rows of each class."""
    x, y, names = dataset.train_x, dataset.train_y, dataset.train_names
    if kept.per_class is None:
        return x, y, names
    require(dataset.classes, "per_class", "data with classes", "a regression")
    rows = data.subset_per_class(y, kept.per_class, torch.Generator().manual_seed(kept.seed))
    return x[rows], y[rows], tuple(names[row] for row in rows.tolist()) if names else ()


def training_inputs(model: Described, data_dir: Path | None, source: str) -> Tensor | None:
    """Return the training inputs from the data of the model, if its bank does not have them; None
    if the data is not available. A file that the model names is read only if the user asks for it:
    if the `source` is test, or if the file is in the folder of data."""
    note = data_note(model)
    if note is None or not isinstance(model, OTAD) or knows_inputs(model, None):
        return None
    path, folder = note.choice.path_from(data_dir), (data_dir or Path()).resolve()
    inside = data_dir is not None and path is not None and folder in path.resolve().parents
    if path is not None and source != "test" and not inside:
        remark(f"note: {path}, which the model names, is not read without --data-dir")
        return None
    try:
        dataset = note.choice.load(data_dir, model.notes)
        return check_training_inputs(model, bank_part(dataset, note.kept)[0])
    except InputError:
        return None


@dataclass(frozen=True, eq=False)
class TrainedNet:
    """A network, and what `describe_data` returns for its data."""

    net: Backbone
    about: dict[str, Any]

    @property
    def backbone(self) -> Backbone:
        return self.net

    @property
    def notes(self) -> dict[str, Any]:
        return self.about

    @property
    def note(self) -> DataNote:
        return DataNote.of(self.about)

    def write(self, folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
        """Write the network and its record, and return their paths."""
        header = {"config": self.net.config(), "about": self.about}
        write_tensors(folder / NET_FILE, self.net.state_dict(), header)
        write_json(folder / RECORD_FILE, record)
        return {"net": str(folder / NET_FILE), "record": str(folder / RECORD_FILE)}

    @staticmethod
    def read(folder: Path) -> TrainedNet:
        path = folder / NET_FILE
        require(path.is_file(), str(folder), "a folder written by `otad train`", f"no {NET_FILE}")
        tensors, header = read_tensors(path)
        with refusing(f"{path}: expected a network with its config and data"):
            net, about = restored(build, header["config"], tensors), dict(header["about"])
            for name in ("data", "task", "input_shape", "classes", "feature_names"):
                require(name in about, str(path), f"notes of its {name}", "none")
            trained = TrainedNet(net, about)
            _ = trained.note  # refuses what it cannot read
        return trained


def refuse_overwriting(out: Path | None, *inputs: str | Path | None) -> None:
    """Refuse an `out` that is one of the inputs, or that is inside an input folder of images, which
    would be read differently afterwards. The word test and names of columns are not files."""
    expected = "a place that is not an input"
    for given in inputs:
        if out in (None, STDOUT) or given in (None, "test") or not os.path.exists(given):
            continue
        same = out.exists() and out.samefile(given)
        require(not same, "out", expected, f"{out}, which would overwrite {given}")
        is_model = (Path(given) / CARD).is_file()  # its folder may contain other files
        inside = not is_model and Path(given).resolve() in out.resolve().parents
        require(not inside, "out", expected, f"{out}, which would be read as part of {given}")


def open_model(
    folder: Path, device: str, data_dir: Path | None, out: Path | None, *inputs: str | Path | None
) -> OTAD:
    """Load a model; refuse an `out` that is a file of the model or its data, or an input."""
    model = load(folder, device=str(check_device(device)))
    _check_opened(model, folder, data_dir, out, *inputs)
    return model


def open_model_or_net(
    folder: Path, device: str, data_dir: Path | None, out: Path | None, *inputs: str | Path | None
) -> OTAD | TrainedNet:
    """Load a model, or a network without a defense that `otad train` wrote."""
    if (folder / CARD).exists() or not (folder / NET_FILE).is_file():
        return open_model(folder, device, data_dir, out, *inputs)
    trained = TrainedNet.read(folder)
    trained.net.to(check_device(device)).eval()
    _check_opened(trained, folder, data_dir, out, *inputs)
    return trained


def module_of(model: OTAD | TrainedNet) -> nn.Module:
    return model.net if isinstance(model, TrainedNet) else model


def _check_opened(
    model: Described,
    folder: Path,
    data_dir: Path | None,
    out: Path | None,
    *inputs: str | Path | None,
) -> None:
    check_names(model.notes, interface_of(model.backbone))
    note = data_note(model)
    if out not in (None, STDOUT):
        files = [*inputs, folder / CARD, folder / RECORD_FILE, *folder.glob("*.safetensors")]
        files.append(None if note is None else note.choice.path_from(data_dir))
        refuse_overwriting(out, *files)
