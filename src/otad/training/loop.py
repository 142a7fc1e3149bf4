"""The training loop of backbones, metrics and the surrogate of the solver."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from otad.checks import refusing, require
from otad.errors import InputError
from otad.io.codec import digest_of
from otad.io.files import locked
from otad.nets.orthogonal import retract
from otad.processes import ALONE, Processes
from otad.progress import part_bars
from otad.training.acceleration import CapturedStep, precision
from otad.training.batch_statistics import check_layers, whole_batch_statistics
from otad.training.checkpoint import describe_run, load_run, save_run
from otad.training.config import LoopConfig

AnyNet = TypeVar("AnyNet", bound=nn.Module)
AnyRecord = TypeVar("AnyRecord")
Batches = Iterator[tuple[Tensor, ...]]
LOCK = ".training.lock"
CHECKPOINT = "checkpoint.safetensors"
_log = logging.getLogger("otad")


@dataclass(frozen=True)
class Saving:
    """Where and how often a run is saved, and when it stops. This does not change what it learns.

    A run is saved in `checkpoint_dir` at its end, and after an epoch if the last save was at least
    `save_seconds` ago. It stops if another epoch would end more than `max_seconds` after its
    start.

    `replaces` names the results of earlier runs in `checkpoint_dir`, the last one written last. If
    there are any names, the run removes these files when it begins, and it starts anew if the
    earlier run had finished or was another one."""

    checkpoint_dir: str | Path | None = None
    save_seconds: float = 0.0
    max_seconds: float | None = None
    replaces: Sequence[str] = ()
    started: float = field(default_factory=lambda: monotonic(), init=False)

    def __post_init__(self) -> None:
        require(self.save_seconds >= 0, "save_seconds", "a number from 0", self.save_seconds)
        if self.max_seconds is not None:
            require(self.max_seconds > 0, "max_seconds", "a positive number", self.max_seconds)
            expected, got = "with a checkpoint_dir to resume from", f"{self.max_seconds} without"
            require(self.checkpoint_dir is not None, "max_seconds", expected, got)


class Training(ABC, Generic[AnyNet, AnyRecord]):
    """One training run. Subclasses define what a batch, a step and a record are.

    Everything random in an epoch is determined by the seed and the number of the epoch, so a run
    that was resumed from a checkpoint ends with the same weights bit for bit."""

    record_type: ClassVar[type]
    checkpoint_name: ClassVar[str] = CHECKPOINT
    label: ClassVar[str] = "training"
    shares_batches: ClassVar[bool] = False
    """Whether a step computes with this process's share of a batch alone, see `Processes`."""
    rows_on_device: ClassVar[bool] = True
    """Whether `batches` indexes tensors on the device of the net."""

    def text(self, record: AnyRecord) -> str:
        """Return the text beside the progress bar."""
        return str(record)

    def __init__(
        self,
        net: AnyNet,
        config: LoopConfig,
        saving: Saving,
        device: torch.device,
        identity: Callable[[], dict[str, Any]],
    ) -> None:
        """`identity` returns what a checkpoint must agree with, beside the network and config."""
        trained = any(weight.requires_grad for weight in net.parameters())
        require(trained, "net", "weights to train", "none that requires a gradient")
        self.config, self.saving, self.device = config, saving, device
        folder = saving.checkpoint_dir
        self.path = None if folder is None else Path(folder) / self.checkpoint_name
        self.processes = Processes.joined(device) if self.shares_batches else ALONE
        named = self.path is not None or self.processes.count > 1
        self.identity = describe_run(net, config) | identity() if named else {}
        self.weights = Averaged(net, config.ema).to(device)
        self.optimizer = config.make_optimizer(net)
        self.history: list[AnyRecord] = []
        self.resumed_after = 0
        self._step = CapturedStep(self.step) if config.captures_steps else self.step

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of training examples."""

    @abstractmethod
    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        """Yield the tensors of each batch of rows (b,), with all random numbers drawn."""

    @abstractmethod
    def step(self, *batch: Tensor, first: bool) -> Tensor:
        """Take one gradient step and return batch means (m,) of the loss and other values."""

    def record(
        self, epoch: int, means: Sequence[float], score: float | None, seconds: float
    ) -> AnyRecord:
        """Return the record of an epoch from the means of its steps and the validation score."""
        return self.record_type(epoch, *means, score, seconds)  # type: ignore[no-any-return]

    def prepare(self) -> None:
        """Do what is needed before the first epoch of this process, if any epoch remains."""

    def validate(self) -> float | None:
        """Return the score on held-out data after an epoch."""
        return None

    def run(self, progress: Callable[[AnyRecord], None] | bool | None) -> None:
        """Train for the remaining epochs, as far as the time allows.

        A lock makes sure that no other training uses the same folder."""
        if self.processes.count > 1:
            self._check_together()
        if self.path is None:
            return self._run(progress)
        with self._locked(self.path):
            if self.processes.rank == 0:
                self._remove_replaced(self.path)
            if self.processes.first_says(self.path.exists()):
                self._resume(self.path)
            return self._run(progress)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        is_free, error = True, None
        with ExitStack() as held:
            if self.processes.rank == 0:
                try:
                    is_free = held.enter_context(locked(path.with_name(LOCK), wait=False))
                except InputError as found:
                    error = found
            if self.processes.first_says(error is not None):  # so that no process waits for another
                raise error or InputError(f"{path.parent}: expected a folder that can be written")
            place = f"{path.parent}, in which another one runs"
            is_free = self.processes.first_says(is_free)
            require(is_free, "checkpoint_dir", "no other training", place)
            yield

    def _check_together(self) -> None:
        """Refuse different arguments, and what several processes compute otherwise than one."""
        run = digest_of(self.identity), str(self.path is None)
        self.processes.require_same(run, "net, data, config and checkpoint_dir")
        check_layers(self.weights.net, self.config, self.processes, self.n_rows)
        captures = self.config.captures_steps
        require(not captures, "cuda_graph", "False on several processes", captures)

    def _remove_replaced(self, path: Path) -> None:
        """Remove the results of an earlier run, and its checkpoint if it had finished."""
        results = [path.with_name(name) for name in self.saving.replaces]
        finished = results and results[-1].exists()
        for old in [*results, path] if finished else results:
            old.unlink(missing_ok=True)

    def _resume(self, path: Path) -> None:
        run, replaces = (self.weights, self.optimizer), bool(self.saving.replaces)
        with refusing(f"{path}: expected a checkpoint of this run"):
            records = load_run(path, self.identity, *run, replaces=replaces)
            self.history = [self.record_type(**record) for record in records]
        self.resumed_after = len(self.history)

    def _run(self, progress: Callable[[AnyRecord], None] | bool | None) -> None:
        now = saved_at = monotonic()
        config, done = self.config, len(self.history)
        deadline = self.saving.started + (self.saving.max_seconds or math.inf)
        with (
            precision(self.device, mixed=False),  # whatever the caller uses
            whole_batch_statistics(self.weights.net, self.processes),
            reporting(progress, config.epochs, done, self.label, self.text) as report,
        ):
            if done < config.epochs:
                self.prepare()
            for epoch in range(done + 1, config.epochs + 1):
                began = now
                record = self.run_epoch(epoch, report.move)
                self.history.append(record)
                now = monotonic()
                is_late = self.processes.first_says(now + (now - began) > deadline)
                is_last = is_late or epoch == config.epochs
                if is_last or now - saved_at >= self.saving.save_seconds:
                    if self.path is not None and self.processes.rank == 0:
                        run = self.weights, self.optimizer, self.history
                        save_run(self.path, self.identity, *run)
                    saved_at = now = monotonic()
                if self.processes.rank == 0 and (is_last or epoch % config.log_every == 0):
                    _log.info("%s", self.text(record))
                report(record)
                if is_last:
                    break
        self.weights.net.load_state_dict(self.weights.best.state_dict())
        self.weights.net.eval()

    def run_epoch(self, epoch: int, move: Callable[[float], None]) -> AnyRecord:
        started, seed = perf_counter(), epoch_seed(self.config.seed, epoch)
        indexed_on = self.device if self.rows_on_device else "cpu"
        row_batches = epoch_batches(self.n_rows, self.config, epoch, indexed_on)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.weights.net.train()
        means: list[Tensor] = []  # on the device, because reading every value would stall a GPU
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []):
            own_seed = seed + self.processes.rank  # dropout draws from the global generators
            torch.default_generator.manual_seed(own_seed)
            if on_cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(own_seed)
            for number, batch in enumerate(self.batches(row_batches, generator)):
                move(epoch - 1 + number / len(row_batches))
                rate = self.config.rate_at(epoch - 1 + (number + 0.5) / len(row_batches))
                for group in self.optimizer.param_groups:
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(rate)
                    else:
                        group["lr"] = rate
                means.append(self._step(*batch, first=epoch == 1 and number == 0))
        retract(self.weights)
        sizes = torch.tensor([len(rows) for rows in row_batches], dtype=torch.float64)
        values = (sizes @ torch.stack(means).cpu().double() / sizes.sum()).tolist()
        weights = self.weights.net.parameters()
        total = torch.stack([weight.detach().sum() for weight in weights]).sum()
        finite, rate = math.isfinite(sum(values) + float(total)), self.config.learning_rate
        got = f"{rate}, which made loss or weights infinite in epoch {epoch}"
        require(finite, "learning_rate", "one at which training converges", got)
        score = self.validate()
        return self.record(epoch, values, score, perf_counter() - started)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of the loss; older gradients are dropped.

        On several processes it is the mean of their gradients, see `Processes.gather_rows`."""
        self.optimizer.zero_grad()
        loss.backward()
        gradients = (weight.grad for weight in self.weights.net.parameters())
        self.processes.average(one for one in gradients if one is not None)

    def update(self, *, first: bool) -> None:
        """Change the weights by their gradient. `first` marks the first step of all."""
        if self.config.gradient_clip > 0:
            parameters = self.weights.net.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)
        self.optimizer.step()
        self.weights.update(first=first)


class Averaged(nn.Module, Generic[AnyNet]):
    """A network and, if the decay is above 0, a running average of its weights. After step t it is

        a_1 = w_1,    a_t = decay a_(t-1) + (1 - decay) w_t.

    The statistics of batch normalization are averaged too; integers are copied. The `AveragedModel`
    of torch would read its counter from the GPU for every weight and step."""

    def __init__(self, net: AnyNet, decay: float) -> None:
        super().__init__()
        self.net = net
        self.average = copy.deepcopy(net).requires_grad_(False) if decay > 0 else None
        self._average_into = get_ema_multi_avg_fn(decay)

    @property
    def best(self) -> AnyNet:
        """The result of the training: the average if there is one."""
        return self.net if self.average is None else self.average

    @torch.no_grad()
    def update(self, *, first: bool) -> None:
        if self.average is None:
            return
        nets, floats = (self.average, self.net), []
        states = (itertools.chain(net.parameters(), net.buffers()) for net in nets)
        for averaged, current in zip(*states, strict=True):
            if first or not averaged.is_floating_point():
                averaged.copy_(current)
            else:
                floats.append((averaged.detach(), current.detach()))
        if floats:
            self._average_into(*zip(*floats, strict=True), 0)


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of everything random in an epoch."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_batches(
    n_rows: int, config: LoopConfig, epoch: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return batches of all rows in a random order; a shorter last batch may be left out."""
    generator = torch.Generator().manual_seed(epoch_seed(config.seed, epoch))
    order = torch.randperm(n_rows, generator=generator).to(device)  # the same for all devices
    if config.whole_batches and n_rows > config.batch_size:
        order = order[: n_rows - n_rows % config.batch_size]
    return order.split(config.batch_size)  # type: ignore[no-any-return]


class Reporter:
    """Takes the record of each epoch. Between two records, `move` takes how many epochs are done,
    such as 2.5, which costs no wait for a GPU."""

    def __init__(
        self,
        report: Callable[[Any], None],
        move: Callable[[float], None] = lambda done: None,
    ) -> None:
        self._report, self.move = report, move

    def __call__(self, record: Any) -> None:
        self._report(record)


@contextmanager
def reporting(
    progress: Callable[[Any], None] | bool | None,
    epochs: int,
    done: int,
    label: str,
    text: Callable[[Any], str],
) -> Iterator[Reporter]:
    """Yield what reports the records: to the caller's own function, by a progress bar, or not.

    A `Reporter` of a caller is used as it is. See `otad.progress`."""
    if isinstance(progress, Reporter):
        yield progress
        return
    with part_bars(False if callable(progress) else progress) as draw:
        if callable(progress):
            yield Reporter(progress)
            return
        said: str | None = None

        def report(record: Any) -> None:
            nonlocal said
            said = text(record)
            draw(label, record.epoch, epochs, said)

        draw(label, done, epochs)
        yield Reporter(report, lambda now: draw(label, now, epochs, said))
