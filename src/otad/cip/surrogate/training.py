"""Training CIP-net on a teacher's solutions, the network's own features, or both:

min over theta of  mean over x' of  alpha |CIP-net(x') - QCP(x')|^2
                                    + (1 - alpha) |CIP-net(x') - z(x')|^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_shape, check_tensor
from otad.cip.local.solver import ExactCip
from otad.cip.surrogate.lessons import Answers, Lesson, Problem, Teacher, rows_of
from otad.cip.surrogate.net import CipNet
from otad.errors import InputError
from otad.io.tensor_files import fingerprint
from otad.training.checkpoint import stable_repr
from otad.training.config import LoopConfig
from otad.training.loop import Saving, Training

_NAMED_BY_SOURCE = {"query", "anchors", "images", "inputs", "features", "own_features"}
_UNIT_ROWS = 256


@dataclass(frozen=True)
class CipNetConfig(LoopConfig):
    """Settings of one run of `train_cip_net`."""

    epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 3e-4
    optimizer: str = "adamw"
    weight_decay: float = 0.05
    decay_on: str = "matrices"
    warmup: float = 1.0
    gradient_clip: float = 1.0


CIP_NET_RECIPE = CipNetConfig()


@dataclass(frozen=True)
class CipNetEpoch:
    """Means over one epoch: the objective, |CIP-net - QCP|^2 during training (None without a
    teacher) and, after the epoch, on held-out problems.

    All in units of the mean |z_i - mean z|^2 among neighbors, see `CipNetResult.unit`.
    """

    epoch: int
    loss: float
    error: float | None
    held_out_error: float | None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        parts = {"loss": self.loss, "to teacher": self.error, "held out": self.held_out_error}
        values = (f"{name} {value:.4g}" for name, value in parts.items() if value is not None)
        return f"epoch {self.epoch}: {', '.join(values)}"


Report = Callable[[CipNetEpoch], None]


@dataclass(frozen=True)
class CipNetResult:
    """`unit`: the squared length in which errors are measured; `resumed_after`: the last epoch read
    from a checkpoint, 0 for none; `epochs`: the number asked for, of which a run that ran out of
    time has fewer."""

    history: tuple[CipNetEpoch, ...]
    unit: float
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done; if not, the same call resumes."""
        return len(self.history) >= self.epochs


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def train_cip_net(
    net: CipNet,
    problems: Problem,
    config: CipNetConfig = CIP_NET_RECIPE,
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
    default solver of a defense; with alpha = 0 it is not used. `own_features` (M,d) are needed for
    alpha below 1. `cached`: solve every problem once, before the training; else in every batch.

    `checkpoint_dir`, `save_seconds` and `max_seconds` are as in `otad.training.train`. A `source`
    names the problems in a checkpoint, instead of a hash of all their numbers. `progress` is called
    with each `CipNetEpoch`; True draws a bar.
    """
    _check(problems, config, alpha, own_features)
    for problem in (problems, held_out):
        if problem is not None:
            net.to(problems.query.device).check_problem(problem)
    teacher = teacher or ExactCip(on_failure="fallback")
    lesson = Lesson(problems, None, own_features, alpha, _unit(problems), config.mixed_precision)
    saving = Saving(checkpoint_dir, save_seconds, max_seconds)
    run = _CipNetTraining(net, lesson, config, saving, teacher, held_out, source, cached=cached)
    run.run(progress)
    return CipNetResult(tuple(run.history), lesson.unit, run.resumed_after, config.epochs)


class _CipNetTraining(Training[CipNet, CipNetEpoch]):
    record_type: ClassVar[type] = CipNetEpoch
    checkpoint_name = "cip-net.safetensors"
    label = "training CIP-net"
    rows_on_device = False  # problems may be in files

    def __init__(
        self,
        net: CipNet,
        lesson: Lesson,
        config: CipNetConfig,
        saving: Saving,
        teacher: Teacher,
        held_out: Problem | None,
        source: str | None,
        *,
        cached: bool,
    ) -> None:
        self.lesson, self.teacher, self.cached = lesson, teacher, cached
        self.held_out = held_out
        self.exam: Answers | None = None

        def identity() -> dict[str, Any]:
            own = {} if lesson.own_features is None else {"own_features": lesson.own_features}
            asked = {"problems": _tensors(lesson.problems) | own}
            if held_out is not None:
                asked["held_out"] = _tensors(held_out)
            named = set() if source is None else _NAMED_BY_SOURCE
            prints = {
                kind: {name: fingerprint({name: parts[name]}) for name in parts.keys() - named}
                for kind, parts in asked.items()
            }
            uses_teacher = lesson.alpha > 0 or held_out is not None
            by = {"teacher": stable_repr(teacher)} if uses_teacher else {}
            return prints | {"source": source, "alpha": lesson.alpha, "cached": cached} | by

        super().__init__(net, config, saving, lesson.problems.query.device, identity)

    @property
    def n_rows(self) -> int:
        return self.lesson.problems.shape[0]

    def prepare(self) -> None:
        rows = self.config.batch_size
        if self.lesson.alpha > 0:
            answers = Answers(self.teacher, self.lesson.problems, rows, cached=self.cached)
            self.lesson = replace(self.lesson, answers=answers)
        if self.held_out is not None:
            self.exam = Answers(self.teacher, self.held_out, rows, cached=True)

    def batches(
        self, row_batches: Sequence[Tensor], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, ...]]:
        return ((rows,) for rows in row_batches)

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        loss, error = self.lesson.objective(self.weights.net, batch[0])
        self.backward(loss)
        self.update(first=first)
        return torch.stack([loss.detach()] + [error] * (self.lesson.answers is not None))

    @torch.no_grad()
    def validate(self) -> float | None:
        """The mean of |CIP-net - QCP|^2 / unit over all held-out rows, in full precision."""
        if self.exam is None:
            return None
        net = self.weights.best.eval()
        total, count = 0.0, self.exam.problem.shape[0]
        for rows in torch.arange(count).split(self.config.batch_size):
            image = net(rows_of(self.exam.problem, rows)).image
            total += float((image - self.exam(rows)).double().square().sum())
        return total / count / self.lesson.unit

    def record(
        self, epoch: int, means: Sequence[float], score: float | None, seconds: float
    ) -> CipNetEpoch:
        error = means[1] if len(means) > 1 else None
        return CipNetEpoch(epoch, means[0], error, score, seconds)


def _tensors(problem: Problem) -> dict[str, Tensor]:
    parts = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


@torch.no_grad()
def _unit(problem: Problem) -> float:
    """The mean |z_i - mean z|^2 over neighbors of the first rows, 1 where they are all equal."""
    images = problem.images_of(slice(0, _UNIT_ROWS)).float()
    spread = float((images - images.mean(1, keepdim=True)).square().sum(2).mean())
    return spread or 1.0


def _check(
    problems: Problem, config: CipNetConfig, alpha: float, own_features: Tensor | None
) -> None:
    if not isinstance(config, CipNetConfig):
        raise InputError(f"config: expected a CipNetConfig, got {type(config).__name__}")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha: expected a number from 0 to 1, got {alpha!r}")
    if alpha < 1 and own_features is None:
        raise InputError(f"own_features: expected them for alpha = {alpha}, got None")
    if own_features is not None:
        check_tensor(own_features, "own_features", "M,d", dtypes=STORAGE_DTYPES)
        check_shape(own_features, "own_features", tuple(problems.query.shape), "like the queries")
    device = problems.query.device.type
    if torch.device(config.device).type != device:
        raise InputError(f"device: expected {device!r} like the problems, got {config.device!r}")
