"""Saving a training of CIP-net after an epoch and taking it up again, to the very same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.cip.surrogate.lessons import Problem
from otad.cip.surrogate.net import CipNet
from otad.training.checkpoint import (
    fingerprint,
    read_checkpoint,
    refuse_foreign,
    write_checkpoint,
)
from otad.training.recipe import TrainConfig

Optimizer = torch.optim.Optimizer
_NAMED_BY_SOURCE = ("query", "anchors", "images", "inputs", "features", "own_features")


@dataclass(frozen=True)
class CipNetEpoch:
    """Means over one epoch: the objective as trained, |CIP-net - QCP|^2 while training (None where
    the teacher was not asked) and, after it, on held-out problems.

    All in units of the mean |z_i - mean z|^2 among neighbors, see `CipNetResult.unit`.
    """

    epoch: int
    loss: float
    error: float | None
    held_out_error: float | None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        parts = {"loss": self.loss, "to teacher": self.error, "held out": self.held_out_error}
        told = (f"{name} {value:.4g}" for name, value in parts.items() if value is not None)
        return f"epoch {self.epoch}: {', '.join(told)}"


def run_identity(
    net: CipNet,
    problems: Problem,
    own_features: Tensor | None,
    config: TrainConfig,
    source: str | None = None,
    held_out: Problem | None = None,
) -> dict[str, Any]:
    """All that decides weights and errors, and so what a checkpoint must share to be resumed.

    `source` names queries, pairs and own features, whose many numbers then are not looked at.
    """
    settings = asdict(config) | {"device": torch.device(config.device).type}
    del settings["log_every"]
    own = {} if own_features is None else {"own_features": own_features}
    asked = {"problems": _tensors(problems) | own}
    if held_out is not None:
        asked["held_out"] = _tensors(held_out)
    named = _NAMED_BY_SOURCE if source is not None else ()
    return {
        "config": settings,
        "net": net.config() | {"initial_weights": fingerprint(net.state_dict())},
        "source": source,
    } | {
        kind: {name: fingerprint({name: part}) for name, part in parts.items() if name not in named}
        for kind, parts in asked.items()
    }


def _tensors(problem: Problem) -> dict[str, Tensor]:
    parts = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def save(
    path: Path,
    identity: Mapping[str, Any],
    net: CipNet,
    optimizer: Optimizer,
    history: Sequence[CipNetEpoch],
) -> None:
    tensors = {f"net/{name}": tensor for name, tensor in net.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items()}
    # Without seconds: a run that was killed shall end with the same file.
    records = [{**asdict(record), "seconds": 0.0} for record in history]
    write_checkpoint(path, tensors, {"run": identity, "history": records})


def resume(
    path: Path, identity: Mapping[str, Any], net: CipNet, optimizer: Optimizer
) -> list[CipNetEpoch]:
    tensors, header = read_checkpoint(path)
    refuse_foreign(path, header["run"], identity)
    moments: dict[int, dict[str, Tensor]] = {}
    for full_name in [name for name in tensors if name.startswith("optimizer/")]:
        _, index, name = full_name.split("/")
        moments.setdefault(int(index), {})[name] = tensors.pop(full_name)
    net.load_state_dict({name.removeprefix("net/"): part for name, part in tensors.items()})
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return [CipNetEpoch(**record) for record in header["history"]]
