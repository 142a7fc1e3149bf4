"""Certificate rules, and the batches they work on.

A rule is a subclass of `Rule` in a file of its own in this folder. The model's answerer names the
rules that can apply to it; the best of them counts, row by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from otad.certify.bisectors import BankBisectors
from otad.certify.half_spaces import ROUNDING, Box
from otad.certify.input_reach import InputReach
from otad.checks import require
from otad.cip import Status
from otad.model.otad import OTAD
from otad.nets import LipschitzMetric

RULES: dict[str, type[Rule]] = {}
SLACK = 1e-12  # relative, for distances computed in float64
TINY = torch.finfo(torch.float64).tiny
PRECISION = "matrix products of the head keep full float32 precision (no TF32, no autocast)"


class Batch:
    """Inputs x (B,*), `embedded` (B,d), with `keys` (B,m), and whether they were `solved` (B,)."""

    @torch.no_grad()
    def __init__(self, reach: InputReach, x: Tensor) -> None:
        model = reach.model
        self.stretch, self.points = reach.keys.stretch, model.bank_points
        self.embedded = model.backbone.embed(x)
        self.keys = self.embedded if model.metric is None else model.query_keys(x)
        self.box = None if reach.corners is None else self._box(*reach.corners)
        self.sides = []  # the slip in both spaces, and the sizes (B,) of the inputs in them
        # Inputs may have been rounded, by half an eps of the dtype, of which the slip has two.
        given = (x.double() / reach.unit).flatten(1).norm(dim=1) / 4
        if reach.embedded is not None:
            size = given + reach.embedded.size_of(self.embedded, x)
            self.sides.append((reach.embedded.slip, size))
        if model.metric is not None:
            # Keys may be short while the terms they are made of are not, so |x - mean| is added.
            # Where x moves by r, each of the three grows by no more.
            center = getattr(model.metric, "mean", model.backbone.mean)
            own = (x.double() - center.double()).flatten(1) / reach.unit.max()
            size = given + reach.keys.size_of(self.keys, x) + own.norm(dim=1)
            if isinstance(model.metric, LipschitzMetric):
                size += model.metric.offset / float(self.stretch.max())
            self.sides.append((reach.keys.slip, size))
        trace = model.trace(x)
        self.answered = torch.full_like(trace.distance, torch.inf)  # |u| (B,) without abstentions
        self.silent = torch.zeros_like(trace.distance, dtype=torch.bool)  # x itself gets no answer
        if (limit := model.abstain_beyond) is not None:
            self.silent = trace.distance > limit
            # The distance from the bank grows by no more than the keys move.
            room = (limit - trace.distance) * (1 - SLACK) - SLACK * limit
            self.answered = room / self.stretch.max().to(room.device).clamp_min(TINY)
            trace = replace(trace, outputs=model.backbone.head(trace.solution.image))
        self.trace, outputs = trace, trace.outputs
        bad = ~outputs.isfinite().reshape(len(outputs), -1).all(1)
        require(not bool(bad.any()), "model", "finite outputs", outputs[bad][:1].tolist())
        self.solved = self.trace.solution.status == int(Status.SOLVED)
        self.proved = trace.neighbors.proved  # (B,): else other points may be the neighbors
        if limit is not None and not (model.answerer.rests_on_neighbors or model.searches_exactly):
            # A changed input may be near the bank, and yet get no answer, as no point is found.
            self.proved = torch.zeros_like(self.proved)

    def _box(self, low: Tensor, high: Tensor) -> Box:
        """Return the bounds of u, for the embedded inputs `low` and `high` (d,) of both bounds."""
        reached = torch.where(self.stretch > 0, self.stretch, torch.inf)  # others do not move
        here = self.embedded.double()
        least, most = ((bound.double() - here) / reached for bound in (low, high))
        return Box((1 + ROUNDING) * least.clamp_max_(0.0), (1 + ROUNDING) * most.clamp_min_(0.0))

    @property
    def prediction(self) -> Tensor:
        return self.trace.outputs.argmax(1)

    @cached_property
    def bisectors(self) -> BankBisectors:
        return BankBisectors(self.keys.double(), self.points, self.stretch)

    def to_input(self, radius: Tensor) -> Tensor:
        """The largest r (B,) for which |u| stays within `radius` (B,) in both spaces."""
        each = [(radius - 2 * slip * size) / (1 + 3 * slip) for slip, size in self.sides]
        return torch.stack(each).amin(0).clamp_min(0.0)

    def from_input(self, eps: float) -> Tensor:
        """The largest |u| (B,) of both spaces for inputs within eps."""
        each = [eps * (1 + 3 * slip) + 2 * slip * size for slip, size in self.sides]
        return torch.stack(each).amax(0)


class Rule(ABC):
    """Proves what cannot change while the query moves by u, |u| bounded (see `Reach`). `if_used`:
    assumptions that are stated where the rule gave a bound."""

    name: ClassVar[str]
    if_used: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        RULES[cls.name] = cls

    def __init__(self, reach: InputReach) -> None:
        self.reach, self.model = reach, reach.model

    @classmethod
    def applies(cls, reach: InputReach) -> bool:
        """Whether all that the rule needs is known."""
        return True

    @staticmethod
    @abstractmethod
    def rows_at_once(model: OTAD) -> int:
        """How many queries fit into the working memory."""

    def assumptions(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        """|u| (B,) within which predictions cannot change. Need not be found where it is no larger
        than `known` (B,)."""

    @abstractmethod
    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        """Regression: the least and the largest answer (B,) while |u| <= `reached` (B,)."""
