"""AutoAttack (Croce and Hein 2020), from the library pyautoattack."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.target import Target, answers
from otad.checks import check_choice, require
from otad.errors import InputError, import_extra
from otad.nets.inputs import frozen
from otad.threat import LpBall, per_row

EXTRA = "attacks"  # the extra that installs the libraries
LIBRARY_NORMS = {"l2": "L2", "linf": "Linf"}
VARIANTS = ("standard", "plus", "rand", "custom")
PARTS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
NEED_CLASSES = {"apgd-dlr": 3, "apgd-t": 4}  # how many logits their loss looks at
TARGETS = 9  # the most classes that the targeted parts try


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[int]:
    """Seed all global generators by a seed drawn from `generator`, inside the block only."""
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield seed
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


class UnitBox:
    """The affine map between inputs in the bounds and the [0, 1] that image libraries expect."""

    def __init__(self, ball: LpBall) -> None:
        if ball.bounds is None:
            raise InputError("bounds: expected the lowest and highest input value, got None")
        self.low, self.high = ball.bounds
        self.width = self.high - self.low

    def to_unit(self, x: Tensor) -> Tensor:
        return ((x - self.low) / self.width).clamp(0.0, 1.0)

    def from_unit(self, units: Tensor) -> Tensor:
        return (self.low + units * self.width).clamp(self.low, self.high)


@register_attack
@dataclass(frozen=True, eq=False)
class AutoAttackSuite(Attack):
    """AutoAttack (Croce and Hein 2020): APGD, FAB and Square in a row, on an image classifier.

    It needs the extra `attacks` and bounded inputs. The counts of answers and gradients are right
    in total and are spread evenly over the examples, because the library does not report which
    example a query belongs to.

    Parameters
    ----------
    variant : str
        "standard", "plus", "rand" (for randomized models) or "custom".
    attacks : tuple of str
        For "custom" alone: which of "apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t" and "square"
        are run.

    Attributes
    ----------
    remarks : list of str
        What the library warned about in the last call, such as a randomized model, zero gradients,
        or Square being stronger than the gradient attacks; and what was changed to run it.

    Examples
    --------
    >>> import otad
    >>> attack = otad.attacks.AutoAttackSuite(variant="custom", attacks=("apgd-ce", "fab"))
    >>> attack.needs.tasks, attack.remarks
    (('classification',), [])
    """

    variant: str = option("standard", check_choice, choices=VARIANTS)
    attacks: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list, init=False, repr=False)
    name = "autoattack"
    family = "white-box"
    needs = Needs(
        gradients=True, images=True, unit_box=True, windows=True, package="pyautoattack",
        tasks=("classification",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = (self.variant == "custom") == bool(self.attacks)
        got = f"{self.attacks!r} with {self.variant!r}"
        require(fits, "attacks", "some with variant 'custom' and none otherwise", got)
        for part in self.attacks:
            check_choice(part, "attacks", PARTS)
        if self.variant == "rand" or (self.attacks and "square" not in self.attacks):
            object.__setattr__(self, "needs", replace(self.needs, windows=False))

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.remarks.clear()
        names = ("pyautoattack", "pyautoattack.checks")
        library, checks = (import_extra(name, EXTRA) for name in names)
        box = UnitBox(ball)
        model, units = _Counted(target, box, x.dtype), box.to_unit(x).float()
        with own_randomness(generator) as seed:
            suite = library.AutoAttack(
                model,
                norm=LIBRARY_NORMS[ball.norm],
                eps=ball.eps / box.width,
                version=self.variant,
                attacks=list(self.attacks) or None,
                seed=seed,
                device=x.device,
            )
            _hasten(suite.square)
            with _contained(target, suite, checks, self.remarks):
                self._fit_to_classes(suite, int(model(box.to_unit(x[:1])).shape[1]))
                found, _ = suite.run_standard_evaluation(units, target.y, batch_size=len(x))
        if not model.has_gradient:
            self.remarks.append("the model has no gradient: the gradient attacks went nowhere")
        if count := model.blind:
            self.remarks.append(f"{count} gradients were NaN or infinite, taken for 0")
        if count := model.abstained:
            self.remarks.append(f"the model abstained on {count} queries, taken for equal logits")
        places = torch.arange(len(x), device=x.device)  # the first examples get the remainder
        target.forwards += model.forwards // len(x) + (places < model.forwards % len(x))
        target.backwards += model.backwards // len(x) + (places < model.backwards % len(x))
        # The library works in single precision: where it changed nothing, return exactly x.
        unchanged = per_row((found == units).flatten(1).all(1), x)
        return torch.where(unchanged, x, box.from_unit(found.to(x.dtype)))

    def _fit_to_classes(self, suite: Any, classes: int) -> None:
        """Leave out the parts that need more classes: the library warns about them and fails."""
        impossible = [part for part in suite.attacks_to_run if NEED_CLASSES.get(part, 2) > classes]
        if impossible:
            suite.attacks_to_run = [p for p in suite.attacks_to_run if p not in impossible]
            left_out = ", ".join(impossible)
            self.remarks.append(f"left out, as there are only {classes} classes: {left_out}")
        expected = f"one that can be run with {classes} classes"
        require(suite.attacks_to_run, "attacks", expected, ", ".join(self.attacks))
        targets = min(TARGETS, classes - 1)
        if targets < TARGETS and {"apgd-t", "fab-t"}.intersection(suite.attacks_to_run):
            remark = f"{targets} target classes instead of {TARGETS}, as there are no more"
            self.remarks.append(remark)
        suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = targets


def _hasten(square: Any) -> None:
    """Make each window of Square once, because it takes the library many small operations, and draw
    its place where the library needs it, as a number that no GPU has to send."""
    square.eta_rectangles = cache(square.eta_rectangles)
    square.random_int = lambda low, high: int(low + (high - low) * torch.rand(1))


class _Counted:
    """The model as the library calls it, on [0, 1]; it counts answers and gradients."""

    def __init__(self, target: Target, box: UnitBox, dtype: torch.dtype) -> None:
        self.target, self.box, self.dtype = target, box, dtype
        self.forwards = self.backwards = self.abstained = self.blind = 0
        self.has_gradient = True

    def __call__(self, units: Tensor) -> Tensor:
        self.forwards += len(units) * self.target.draws
        moved = self.box.from_unit(units).to(self.dtype)
        logits = answers(self.target.model, moved).to(units.dtype)
        silent = logits.isnan().any(1, keepdim=True)
        if moved.requires_grad:
            moved.register_hook(lambda gradient: self._made_finite(gradient, silent[:, 0]))
        self.abstained += int(silent.sum())
        logits = logits.masked_fill(silent, 0.0)
        if moved.requires_grad:
            if not logits.requires_grad:
                self.has_gradient = False
                logits = logits + 0.0 * moved.flatten(1).sum(1, keepdim=True).to(logits.dtype)
            logits.register_hook(self._count_gradient)
        return logits

    def _made_finite(self, gradient: Tensor, silent: Tensor) -> Tensor:
        self.blind += int((~gradient.flatten(1).isfinite().all(1) & ~silent).sum())
        return gradient.nan_to_num(0.0, 0.0, 0.0)

    def _count_gradient(self, gradient: Tensor) -> None:
        self.backwards += len(gradient) * self.target.draws


@contextmanager
def _contained(target: Target, suite: Any, checks: Any, remarks: list[str]) -> Iterator[None]:
    """Add the library's warnings to `remarks`, and undo its side effects.

    FAB leaves gradients in the weights. The check for dynamic models counts calls over all models
    and removes a debugger."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (message := record.getMessage()) not in remarks:
                remarks.append(message)

    listener, tracer = Listener(level=logging.WARNING), sys.gettrace()
    suite.logger.addHandler(listener)
    checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    try:
        with frozen(target.model):
            yield
    finally:
        suite.logger.removeHandler(listener)
        sys.settrace(tracer)
