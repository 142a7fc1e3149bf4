"""Who still stands during an attack: work is spent on nobody else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.attacks.base import Best, Target, gain_of


class Survivors:
    """The examples x (B,*) a model still answers right, and the best input found for each one."""

    def __init__(self, target: Target, x: Tensor) -> None:
        self._target = target
        self._best = Best(x)
        self._standing = torch.ones(len(x), dtype=torch.bool, device=x.device)

    @property
    def rows(self) -> Tensor:
        """Which of the B examples are not broken (int64)."""
        return self._standing.nonzero()[:, 0]

    def among(self, rows: Tensor) -> Tensor:
        """Those of `rows` (int64) that are not broken."""
        return rows[self._standing[rows]]

    @property
    def inputs(self) -> Tensor:
        """The best input (B,*) so far."""
        return self._best.inputs

    def judge(self, moved: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
        """Take note of the model's answers at inputs, one for each of `rows`; who still stands."""
        broken = self._target.is_broken(outputs, rows)
        gain = gain_of(outputs, self._target.targets(rows))
        # A tie of logits breaks a row at gain 0, and nothing may then be thought better.
        self._best.offer(moved, gain.masked_fill(broken, math.inf), rows)
        self._standing[rows[broken]] = False
        return ~broken
