"""Training a CIP-net on a solver's answers, on the backbone's own features, or on both:

min over theta of  mean over x' of  alpha |CIP-net(x') - QCP(x')|^2
                                    + (1 - alpha) |CIP-net(x') - z(x')|^2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_count, check_shape, check_tensor, require
from otad.cip.judge import map_curvature
from otad.cip.local.feature import assemble
from otad.cip.local.solver import ExactCip
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.solution import CipSolution
from otad.cip.surrogate.net import CipNet
from otad.io.mapped_rows import gathered
from otad.io.tensor_files import fingerprint
from otad.search.neighbors import TorchSearch
from otad.short_repr import short_repr
from otad.training.acceleration import precision
from otad.training.checkpoint import stable_repr
from otad.training.config import LoopConfig
from otad.training.loop import Batches, Saving, Training

Problem = CipProblem | BankProblem
Teacher = Callable[[Problem], CipSolution]
_NAMED_BY_SOURCE = {"query", "anchors", "images", "inputs", "features", "own_features"}
_UNIT_ROWS = 256
CHECKPOINT = "cip-net.safetensors"


@dataclass(frozen=True)
class CipNetConfig(LoopConfig):
    """The settings of `train_cip_net`: those of the loop in `otad.training.TrainConfig`.

    Examples
    --------
    >>> from otad.cip.surrogate import CipNetConfig
    >>> CipNetConfig(epochs=5).optimizer
    'adamw'
    """

    epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 3e-4
    optimizer: str = "adamw"
    weight_decay: float = 0.05
    decay_on: str = "matrices"
    warmup: float = 1.0
    gradient_clip: float = 1.0


CIP_NET_RECIPE = CipNetConfig()
"""The settings that work well for most banks."""


@dataclass(frozen=True)
class CipNetEpoch:
    """What is recorded about one epoch, in units of `CipNetResult.unit`.

    Attributes
    ----------
    epoch : int
        The number of the epoch, from 1.
    loss : float
        The mean objective.
    error : float or None
        The mean squared distance from the teacher's images in training, None without a teacher.
    held_out_error : float or None
        The same on held-out problems after the epoch.
    seconds : float
        The duration, or 0 for an epoch read from a checkpoint.

    Examples
    --------
    >>> from otad.cip.surrogate import CipNetEpoch
    >>> print(CipNetEpoch(epoch=1, loss=0.5, error=0.5, held_out_error=None))
    epoch 1: loss 0.5, to teacher 0.5
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


@dataclass(frozen=True)
class CipNetResult:
    """What `train_cip_net` returns: a record of every epoch.

    Attributes
    ----------
    history : tuple of CipNetEpoch
        One record for each epoch.
    unit : float
        The mean of `|z_i - mean z|^2` among neighbors, in which errors are measured.
    resumed_after : int
        The last epoch that was read from a checkpoint, or 0.
    epochs : int
        The number of epochs that was asked for.

    Examples
    --------
    >>> from otad.cip.surrogate import CipNetEpoch, CipNetResult
    >>> history = (CipNetEpoch(1, 0.5, 0.5, None),)
    >>> CipNetResult(history, unit=1.0, resumed_after=0, epochs=2).finished
    False
    """

    history: tuple[CipNetEpoch, ...]
    unit: float
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)
    __repr__ = short_repr

    @property
    def finished(self) -> bool:
        """Whether all epochs are done. If not, the same call resumes the training."""
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
    """Return bank points as queries, each with its nearest neighbors other than itself.

    Parameters
    ----------
    inputs, features : Tensor (N, d)
        The points of the bank and their features.
    n_neighbors : int
        The number K of neighbors.
    smoothness, strong_convexity : float
        The curvature of the problems.
    rows : Tensor (M,) of int64 or None
        The bank rows that are queries, by default all.

    Returns
    -------
    BankProblem
        M problems. The network's own features of the queries are `features[rows]`.

    Examples
    --------
    >>> import torch
    >>> from otad.cip.surrogate import leave_one_out
    >>> leave_one_out(torch.eye(5), torch.eye(5), n_neighbors=3, smoothness=2.0).shape
    (5, 3, 5)
    """
    check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES, finite=False)
    check_count(n_neighbors, "n_neighbors")
    rows = torch.arange(len(inputs)) if rows is None else rows
    check_tensor(rows, "rows", "M", dtypes=(torch.int64,))
    low, high = torch.aminmax(rows)
    fits = low >= 0 and high < len(inputs)
    require(fits, "rows", f"0 to {len(inputs) - 1}", f"{int(low)} to {int(high)}")
    query = gathered(inputs, rows).to(torch.promote_types(inputs.dtype, torch.float32))
    indices = TorchSearch(inputs)(query, n_neighbors, exclude=rows).indices
    return BankProblem(query, inputs, features, indices, smoothness, strong_convexity)


@torch.inference_mode(False)  # gradients work in inference mode too
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
    progress: Callable[[CipNetEpoch], None] | bool | None = None,
    **saving: Any,
) -> CipNetResult:
    """Train a CIP-net in place on problems, and leave it in evaluation mode.

    Parameters
    ----------
    net : CipNet
        The network.
    problems : CipProblem or BankProblem
        M problems. No query may be among its own neighbors: see `leave_one_out`.
    config : CipNetConfig
        The settings.
    teacher : callable or None
        The solver whose images are learned, by default an `ExactCip`. With alpha = 0 it is not
        used.
    alpha : float
        The weight of the teacher's images against `own_features`, from 0 to 1.
    own_features : Tensor (M, d) or None
        The backbone's own features of the queries, which are needed for alpha below 1.
    held_out : CipProblem, BankProblem or None
        Problems on which the error is measured after each epoch.
    cached : bool
        Whether every problem is solved once before the training, instead of in every batch.
    source : str or None
        A name of the problems in a checkpoint, instead of a hash of all their numbers.
    progress, **saving
        As in `otad.training.train`, such as `checkpoint_dir`.

    Returns
    -------
    CipNetResult
        A record of every epoch.

    Examples
    --------
    >>> import torch
    >>> from otad.cip.surrogate import CipNet, CipNetConfig, leave_one_out, train_cip_net
    >>> points = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    >>> problems = leave_one_out(points, points, n_neighbors=3, smoothness=2.0)
    >>> net = CipNet(2, n_neighbors=3, width=8, blocks=1, heads=2)
    >>> result = train_cip_net(net, problems, CipNetConfig(epochs=2, batch_size=10))
    >>> len(result.history), result.finished
    (2, True)
    """
    is_config = isinstance(config, CipNetConfig)
    require(is_config, "config", "a CipNetConfig", type(config).__name__)
    require(0 <= alpha <= 1, "alpha", "a number from 0 to 1", repr(alpha))
    if own_features is None:
        expected = f"the features of the backbone, because alpha is {alpha} and not 1"
        require(alpha == 1, "own_features", expected, None)
    else:
        check_tensor(own_features, "own_features", "M,d", dtypes=STORAGE_DTYPES)
        check_shape(own_features, "own_features", tuple(problems.query.shape), "like the queries")
    device, asked = problems.query.device.type, torch.device(config.device).type
    require(asked == device, "device", f"{device!r} like the problems", repr(asked))
    for problem in (problems, held_out):
        if problem is not None:
            net.to(problems.query.device).check_problem(problem)
    teacher = teacher or ExactCip(on_failure="fallback")
    task = _Task(problems, held_out, own_features, source, teacher, alpha, cached)
    run = _CipNetTraining(net, task, config, Saving(**saving))
    run.run(progress)
    return CipNetResult(tuple(run.history), run.unit, run.resumed_after, config.epochs)


@dataclass(frozen=True, eq=False)
class _Task:
    """The arguments of `train_cip_net` with which a checkpoint must agree."""

    problems: Problem
    held_out: Problem | None
    own_features: Tensor | None
    source: str | None
    teacher: Teacher
    alpha: float
    cached: bool

    def identity(self) -> dict[str, Any]:
        kinds = {"problems": vars(self.problems) | {"own_features": self.own_features}}
        if self.held_out is not None:
            kinds["held_out"] = vars(self.held_out)
        named = set() if self.source is None else _NAMED_BY_SOURCE
        prints: dict[str, Any] = {}
        for kind, parts in kinds.items():
            hashed = [name for name in parts if name not in named]
            tensors = {name: parts[name] for name in hashed if isinstance(parts[name], Tensor)}
            prints[kind] = {name: fingerprint({name: part}) for name, part in tensors.items()}
        uses_teacher = self.alpha > 0 or self.held_out is not None
        by = {"teacher": stable_repr(self.teacher)} if uses_teacher else {}
        return prints | {"source": self.source, "alpha": self.alpha, "cached": self.cached} | by


class _CipNetTraining(Training[CipNet, CipNetEpoch]):
    record_type: ClassVar[type] = CipNetEpoch
    checkpoint_name = CHECKPOINT
    label = "training CIP-net"
    rows_on_device = False  # problems may be in files

    def __init__(self, net: CipNet, task: _Task, config: CipNetConfig, saving: Saving) -> None:
        self.task, self.unit = task, _unit(task.problems)
        self.targets: TeacherImages | None = None
        self.held_out_targets: TeacherImages | None = None
        super().__init__(net, config, saving, task.problems.query.device, task.identity)

    @property
    def n_rows(self) -> int:
        return self.task.problems.shape[0]

    def prepare(self) -> None:
        rows, task = self.config.batch_size, self.task
        if task.alpha > 0:
            self.targets = TeacherImages(task.teacher, task.problems, rows, cached=task.cached)
        if task.held_out is not None:
            self.held_out_targets = TeacherImages(task.teacher, task.held_out, rows, cached=True)

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        return ((rows,) for rows in row_batches)

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        (rows,) = batch
        task = self.task
        with precision(self.device, mixed=self.config.mixed_precision):
            image = self.weights.net(task.problems.select(rows)).image
        loss, means = image.new_zeros(()), []
        if self.targets is not None:
            error = _mean_square(image - self.targets(rows)) / self.unit
            loss, means = loss + task.alpha * error, [error.detach()]
        if task.own_features is not None and task.alpha < 1:
            own = gathered(task.own_features, rows, image.device).to(image)
            loss = loss + (1 - task.alpha) * _mean_square(image - own) / self.unit
        self.backward(loss)
        self.update(first=first)
        return torch.stack([loss.detach(), *means])

    @torch.no_grad()
    def validate(self) -> float | None:
        targets = self.held_out_targets
        if targets is None:
            return None
        net, total, count = self.weights.best.eval(), 0.0, targets.problem.shape[0]
        for rows in torch.arange(count).split(self.config.batch_size):
            image = net(targets.problem.select(rows)).image
            total += float((image - targets(rows)).double().square().sum())
        return total / count / self.unit

    def record(
        self, epoch: int, means: Sequence[float], score: float | None, seconds: float
    ) -> CipNetEpoch:
        error = means[1] if len(means) > 1 else None
        return CipNetEpoch(epoch, means[0], error, score, seconds)


class TeacherImages:
    """The teacher's images (b,d) of some rows of a problem.

    With `cached` every row is solved once at the beginning. Its K multipliers are stored, and the
    images are assembled from them each time."""

    def __init__(
        self, teacher: Teacher, problem: Problem, batch_size: int, *, cached: bool
    ) -> None:
        self.teacher, self.problem = teacher, problem
        self._cache: tuple[Tensor, Tensor] | None = None
        if cached:
            every = torch.arange(problem.shape[0]).split(batch_size)
            parts = [self._solve(problem.select(rows)) for rows in every]
            self._cache = torch.cat([part[0] for part in parts]), torch.cat([x[1] for x in parts])

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        part = self.problem.select(rows)
        if self._cache is None:
            weights, convexity = self._solve(part)
        else:
            weights, convexity = (known[rows.to(known.device)] for known in self._cache)
        return assemble(part, weights, convexity if convexity.any() else None)

    @torch.no_grad()
    def _solve(self, problem: Problem) -> tuple[Tensor, Tensor]:
        solution = self.teacher(problem)
        got = type(solution).__name__
        require(isinstance(solution, CipSolution), "teacher", "one that gives a CipSolution", got)
        found = bool(solution.multipliers.isfinite().all())
        require(found, "teacher", "multipliers for every row, e.g. by on_failure='fallback'", "NaN")
        convexity = map_curvature(problem, solution)[1]
        convexity = torch.where(solution.failed, problem.strong_convexity, convexity)
        return solution.multipliers, convexity


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().sum(1).mean()


@torch.no_grad()
def _unit(problem: Problem) -> float:
    images = problem.images_of(slice(0, _UNIT_ROWS)).float()
    return float((images - images.mean(1, keepdim=True)).square().sum(2).mean()) or 1.0
