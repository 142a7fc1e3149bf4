"""What the attacks of other libraries need around them: a seed of ours, and inputs in [0, 1]."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.errors import InputError, MissingExtraError
from otad.threat import LpBall


def import_extra(module: str) -> Any:
    """A module of the extra `attacks`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], "attacks") from error


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[int]:
    """A seed drawn from `generator`, which also seeds the global generators of torch, NumPy and
    Python inside the block; after it they are as they were before."""
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
