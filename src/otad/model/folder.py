"""A model on disk: a folder of safetensors files, and card.json, which names them.

The names of the files contain fingerprints, and card.json is replaced last. So if saving is
interrupted, the previous model remains. A lock lets one process save at a time. A card that was
edited, or whose files were changed, is refused. Nothing is ever unpickled."""

from __future__ import annotations

import json
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import require
from otad.errors import InputError
from otad.io.codec import digest_of, parse_json, read_json
from otad.io.files import is_inside, locked, replacing
from otad.io.tensor_files import fingerprint, fingerprint_of, read_tensors, write_tensors
from otad.model.bank import FeatureBank
from otad.model.bank_shards import remove_shards
from otad.model.model_card import README, EvaluationLike, add_evaluation, write_readme
from otad.model.names import check_names
from otad.nets.features import classes_of_user
from otad.nets.files import NET_FILE

CARD = "card.json"
LOCK = ".lock"
FORMAT = "otad-model"
VERSIONS = (1, 2, 3, 4)  # plain, with a metric, global, with a surrogate
_OWN_FILE = r"(?:backbone|bank|metric|keys|levels|surrogate)-[0-9a-f]{16}\.safetensors"
_SHARDS = re.compile(r"bank-[0-9a-f]{16}")  # a folder of shards
_OWN_NAME = re.compile(rf"{_OWN_FILE}|\.{_OWN_FILE}\.[0-9a-f]{{16}}\.partial")


@dataclass(frozen=True, eq=False)
class Block:
    """Tensors with a file of their own.

    `kind` begins the name of the file, `entry` is what card.json holds about the tensors, and
    `header` is what the file itself holds. With `of_bank` the file also names its bank."""

    kind: str
    tensors: Mapping[str, Tensor]
    entry: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    of_bank: bool = False


def write_model(
    folder: str | Path,
    about: Mapping[str, Any],
    bank: FeatureBank,
    blocks: Mapping[str, Block],
    *,
    shards: int | None = None,
) -> Path:
    """Write a model folder, or replace the model in it, and return the path of card.json.

    card.json holds `about` and names the files. With `shards` the bank is a folder of so many.
    The keys of `blocks` say where their entries are in card.json, with dots between levels."""
    folder = Path(folder)
    refuse_foreign_card(folder)
    with locked(folder / LOCK):
        bank_file = _bank_file(bank)
        if shards is not None:
            bank_file = bank_file.removesuffix(".safetensors")
        card = {
            "format": FORMAT,
            "written_with": {"torch": torch.__version__, "python": platform.python_version()},
            **about,
            "bank": {
                "file": bank_file,
                "fingerprint": bank.fingerprint,
                "points": len(bank),
                "dim": bank.dim,
                "dtype": str(bank.dtype).removeprefix("torch."),
                "sample": bank.sample(),
            },
        }
        files = {}
        for place, block in blocks.items():
            header = {"part": block.kind, **block.header}
            if block.of_bank:
                header["bank"] = _owner(card)
            note = json.dumps(header, sort_keys=True, default=str)
            name = _file_name(block.kind, block.tensors, note)
            files[name] = block.tensors, header
            *parents, last = place.split(".")
            entries = card
            for parent in parents:
                entries = entries[parent]
            entries[last] = {**block.entry, "file": name, "fingerprint": fingerprint(block.tensors)}
        check_names(card["notes"], card["interface"])
        for name in classes_of_user([card["backbone"], card.get("metric")]):
            only = f"the folder has the weights of {name}, but not its code"
            give = "load it by otad.load(folder, net=...), with a module that is built alike"
            warnings.warn(f"net: {only}: {give}", stacklevel=4)
        _sealed_text(card)  # refuses notes that are not plain before anything is written
        card["bank"]["checksum"] = bank.save(folder / bank_file, shards=shards)
        for name, (held, header) in files.items():
            write_tensors(folder / name, held, header)
        _write_card(folder, card)
        for old in folder.iterdir():  # files of earlier saves, also of interrupted ones
            if old.name in {bank_file, *files}:
                continue
            if _OWN_NAME.fullmatch(old.name) and old.is_file():
                old.unlink()
            elif _SHARDS.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
                remove_shards(old)
        return folder / CARD


def note_evaluation(
    folder: str | Path, evaluation: EvaluationLike, described: Mapping[str, Any], **about: Any
) -> Path:
    """Add the figures of an evaluation to the cards of a model folder.

    The path of its README.md is returned. `described` and `about` describe the model in the folder,
    as in `OTAD.save`."""
    folder = Path(folder)
    with locked(folder / LOCK):
        card = read_card(folder) | about
        card["notes"] = add_evaluation(card["notes"], evaluation, described)
        _write_card(folder, card)
    return folder / README


def _write_card(folder: Path, card: Mapping[str, Any]) -> None:
    with replacing(folder / CARD) as partial:
        partial.write_text(_sealed_text(card), encoding="utf-8")
    write_readme(folder, card)


def _bank_file(bank: FeatureBank) -> str:
    tensors = {"inputs": bank.inputs, "features": bank.features, "labels": bank.labels}
    return _file_name("bank", tensors, bank.fingerprint)


def _file_name(kind: str, tensors: Mapping[str, Tensor], note: str) -> str:
    return f"{kind}-{fingerprint_of(tensors, note=note)[:16]}.safetensors"


def _owner(card: Mapping[str, Any]) -> str:
    """Return the name of the bank that levels belong to: its network, its data and its file."""
    return f"{card['bank']['fingerprint']} in {card['bank']['file']}"


def refuse_foreign_card(folder: Path) -> None:
    """Refuse a folder in which card.json is a file of something else, and a file as a folder."""
    for place in (folder, *folder.parents):
        require(place.is_dir() or not place.exists(), str(place), "a folder, or none", "a file")
    path, card = folder / CARD, {"format": FORMAT}
    if path.exists():
        try:
            card = read_json(path)
        except InputError:
            card = {}
    ours = isinstance(card, Mapping) and card.get("format") == FORMAT
    expected = "no file, or the card of a model to replace"
    require(ours, str(path), expected, "another one: save the model to another folder")


def read_card(folder: str | Path) -> dict[str, Any]:
    """Return the content of card.json, after its format, version and checksum were checked."""
    path = Path(folder) / CARD
    is_net = (path.parent / NET_FILE).is_file()
    undefended = "a network without a defense: give this folder to `otad defend` first"
    got = undefended if is_net else "none"
    require(path.exists(), str(folder), f"a model folder with {CARD}", got)
    card = read_json(path)
    is_table = isinstance(card, Mapping)
    found = (card.get("format"), card.get("version")) if is_table else repr(card)[:200]
    known = f"{FORMAT} of version {', '.join(map(str, VERSIONS))}"
    require(found in [(FORMAT, version) for version in VERSIONS], str(path), known, found)
    stored = card.pop("checksum", None)
    edited = f"{_checksum(card)}: the card was edited; load the model and save it again instead"
    require(stored == _checksum(card), str(path), f"contents with checksum {stored}", edited)
    return dict(card)


def read_bank(folder: Path, card: Mapping[str, Any], *, verify: bool, mmap: bool) -> FeatureBank:
    """Return the bank that card.json names.

    With `verify` all of it is read, and a changed byte is refused. Otherwise its header and a
    sample of its points are compared."""
    entry = card["bank"]
    path = _existing(folder, entry)
    named = {f"expect_{name}": entry.get(name) for name in ("fingerprint", "checksum")}
    bank = FeatureBank.load(path, **named, verify=verify, mmap=mmap)
    found = bank.sample()
    expected = entry.get("sample", found)
    require(found == expected, str(path), f"points with the fingerprint {expected}", found)
    if verify and "checksum" not in entry:  # older cards have the fingerprint in the file's name
        name = _bank_file(bank)
        require(name == path.name, str(path), f"the contents of {path.name}", f"those of {name}")
    return bank


def read_block(
    folder: Path, card: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors of a block, and refuse them if they were not written with this card."""
    path, owner, expected = _existing(folder, entry), _owner(card), entry["fingerprint"]
    tensors, header = read_tensors(path)
    found, bank = fingerprint(tensors), header.get("bank", owner)
    contents = f"the contents {expected} named in {CARD}"
    require(found == expected, str(path), contents, f"{found}: a file of another model")
    require(bank == owner, str(path), f"a file for the bank {owner}", f"one for {bank}")
    return tensors


def _existing(folder: Path, entry: Mapping[str, Any]) -> Path:
    """Return the file of an entry, which must be a regular file in the folder itself, or the folder
    of its shards."""
    name = str(entry["file"])
    path, of_shards = folder / name, _SHARDS.fullmatch(name)
    ours = of_shards or _OWN_NAME.fullmatch(name)
    require(ours, f"{folder / CARD}", "the name of a model's file", repr(name))
    exists = path.is_dir() if of_shards else path.is_file()
    inside = exists and is_inside(path, folder)
    found = "none, or none that is a regular file inside the folder"
    require(inside, str(path), f"the file that {CARD} names", found)
    return path


def _sealed_text(card: Mapping[str, Any]) -> str:
    """Return the card as JSON, with its checksum."""
    plain = {}
    for name, entry in card.items():
        try:
            plain[name] = parse_json(json.dumps(entry, allow_nan=False), name)  # as readers see it
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: expected plain JSON values, got: {error}") from error
    return json.dumps(plain | {"checksum": _checksum(plain)}, indent=2) + "\n"


def _checksum(card: Mapping[str, Any]) -> str:
    return digest_of(card, length=64)
