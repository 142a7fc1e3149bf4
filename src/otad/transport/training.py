"""Training by the paper's Algorithm 1, loss + alpha * transport energy:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

which draws the map x_i -> z_i towards optimal transport of the training points.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from otad.errors import InputError
from otad.nets.base import Backbone
from otad.transport.history import METRICS, EpochRecord, Report, TrainResult, reporting
from otad.transport.recipe import TrainConfig
from otad.transport.resume import resume, run_identity, save

CHECKPOINT_NAME = "checkpoint.safetensors"
_SCORING_ROWS = 1024
_PARTS = ("train_x", "train_y", "val_x", "val_y")
_log = logging.getLogger("otad")


class Split(Protocol):
    """Training inputs (N,*input_shape) and targets (N,); `val_x` and `val_y` alike may follow."""

    @property
    def train_x(self) -> Tensor: ...
    @property
    def train_y(self) -> Tensor: ...


def train(
    net: Backbone,
    data: Split | Sequence[Tensor],
    config: TrainConfig,
    *,
    checkpoint_dir: str | Path | None = None,
    progress: Report | bool = False,
) -> TrainResult:
    """Train `net` in place, leaving it on `config.device` in evaluation mode.

    `data` is a `Split`, or (train_x, train_y) or (train_x, train_y, val_x, val_y). With a
    `checkpoint_dir` every epoch is saved there, and a call with the same net as at the start, data
    and config goes on where a killed one stopped, to the very same weights. `progress` is called
    with each `EpochRecord` once its epoch is saved; True draws a bar.
    """
    device = present_device(config.device)
    tensors = _check_data(net, data)
    path = None if checkpoint_dir is None else Path(checkpoint_dir) / CHECKPOINT_NAME
    identity = {} if path is None else run_identity(net, tensors, config)
    optimizer = config.make_optimizer(net.to(device).parameters())
    history: list[EpochRecord] = []
    if path is not None and path.exists():
        history = resume(path, identity, net, optimizer)
    resumed_after = len(history)

    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    with reporting(progress, config.epochs, resumed_after) as report:
        for epoch in range(resumed_after + 1, config.epochs + 1):
            record = _run_epoch(net, optimizer, tensors, config, epoch)
            history.append(record)
            if path is not None:
                save(path, identity, net, optimizer, history)
            if epoch % config.log_every == 0 or epoch == config.epochs:
                _log.info("%s", record)
            report(record)
    net.eval()
    return TrainResult(tuple(history), METRICS[net.task], resumed_after)


def _run_epoch(
    net: Backbone,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Tensor],
    config: TrainConfig,
    epoch: int,
) -> EpochRecord:
    started = time.perf_counter()
    x, y = data["train_x"], data["train_y"]
    seed = epoch_seed(config.seed, epoch)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    batches = order.to(x.device).split(config.batch_size)
    net.train()
    means = []  # kept on the device: reading a value in every step would stall a GPU
    with own_randomness(x.device, seed):
        for step, rows in enumerate(batches):
            rate = config.rate_at(epoch - 1 + (step + 0.5) / len(batches))
            for group in optimizer.param_groups:
                group["lr"] = rate
            means.append(_step(net, optimizer, x[rows], y[rows], config))
    sizes = torch.tensor([len(rows) for rows in batches], dtype=torch.float64)
    loss, energy, train_score = (sizes @ torch.stack(means).cpu().double() / sizes.sum()).tolist()
    total = sum(float(weight.detach().sum()) for weight in net.parameters())
    if not math.isfinite(loss + energy + total):
        raise InputError(
            f"learning_rate: expected one at which training converges, got {config.learning_rate}, "
            f"which made loss or weights infinite in epoch {epoch}"
        )
    val_score = _mean_score(net, data["val_x"], data["val_y"]) if "val_x" in data else None
    return EpochRecord(epoch, loss, energy, train_score, val_score, time.perf_counter() - started)


def _step(
    net: Backbone, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, config: TrainConfig
) -> Tensor:
    """One gradient step; the batch means of loss, energy and score, (3,)."""
    features, energies = net.transport(net.embed(x))
    outputs, energy = net.head(features), energies.mean()
    if net.task == "classification":
        loss = functional.cross_entropy(outputs, y)
    else:
        loss = functional.mse_loss(outputs, y)
    optimizer.zero_grad()
    (loss + config.energy_weight * energy if config.energy_weight > 0 else loss).backward()
    optimizer.step()
    return torch.stack([loss.detach(), energy.detach(), _scores(outputs.detach(), y).mean()])


def _mean_score(net: Backbone, x: Tensor, y: Tensor) -> float:
    net.eval()
    with torch.no_grad():
        parts = zip(x.split(_SCORING_ROWS), y.split(_SCORING_ROWS), strict=True)
        sums = [_scores(net(rows), targets).sum() for rows, targets in parts]
    return float(torch.stack(sums).double().sum()) / len(y)


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per row, 1 or 0 for right or wrong, or the squared error of a value."""
    if outputs.dim() == 2:
        return (outputs.argmax(1) == targets).float()
    return (outputs - targets).square()


def parts_of(data: Split | Sequence[Tensor]) -> dict[str, Tensor]:
    """train_x, train_y and, where given, val_x and val_y, as they came."""
    found: dict[str, Tensor | None]
    if isinstance(data, Sequence):
        found = dict(zip((*_PARTS, "more"), data, strict=False))
    else:
        found = {name: getattr(data, name, None) for name in _PARTS}
    parts = {name: part for name, part in found.items() if part is not None}
    if tuple(parts) not in (_PARTS[:2], _PARTS):
        raise InputError(
            f"data: expected {', '.join(_PARTS[:2])} or {', '.join(_PARTS)}, "
            f"got {', '.join(parts) or type(data).__name__}"
        )
    return parts


def refuse_one_class(labels: Tensor) -> None:
    """Training labels (N,) must have something to tell apart."""
    if bool((labels == labels[0]).all()):
        raise InputError(
            f"train_y: expected at least two classes, got only the label {int(labels[0])}"
        )


def _check_data(net: Backbone, data: Split | Sequence[Tensor]) -> dict[str, Tensor]:
    """All parts, fit for the net."""
    parts = parts_of(data)
    for kind in ("train", "val")[: len(parts) // 2]:
        inputs = net.check_inputs(parts[f"{kind}_x"], f"{kind}_x")
        net.check_targets(parts[f"{kind}_y"], len(inputs), f"{kind}_y")
    if net.task == "classification":
        refuse_one_class(parts["train_y"])
    return parts


def present_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device: expected one that is present, got {name!r} without CUDA")
    return device


def epoch_seed(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Layers that draw (dropout) do so from `seed`; the caller's global state is put back."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
