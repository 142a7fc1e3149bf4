"""A row under attack: what is left of its score on some of the test points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.base import Best
from otad.checks import check_count
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.potential import BankPotential
from otad.data import Dataset
from otad.errors import InputError
from otad.evaluate.suite import defended_of, make_attack
from otad.experiments.attack_records import AttackedScore
from otad.experiments.config import RowSpec
from otad.experiments.rows import predict, predictor
from otad.experiments.shifts import shifts
from otad.experiments.specs import RANDOM_STEP, AttackSpec
from otad.model.diagnostics import Distribution
from otad.model.otad import OTAD
from otad.nets import Backbone, only_normalizes
from otad.scores import is_right, score_of, share_score
from otad.threat import NORMS

Report = Callable[[int, int], None]
BATCH = 1000


def points_of(size: int, points: int, seed: int) -> Tensor:
    """`points` rows of a test part of `size`: fewer are the first of more."""
    if check_count(points, "points") > size:
        raise InputError(f"points: expected at most the {size} test points, got {points}")
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:points]


def ball_of(spec: AttackSpec, backbone: Backbone) -> LpBall:
    """The threat model of a spec for the inputs of a net."""
    bounds, eps = backbone.bounds, spec.eps
    if eps is None:
        if bounds is None:
            raise InputError("eps: expected a radius where inputs are unbounded, got none")
        eps = bounds[1] - bounds[0]
        if spec.norm == "l2":
            eps *= math.sqrt(math.prod(backbone.input_shape))
    scale = backbone.std.expand(backbone.input_shape) if spec.unit == "std" else None
    return NORMS[spec.norm](eps, bounds=bounds, scale=scale)


def made_attack(
    name: str, model: nn.Module, options: Mapping[str, Any], train_x: Tensor | None = None
) -> Attack:
    """An attack with options as a TOML file has them; `train_x` for those that walk to them."""
    settled: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in options.items()
    }
    if name == "straight" and defended_of(model) is not None:
        return make_attack(name, model, train_x=train_x, **settled)
    return make_attack(name, model, **settled)


def inputs_of_bank(base: OTAD, rows: Tensor | None, data: Dataset) -> Tensor | None:
    """The training inputs of a bank of these rows, where they cannot be told from it."""
    if only_normalizes(base.backbone):
        return None
    return data.train_x if rows is None else data.train_x[rows]


def attack_row(
    spec: AttackSpec,
    row: RowSpec,
    base: OTAD,
    data: Dataset,
    *,
    bank_rows: Tensor | None,
    seed: int,
    report: Report,
    potential: BankPotential | None = None,
    surrogate: CipNet | None = None,
) -> AttackedScore:
    """The attacks of `spec` one after the other; a classifier's on the points still standing.

    Every attack draws from a generator of its own with the same seed.
    """
    started = time.perf_counter()
    model, backbone = predictor(base, row, potential, surrogate), base.backbone
    chosen = points_of(len(data.test_x), spec.points, seed)
    x, y = data.test_x[chosen], data.test_y[chosen]
    ball = ball_of(spec, backbone)
    train_x = inputs_of_bank(base, bank_rows, data)
    search = _Search(backbone if spec.on == "net" else model, x, y, ball, train_x)
    total = len(spec.runs) * len(x)
    replaced = {"bpda": "pgd"} if search.victim is backbone else {}  # nothing to approximate there
    for place, (name, options) in enumerate(spec.runs.items()):
        progress = partial(_report_from, report, place * len(x), total)
        search.run(replaced.get(name, name), options, seed, progress)
    clean, moved = (predict(model, inputs) for inputs in (x, search.best.inputs))
    if y.is_floating_point():
        wrong = torch.ones(len(x), dtype=torch.bool)
        score, metrics = score_of(moved, y), shifts(moved, clean, y)
    else:
        wrong = ~is_right(moved, y)
        if search.victim is model:
            wrong |= search.broken  # on the verge, another batch may round to another answer
        score, metrics = share_score(int((~wrong).sum()), len(x)), {}
        wrong &= is_right(clean, y)
    return AttackedScore(
        label=spec.label,
        score=score,
        clean=score_of(clean, y),
        metrics=metrics,
        distance=Distribution.of(ball.distance(search.best.inputs, x)[wrong]),
        eps=spec.eps,
        threat=ball.describe(),
        settings={
            "attacks": spec.runs,
            "replaced": {name: other for name, other in replaced.items() if name in spec.runs},
            "on": spec.on,
            "unit": spec.unit,
        },
        forwards=search.forwards,
        backwards=search.backwards,
        seconds=time.perf_counter() - started,
    )


def _report_from(report: Report, start: int, total: int, done: int) -> None:
    report(start + done, total)


class _Search:
    """The worst found so far for each point, and what it has cost."""

    def __init__(
        self, victim: nn.Module, x: Tensor, y: Tensor, ball: LpBall, train_x: Tensor | None
    ) -> None:
        self.victim, self.x, self.y, self.ball, self.train_x = victim, x, y, ball, train_x
        self.device = next(victim.parameters()).device
        self.best = Best(x)
        self.broken = torch.zeros(len(x), dtype=torch.bool)
        self.forwards = self.backwards = 0

    def run(
        self, name: str, options: Mapping[str, Any], seed: int, report: Callable[[int], None]
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        if name == RANDOM_STEP:
            self.best.offer(self.ball.surface(self.x, generator), torch.zeros(len(self.x)))
            report(len(self.x))
            return
        attack = made_attack(name, self.victim, options, self.train_x)
        done = 0
        for batch in torch.arange(len(self.x)).split(BATCH):
            rows = batch[~self.broken[batch]]
            if len(rows):
                x, y = (part[rows].to(self.device) for part in (self.x, self.y))
                found = attack(self.victim, x, y, self.ball, generator=generator)
                self.best.offer(found.inputs.cpu(), found.gain.cpu(), rows)
                self.broken[rows] = found.broken.cpu()
                self.forwards += int(found.forwards.sum())
                self.backwards += int(found.backwards.sum())
            done += len(batch)
            report(done)
