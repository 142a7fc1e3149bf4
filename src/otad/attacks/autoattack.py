"""Square (Andriushchenko et al. 2020) and AutoAttack (Croce and Hein 2020), by pyautoattack."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, option, register_attack
from otad.attacks.library_adapters import UnitBox, import_extra, own_randomness
from otad.attacks.needs import Knowledge, Needs, Setting
from otad.attacks.objectives import cross_entropy
from otad.checks import check_choice, check_count, require
from otad.errors import InputError
from otad.threat import LpBall, per_row

LIBRARY_NORMS = {"l2": "L2", "linf": "Linf"}
VARIANTS = ("standard", "plus", "rand", "custom")
PARTS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
NEED_CLASSES = {"apgd-dlr": 3, "apgd-t": 4}  # their loss looks at so many logits
TARGETS = 9  # classes the targeted parts try, where there are so many


class SquareWindows(Attack):
    """Attacks that include Square of pyautoattack, which cannot tile every image in l2."""

    @classmethod
    def misfit(cls, known: Knowledge, setting: Setting | None = None) -> str | None:
        reason = super().misfit(known, setting)
        if reason or setting is None or setting.threat is None:
            return reason
        return cls.windows_misfit(setting.input_shape, setting.threat)

    @staticmethod
    def windows_misfit(input_shape: Sequence[int], threat: LpBall) -> str | None:
        """Why the library's first l2 step, windows of a fifth of the height, fails on such images:
        from a margin of half of what five windows leave, it lays as many as the sides hold, and
        only a window of a single pixel may stick out."""
        height, width = input_shape[1:]
        side = height // 5
        margin = (height - 5 * side) // 2
        ends = [margin + length // side * side - length for length in (height, width) if side]
        if threat.norm != "l2" or side == 1 or (side > 1 and max(ends) <= 0):
            return None
        expected = "images that the l2 windows of Square can tile, such as 28 x 28 or 32 x 32"
        return f"expected {expected}, got {height} x {width}; random_search takes any shape"

    def check_windows(self, x: Tensor, ball: LpBall) -> None:
        if reason := self.windows_misfit(x.shape[1:], ball):
            raise InputError(f"{self.name}: {reason}")


@register_attack
@dataclass(frozen=True, eq=False)
class Square(SquareWindows):
    """Random search over square windows of images (B,C,H,W): `queries` answers for each example in
    each of `restarts`. `loss`: what a change must improve, "margin" or "ce" (cross-entropy); in
    regression, always the error."""

    queries: int = option(2000, check_count, least=2)
    restarts: int = option(1, check_count)
    loss: str = option("margin", check_choice, choices=("margin", "ce"))
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True, package="pyautoattack")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.check_windows(x, ball)
        box, survivors = UnitBox(ball), Survivors(target, x, ball)

        def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            moved = survivors.project(box.from_unit(units), rows)
            outputs = target(moved, rows)
            alive = survivors.judge(moved, outputs, rows)
            return alive.to(x) * 2 - 1, self._losses(outputs, target.targets(rows))

        engine = import_extra("pyautoattack.square").SquareAttack(
            None,
            norm=LIBRARY_NORMS[ball.norm],
            n_queries=self.queries - 1,  # it asks once before it counts
            eps=ball.eps / box.width,
            device=x.device,
        )
        # The library only hands its labels on to this function, in step with the inputs it still
        # works on. With row numbers in their place every query is known by its example.
        engine.margin_and_loss = judge
        engine.init_hyperparam(x)
        for _ in range(self.restarts):
            rows = survivors.rows
            if len(rows):
                with own_randomness(generator):
                    engine.attack_single_run(box.to_unit(x[rows]), rows)
        return survivors.inputs

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What the attack wants small (B,)."""
        if self.loss == "ce" and not y.is_floating_point():
            losses = -cross_entropy(outputs, y)
            return losses.masked_fill(losses.isnan(), -math.inf)
        return -gain_of(outputs, y)


@register_attack
@dataclass(frozen=True, eq=False)
class AutoAttackSuite(SquareWindows):
    """APGD, FAB and Square in a row, on images (B,C,H,W) of a classifier.

    - `variant`: "standard", "plus", "rand" (for randomized models) or "custom", which runs the
      `attacks` of `PARTS` it is given.
    - `remarks`: what the library warned of in the last call (a randomized model, zero gradients,
      Square stronger than the gradient attacks, ...), and what had to be changed to run it.

    The library does not say which example a query is for: the counts of answers and gradients
    are right in total and spread evenly over the examples.
    """

    variant: str = option("standard", check_choice, choices=VARIANTS)
    attacks: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list, init=False, repr=False)
    name = "autoattack"
    family = "white-box"
    needs = replace(Square.needs, gradients=True, tasks=("classification",))

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = (self.variant == "custom") == bool(self.attacks)
        got = f"{self.attacks!r} with {self.variant!r}"
        require(fits, "attacks", "some with variant 'custom' and none otherwise", got)
        for part in self.attacks:
            check_choice(part, "attacks", PARTS)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.remarks.clear()
        library, checks = import_extra("pyautoattack"), import_extra("pyautoattack.checks")
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
            with _contained(target, suite, checks, self.remarks):
                self._fit_to_classes(suite, int(model(box.to_unit(x[:1])).shape[1]))
                if "square" in suite.attacks_to_run:
                    self.check_windows(x, ball)
                found, _ = suite.run_standard_evaluation(units, target.y, batch_size=len(x))
        if not model.has_gradient:
            self.remarks.append("the model has no gradient: the gradient attacks went nowhere")
        if count := model.abstained:
            self.remarks.append(f"the model abstained on {count} queries, taken for equal logits")
        places = torch.arange(len(x), device=x.device)  # the rest goes to the first examples
        target.forwards += model.forwards // len(x) + (places < model.forwards % len(x))
        target.backwards += model.backwards // len(x) + (places < model.backwards % len(x))
        # The library holds x in single precision: where it changed nothing, return exactly x.
        unchanged = per_row((found == units).flatten(1).all(1), x)
        return torch.where(unchanged, x, box.from_unit(found.to(x.dtype)))

    def _fit_to_classes(self, suite: Any, classes: int) -> None:
        """The library warns of too few classes and then fails: leave out what cannot be run."""
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


class _Counted:
    """The model on [0, 1] as the library calls it; counts answers and gradients of single rows."""

    def __init__(self, target: Target, box: UnitBox, dtype: torch.dtype) -> None:
        self.target, self.box, self.dtype = target, box, dtype
        self.forwards = self.backwards = self.abstained = 0
        self.has_gradient = True

    def __call__(self, units: Tensor) -> Tensor:
        self.forwards += len(units)
        moved = self.box.from_unit(units).to(self.dtype)
        if wants_gradient := moved.requires_grad:
            moved.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
        logits: Tensor = self.target.model(moved).to(units.dtype)
        silent = logits.isnan().any(1, keepdim=True)
        self.abstained += int(silent.sum())
        logits = logits.masked_fill(silent, 0.0)
        if wants_gradient:
            if not logits.requires_grad:
                self.has_gradient = False
                logits = logits + 0.0 * moved.flatten(1).sum(1, keepdim=True).to(logits.dtype)
            logits.register_hook(self._count_gradient)
        return logits

    def _count_gradient(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


@contextmanager
def _contained(target: Target, suite: Any, checks: Any, remarks: list[str]) -> Iterator[None]:
    """Undo what the library does to its surroundings, and add its warnings to `remarks`: FAB leaves
    gradients in the model's weights, and the check for dynamic models counts calls over all models
    ever checked and removes a debugger's trace function."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (message := record.getMessage()) not in remarks:
                remarks.append(message)

    weights = [weight for weight in target.model.parameters() if weight.requires_grad]
    listener, tracer = Listener(level=logging.WARNING), sys.gettrace()
    suite.logger.addHandler(listener)
    checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
        suite.logger.removeHandler(listener)
        sys.settrace(tracer)
