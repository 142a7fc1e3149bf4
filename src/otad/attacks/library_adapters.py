"""What the attacks of other libraries need around them: a seed of ours, and inputs in [0, 1]."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.attacks.base import Attack
from otad.attacks.needs import Knowledge
from otad.errors import InputError, MissingExtraError
from otad.threat import LpBall

LIBRARY_NORMS = {"l2": "L2", "linf": "Linf"}


def require(module: str) -> Any:
    """A module of the extra `attacks`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], "attacks") from error


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[int]:
    """A seed drawn from `generator`, which also seeds the global generators inside the block.

    Those of torch, NumPy and Python are as they were before when the block ends.
    """
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


@dataclass(frozen=True)
class UnitBox:
    """The affine map between inputs in [low, high] and the [0, 1] that image libraries expect."""

    low: float
    high: float

    @staticmethod
    def of(ball: LpBall) -> UnitBox:
        if ball.bounds is None:
            raise InputError("bounds: expected the lowest and highest input value, got None")
        return UnitBox(*ball.bounds)

    @property
    def width(self) -> float:
        return self.high - self.low

    def to_unit(self, x: Tensor) -> Tensor:
        return ((x - self.low) / self.width).clamp(0.0, 1.0)

    def from_unit(self, units: Tensor) -> Tensor:
        return (self.low + units * self.width).clamp(self.low, self.high)


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
