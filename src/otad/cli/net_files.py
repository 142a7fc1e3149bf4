"""A trained net on disk: one safetensors file that says all about itself, and a record to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otad.errors import InputError
from otad.io.files import replacing
from otad.io.tensor_files import read_tensors, write_tensors
from otad.nets import Backbone, build

NET_FILE = "net.safetensors"
RECORD_FILE = "training.json"


@dataclass(frozen=True, eq=False)
class TrainedNet:
    """A net and what it knows of its data (see `describe_data`)."""

    net: Backbone
    about: dict[str, Any]


def write_net(folder: Path, trained: TrainedNet, record: Mapping[str, Any]) -> None:
    """The net with its config, and the record of its training beside it."""
    header = {"config": trained.net.config(), "about": trained.about}
    write_tensors(folder / NET_FILE, trained.net.state_dict(), header)
    with replacing(folder / RECORD_FILE) as partial:
        partial.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_net(folder: Path) -> TrainedNet:
    path = folder / NET_FILE
    if not path.is_file():
        raise InputError(f"{folder}: expected a folder written by `otad train`, got no {NET_FILE}")
    tensors, header = read_tensors(path)
    try:
        net, about = build(header["config"]), dict(header["about"])
        net.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:
        raise InputError(f"{path}: expected a net with its config, got: {error}") from error
    return TrainedNet(net.eval(), about)
