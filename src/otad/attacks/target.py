"""The model under attack: how it is asked, when it counts as broken, and what was found so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from otad.attacks.projection import projected
from otad.attacks.row_graphs import row_wise
from otad.checks import check_shape, require
from otad.model.captured import answered, attempt, quick
from otad.threat import LpBall, per_row

Loss = Callable[..., Tensor]
"""Maps outputs (n,C) or (n,) and targets (n,) to the values (n,) that an attacker maximizes."""


DRAWS = 10  # of a randomized model: its answer is the mean of their outputs


def is_randomized(model: nn.Module) -> bool:
    """Return whether a model declares by its attribute `randomized` that its answers are random."""
    return bool(getattr(model, "randomized", False))


def answers(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a model, or their mean over the draws of a randomized model."""
    if not is_randomized(model):
        return quick(model)(x)
    return torch.stack([model(x) for _ in range(DRAWS)]).mean(0)


@contextmanager
def seeded(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Seed the draws of a randomized model by `generator`, inside the block only."""
    if not is_randomized(model):
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Return max_{c != y} logits_c - logits_y (B,), the loss of Carlini and Wagner.

    Unlike the cross-entropy it has a gradient even where the model is very sure."""
    own = logits.gather(1, y[:, None])[:, 0]
    return logits.scatter(1, y[:, None], -math.inf).amax(1) - own


def gain_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Return how far an attack has come (B,): the margin, or in regression the error |f - y|.

    It is infinite where the model abstains (NaN), because an abstention is not a correct answer,
    and 0 between two infinite logits."""
    if y.is_floating_point():
        found = (outputs - y).abs()
        return found.masked_fill(found.isnan(), math.inf)
    silent = outputs.isnan().any(1)
    return margin(outputs, y).nan_to_num(0.0, math.inf, -math.inf).masked_fill(silent, math.inf)


class Evaluated(NamedTuple):
    """The attacked model's outputs, the values (n,) to maximize, and their gradient (n,*)."""

    outputs: Tensor
    value: Tensor
    gradient: Tensor


@row_wise
def judged(
    best: Tensor, gain: Tensor, moved: Tensor, outputs: Tensor, y: Tensor,
    *, tolerance: float, breakable: bool, final: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the better of the `best` inputs (n,*) and `moved`, where the model's outputs are
    given, its gain (n,), and whether `moved` breaks the example (n,).

    If it is `final`, nothing is better than an input that breaks the example."""
    broken, found = is_wrong(outputs, y, tolerance) & breakable, gain_of(outputs, y)
    if final:
        # Tied logits break an example although its gain is 0: no later input may replace it.
        found = found.masked_fill(broken, math.inf)
    better = found > gain
    kept = torch.where(per_row(better, moved), moved, best)
    return kept, torch.where(better, found.to(gain.dtype), gain), broken


def is_wrong(outputs: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Return whether outputs are wrong (n,): another class, an abstention, a large error."""
    if y.is_floating_point():
        return ~((outputs - y).abs() <= tolerance)
    return (outputs.argmax(1) != y) | outputs.isnan().any(1)


@row_wise
def slope_of(outputs: Tensor, *about: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the values (n,) of a loss at outputs, and its gradient in them."""
    return value_and_gradient(lambda at: loss(at, *about), outputs)


@row_wise
def without_holes(value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient (n,*) with 0 where it is not finite, and whether an attack is blind there
    (n,): an entry is NaN or infinite although the value (n,) is finite."""
    blind = ~gradient.flatten(1).isfinite().all(1) & value.isfinite()
    return gradient.nan_to_num(0.0, 0.0, 0.0), blind


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (n,) of a function of each row, and its gradient (n,*).

    The gradient is 0 where the function has none."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = function(x)
        total = value.sum()
    if not total.requires_grad:
        return value, torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True)
    return value.detach(), gradient


class Target:
    """The model under attack with the right answers, and a count of how often it was asked.

    A randomized model answers by the mean over `DRAWS` draws, and its gradient is the mean of their
    gradients (expectation over transformation, Athalye et al. 2018). Each draw is counted.

    `y` (B,) holds labels (int64), or in regression values: an example is broken once its error
    exceeds `tolerance`. The argument `rows` (int64) of the methods selects different examples.
    With `breakable=False` no example ever counts as broken, so that attacks go as far as they
    can."""

    def __init__(
        self, model: nn.Module, y: Tensor, tolerance: float = math.inf, *, breakable: bool = True
    ) -> None:
        self.model, self.y, self.tolerance, self.breakable = model, y, tolerance, breakable
        self.draws = DRAWS if is_randomized(model) else 1
        self.forwards = torch.zeros(len(y), dtype=torch.int64, device=y.device)
        self.backwards = torch.zeros_like(self.forwards)
        self._asked = torch.full_like(self.forwards[:1], self.draws)
        self.blind = torch.zeros_like(self.forwards, dtype=torch.bool)
        self._attempts = True  # until one fails

    def targets(self, rows: Tensor | None = None) -> Tensor:
        return self.y if rows is None else self.y[rows]

    def _count(self, counter: Tensor, rows: Tensor | None) -> None:
        if rows is None:
            counter += self.draws
        else:
            counter.index_add_(0, rows, self._asked.expand(len(rows)))

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the outputs for inputs x (n,*), one for each of `rows`, without a gradient."""
        self._count(self.forwards, rows)
        with torch.no_grad():
            return answers(self.model, x)

    def evaluate(
        self, x: Tensor, loss: Loss, rows: Tensor | None = None, *about: Tensor
    ) -> Evaluated:
        """Return the outputs at inputs x (n,*), their loss, and its gradient in x.

        The loss is a function of outputs, right answers and the tensors (n,*) `about` them."""
        self._count(self.forwards, rows)
        self._count(self.backwards, rows)
        about = self.targets(rows), *about
        drawn = [self._evaluated(x, loss, rows, about) for _ in range(self.draws)]
        if self.draws == 1:
            return drawn[0]
        return Evaluated(*(torch.stack(each).mean(0) for each in zip(*drawn, strict=True)))

    def _evaluated(
        self, x: Tensor, loss: Loss, rows: Tensor | None, about: tuple[Tensor, ...]
    ) -> Evaluated:
        model = quick(self.model) if self.draws == 1 else self.model
        outputs, pull, are_right = (attempt if self._attempts else answered)(model, x)
        value, slope = slope_of(outputs, *about, loss=loss)
        found = Evaluated(outputs, value, self._seen(value, pull(slope), rows))
        if not are_right():  # asked only now, because the host waits here for the answers
            self._attempts = False
            return self._evaluated(x, loss, rows, about)
        return found

    def differentiate(
        self, function: Callable[[Tensor], Tensor], x: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the values (n,) of a function of inputs (n,*), and a finite gradient (n,*).

        There is one input for each of `rows`. Entries of the gradient that are NaN or infinite
        become 0. Where that happens although the value is finite, the example is marked as `blind`,
        because the attack does not see where to go."""
        value, gradient = value_and_gradient(function, x)
        return value, self._seen(value, gradient, rows)

    def _seen(self, value: Tensor, gradient: Tensor, rows: Tensor | None) -> Tensor:
        gradient, blind = without_holes(value, gradient)
        rows = torch.arange(len(value), device=value.device) if rows is None else rows
        self.blind[rows] |= blind  # without a question that a GPU would have to answer first
        return gradient

    def is_broken(self, outputs: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return whether outputs are wrong (n,), see `is_wrong`."""
        return is_wrong(outputs, self.targets(rows), self.tolerance) & self.breakable

    def is_done(self, gain: Tensor) -> Tensor:
        """Return whether a larger gain (n,) would be of no use.

        In classification any gain above 0 is enough; in regression an error can always grow."""
        return (gain == math.inf if self.y.is_floating_point() else gain > 0) & self.breakable


class Survivors:
    """The examples x (B,*) that are not broken yet, and the best inputs found so far.

    `inputs` (B,*) are the best points of the ball, and `gain` (B,) is their gain (see `gain_of`).
    It is infinite once nothing can be better."""

    def __init__(self, target: Target, x: Tensor, ball: LpBall) -> None:
        self.target, self.x, self.ball = target, x, ball
        self.inputs = x.clone()
        self.gain = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)

    @property
    def rows(self) -> Tensor:
        """The examples (int64) that are still worth attacking."""
        return self.among(torch.arange(len(self.gain), device=self.gain.device))

    def among(self, rows: Tensor) -> Tensor:
        """Return those of `rows` that are still worth attacking."""
        return rows[~self.target.is_done(self.gain[rows])]

    def project(self, moved: Tensor, rows: Tensor) -> Tensor:
        return projected(self.ball, moved, self.x[rows])

    def offer(self, moved: Tensor, rows: Tensor) -> None:
        """Ask the model about inputs (n,*) and keep those with more gain.

        Broken examples are updated as well."""
        self._record(moved, self.target(moved, rows), rows, final=False)

    def ask(self, moved: Tensor, rows: Tensor) -> Tensor:
        """Ask the model about inputs (n,*) and record its outputs as `judge` does."""
        return self.judge(moved, self.target(moved, rows), rows)

    def judge(self, moved: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
        """Record the model's outputs at inputs (n,*) and return which of them are not broken.

        The first broken input of an example is final."""
        return ~self._record(moved, outputs, rows, final=True)

    def _record(self, moved: Tensor, outputs: Tensor, rows: Tensor, *, final: bool) -> Tensor:
        target = self.target
        about = self.inputs[rows], self.gain[rows], moved, outputs, target.targets(rows)
        how: dict[str, Any] = {"tolerance": target.tolerance, "breakable": target.breakable}
        self.inputs[rows], self.gain[rows], broken = judged(*about, **how, final=final)
        return broken


def check_outputs(outputs: Tensor, y: Tensor, name: str = "model") -> None:
    """Refuse outputs whose shape or number of classes does not fit the targets y (B,)."""
    got = f"{type(outputs).__name__}; wrap the network in a module that returns its logits alone"
    require(isinstance(outputs, Tensor), name, "a tensor of outputs", got)
    require(outputs.is_floating_point(), name, "outputs as floats", outputs.dtype)
    if y.is_floating_point():
        reason = "of values, as y holds floats (labels are integers)"
        check_shape(outputs, name, (len(y),), reason)
        return
    shape = tuple(outputs.shape)
    fits = len(shape) == 2 and shape[0] == len(y) and shape[1] >= 2
    expected = f"logits ({len(y)}, C) of at least 2 classes, as y holds labels"
    require(fits, name, expected, f"outputs of shape {shape}")
    low, high = (int(value) for value in torch.aminmax(y))
    known = low >= 0 and high < shape[1]
    require(known, "y", f"labels from 0 to {shape[1] - 1}", f"{low} to {high}")
