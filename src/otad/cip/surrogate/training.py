"""Training CIP-net on a teacher's solutions, the network's own features, or both:

min over theta of  mean over x' of  alpha |CIP-net(x') - QCP(x')|^2
                                    + (1 - alpha) |CIP-net(x') - z(x')|^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_count, check_shape, check_tensor
from otad.cip.judge import map_curvature
from otad.cip.local.feature import assemble
from otad.cip.local.solver import ExactCip
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.solution import CipSolution
from otad.cip.surrogate.net import CipNet
from otad.errors import InputError
from otad.io.mapped_rows import gathered
from otad.io.tensor_files import fingerprint
from otad.search.neighbors import TorchSearch
from otad.training.acceleration import precision
from otad.training.checkpoint import stable_repr
from otad.training.config import LoopConfig
from otad.training.loop import Saving, Training

Problem = CipProblem | BankProblem
Teacher = Callable[[Problem], CipSolution]
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
    from a checkpoint, 0 for none; `epochs`: the number requested, of which a run that ran out of
    time has fewer."""

    history: tuple[CipNetEpoch, ...]
    unit: float
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done; if not, the same call resumes."""
        return len(self.history) >= self.epochs


def leave_one_out(
    inputs: Tensor,
    features: Tensor,
    n_neighbors: int,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    rows: Tensor | None = None,
) -> BankProblem:
    """Points of a bank (N,d) as queries, each among its nearest neighbors other than itself.

    `rows` (M,) int64 chooses the points, all by default; `features[rows]` are then the network's
    own features of the queries. For neighbors by another metric make the `BankProblem` yourself.
    """
    check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES, finite=False)
    check_count(n_neighbors, "n_neighbors")
    if rows is None:
        rows = torch.arange(len(inputs))
    check_tensor(rows, "rows", "M", dtypes=(torch.int64,))
    query = gathered(inputs, rows).to(torch.promote_types(inputs.dtype, torch.float32))
    indices = TorchSearch(inputs)(query, n_neighbors, exclude=rows).indices
    return BankProblem(query, inputs, features, indices, smoothness, strong_convexity)


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
    saving = Saving(checkpoint_dir, save_seconds, max_seconds)
    data = _Data(problems, held_out, own_features, source)
    run = _CipNetTraining(net, data, config, saving, teacher, alpha, cached=cached)
    run.run(progress)
    return CipNetResult(tuple(run.history), run.unit, run.resumed_after, config.epochs)


@dataclass(frozen=True, eq=False)
class _Data:
    """The arguments of `train_cip_net` of these names."""

    problems: Problem
    held_out: Problem | None
    own_features: Tensor | None
    source: str | None

    def fingerprints(self) -> dict[str, Any]:
        own = {} if self.own_features is None else {"own_features": self.own_features}
        kinds = {"problems": _tensors(self.problems) | own}
        if self.held_out is not None:
            kinds["held_out"] = _tensors(self.held_out)
        named = set() if self.source is None else _NAMED_BY_SOURCE
        return {
            kind: {name: fingerprint({name: parts[name]}) for name in parts.keys() - named}
            for kind, parts in kinds.items()
        }


class _CipNetTraining(Training[CipNet, CipNetEpoch]):
    record_type: ClassVar[type] = CipNetEpoch
    checkpoint_name = "cip-net.safetensors"
    label = "training CIP-net"
    rows_on_device = False  # problems may be in files

    def __init__(
        self,
        net: CipNet,
        data: _Data,
        config: CipNetConfig,
        saving: Saving,
        teacher: Teacher,
        alpha: float,
        *,
        cached: bool,
    ) -> None:
        self.data, self.teacher, self.alpha, self.cached = data, teacher, alpha, cached
        self.unit = _unit(data.problems)
        self.targets: TeacherImages | None = None
        self.held_out_targets: TeacherImages | None = None

        def identity() -> dict[str, Any]:
            uses_teacher = alpha > 0 or data.held_out is not None
            by = {"teacher": stable_repr(teacher)} if uses_teacher else {}
            settings = {"source": data.source, "alpha": alpha, "cached": cached}
            return data.fingerprints() | settings | by

        super().__init__(net, config, saving, data.problems.query.device, identity)

    @property
    def n_rows(self) -> int:
        return self.data.problems.shape[0]

    def prepare(self) -> None:
        rows, data = self.config.batch_size, self.data
        if self.alpha > 0:
            self.targets = TeacherImages(self.teacher, data.problems, rows, cached=self.cached)
        if data.held_out is not None:
            self.held_out_targets = TeacherImages(self.teacher, data.held_out, rows, cached=True)

    def batches(
        self, row_batches: Sequence[Tensor], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, ...]]:
        return ((rows,) for rows in row_batches)

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        (rows,) = batch
        with precision(self.device, mixed=self.config.mixed_precision):
            image = self.weights.net(self.data.problems.select(rows)).image
        loss, means = image.new_zeros(()), []
        if self.targets is not None:
            error = _mean_square(image - self.targets(rows)) / self.unit
            loss, means = loss + self.alpha * error, [error.detach()]
        if self.data.own_features is not None and self.alpha < 1:
            own = gathered(self.data.own_features, rows, image.device).to(image)
            loss = loss + (1 - self.alpha) * _mean_square(image - own) / self.unit
        self.backward(loss)
        self.update(first=first)
        return torch.stack([loss.detach(), *means])

    @torch.no_grad()
    def validate(self) -> float | None:
        """The mean of |CIP-net - QCP|^2 / unit over all held-out rows, in full precision."""
        problem, targets = self.data.held_out, self.held_out_targets
        if problem is None or targets is None:
            return None
        net = self.weights.best.eval()
        total, count = 0.0, problem.shape[0]
        for rows in torch.arange(count).split(self.config.batch_size):
            image = net(problem.select(rows)).image
            total += float((image - targets(rows)).double().square().sum())
        return total / count / self.unit

    def record(
        self, epoch: int, means: Sequence[float], score: float | None, seconds: float
    ) -> CipNetEpoch:
        error = means[1] if len(means) > 1 else None
        return CipNetEpoch(epoch, means[0], error, score, seconds)


class TeacherImages:
    """The teacher's images (b,d) of some rows of a problem.

    With `cached` every row is solved once, now, and only its K multipliers are stored: the images
    are assembled from the neighbors each time, at a small part of the cost of solving.
    """

    def __init__(
        self, teacher: Teacher, problem: Problem, batch_size: int, *, cached: bool
    ) -> None:
        self.teacher, self.problem = teacher, problem
        self._cache: tuple[Tensor, Tensor] | None = None
        if cached:
            every = torch.arange(problem.shape[0]).split(batch_size)
            parts = [self._solve(problem.select(rows)) for rows in every]
            weights, convexity = (torch.cat(column) for column in zip(*parts, strict=True))
            self._cache = weights, convexity

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        part = self.problem.select(rows)
        if self._cache is None:
            weights, convexity = self._solve(part)
        else:
            weights, convexity = (known[rows.to(known.device)] for known in self._cache)
        return assemble(part, weights, convexity, bool(convexity.any()))

    @torch.no_grad()
    def _solve(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Multipliers (b,K), and the strong convexity (b,) of the map they belong to."""
        solution = self.teacher(problem)
        if not bool(solution.multipliers.isfinite().all()):
            raise InputError(
                "teacher: expected one that finds multipliers for every row, for instance "
                "ExactCip(on_failure='fallback'), got NaN"
            )
        convexity = map_curvature(problem, solution)[1]
        convexity = torch.where(solution.failed, problem.strong_convexity, convexity)
        return solution.multipliers, convexity


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().sum(1).mean()


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
