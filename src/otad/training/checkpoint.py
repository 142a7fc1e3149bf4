"""The state of a training in one safetensors file with a checksum, without pickle.

Tensors and a JSON header are in one file, which is replaced by one rename. If the process is killed
at any moment, the file of the previous epoch or of the new one remains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import require
from otad.errors import InputError
from otad.io.tensor_files import fingerprint, read_tensors, write_tensors
from otad.training.config import LoopConfig

_FINGERPRINT = re.compile("'[0-9a-f]{64}'")
_RENAMED = {"config.replayed": "config.cuda_graph"}
# The values of settings that a description of a run may lack. Files of version 1 have all settings
# of a backbone in every config.
_ABSENT = {
    **dict.fromkeys(("config.compiled", "config.cuda_graph"), False),
    **{f"config.{name}": 0.0 for name in ("energy_weight", "label_smoothing", "mixing")},
    **{f"config.adversary.{name}": 0.0 for name in ("warmup", "weight_warmup")},
    "config.adversary.norm": "l2",
    "config.adversary.unit": "input",
    "config.augment": "none",
    "config.beta": 6.0,
    "config.channels_last": False,
    "config.loss": "fit",
    "config.margin_rivals": 8,
    "config.margin_temperature": 0.2,
    "config.mixing_by": "both",
    "config.nesterov": False,
    "config.pair_smoothness": 2.0,
    "config.pair_weight": 0.0,
    "config.target_margin": 1.0,
}


def stable_repr(value: object) -> str:
    """Return the `repr` without memory addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def describe_run(net: nn.Module, config: LoopConfig) -> dict[str, Any]:
    """Return the settings and the initial network; a checkpoint must agree with both."""
    settings = asdict(config) | {"device": torch.device(config.device).type}
    del settings["log_every"]
    try:
        structure = net.config()  # type: ignore[operator]
    except InputError:  # it contains the user's own modules
        structure = {"structure": stable_repr(net)}
    if frozen := [name for name, weight in net.named_parameters() if not weight.requires_grad]:
        structure["frozen"] = frozen
    initial = {"initial_weights": fingerprint(net.state_dict())}
    return {"config": settings, "net": structure | initial}


def save_run(
    path: Path,
    identity: Mapping[str, Any],
    weights: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: Sequence[Any],
) -> None:
    """Write the weights, the state of the optimizer and the records of a run to a file."""
    tensors = {f"net/{name}": tensor for name, tensor in weights.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items()}
    # Without durations, so that a run that was killed and resumed ends with the same file.
    records = [{**asdict(record), "seconds": 0.0} for record in history]
    write_tensors(path, tensors, {"run": identity, "history": records})


def load_run(
    path: Path,
    identity: Mapping[str, Any],
    weights: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    replaces: bool = False,
) -> list[dict[str, Any]]:
    """Load the weights and the optimizer's state of the run `identity`; return its records. A
    checkpoint of another run is refused, or left unread if this run `replaces` it."""
    tensors, header = read_tensors(path)
    differences = _differences(header["run"], identity)
    if differences and replaces:
        return []
    remedy = "use another folder or the same arguments again; --force of a command starts anew"
    got = f"one that differs in {'; '.join(differences)}; {remedy}"
    require(not differences, str(path), "a checkpoint of this run", got)
    state: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        owner, name = full_name.split("/", 1)
        if owner == "net":
            state[name] = tensor
        else:
            index, moment = name.split("/")
            moments.setdefault(int(index), {})[moment] = tensor
    if not any(name.startswith("net.") for name in state):  # a surrogate saved by version 1
        state = {f"net.{name}": tensor for name, tensor in state.items()}
    weights.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    # A fused optimizer reads weights and moments in memory order: both need the same layout.
    for weight, of_weight in optimizer.state.items():
        for name, moment in of_weight.items():
            if moment.dim() > 1:
                of_weight[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
    return header["history"]  # type: ignore[no-any-return]


def _differences(run: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between a saved run and this one, with its values, except
    those that are fingerprints."""
    there, here, found = _flatten(run), _flatten(identity), []
    for name in sorted({*there, *here}):
        if there.get(name, _ABSENT.get(name)) != here.get(name, _ABSENT.get(name)):
            values = f" ({here.get(name, 'nothing')!r} here, {there.get(name, 'nothing')!r} there)"
            found.append(name if _FINGERPRINT.search(values) else name + values)
    return found


def _flatten(tree: Any, *path: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {_RENAMED.get(".".join(path), ".".join(path)): tree}
    branches = (_flatten(branch, *path, name) for name, branch in tree.items())
    return {leaf: value for branch in branches for leaf, value in branch.items()}
