"""A model on disk: a folder of two safetensors files and the JSON card that binds them.

The files carry their own fingerprints in their names and the card is replaced last, so a kill while
saving leaves the model that was there before, whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from otad.errors import InputError
from otad.nets import Backbone, build
from otad.transport.bank import FeatureBank
from otad.transport.checkpoint import fingerprint, read_checkpoint, write_checkpoint
from otad.transport.files import replacing

CARD = "card.json"
FORMAT = "otad-model"
VERSION = 1


@dataclass(frozen=True)
class ModelParts:
    """What a model is made of: network, bank, settings of the defense, and the user's notes."""

    backbone: Backbone
    bank: FeatureBank
    settings: dict[str, Any]
    notes: dict[str, Any]


def write_model(folder: str | Path, parts: ModelParts) -> Path:
    """Write a model folder, or replace the model in it; the path of its card."""
    folder = Path(folder)
    state, bank = parts.backbone.state_dict(), parts.bank
    net_print = fingerprint(state)
    bank_print = fingerprint({"inputs": bank.inputs, "features": bank.features})
    net_file = f"backbone-{net_print[:16]}.safetensors"
    bank_file = f"bank-{bank_print[:16]}.safetensors"
    write_checkpoint(folder / net_file, state, {"config": parts.backbone.config()})
    bank.save(folder / bank_file)
    card = {
        "format": FORMAT,
        "version": VERSION,
        "written_with": {"torch": torch.__version__, "python": platform.python_version()},
        "backbone": {
            "file": net_file,
            "fingerprint": net_print,
            "config": parts.backbone.config(),
        },
        "bank": {
            "file": bank_file,
            "fingerprint": bank.fingerprint,
            "points": len(bank),
            "dim": bank.dim,
            "dtype": str(bank.dtype).removeprefix("torch."),
        },
        "settings": parts.settings,
        "notes": parts.notes,
    }
    try:
        text = json.dumps(card, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"notes: expected plain JSON values, got: {error}") from error
    with replacing(folder / CARD) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    for kind, current in (("backbone", net_file), ("bank", bank_file)):
        for old in folder.glob(f"{kind}-*.safetensors"):
            if old.name != current:
                old.unlink()
    return folder / CARD


def read_card(folder: str | Path) -> dict[str, Any]:
    """The card of a model folder, checked for format and version."""
    path = Path(folder) / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder}: expected a model folder with {CARD}, got none") from error
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: expected a model card in JSON, got: {error}") from error
    found = (card.get("format"), card.get("version")) if isinstance(card, Mapping) else None
    if found != (FORMAT, VERSION):
        raise InputError(f"{path}: expected {FORMAT} of version {VERSION}, got {found}")
    return dict(card)


def read_model(folder: str | Path, *, verify: bool = True, mmap: bool = False) -> ModelParts:
    """Read a model folder. `verify` reads the whole bank once and refuses one changed byte."""
    folder = Path(folder)
    card = read_card(folder)
    try:
        net_card, bank_card = card["backbone"], card["bank"]
        backbone = build(net_card["config"])
        net_path, bank_path = folder / net_card["file"], folder / bank_card["file"]
        net_print, bank_print = net_card["fingerprint"], bank_card["fingerprint"]
        settings, notes = dict(card["settings"]), dict(card["notes"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / CARD}: expected a whole model card, got: {error!r}") from error
    for path in (net_path, bank_path):
        if not path.exists():
            raise InputError(f"{path}: expected the file that {CARD} names, got none")
    state = read_checkpoint(net_path).tensors
    if fingerprint(state) != net_print:
        raise InputError(
            f"{net_path}: expected the weights {net_print} named in {CARD}, "
            f"got {fingerprint(state)}: a file of another model"
        )
    try:
        backbone.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{net_path}: expected weights that fit {CARD}, got: {error}") from error
    bank = FeatureBank.load(bank_path, expect_fingerprint=bank_print, verify=verify, mmap=mmap)
    return ModelParts(backbone.eval(), bank, settings, notes)
