"""What is measured of a row's model: scores, certificates, Lipschitz constants, attacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.attacks import Attack, LpBall
from otad.attacks.target import answers, is_randomized, seeded
from otad.certify import certify, certify_values
from otad.checks import require
from otad.data import Dataset
from otad.errors import InputError
from otad.evaluate.protocol import run_attacks
from otad.evaluate.suite import defended_of, make_attack
from otad.experiments.records import AttackedScore, PotentialRecord, Regularity, RowRecord
from otad.experiments.spec import RANDOM_STEP, AttackSpec, CertifySpec, RowSpec, name_of
from otad.model import diagnostics
from otad.model.account import AccountBuilder
from otad.model.diagnostics import Distribution
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.progress import Counter
from otad.scores import Score, is_right, regression_metrics, score_of, share_score
from otad.threat import NORMS
from otad.training import Adversary

VERSION = 1  # raise it when the same model on the same data would be measured differently
BATCH = 1000
VIOLATION_ROWS = 10_000


class RowContext(NamedTuple):
    """What is measured: a row's model over the net `backbone`, on a data set."""

    model: nn.Module
    backbone: Backbone
    data: Dataset
    seed: int
    report: Counter

    def batches(self, x: Tensor) -> Iterator[Tensor]:
        return batches_of(x, self.backbone.mean.device, self.report)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """The model's outputs for all of x, on the CPU; the mean over draws of a random one."""
        with seeded(self.model, torch.Generator().manual_seed(self.seed)):
            return torch.cat([answers(self.model, batch).cpu() for batch in self.batches(x)])


def points_of(size: int, points: int, seed: int) -> Tensor:
    """`points` random rows of a test part of `size`: fewer are the first of more."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:points]


def batches_of(x: Tensor, device: torch.device, report: Counter) -> Iterator[Tensor]:
    """The rows of x in batches on a device, reporting those that are done."""
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH].to(device)
        report(min(start + BATCH, len(x)), len(x))


def right_under_attack(of: RowContext, adversary: Adversary) -> Tensor:
    """Which train points (N,) a net gets right before and after an adversary perturbs them."""
    net, ball, right = of.backbone, adversary.ball(of.backbone), []
    generator = torch.Generator().manual_seed(of.seed)
    for x, y in zip(of.batches(of.data.train_x), of.data.train_y.split(BATCH), strict=True):
        labels = y.to(x.device)
        loss = partial(functional.cross_entropy, target=labels, reduction="none")
        perturbed = adversary.attack(ball, net, x, loss, adversary.start(ball, x, generator))
        with torch.no_grad():
            right.append(is_right(net(perturbed), labels) & is_right(net(x), labels))
    return torch.cat(right)


def measure_row(row: RowSpec, of: RowContext, potential: PotentialRecord | None) -> RowRecord:
    """The score of a row's model on the test part, without attacks."""
    started = time.perf_counter()
    model, backbone, data = of.model, of.backbone, of.data
    account, certified, inside, lipschitz = None, {}, {}, None
    if isinstance(model, OTAD):
        builder = AccountBuilder(model, potentials=True, relative_error=True)
        batches = of.batches(data.test_x)
        outputs = torch.cat([builder.add(batch).outputs.cpu() for batch in batches])
        account = builder.account()
    else:
        outputs = of.predict(data.test_x)
    if row.certify is not None:
        assert isinstance(model, OTAD | Backbone)
        given = data.test_x, data.test_y, row.certify, of.report
        certified = certified_scores(model, *given)
        if row.certify.within_bounds:
            inside = certified_scores(model, *given, within_bounds=True)
    if row.lipschitz is not None:
        spec, generator = row.lipschitz, torch.Generator().manual_seed(of.seed)
        chosen = torch.randperm(len(data.test_x), generator=generator)[: spec.points]
        with torch.no_grad():
            points = backbone.embed(data.test_x[chosen].to(backbone.mean.device))
        function = (
            diagnostics.defended_map(model)
            if isinstance(model, OTAD)
            else (lambda embedded: backbone.transport(embedded)[0])
        )
        settings: dict[str, Any] = {"radius": spec.radius, "steps": spec.steps}
        found = diagnostics.local_lipschitz(function, points, generator=generator, **settings)
        lipschitz = Distribution.of(found)
    score, seconds = score_of(outputs, data.test_y), time.perf_counter() - started
    return RowRecord(score, account, lipschitz, seconds, {}, certified, potential, inside)


def certified_scores(
    model: OTAD | Backbone,
    x: Tensor,
    y: Tensor,
    spec: CertifySpec,
    report: Counter,
    *,
    within_bounds: bool = False,
) -> dict[str, Score]:
    """Certified accuracy by radius; in regression, the largest mean squared error in the ball."""
    backbone = model.backbone if isinstance(model, OTAD) else model
    device = backbone.mean.device
    unit = backbone.std.expand(backbone.input_shape) if spec.unit == "std" else None
    if y.is_floating_point() and isinstance(model, OTAD):
        require(not within_bounds, "certify.within_bounds", "False in regression", within_bounds)
        found, x, y = {}, x.to(device), y.to(device)
        for done, radius in enumerate(spec.eps, start=1):
            bound = certify_values(model, x, radius, unit=unit)
            is_low = (bound.low - y).abs() > (bound.high - y).abs()
            found[name_of(radius)] = score_of(torch.where(is_low, bound.low, bound.high), y)
            report(done, len(spec.eps))
        return found
    counts = dict.fromkeys(spec.eps, 0)
    for inputs, targets in zip(batches_of(x, device, report), y.split(BATCH), strict=True):
        certificate = certify(model, inputs, unit=unit, within_bounds=within_bounds)
        for radius in spec.eps:
            counts[radius] += int(certificate.holds(targets.to(device), radius).sum())
    return {name_of(radius): share_score(count, len(x)) for radius, count in counts.items()}


def measure_regularity(of: RowContext) -> Regularity:
    started, model = time.perf_counter(), of.model
    assert isinstance(model, OTAD)
    rows = points_of(len(model.bank_inputs), VIOLATION_ROWS, of.seed)
    train, test = of.batches(of.data.train_x), of.batches(of.data.test_x)
    energy = [diagnostics.transport_energy(of.backbone, batch).cpu() for batch in train]
    least = [diagnostics.neighborhood_smoothness(model, batch).cpu() for batch in test]
    spreads = Distribution.of(torch.cat(energy)), Distribution.of(torch.cat(least))
    violations = diagnostics.monotonicity_violations(model, rows)
    return Regularity(*spreads, violations, len(rows), time.perf_counter() - started)


def ball_of(spec: AttackSpec, backbone: Backbone) -> LpBall:
    bounds, eps = backbone.bounds, spec.eps
    if eps is None:
        if bounds is None:
            raise InputError("eps: expected a radius where inputs are unbounded, got none")
        side = math.prod(backbone.input_shape) if spec.norm == "l2" else 1
        eps = (bounds[1] - bounds[0]) * math.sqrt(side)
    scale = backbone.std.expand(backbone.input_shape) if spec.unit == "std" else None
    return NORMS[spec.norm](eps, bounds=bounds, scale=scale)


def make_attacks(
    runs: Mapping[str, Mapping[str, Any]], model: nn.Module, train_x: Tensor | None = None
) -> list[Attack]:
    """Attacks with options as a TOML file has them; `train_x`: see `make_attack`."""
    attacks = []
    for name, options in runs.items():
        settled: dict[str, Any] = {"train_x": None if defended_of(model) is None else train_x}
        settled |= {key: tuple(one) if type(one) is list else one for key, one in options.items()}
        attacks.append(make_attack(name, model, **settled))
    return attacks


def attack_row(spec: AttackSpec, of: RowContext, train_x: Tensor | None) -> AttackedScore:
    """The worst case over the attacks of `spec` on a row's model."""
    started, device = time.perf_counter(), of.backbone.mean.device
    chosen = points_of(len(of.data.test_x), spec.points, of.seed)
    x, y = of.data.test_x[chosen], of.data.test_y[chosen]
    ball, victim = ball_of(spec, of.backbone), of.backbone if spec.on == "net" else of.model
    # On the net itself there is nothing to approximate.
    replaced = {"bpda": "pgd"} if victim is of.backbone and "bpda" in spec.runs else {}
    runs = {replaced.get(name, name): options for name, options in spec.runs.items()}
    broken, forwards, backwards = torch.zeros(len(x), dtype=torch.bool), 0, 0
    if RANDOM_STEP in runs:
        inputs = ball.surface(x, torch.Generator().manual_seed(of.seed))
    else:
        how: dict[str, Any] = {"strongest": True, "seed": of.seed, "batch_size": BATCH}
        how["progress"] = lambda attack, done, total, worst: of.report(done, total)
        attacks = make_attacks(runs, victim, train_x)
        found = run_attacks(victim, x.to(device), y.to(device), ball, attacks, **how)
        inputs, broken = found.inputs, found.right & found.distances.isfinite()
        forwards = sum(record.forwards for record in found.records)
        backwards = sum(record.backwards for record in found.records)
    clean, outputs = of.predict(x), of.predict(inputs)
    is_value = y.is_floating_point()
    if is_value:
        wrong, score = torch.ones(len(x), dtype=torch.bool), score_of(outputs, y)
    else:
        wrong = ~is_right(outputs, y)
        if victim is of.model:
            wrong |= broken  # close to a boundary, rounding may differ between batches
        if is_randomized(of.model):
            wrong |= ~is_right(clean, y)  # luck in new draws is no robustness
        score = share_score(int((~wrong).sum()), len(x))
        wrong &= is_right(clean, y)
    return AttackedScore(
        score=score,
        clean=score_of(clean, y),
        metrics=regression_metrics(outputs, clean, y) if is_value else {},
        distance=Distribution.of(ball.distance(inputs, x)[wrong]),
        threat=ball.describe(),
        forwards=forwards,
        backwards=backwards,
        seconds=time.perf_counter() - started,
        replaced=replaced,
    )
