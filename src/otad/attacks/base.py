"""The base class of all attacks: it checks inputs, projects what is found, and measures it."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, final

import torch
from torch import Tensor, nn

from otad.attacks.needs import Knowledge, Needs, Setting
from otad.attacks.projection import has_kernel
from otad.attacks.row_graphs import graphs_for, graphs_of_rows
from otad.attacks.target import Target, check_outputs, gain_of, is_randomized, seeded
from otad.checks import (
    WORKING_DTYPES,
    check_evaluation,
    check_shape,
    check_tensor,
    check_weights,
    require,
    taking,
)
from otad.errors import InputError
from otad.model.captured import capturing, uncaptured
from otad.short_repr import median_text
from otad.threat import LpBall


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack found, with one row for each of the B examples.

    Attributes
    ----------
    inputs : Tensor (B, *input_shape)
        The best inputs found within the ball. Where the model's answer was wrong already, this is
        the example itself.
    broken : Tensor (B,) of bool
        Whether the model's answer at `inputs` is wrong.
    abstained : Tensor (B,) of bool
        Whether the model gave no answer at `inputs`.
    distance : Tensor (B,) of float64
        The distance of `inputs` from the examples, in the norm and the units of the ball.
    gain : Tensor (B,)
        The largest logit of a wrong class minus the logit of the right class; in regression the
        absolute error.
    forwards, backwards : Tensor (B,) of int64
        How often the model was asked for an answer and for a gradient.
    blind : Tensor (B,) of bool
        Whether some gradient or the result was NaN or infinite, so that the attack may have missed
        something.
    seconds : float
        The duration of the attack.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = torch.nn.Linear(2, 2).eval()
    >>> x, y = torch.rand(5, 2), torch.zeros(5, dtype=torch.int64)
    >>> noise = otad.attacks.RandomNoise(draws=3)
    >>> result = noise(model, x, y, otad.L2(0.1), generator=torch.Generator().manual_seed(0))
    >>> result.inputs.shape, result.broken.dtype
    (torch.Size([5, 2]), torch.bool)
    >>> bool((result.distance <= 0.1).all())
    True
    """

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
        """The share of the examples, from 0 to 1, that the model still answers right."""
        return float((~self.broken).double().mean())


def option(default: Any, check: Callable[..., object], **limits: Any) -> Any:
    """Declare a field of an attack whose values are checked by `check(value, name, **limits)`."""
    return field(default=default, metadata={"check": partial(check, **limits)})


class Attack(ABC):
    """A search for inputs within a ball around each example that a model answers wrongly.

    All attacks are called the same way: see `Attack.__call__`. To add one, subclass `Attack`, set
    the class attributes below and write `run`. Whatever `run` returns is projected into the ball,
    answered by the model again and measured, so no attack can claim too much.

    Attributes
    ----------
    name : str
        The name by which suites and the command line find the attack.
    family : str
        "white-box", "black-box", "adaptive" (knows the defense) or "random".
    needs : Needs
        What the attack needs of a model, its inputs and the threat model.
    version : int
        A number to raise when results change, because cached results are stored under it.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> class Darken(otad.attacks.Attack):
    ...     name, family = "darken", "random"
    ...     def run(self, target, x, ball, generator):
    ...         return x - ball.eps
    >>> model = torch.nn.Linear(2, 2).eval()
    >>> x, y = torch.rand(5, 2), torch.zeros(5, dtype=torch.int64)
    >>> generator = torch.Generator().manual_seed(0)
    >>> result = Darken()(model, x, y, otad.Linf(0.1), generator=generator)
    >>> bool((result.distance <= 0.1).all())
    True
    """

    name: ClassVar[str]
    family: ClassVar[str]
    needs: ClassVar[Needs] = Needs()
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # called for dataclasses only
            value, check = getattr(self, one.name), one.metadata.get("check")
            if check is not None and value is not one.default:
                check(value, one.name)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        """Make the attack for a model of which this is known.

        Parameters
        ----------
        known : Knowledge
            What the attacker knows. It fills the fields that need it, such as the undefended
            network, unless they are given.
        **options
            Arguments of the class.

        Raises
        ------
        InputError
            If the class has no such option, or refuses its value.
        """
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
        """Return why the attack does not fit a model or a setting, or None where it fits."""
        return cls.needs.unmet_by_model(known) or (setting and cls.needs.unmet_in(setting))

    @abstractmethod
    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        """Return the most promising input (B,*) for each of the examples x (B,*)."""

    @final
    @torch.inference_mode(False)  # gradients work in inference mode too
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
        """Attack all examples in one batch.

        Examples that the model answers wrongly without an attack are broken from the start and are
        not attacked.

        Parameters
        ----------
        model : nn.Module
            The model, in evaluation mode: inputs (B, *input_shape) -> logits (B, C), or values (B,)
            in regression.
        x : Tensor (B, *input_shape)
            The examples, within the bounds of the ball.
        y : Tensor (B,)
            The right answers: labels (int64), or values in regression.
        ball : LpBall
            The threat model, such as `otad.L2(0.5)`.
        generator : torch.Generator
            The only source of randomness, on the CPU.
        tolerance : float
            The error of a value above which an example is broken, in regression alone. By default
            no error breaks an example, and the attack makes it as large as it can.

        Returns
        -------
        AttackResult
            The best inputs found, measured by the model itself.

        Raises
        ------
        InputError
            If the inputs or the threat model do not fit the attack, or weights are not finite.
        """
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
        graphs = graphs_for(x.device, ball) if has_kernel(ball, x) else None
        with capturing(model), graphs_of_rows(graphs), seeded(model, generator):
            with taking(x, "model"):
                clean = target(x)
            check_outputs(clean, y)
            broken = target.is_broken(clean)
            inputs, outputs = x.clone(), clean.clone()
            rows = (~broken).nonzero()[:, 0]
            if len(rows):
                # Draws by luck do not count: an attack on a randomized model goes as far as it can.
                stops = not is_randomized(model)
                inner, examples = Target(model, y[rows], tolerance, breakable=stops), x[rows]
                # A copy, because an attack may work in place; contiguous, although x may not be.
                given = examples.clone(memory_format=torch.contiguous_format)
                found = self.run(inner, given, ball, generator).detach()
                check_shape(found, f"{self.name}.run", tuple(examples.shape), "like its examples")
                finite = found.isfinite()
                found = ball.project(torch.where(finite, found, examples), examples)
                with uncaptured():  # the model itself is the judge
                    answered = inner(found)
                wrong = target.is_broken(answered, rows)
                if not stops:  # the example itself has been judged
                    wrong &= (found != examples).flatten(1).any(1)
                better = wrong | (gain_of(answered, y[rows]) > gain_of(clean[rows], y[rows]))
                inputs[rows[better]], outputs[rows[better]] = found[better], answered[better]
                broken[rows[wrong]] = True
                target.forwards[rows] += inner.forwards
                target.backwards[rows] += inner.backwards
                target.blind[rows] = inner.blind | ~finite.flatten(1).all(1)
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
        """Refuse networks among the attack's options whose weights are not finite."""
        for name, value in vars(self).items():
            net = getattr(value, "__self__", value)  # a method of a network is one as well
            if isinstance(net, nn.Module):
                check_weights(net, name)
            elif isinstance(value, Attack):
                value.check_networks()

    @final
    def check_inputs(self, x: Tensor, y: Tensor, ball: LpBall) -> None:
        """Refuse examples and threat models for which the attack does not work."""
        task = "regression" if y.is_floating_point() else "classification"
        if reason := self.needs.unmet_in(Setting(x.shape[1:], task, ball)):
            raise InputError(f"{self.name}: {reason}")


def blindness(blind: Tensor) -> str:
    """Describe for how many examples (B,) an attack met what is not finite."""
    share = f"{int(blind.sum())} of {len(blind)} examples"
    return f"gradients or steps were NaN or infinite on {share}, where the attack may be too weak"


ATTACKS: dict[str, type[Attack]] = {}
"""Every registered attack by its name."""
_Class = TypeVar("_Class", bound=type[Attack])


def register_attack(attack: _Class) -> _Class:
    """Make an attack available by its name, as a class decorator.

    Parameters
    ----------
    attack : subclass of Attack
        The class. Its `name` must not be taken by another class.

    Returns
    -------
    subclass of Attack
        The same class, which is now in `ATTACKS`.

    Examples
    --------
    >>> import otad
    >>> @otad.attacks.register_attack
    ... class Brighten(otad.attacks.Attack):
    ...     name, family = "brighten", "random"
    ...     def run(self, target, x, ball, generator):
    ...         return x + ball.eps
    >>> otad.attacks.ATTACKS.pop("brighten") is Brighten  # and removed again
    True
    """
    known = ATTACKS.get(attack.name, attack)
    same = (known.__module__, known.__qualname__) == (attack.__module__, attack.__qualname__)
    require(same, "name", "one that is not taken", repr(attack.name))
    ATTACKS[attack.name] = attack
    return attack
