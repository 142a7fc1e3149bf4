"""Training CIP-net on a teacher's answers, the network's own features, or both:

min over theta of  mean over x' of  alpha |CIP-net(x') - QCP(x')|^2
                                    + (1 - alpha) |CIP-net(x') - z(x')|^2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_shape, check_tensor
from otad.cip.local.solver import ExactCip
from otad.cip.surrogate.lessons import Answers, Lesson, Problem, Teacher, rows_of
from otad.cip.surrogate.net import CipNet
from otad.cip.surrogate.resume import CipNetEpoch, resume, run_identity, save
from otad.errors import InputError
from otad.training.checkpoint import nameless
from otad.training.epochs import Saving, run_epochs
from otad.training.randomness import epoch_batches
from otad.training.recipe import TrainConfig
from otad.training.weight_decay import decay_groups

CHECKPOINT_NAME = "cip-net.safetensors"
CIP_NET_RECIPE = TrainConfig(
    epochs=20,
    batch_size=256,
    learning_rate=3e-4,
    optimizer="adamw",
    weight_decay=0.05,
    decay_on="matrices",
    warmup=1.0,
    gradient_clip=1.0,
)
# Settings of other trainings, which would be without effect here.
_IGNORED = {
    "CIP-net transports nothing": ("energy_weight", "pair_weight", "pair_smoothness"),
    "CIP-net learns features, and no classes": (
        "loss",
        "label_smoothing",
        "target_margin",
        "mixing",
    ),
    "CIP-net learns from problems, not from images": ("augment",),
    "the training of CIP-net has none of it": ("ema", "compiled", "replayed"),
}
_UNIT_ROWS = 256

Report = Callable[[CipNetEpoch], None]


@dataclass(frozen=True)
class CipNetResult:
    """`unit`: the squared length in which errors are measured; `resumed_after`: the epoch a
    checkpoint gave, 0 for none; `epochs`: all that were asked for, of which a run that was out of
    time has fewer."""

    history: tuple[CipNetEpoch, ...]
    unit: float
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)

    @property
    def finished(self) -> bool:
        """All epochs are done; if not, the same call goes on."""
        return len(self.history) >= self.epochs


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
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
    source: str | None = None,
    checkpoint_dir: str | Path | None = None,
    save_seconds: float = 0.0,
    max_seconds: float | None = None,
    progress: Report | bool = False,
) -> CipNetResult:
    """Train `net` in place on the rows of `problems`; it is left in evaluation mode.

    No query may be among its own neighbors (see `leave_one_out`). `teacher` is by default the
    solver a defense uses by default; with alpha = 0 it is not asked. `own_features` (M,d) are
    needed for alpha below 1. `cached`: solve every problem once, before; else whenever it comes
    up. Settings of the config that mean nothing here are refused.

    With a `checkpoint_dir` every epoch is saved there, or one in `save_seconds`, and a call with
    the same net as at the start, problems and settings goes on where a killed one stopped, to the
    same weights. So does one that was out of time: rather than run beyond `max_seconds` it ends
    early, after an epoch at least, with a result that is not `finished`. A `source` is what the
    problems are known by there, instead of by a hash of all their numbers. `progress` is called
    with each `CipNetEpoch`; True draws a bar.
    """
    saving = Saving(checkpoint_dir, save_seconds, max_seconds)
    teacher = teacher or ExactCip(on_failure="fallback")
    _check(problems, config, alpha, own_features)
    path = saving.path(CHECKPOINT_NAME)
    net.to(problems.query.device)
    for problem in (problems, held_out):
        if problem is not None:
            net.check_problem(problem)
    optimizer = config.make_optimizer(decay_groups(net, config))
    history: list[CipNetEpoch] = []
    identity: dict[str, Any] = {}
    if path is not None:
        settings = {"alpha": alpha, "cached": cached}
        is_asked = alpha > 0 or held_out is not None
        asked = {"teacher": nameless(teacher)} if is_asked else {}
        identity = run_identity(net, problems, own_features, config, source, held_out)
        identity |= settings | asked
        if path.exists():
            history = resume(path, identity, net, optimizer)
    resumed_after, unit = len(history), _unit(problems)
    net.eval()
    if resumed_after == config.epochs:
        return CipNetResult(tuple(history), unit, resumed_after, config.epochs)

    answers = Answers(teacher, problems, config.batch_size, cached=cached) if alpha > 0 else None
    lesson = Lesson(problems, answers, own_features, alpha, unit, config.mixed_precision)
    exam = None if held_out is None else Answers(teacher, held_out, config.batch_size, cached=True)

    def run_epoch(epoch: int) -> CipNetEpoch:
        began = time.perf_counter()
        loss, error = _run_epoch(net, optimizer, lesson, config, epoch)
        missed = None if exam is None else _error(net, exam, config.batch_size, unit)
        return CipNetEpoch(epoch, loss, error, missed, time.perf_counter() - began)

    def save_all() -> None:
        if path is not None:
            save(path, identity, net, optimizer, history)

    run_epochs(run_epoch, history, config, saving, save_all, progress, "training CIP-net")
    net.eval()
    return CipNetResult(tuple(history), unit, resumed_after, config.epochs)


def _run_epoch(
    net: CipNet,
    optimizer: torch.optim.Optimizer,
    lesson: Lesson,
    config: TrainConfig,
    epoch: int,
) -> tuple[float, float | None]:
    net.train()
    batches = epoch_batches(lesson.problems.shape[0], config, epoch)
    means = []  # kept on the device: reading a value in every step would stall a GPU
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.rate_at(epoch - 1 + (step + 0.5) / len(batches))
        loss, error = lesson.objective(net, rows)
        optimizer.zero_grad()
        loss.backward()
        if config.gradient_clip > 0:
            torch.nn.utils.clip_grad_norm_(net.parameters(), config.gradient_clip)
        optimizer.step()
        means.append(torch.stack([loss.detach(), error]))
    sizes = torch.tensor([len(rows) for rows in batches], dtype=torch.float64)
    mean, missed = (sizes @ torch.stack(means).cpu().double() / sizes.sum()).tolist()
    total = torch.stack([weight.detach().sum() for weight in net.parameters()]).sum()
    if not math.isfinite(mean + float(total)):
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
    for reason, names in _IGNORED.items():
        config.refuse_changed(names, reason)
    device = problems.query.device.type
    if torch.device(config.device).type != device:
        raise InputError(f"device: expected {device!r} like the problems, got {config.device!r}")
