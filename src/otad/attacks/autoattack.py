"""Square (Andriushchenko et al. 2020) and AutoAttack (Croce and Hein 2020), by pyautoattack."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, register_attack
from otad.attacks.library_adapters import UnitBox, own_randomness, require
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.objectives import cross_entropy
from otad.checks import check_choice, check_count
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
    def misfit(
        cls,
        known: Knowledge,
        input_shape: Sequence[int] | None = None,
        task: str = "classification",
        threat: LpBall | None = None,
    ) -> str | None:
        reason = super().misfit(known, input_shape, task, threat)
        if reason is None and input_shape is not None and threat is not None:
            reason = cls.windows_misfit(input_shape, threat)
        return reason

    @staticmethod
    def windows_misfit(input_shape: Sequence[int], threat: LpBall) -> str | None:
        """Why the library's first l2 step, windows of a fifth of the height, fails on such images.

        From a margin of half of what five windows leave, it lays as many as the sides hold: the
        last one may stick out, which only windows of a single pixel survive.
        """
        if threat.norm != "l2":
            return None
        height, width = input_shape[1:]
        side = height // 5
        margin = (height - 5 * side) // 2
        ends = [margin + length // side * side - length for length in (height, width) if side]
        if side == 1 or (side > 1 and max(ends) <= 0):
            return None
        return (
            "expected images whose sides the l2 windows of Square can tile (28 x 28, 32 x 32, "
            f"...), got {height} x {width}; random_search takes any shape"
        )

    def check_windows(self, x: Tensor, ball: LpBall) -> None:
        if reason := self.windows_misfit(x.shape[1:], ball):
            raise InputError(f"{self.name}: {reason}")


@register_attack
@dataclass(frozen=True, eq=False)
class Square(SquareWindows):
    """Random search over square windows of images (B,C,H,W), without gradients.

    - `queries`: the most answers asked for each example, in each restart.
    - `restarts`: how often the examples that survive are attacked.
    - `loss`: what a change must improve, "margin" or "ce" (cross-entropy). In regression, always
      the error.
    """

    queries: int = 2000
    restarts: int = 1
    loss: str = "margin"
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True, package="pyautoattack")

    def __post_init__(self) -> None:
        check_count(self.queries, "queries", least=2)
        check_count(self.restarts, "restarts")
        check_choice(self.loss, "loss", ("margin", "ce"))

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.check_windows(x, ball)
        box, survivors = UnitBox.of(ball), Survivors(target, x, ball)

        def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            moved = survivors.project(box.from_unit(units), rows)
            outputs = target(moved, rows)
            alive = survivors.judge(moved, outputs, rows)
            return alive.to(x) * 2 - 1, self._losses(outputs, target.targets(rows))

        engine = require("pyautoattack.square").SquareAttack(
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

    variant: str = "standard"
    attacks: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list, init=False, repr=False)
    name = "autoattack"
    family = "white-box"
    needs = Needs(
        gradients=True,
        images=True,
        unit_box=True,
        package="pyautoattack",
        tasks=("classification",),
    )

    def __post_init__(self) -> None:
        check_choice(self.variant, "variant", VARIANTS)
        if (self.variant == "custom") != bool(self.attacks):
            raise InputError(
                "attacks: expected some with variant 'custom' and none otherwise, "
                f"got {self.attacks!r} with {self.variant!r}"
            )
        for part in self.attacks:
            check_choice(part, "attacks", PARTS)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.remarks.clear()
        box = UnitBox.of(ball)
        library, checks = require("pyautoattack"), require("pyautoattack.checks")
        model = _Counted(target, box, x.dtype)
        units = box.to_unit(x).float()
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
            with _contained(target, suite.logger, checks, self.remarks):
                self._fit_to_classes(suite, int(model(box.to_unit(x[:1])).shape[1]))
                if "square" in suite.attacks_to_run:
                    self.check_windows(x, ball)
                found, _ = suite.run_standard_evaluation(units, target.y, batch_size=len(x))
        self.remarks.extend(model.remarks())
        target.forwards += _spread(model.forwards, target.forwards)
        target.backwards += _spread(model.backwards, target.backwards)
        # The library holds x in single precision: where it changed nothing, return exactly x.
        unchanged = per_row((found == units).flatten(1).all(1), x)
        return torch.where(unchanged, x, box.from_unit(found.to(x.dtype)))

    def _fit_to_classes(self, suite: Any, classes: int) -> None:
        """The library warns of too few classes and then fails: leave out what cannot be run."""
        impossible = [part for part in suite.attacks_to_run if NEED_CLASSES.get(part, 2) > classes]
        if impossible:
            suite.attacks_to_run = [p for p in suite.attacks_to_run if p not in impossible]
            self.remarks.append(
                f"left out, as there are only {classes} classes: {', '.join(impossible)}"
            )
        if not suite.attacks_to_run:
            raise InputError(
                f"attacks: expected one that can be run with {classes} classes, "
                f"got {', '.join(self.attacks)}"
            )
        targeted = {"apgd-t", "fab-t"}.intersection(suite.attacks_to_run)
        if targeted and classes - 1 < TARGETS:
            self.remarks.append(
                f"{classes - 1} target classes instead of {TARGETS}, as there are no more"
            )
        suite.apgd_targeted.n_target_classes = min(TARGETS, classes - 1)
        suite.fab.n_target_classes = min(TARGETS, classes - 1)


class _Counted:
    """The model on [0, 1] as the library calls it; counts answers and gradients of single rows."""

    def __init__(self, target: Target, box: UnitBox, dtype: torch.dtype) -> None:
        self.target = target
        self.box = box
        self.dtype = dtype
        self.forwards = 0
        self.backwards = 0
        self.abstained = 0
        self.has_gradient = True

    def __call__(self, units: Tensor) -> Tensor:
        self.forwards += len(units)
        moved = self.box.from_unit(units).to(self.dtype)
        wants_gradient = moved.requires_grad
        if wants_gradient:
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

    def remarks(self) -> Iterator[str]:
        if not self.has_gradient:
            yield "the model has no gradient: the gradient attacks went nowhere"
        if self.abstained:
            yield (
                f"the model abstained on {self.abstained} queries, "
                "which the library takes for equal logits"
            )


def _spread(total: int, like: Tensor) -> Tensor:
    """Integers that sum to `total`, as equal as can be."""
    shares = torch.full_like(like, total // len(like))
    shares[: total % len(like)] += 1
    return shares


@contextmanager
def _contained(
    target: Target, logger: logging.Logger, checks: Any, remarks: list[str]
) -> Iterator[None]:
    """Undo what the library does to its surroundings, and add its warnings to `remarks`.

    FAB calls `backward`, which would leave gradients in the model's own weights. The check for
    dynamic models counts calls over all models ever checked, and removes a debugger's trace
    function.
    """

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (message := record.getMessage()) not in remarks:
                remarks.append(message)

    weights = [weight for weight in target.model.parameters() if weight.requires_grad]
    listener, tracer = Listener(level=logging.WARNING), sys.gettrace()
    logger.addHandler(listener)
    checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
        logger.removeHandler(listener)
        sys.settrace(tracer)
