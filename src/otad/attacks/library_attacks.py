"""Attacks of other libraries: Square (Andriushchenko et al. 2020) and AutoAttack (Croce and Hein
2020) by pyautoattack, NGOpt by nevergrad."""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import cross_entropy
from otad.checks import check_choice, check_count, check_positive, require
from otad.errors import InputError, import_extra
from otad.threat import LpBall, per_row

EXTRA = "attacks"  # that installs the libraries
LIBRARY_NORMS = {"l2": "L2", "linf": "Linf"}
VARIANTS = ("standard", "plus", "rand", "custom")
PARTS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
NEED_CLASSES = {"apgd-dlr": 3, "apgd-t": 4}  # their loss looks at so many logits
TARGETS = 9  # classes the targeted parts try, where there are so many
WEIGHT = 10.0  # of NgOpt: the margin against the size of the step
HISTORY = 16  # candidates that nevergrad archives: by default all of them, in 784 dimensions


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[int]:
    """A seed drawn from `generator`, which seeds all global generators, inside the block only."""
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
class Square(Attack):
    """Random search over square windows of images (B,C,H,W): `queries` answers for each example in
    each of `restarts`. `loss`: what a change must improve, "margin" or "ce" (cross-entropy); in
    regression, always the error."""

    queries: int = option(2000, check_count, least=2)
    restarts: int = option(1, check_count)
    loss: str = option("margin", check_choice, choices=("margin", "ce"))
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True, windows=True, package="pyautoattack")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        box, survivors = UnitBox(ball), Survivors(target, x, ball)

        def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            moved, y = survivors.project(box.from_unit(units), rows), target.targets(rows)
            outputs = target(moved, rows)
            alive = survivors.judge(moved, outputs, rows)
            by_entropy = self.loss == "ce" and not y.is_floating_point()
            gain = (cross_entropy if by_entropy else gain_of)(outputs, y)
            return alive.to(x) * 2 - 1, -gain.masked_fill(gain.isnan(), math.inf)

        engine = import_extra("pyautoattack.square", EXTRA).SquareAttack(
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


@register_attack
@dataclass(frozen=True, eq=False)
class AutoAttackSuite(Attack):
    """APGD, FAB and Square in a row, on images (B,C,H,W) of a classifier.

    - `variant`: "standard", "plus", "rand" (for randomized models) or "custom", which runs the
      `attacks` of `PARTS` it is given.
    - `remarks`: what the library warned of in the last call (a randomized model, zero gradients,
      Square stronger than the gradient attacks, ...), and what had to be changed to run it.

    Counts of answers and gradients are right in total and spread evenly over the examples: the
    library does not say which example a query is for."""

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
            with _contained(target, suite, checks, self.remarks):
                self._fit_to_classes(suite, int(model(box.to_unit(x[:1])).shape[1]))
                found, _ = suite.run_standard_evaluation(units, target.y, batch_size=len(x))
        if not model.has_gradient:
            self.remarks.append("the model has no gradient: the gradient attacks went nowhere")
        if count := model.blind:
            self.remarks.append(f"{count} gradients were NaN or infinite, taken for 0")
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
        self.forwards = self.backwards = self.abstained = self.blind = 0
        self.has_gradient = True

    def __call__(self, units: Tensor) -> Tensor:
        self.forwards += len(units)
        moved = self.box.from_unit(units).to(self.dtype)
        logits: Tensor = self.target.model(moved).to(units.dtype)
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
        self.backwards += len(gradient)


@contextmanager
def _contained(target: Target, suite: Any, checks: Any, remarks: list[str]) -> Iterator[None]:
    """Add the library's warnings to `remarks`, and undo what it does: FAB leaves gradients in the
    weights; the check for dynamic models counts calls over all models and removes a debugger."""

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


@register_attack
@dataclass(frozen=True, eq=False)
class NgOpt(Attack):
    """min over delta of 10 max(0, logit_y - max_{c != y} logit_c) + |delta|_2^2, every candidate
    projected into the ball; in regression the error is maximized. NGOpt chooses an optimizer by
    dimension and budget. Each example has its own, and all advance together.

    - `budget`: the most answers asked for each example.
    - `sigma`: the standard deviation of the first step, in units of the ball's `scale`.
    - `processes`: how many share the work of the optimizers, which is most of it for images. With
      more than one, a script of yours needs the usual `if __name__ == "__main__":`."""

    budget: int = option(850, check_count)
    sigma: float = option(0.1, check_positive)
    processes: int = option(1, check_count)
    name = "ngopt"
    family = "black-box"
    needs = Needs(package="nevergrad")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        free = ball.free_features(x)
        if not len(free):
            return x
        scale = torch.ones_like(x[0]) if ball.scale is None else ball.scale.to(x)
        settings, count = (len(free), self.budget, self.sigma), min(self.processes, len(x))
        import_extra("nevergrad", EXTRA)
        with own_randomness(generator) as seed, ExitStack() as stack:
            seeds = dict(enumerate(range(seed, seed + len(x))))
            made = _Optimizers(settings, seeds) if count == 1 else _Pool(settings, seeds, count)
            optimizers = stack.enter_context(closing(made))
            rows = survivors.rows
            for _ in range(self.budget):
                asked = optimizers.ask(rows.tolist())
                values = torch.from_numpy(np.stack([asked[row] for row in rows.tolist()]))
                moved = x[rows].clone()
                moved.flatten(1)[:, free] += values.to(x) * scale.flatten()[free]
                moved = survivors.project(moved, rows)
                outputs = target(moved, rows)
                losses = _losses(outputs, target.targets(rows), (moved - x[rows]) / scale)
                optimizers.tell(dict(zip(rows.tolist(), losses, strict=True)))
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    break
        return survivors.inputs


def _losses(outputs: Tensor, y: Tensor, step: Tensor) -> list[float]:
    found = -gain_of(outputs, y).double().clamp_max(1e30)
    if not y.is_floating_point():
        found = WEIGHT * found.clamp_min(0.0) + step.double().flatten(1).square().sum(1)
    return [float(loss) for loss in found]


Settings = tuple[int, int, float]  # dimension, budget, standard deviation of the first step


class _Optimizers:
    """Optimizers in this process, by row: `ask` for candidates (d,), `tell` their losses."""

    def __init__(self, settings: Settings, seeds: dict[int, int]) -> None:
        self._optimizers = {row: _optimizer(settings, seed) for row, seed in seeds.items()}
        self._asked: dict[int, Any] = {}

    def ask(self, rows: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        self._asked = {row: self._optimizers[row].ask() for row in rows}
        return {row: candidate.value for row, candidate in self._asked.items()}

    def tell(self, losses: dict[int, float]) -> None:
        for row, loss in losses.items():
            self._optimizers[row].tell(self._asked[row], loss)

    def close(self) -> None:
        """Nothing to end in this process."""


class _Pool(_Optimizers):
    """The same in several processes, with the same results; row i in process i modulo their number,
    so that all have about as many rows left at any time."""

    def __init__(self, settings: Settings, seeds: dict[int, int], processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a GPU's driver
        self._members: list[tuple[Connection, Any]] = []
        for place in range(processes):
            ours, theirs = context.Pipe()
            own = dict(list(seeds.items())[place::processes])
            process = context.Process(target=_serve, args=(theirs, settings, own), daemon=True)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def ask(self, rows: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        for place, (pipe, _) in enumerate(self._members):
            pipe.send(("ask", [row for row in rows if row % len(self._members) == place]))
        return {row: value for pipe, _ in self._members for row, value in pipe.recv().items()}

    def tell(self, losses: dict[int, float]) -> None:
        for place, (pipe, _) in enumerate(self._members):
            own = {row: losses[row] for row in losses if row % len(self._members) == place}
            pipe.send(("tell", own))

    def close(self) -> None:
        for pipe, process in self._members:
            pipe.close()  # which ends the process
            process.join()


def _serve(pipe: Connection, settings: Settings, seeds: dict[int, int]) -> None:
    own = _Optimizers(settings, seeds)
    with suppress(EOFError):
        while True:
            action, argument = pipe.recv()
            if action == "ask":
                pipe.send(own.ask(argument))
            else:
                own.tell(argument)


def _optimizer(settings: Settings, seed: int) -> Any:
    nevergrad = import_extra("nevergrad", EXTRA)
    dimension, budget, sigma = settings
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=sigma)
    space.random_state = np.random.RandomState(seed % 2**32)
    chosen = nevergrad.optimizers.NGOpt(space, budget=budget).optim
    if isinstance(chosen, nevergrad.optimization.optimizerlib._MetaModel):
        # An optimizer inside a quadratic model, which proposes a point now and then: it needs more
        # points than the budget, or in few dimensions fails with NumPy 2.4.
        chosen = chosen._optim
    chosen.pruning = nevergrad.optimization.utils.Pruning(1, HISTORY)
    return chosen
