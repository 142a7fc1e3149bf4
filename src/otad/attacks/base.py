"""What every attack does the same way: check, count, project, ask the model again, measure."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, final

import torch
from torch import Tensor, nn

from otad.attacks.needs import Knowledge, Needs, Setting
from otad.checks import (
    WORKING_DTYPES,
    check_evaluation,
    check_shape,
    check_tensor,
    check_weights,
    require,
)
from otad.errors import InputError
from otad.short_repr import median_text
from otad.threat import LpBall

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs (n,C) or (n,) and targets (n,) -> what an attacker wants large (n,), differentiable."""


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{c != y} logits_c - logits_y (B,), the loss of Carlini and Wagner. Never flat."""
    own = logits.gather(1, y[:, None])[:, 0]
    return logits.scatter(1, y[:, None], -math.inf).amax(1) - own


def gain_of(outputs: Tensor, y: Tensor) -> Tensor:
    """How far an attack has come (B,): the margin, in regression |f - y|; infinite where the model
    abstains (NaN), as that is no correct answer."""
    found = (outputs - y).abs() if y.is_floating_point() else margin(outputs, y)
    return found.masked_fill(found.isnan(), math.inf)


class Evaluated(NamedTuple):
    """Outputs of the attacked model, what an attack maximizes (n,), and its gradient (n,*)."""

    outputs: Tensor
    value: Tensor
    gradient: Tensor


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Values (n,) of a function of each row, and its gradient (n,*), 0 where it has none."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        value = function(x)
        total = value.sum()
    if not total.requires_grad:
        return value, torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True)
    return value.detach(), gradient


class Target:
    """The model under attack with the right answers `y` (B,): labels (int64) or, in regression,
    values, broken once their error exceeds `tolerance`. Counts how often it is asked. `rows`
    (int64) select some of the examples. Without `breakable` it is attacked as far as it goes."""

    def __init__(
        self, model: nn.Module, y: Tensor, tolerance: float = math.inf, *, breakable: bool = True
    ) -> None:
        self.model, self.y, self.tolerance, self.breakable = model, y, tolerance, breakable
        self.forwards = torch.zeros(len(y), dtype=torch.int64, device=y.device)
        self.backwards = torch.zeros_like(self.forwards)
        self.blind = torch.zeros_like(self.forwards, dtype=torch.bool)

    def targets(self, rows: Tensor | None = None) -> Tensor:
        return self.y if rows is None else self.y[rows]

    def _count(self, counter: Tensor, rows: Tensor | None) -> None:
        rows = torch.arange(len(self.y), device=self.y.device) if rows is None else rows
        counter.index_add_(0, rows, torch.ones_like(rows))

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Outputs for inputs x (n,*), one for each of `rows`, without gradient."""
        self._count(self.forwards, rows)
        with torch.no_grad():
            outputs: Tensor = self.model(x)
        return outputs

    def evaluate(self, x: Tensor, loss: Loss, rows: Tensor | None = None) -> Evaluated:
        self._count(self.forwards, rows)
        self._count(self.backwards, rows)
        outputs: list[Tensor] = []

        def value_of(inputs: Tensor) -> Tensor:
            outputs.append(self.model(inputs))
            return loss(outputs[0], self.targets(rows))

        value, gradient = self.differentiate(value_of, x, rows)
        return Evaluated(outputs[0].detach(), value, gradient)

    def differentiate(
        self, function: Callable[[Tensor], Tensor], x: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values (n,) of a function of inputs (n,*), one for each of `rows`, and a gradient to
        climb: what is NaN or infinite in it is 0, and `blind` notes the examples with a value."""
        value, gradient = value_and_gradient(function, x)
        blind = ~gradient.flatten(1).isfinite().all(1) & value.isfinite()
        if bool(blind.any()):
            self.blind[blind if rows is None else rows[blind]] = True
        return value, gradient.nan_to_num(0.0, 0.0, 0.0)

    def is_broken(self, outputs: Tensor, rows: Tensor | None = None) -> Tensor:
        """Whether answers (n,) are wrong: another class, an abstention, an error too large."""
        y = self.targets(rows)
        if y.is_floating_point():
            return ~((outputs - y).abs() <= self.tolerance) & self.breakable
        return ((outputs.argmax(1) != y) | outputs.isnan().any(1)) & self.breakable

    def is_done(self, gain: Tensor) -> Tensor:
        """Whether a larger gain (n,) is useless: of a class, but an error may always grow."""
        return (gain == math.inf if self.y.is_floating_point() else gain > 0) & self.breakable


class Survivors:
    """Which examples x (B,*) are not broken yet, and the best `inputs` (B,*) of the ball found,
    with their `gain` (B,): see `gain_of`; infinite once nothing can be better."""

    def __init__(self, target: Target, x: Tensor, ball: LpBall) -> None:
        self.target, self.x, self.ball = target, x, ball
        self.inputs = x.clone()
        self.gain = torch.full((len(x),), -math.inf, dtype=x.dtype, device=x.device)

    @property
    def rows(self) -> Tensor:
        return self.among(torch.arange(len(self.gain), device=self.gain.device))

    def among(self, rows: Tensor) -> Tensor:
        return rows[~self.target.is_done(self.gain[rows])]

    def project(self, moved: Tensor, rows: Tensor) -> Tensor:
        return self.ball.project(moved, self.x[rows])

    def offer(self, moved: Tensor, rows: Tensor) -> None:
        """Ask about inputs (n,*); keep those with more gain, also of broken examples."""
        self._keep(moved, gain_of(self.target(moved, rows), self.target.targets(rows)), rows)

    def ask(self, moved: Tensor, rows: Tensor) -> Tensor:
        return self.judge(moved, self.target(moved, rows), rows)

    def judge(self, moved: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
        """Record the model's outputs at inputs (n,*); which of them (bool) are not broken. The
        first broken input of an example is final."""
        broken = self.target.is_broken(outputs, rows)
        gain = gain_of(outputs, self.target.targets(rows))
        # Tied logits break an example at gain 0, and nothing later may count as better.
        self._keep(moved, gain.masked_fill(broken, math.inf), rows)
        return ~broken

    def _keep(self, moved: Tensor, gain: Tensor, rows: Tensor) -> None:
        better = gain > self.gain[rows]
        self.inputs[rows[better]] = moved[better]
        self.gain[rows[better]] = gain[better].to(self.gain.dtype)


@dataclass(frozen=True, eq=False)
class AttackResult:
    """`inputs` (B,*): the best found within the ball. `broken` (B,): the model's answer there is
    wrong (or was, unattacked: then `inputs` is the example itself). `abstained` (B,): it gave none.
    `distance` (B,) float64: measured from the example. `gain` (B,): see `gain_of`. `forwards`,
    `backwards` (B,): how often the model was asked for an answer, for a gradient. `blind` (B,): a
    gradient on the way was NaN or infinite, so that the attack may have missed something."""

    inputs: Tensor
    broken: Tensor
    abstained: Tensor
    distance: Tensor
    gain: Tensor
    forwards: Tensor
    backwards: Tensor
    blind: Tensor
    seconds: float

    def __repr__(self) -> str:
        broken = self.broken.sum()
        found = f"{len(self.broken)} inputs, {int(broken)} broken"
        far = f", distance {median_text(self.distance[self.broken])}" if broken else ""
        return f"AttackResult({found}{far}, {self.seconds:.3g} s)"

    @property
    def accuracy(self) -> float:
        """The share of the examples still answered right."""
        return float((~self.broken).double().mean())


def option(default: Any, check: Callable[..., object], **limits: Any) -> Any:
    """A dataclass field of an attack, whose values `check(value, name, **limits)` may refuse."""
    return field(default=default, metadata={"check": partial(check, **limits)})


class Attack(ABC):
    """Looks for an input within a ball around each example that a model answers wrongly. A new
    attack sets `name`, `family` and `needs` and writes `run`, which may return anything:
    `__call__` projects, asks the model again and measures, so no attack can claim too much."""

    name: ClassVar[str]
    family: ClassVar[str]  # "white-box", "black-box", "adaptive" or "random"
    needs: ClassVar[Needs] = Needs()
    version: ClassVar[int] = 1  # raise it when results change: cached results are named by it

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # called for dataclasses only
            value, check = getattr(self, one.name), one.metadata.get("check")
            if check is not None and value is not one.default:
                check(value, one.name)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        """The attack for a model of which this is known; `options` are those of the class. A field
        with metadata "known" is by default that attribute of `known`."""
        accepted = tuple(inspect.signature(cls).parameters)
        unknown = ", ".join(name for name in options if name not in accepted)
        expected = f"options of {cls.name}, which are {', '.join(accepted)}"
        require(not unknown, "attack", expected, unknown)
        declared: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
        for name, one in declared.items():
            if source := one.metadata.get("known"):
                options.setdefault(name, getattr(known, source))
        try:
            return cls(**options)
        except TypeError as error:  # an option of a type that its check cannot compare
            raise InputError(f"attack: expected {expected}, got {options}: {error}") from error

    @classmethod
    def misfit(cls, known: Knowledge, setting: Setting | None = None) -> str | None:
        """Why the attack does not fit a model, or in that setting; None where it fits."""
        return cls.needs.unmet_by_model(known) or (setting and cls.needs.unmet_in(setting))

    @abstractmethod
    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        """The most promising input (B,*) for each of the examples x."""

    @final
    @torch.inference_mode(False)  # gradients, whatever mode the caller is in
    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        ball: LpBall,
        *,
        generator: torch.Generator,
        tolerance: float = math.inf,
    ) -> AttackResult:
        """Attack examples x (B,*) with right answers y (B,), all in one batch, but for those whose
        class is wrong already. `generator` (on the CPU) is the only source of randomness."""
        check_evaluation(model, "model")
        check_weights(model, "model")
        self.check_networks()
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise InputError("x: expected a tensor of at least one example (B,*input_shape)")
        check_tensor(x, "x", "B" + ",*" * (x.dim() - 1))
        check_tensor(y, "y", "B", dtypes=(torch.int64, *WORKING_DTYPES))
        check_shape(y, "y", (len(x),), "with one target per example")
        ball.check_inputs(x)
        self.check_inputs(x, y, ball)
        started = time.perf_counter()
        x, target = x.detach(), Target(model, y, tolerance)
        clean = target(x)
        check_outputs(clean, y)
        broken = target.is_broken(clean)
        inputs, outputs = x.clone(), clean.clone()
        rows = (~broken).nonzero()[:, 0]
        if len(rows):
            inner, examples = Target(model, y[rows], tolerance), x[rows]
            # A copy, as an attack may work in place; in one piece, though images may be permuted.
            given = examples.clone(memory_format=torch.contiguous_format)
            found = self.run(inner, given, ball, generator).detach()
            check_shape(found, f"{self.name}.run", tuple(examples.shape), "like its examples")
            found = ball.project(torch.where(found.isfinite(), found, examples), examples)
            answers = inner(found)
            wrong = inner.is_broken(answers)
            better = wrong | (gain_of(answers, y[rows]) > gain_of(clean[rows], y[rows]))
            inputs[rows[better]], outputs[rows[better]] = found[better], answers[better]
            broken[rows[wrong]] = True
            target.forwards[rows] += inner.forwards
            target.backwards[rows] += inner.backwards
            target.blind[rows] = inner.blind
        if bool(target.blind.any()):
            warnings.warn(f"{self.name}: {blindness(target.blind)}", stacklevel=2)
        return AttackResult(
            inputs=inputs,
            broken=broken,
            abstained=outputs.isnan().view(len(x), -1).any(1),
            distance=ball.distance(inputs, x),
            gain=gain_of(outputs, y),
            forwards=target.forwards,
            backwards=target.backwards,
            blind=target.blind,
            seconds=time.perf_counter() - started,
        )

    @final
    def check_networks(self) -> None:
        """Refuse networks of the attack's own that have weights which are not finite."""
        for name, value in vars(self).items():
            net = getattr(value, "__self__", value)  # a method of a network is one as well
            if isinstance(net, nn.Module):
                check_weights(net, name)
            elif isinstance(value, Attack):
                value.check_networks()

    @final
    def check_inputs(self, x: Tensor, y: Tensor, ball: LpBall) -> None:
        """Refuse examples and a threat that the attack does not fit."""
        task = "regression" if y.is_floating_point() else "classification"
        if reason := self.needs.unmet_in(Setting(x.shape[1:], task, ball)):
            raise InputError(f"{self.name}: {reason}")


def blindness(blind: Tensor) -> str:
    """A remark about an attack with blind rows (B,)."""
    share = f"{int(blind.sum())} of {len(blind)} examples"
    return f"gradients were NaN or infinite on {share}, where the attack may be too weak"


ATTACKS: dict[str, type[Attack]] = {}  # every registered attack by name
_Class = TypeVar("_Class", bound=type[Attack])


def register_attack(attack: _Class) -> _Class:
    """Class decorator: make the attack available by its name."""
    known = ATTACKS.get(attack.name, attack)
    same = (known.__module__, known.__qualname__) == (attack.__module__, attack.__qualname__)
    require(same, "name", "one that is not taken", repr(attack.name))
    ATTACKS[attack.name] = attack
    return attack


def check_outputs(outputs: Tensor, y: Tensor, name: str = "model") -> None:
    """Refuse outputs that targets y (B,) do not fit."""
    if y.is_floating_point():
        check_shape(outputs, name, (len(y),), "of values, as y holds values")
        return
    shape = tuple(outputs.shape)
    fits = len(shape) == 2 and shape[0] == len(y) and shape[1] >= 2
    expected = f"logits ({len(y)}, C) of at least 2 classes, as y holds labels"
    require(fits, name, expected, f"outputs of shape {shape}")
    low, high = (int(value) for value in torch.aminmax(y))
    known = low >= 0 and high < shape[1]
    require(known, "y", f"labels from 0 to {shape[1] - 1}", f"{low} to {high}")
