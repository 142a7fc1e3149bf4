"""Saving a training run after an epoch and taking it up again, to the very same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets.base import Backbone
from otad.nets.metric import Metric
from otad.training.checkpoint import (
    fingerprint,
    nameless,
    read_checkpoint,
    refuse_foreign,
    write_checkpoint,
)
from otad.training.history import EpochRecord
from otad.training.recipe import TrainConfig

CHECKPOINT_NAME = "checkpoint.safetensors"
Optimizer = torch.optim.Optimizer


def run_identity(
    net: Backbone | Metric,
    data: Mapping[str, Tensor],
    config: TrainConfig,
    own_augment: str | None = None,
) -> dict[str, Any]:
    """All that decides the final weights, and so what a checkpoint must share to be resumed."""
    settings = asdict(config) | {"device": torch.device(config.device).type}
    del settings["log_every"]
    try:
        structure = net.config()
    except InputError:  # a user's own modules: enough to recognize them again
        structure = {"structure": nameless(net)}
    if frozen := [name for name, weight in net.named_parameters() if not weight.requires_grad]:
        structure["frozen"] = frozen
    return {
        "config": settings,
        "augment": own_augment,
        "net": structure | {"initial_weights": fingerprint(net.state_dict())},
        "data": {name: fingerprint({name: tensor}) for name, tensor in data.items()},
    }


def save(
    path: Path,
    identity: Mapping[str, Any],
    run: nn.Module,
    optimizer: Optimizer,
    history: Sequence[EpochRecord],
) -> None:
    tensors = {f"net/{name}": tensor for name, tensor in run.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items()}
    header = {"run": identity, "history": [_lasting(record) for record in history]}
    write_checkpoint(path, tensors, header)


def _lasting(record: EpochRecord) -> dict[str, Any]:
    """The record without its time, so that a run that was killed ends with the same file."""
    return {field.name: getattr(record, field.name) for field in fields(record) if field.compare}


def resume(
    path: Path, identity: Mapping[str, Any], run: nn.Module, optimizer: Optimizer
) -> list[EpochRecord]:
    """Load weights and optimizer state of the run `identity`; its records so far."""
    tensors, header = read_checkpoint(path)
    refuse_foreign(path, header["run"], identity)
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        owner, name = full_name.split("/", 1)
        if owner == "net":
            weights[name] = tensor
        else:
            index, moment = name.split("/")
            moments.setdefault(int(index), {})[moment] = tensor
    run.load_state_dict(weights)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    _lay_out(optimizer)
    return [EpochRecord(**record) for record in header["history"]]


def _lay_out(optimizer: Optimizer) -> None:
    """Moments in memory as their weights lie: one kernel for all goes through both by address, and
    a file has rows one after another."""
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.dim() > 1:
                moments[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
