"""A model on disk: a folder of safetensors files and the JSON card that binds them.

Network and bank have a file each; so have, where neighbors are sought by a metric, its network and
the bank's keys in it, the network that imitates the solver where there is one, and in global scope
the levels of the one potential of that bank.

The files carry their own fingerprints in their names and the card is replaced last, so a kill while
saving leaves the model that was there before, whole. A card that was edited since, or that names
other files than those it was written with, is refused. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.io.files import replacing
from otad.model.bank import FeatureBank, fingerprint_of
from otad.nets import Backbone, Metric, build, build_metric
from otad.training.checkpoint import Checkpoint, fingerprint, read_checkpoint, write_checkpoint

CARD = "card.json"
FORMAT = "otad-model"
KINDS = ("backbone", "bank", "metric", "keys", "levels", "surrogate")
_OWN_FILE = rf"(?:{'|'.join(KINDS)})-[0-9a-f]{{16}}\.safetensors"
_OWN_NAME = re.compile(rf"{_OWN_FILE}|\.{_OWN_FILE}\.[0-9a-f]{{16}}\.partial")
# Who knows the first of these alone must not read the others.
VERSIONS = {"plain": 1, "with a metric": 2, "global": 3, "estimated": 4}


@dataclass(frozen=True)
class ModelParts:
    """What a model is made of: network, bank, settings of the defense, and the user's notes; and
    the metric in which neighbors are sought with the bank's keys (N,m), the one potential of the
    bank, or the network in the place of a solver, if it has one."""

    backbone: Backbone
    bank: FeatureBank
    settings: dict[str, Any]
    notes: dict[str, Any]
    metric: Metric | None = None
    keys: Tensor | None = None
    potential: BankPotential | None = None
    surrogate: CipNet | None = None


def write_model(folder: str | Path, parts: ModelParts) -> Path:
    """Write a model folder, or replace the model in it; the path of its card."""
    folder = Path(folder)
    refuse_foreign_card(folder)
    state, bank = parts.backbone.state_dict(), parts.bank
    net_print = fingerprint(state)
    tensors = {"inputs": bank.inputs, "features": bank.features, "labels": bank.labels}
    bank_print = fingerprint_of(tensors, note=bank.fingerprint)
    names = {
        "backbone": f"backbone-{net_print[:16]}.safetensors",
        "bank": f"bank-{bank_print[:16]}.safetensors",
    }
    card: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSIONS["plain"],
        "written_with": {"torch": torch.__version__, "python": platform.python_version()},
        "backbone": {
            "file": names["backbone"],
            "fingerprint": net_print,
            "config": parts.backbone.config(),
        },
        "bank": {
            "file": names["bank"],
            "fingerprint": bank.fingerprint,
            "points": len(bank),
            "dim": bank.dim,
            "dtype": str(bank.dtype).removeprefix("torch."),
        },
        "settings": parts.settings,
        "notes": parts.notes,
    }
    extra: dict[str, tuple[Path, dict[str, Tensor], dict[str, Any]]] = {}
    if parts.metric is not None and parts.keys is not None:
        card |= {"version": VERSIONS["with a metric"], "metric": {"config": parts.metric.config()}}
        for kind, held in (("metric", parts.metric.state_dict()), ("keys", {"keys": parts.keys})):
            mark = fingerprint(held)
            names[kind] = f"{kind}-{mark[:16]}.safetensors"
            extra[kind] = folder / names[kind], held, {"part": kind}
            card["metric"][kind] = {"file": names[kind], "fingerprint": mark}
    if parts.potential is not None:
        held, owner = {"levels": parts.potential.levels}, _owner(card)
        mark = fingerprint(held)
        names["levels"] = f"levels-{fingerprint_of(held, note=owner)[:16]}.safetensors"
        extra["levels"] = folder / names["levels"], held, {"part": "levels", "bank": owner}
        card |= {
            "version": VERSIONS["global"],
            "potential": {
                "file": names["levels"],
                "fingerprint": mark,
                "smoothness": parts.potential.smoothness,
                "strong_convexity": parts.potential.strong_convexity,
                "left_out": len(parts.potential.left_out),
                "sweeps": parts.potential.sweeps,
                "violation": parts.potential.violation,
            },
        }
    if parts.surrogate is not None:
        held, config = parts.surrogate.state_dict(), parts.surrogate.config()
        mark = fingerprint(held)
        names["surrogate"] = f"surrogate-{mark[:16]}.safetensors"
        extra["surrogate"] = folder / names["surrogate"], held, {"config": config}
        entry = {"file": names["surrogate"], "fingerprint": mark, "config": config}
        card |= {"version": VERSIONS["estimated"], "surrogate": entry}
    text = _sealed_text(card)
    write_checkpoint(folder / names["backbone"], state, {"config": parts.backbone.config()})
    bank.save(folder / names["bank"])
    for path, held, header in extra.values():
        write_checkpoint(path, held, header)
    with replacing(folder / CARD) as partial:
        partial.write_text(text, encoding="utf-8")
    _clear(folder, keep=names.values())
    return folder / CARD


def refuse_foreign_card(folder: Path) -> None:
    """Refuse a folder where the name of the card is taken by a file that is none."""
    path = folder / CARD
    if not path.exists():
        return
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        card = None
    if not isinstance(card, Mapping) or card.get("format") != FORMAT:
        raise InputError(
            f"{path}: expected no file, or the card of a model to replace, got another one, which "
            "would be lost: save the model to another folder"
        )


def _clear(folder: Path, keep: Collection[str]) -> None:
    """Remove what earlier saves, killed ones too, left: only files of the very names they give."""
    for old in folder.iterdir():
        if _OWN_NAME.fullmatch(old.name) and old.name not in keep and old.is_file():
            old.unlink()


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
    if found is None or found[0] != FORMAT or found[1] not in VERSIONS.values():
        known = ", ".join(map(str, VERSIONS.values()))
        raise InputError(f"{path}: expected {FORMAT} of version {known}, got {found}")
    stored = card.pop("checksum", None)
    if stored != _checksum(card):
        raise InputError(
            f"{path}: expected contents with checksum {stored}, got {_checksum(card)}: the card "
            "was edited; load the model and save it anew instead"
        )
    return dict(card)


def read_model(folder: str | Path, *, verify: bool = True, mmap: bool = False) -> ModelParts:
    """Read a model folder. `verify` reads the whole bank once and refuses one changed byte."""
    folder = Path(folder)
    card = read_card(folder)
    try:
        net_card, bank_card = card["backbone"], card["bank"]
        backbone = build(net_card["config"])
        bank_path, bank_print = folder / bank_card["file"], bank_card["fingerprint"]
        settings, notes = dict(card["settings"]), dict(card["notes"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / CARD}: expected a whole model card, got: {error!r}") from error
    if not bank_path.exists():
        raise InputError(f"{bank_path}: expected the file that {CARD} names, got none")
    _give_weights(backbone, folder, net_card)
    bank = FeatureBank.load(bank_path, expect_fingerprint=bank_print, verify=verify, mmap=mmap)
    metric, keys = _read_metric(folder, card["metric"]) if "metric" in card else (None, None)
    potential = _read_potential(folder, card) if "potential" in card else None
    surrogate = _read_surrogate(folder, card["surrogate"]) if "surrogate" in card else None
    parts = backbone.eval(), bank, settings, notes, metric, keys, potential, surrogate
    return ModelParts(*parts)


def _read_metric(folder: Path, card: Mapping[str, Any]) -> tuple[Metric, Tensor]:
    metric = build_metric(card["config"])
    _give_weights(metric, folder, card["metric"])
    return metric.eval(), _held(folder, card["keys"]).tensors["keys"]


def _read_surrogate(folder: Path, entry: Mapping[str, Any]) -> CipNet:
    try:
        surrogate = CipNet.from_config(entry["config"])
        _give_weights(surrogate, folder, entry)
    except KeyError as error:
        raise InputError(f"{folder / CARD}: expected a whole model card, got: {error!r}") from error
    return surrogate.eval()


def _owner(card: Mapping[str, Any]) -> str:
    """The bank that levels belong to: its net and data, and the file with its contents' print."""
    return f"{card['bank']['fingerprint']} in {card['bank']['file']}"


def _read_potential(folder: Path, card: Mapping[str, Any]) -> BankPotential:
    entry, owner = card["potential"], _owner(card)
    tensors, header = _held(folder, entry)
    levels, bank = tensors["levels"], header.get("bank")
    if bank != owner:
        raise InputError(
            f"{folder / entry['file']}: expected the levels of the bank {owner}, got those of "
            f"{bank}"
        )
    try:
        curvature = entry["smoothness"], entry["strong_convexity"]
        account = entry["sweeps"], entry["violation"]
    except KeyError as error:
        raise InputError(f"{folder / CARD}: expected a whole model card, got: {error!r}") from error
    return BankPotential(levels, *curvature, levels.isnan().nonzero()[:, 0], *account)


def _give_weights(net: nn.Module, folder: Path, entry: Mapping[str, Any]) -> None:
    """The weights of a file that the card names, into the net that the card describes."""
    state = _held(folder, entry).tensors
    try:
        net.load_state_dict(state, assign=True)  # which keeps their dtype
    except RuntimeError as error:
        path = folder / entry["file"]
        raise InputError(f"{path}: expected weights that fit {CARD}, got: {error}") from error


def _held(folder: Path, entry: Mapping[str, str]) -> Checkpoint:
    """The contents of a file that the card names, if they are those it was written with."""
    path = folder / entry["file"]
    if not path.exists():
        raise InputError(f"{path}: expected the file that {CARD} names, got none")
    held = read_checkpoint(path)
    if (found := fingerprint(held.tensors)) != entry["fingerprint"]:
        raise InputError(
            f"{path}: expected the contents {entry['fingerprint']} named in {CARD}, "
            f"got {found}: a file of another model"
        )
    return held


def _sealed_text(card: Mapping[str, Any]) -> str:
    """The card as JSON, with its checksum."""
    plain = {}
    for name, entry in card.items():
        try:
            plain[name] = json.loads(json.dumps(entry, allow_nan=False))  # as a reader will see it
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: expected plain JSON values, got: {error}") from error
    return json.dumps(plain | {"checksum": _checksum(plain)}, indent=2) + "\n"


def _checksum(card: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
