"""Square Attack (Andriushchenko et al. 2020), by the library of AutoAttack."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from otad.attacks.base import Attack, Target, gain_of, register_attack
from otad.attacks.library_adapters import LIBRARY_NORMS, UnitBox, own_randomness
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.survivors import Survivors
from otad.checks import check_choice, check_count
from otad.errors import InputError, MissingExtraError
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class Square(Attack):
    """Random search over square windows of images (B,C,H,W): no gradient is asked for.

    - `queries`: the most answers asked for each example, in each restart.
    - `restarts`: how often those that still stand are attacked.
    - `loss`: what a change must improve, "margin" or "ce" (cross-entropy). In regression, always
      the error.
    """

    queries: int = 2000
    restarts: int = 1
    loss: str = "margin"
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True, package="pyautoattack")

    @classmethod
    def misfit(
        cls,
        known: Knowledge,
        input_shape: Sequence[int] | None = None,
        task: str = "classification",
        threat: LpBall | None = None,
    ) -> str | None:
        reason = super().misfit(known, input_shape, task, threat)
        if reason is None and input_shape is not None:
            reason = windows_misfit(input_shape, threat)
        return reason

    def __post_init__(self) -> None:
        check_count(self.queries, "queries", least=2)
        check_count(self.restarts, "restarts")
        check_choice(self.loss, "loss", ("margin", "ce"))

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        if reason := windows_misfit(x.shape[1:], ball):
            raise InputError(f"{self.name}: {reason}")
        box = UnitBox.of(ball)
        survivors = Survivors(target, x)

        def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            moved = ball.project(box.from_unit(units), x[rows])
            outputs = target(moved, rows)
            standing = survivors.judge(moved, outputs, rows)
            return standing.to(x) * 2 - 1, self._losses(outputs, target.targets(rows))

        engine = _engine()(
            None,
            norm=LIBRARY_NORMS[ball.norm],
            n_queries=self.queries - 1,  # it asks once before it counts
            eps=ball.eps / box.width,
            device=x.device,
        )
        # The library only ever hands its labels on to this function, in step with the inputs it
        # still works on. With row numbers in their place every query is known by its example.
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
            losses = -F.cross_entropy(outputs, y, reduction="none")
            return losses.masked_fill(losses.isnan(), -math.inf)
        return -gain_of(outputs, y)


def windows_misfit(input_shape: Sequence[int], threat: LpBall | None) -> str | None:
    """Why the library's first l2 step, windows of a fifth of the height, fails on such images.

    From a margin of half of what five windows leave, it lays as many as the sides hold: the last
    one may stick out, which only windows of a single pixel survive.
    """
    if threat is None or threat.norm != "l2":
        return None
    height, width = input_shape[1:]
    side = height // 5
    margin = (height - 5 * side) // 2
    fits = side == 1 or (
        side > 1 and all(margin + length // side * side <= length for length in (height, width))
    )
    if fits:
        return None
    return (
        "expected images whose sides the l2 windows of Square can tile (28 x 28, 32 x 32, ...), "
        f"got {height} x {width}; random_search takes any shape"
    )


def _engine() -> Any:
    try:
        return importlib.import_module("pyautoattack.square").SquareAttack
    except ImportError as error:
        raise MissingExtraError("pyautoattack", "attacks") from error
