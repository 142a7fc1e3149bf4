"""Training CIP-net on a teacher's answers, the network's own features, or both:

min over theta of  mean over x' of  alpha |CIP-net(x') - QCP(x')|^2
                                    + (1 - alpha) |CIP-net(x') - z(x')|^2.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_count, check_shape, check_tensor
from otad.cip.solver import ExactCip
from otad.cip.surrogate.lessons import Answers, Problem, Teacher, rows_of
from otad.cip.surrogate.net import CipNet
from otad.cip.surrogate.resume import CipNetEpoch, resume, run_identity, save
from otad.errors import InputError
from otad.transport.recipe import TrainConfig

CHECKPOINT_NAME = "cip-net.safetensors"
CIP_NET_RECIPE = TrainConfig(
    epochs=20,
    batch_size=256,
    learning_rate=3e-4,
    optimizer="adamw",
    weight_decay=0.05,
    warmup=1.0,
)
_UNIT_ROWS = 256
_log = logging.getLogger("otad")


@dataclass(frozen=True)
class CipNetResult:
    """`unit`: the squared length in which errors are measured; `resumed_after`: the epoch a
    checkpoint gave, 0 for none."""

    history: tuple[CipNetEpoch, ...]
    unit: float
    resumed_after: int = field(compare=False)


def train_cip_net(
    net: CipNet,
    problems: Problem,
    config: TrainConfig = CIP_NET_RECIPE,
    *,
    teacher: Teacher | None = None,
    alpha: float = 1.0,
    own_features: Tensor | None = None,
    held_out: Problem | None = None,
    cached: bool = True,
    half: bool = False,
    checkpoint_dir: str | Path | None = None,
    save_every: int = 1,
    progress: Callable[[CipNetEpoch], None] | None = None,
) -> CipNetResult:
    """Train `net` in place on the rows of `problems`; it is left in evaluation mode.

    No query may be among its own neighbors (see `leave_one_out`). `teacher` is by default the
    solver a defense uses by default; with alpha = 0 it is not asked. `own_features` (M,d) are
    needed for alpha below 1. `cached`: solve every problem once, before; else whenever it comes
    up. `half` trains in bfloat16 where autocast finds it safe. With a `checkpoint_dir` every
    `save_every`-th epoch is saved there, and a call with the same net as at the start, problems
    and settings goes on where a killed one stopped, to the same weights.
    """
    teacher = teacher or ExactCip(on_failure="fallback")
    _check(problems, config, alpha, own_features)
    check_count(save_every, "save_every")
    path = None if checkpoint_dir is None else Path(checkpoint_dir) / CHECKPOINT_NAME
    net.to(problems.query.device)
    for problem in (problems, held_out):
        if problem is not None:
            net.check_problem(problem)
    optimizer = config.make_optimizer(net.parameters())
    history: list[CipNetEpoch] = []
    identity: dict[str, Any] = {}
    if path is not None:
        settings = {"alpha": alpha, "cached": cached, "half": half}
        asked = {"teacher": repr(teacher)} if alpha > 0 else {}
        identity = run_identity(net, problems, own_features, config) | settings | asked
        if path.exists():
            history = resume(path, identity, net, optimizer)
    resumed_after = len(history)

    lesson = _Lesson(
        problems,
        Answers(teacher, problems, config.batch_size, cached=cached) if alpha > 0 else None,
        own_features,
        alpha,
        _unit(problems),
        half,
    )
    exam = None if held_out is None else Answers(teacher, held_out, config.batch_size, cached=True)
    orders = torch.Generator().manual_seed(config.seed)
    for epoch in range(1, config.epochs + 1):
        order = torch.randperm(problems.shape[0], generator=orders)
        if epoch <= resumed_after:
            continue
        started = time.perf_counter()
        loss, error = _run_epoch(net, optimizer, lesson, order, config, epoch)
        held_out_error = None if exam is None else _error(net, exam, config.batch_size, lesson.unit)
        record = CipNetEpoch(epoch, loss, error, held_out_error, time.perf_counter() - started)
        history.append(record)
        if path is not None and (epoch % save_every == 0 or epoch == config.epochs):
            save(path, identity, net, optimizer, history)
        if epoch % config.log_every == 0 or epoch == config.epochs:
            _log.info("%s", record)
        if progress is not None:
            progress(record)
    net.eval()
    return CipNetResult(tuple(history), lesson.unit, resumed_after)


@dataclass(frozen=True, eq=False)
class _Lesson:
    """Problems with what is to be answered to them."""

    problems: Problem
    answers: Answers | None
    own_features: Tensor | None
    alpha: float
    unit: float
    half: bool

    def objective(self, net: CipNet, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The batch means of the objective and of the error to the teacher (NaN if not asked)."""
        problem = rows_of(self.problems, rows)
        device = problem.query.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.half):
            image = net(problem).image
        loss, error = image.new_zeros(()), image.new_full((), torch.nan)
        if self.answers is not None:
            missed = _mean_square(image - self.answers(rows)) / self.unit
            loss, error = loss + self.alpha * missed, missed.detach()
        if self.own_features is not None and self.alpha < 1:
            own = self.own_features[rows.to(self.own_features.device)].to(image)
            loss = loss + (1 - self.alpha) * _mean_square(image - own) / self.unit
        return loss, error


def _run_epoch(
    net: CipNet,
    optimizer: torch.optim.Optimizer,
    lesson: _Lesson,
    order: Tensor,
    config: TrainConfig,
    epoch: int,
) -> tuple[float, float | None]:
    net.train()
    batches = order.split(config.batch_size)
    means = []  # kept on the device: reading a value in every step would stall a GPU
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.rate_at(epoch - 1 + (step + 0.5) / len(batches))
        loss, error = lesson.objective(net, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(torch.stack([loss.detach(), error]))
    sizes = torch.tensor([len(rows) for rows in batches], dtype=torch.float64)
    mean, missed = (sizes @ torch.stack(means).cpu().double() / sizes.sum()).tolist()
    total = sum(float(weight.detach().sum()) for weight in net.parameters())
    if not math.isfinite(mean + total):
        raise InputError(
            f"learning_rate: expected one at which training converges, got {config.learning_rate}, "
            f"which made loss or weights infinite in epoch {epoch}"
        )
    return mean, None if lesson.answers is None else missed


@torch.no_grad()
def _error(net: CipNet, exam: Answers, batch_size: int, unit: float) -> float:
    """The mean of |CIP-net - QCP|^2 / unit over all rows, in full precision."""
    net.eval()
    total, count = 0.0, exam.problem.shape[0]
    for rows in torch.arange(count).split(batch_size):
        image = net(rows_of(exam.problem, rows)).image
        total += float((image - exam(rows)).double().square().sum())
    return total / count / unit


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().sum(1).mean()


@torch.no_grad()
def _unit(problem: Problem) -> float:
    """The mean |z_i - mean z|^2 over neighbors of the first rows, 1 where they are all alike."""
    images = problem.images_of(slice(0, _UNIT_ROWS)).float()
    spread = float((images - images.mean(1, keepdim=True)).square().sum(2).mean())
    return spread or 1.0


def _check(
    problems: Problem, config: TrainConfig, alpha: float, own_features: Tensor | None
) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha: expected a number from 0 to 1, got {alpha!r}")
    if alpha < 1 and own_features is None:
        raise InputError(f"own_features: expected them for alpha = {alpha}, got None")
    if own_features is not None:
        check_tensor(own_features, "own_features", "M,d", dtypes=STORAGE_DTYPES)
        check_shape(own_features, "own_features", tuple(problems.query.shape), "like the queries")
    if config.energy_weight:
        raise InputError(
            f"energy_weight: expected 0, as CIP-net transports nothing, got {config.energy_weight}"
        )
    device = problems.query.device.type
    if torch.device(config.device).type != device:
        raise InputError(f"device: expected {device!r} like the problems, got {config.device!r}")
