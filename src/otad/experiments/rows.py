"""What is measured of a row's model: scores, certificates, Lipschitz constants, attacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.certify import certify, certify_values
from otad.data import Dataset
from otad.errors import InputError
from otad.evaluate.protocol import run_attacks
from otad.evaluate.records import AttackRecord
from otad.evaluate.suite import defended_of, make_attack
from otad.experiments.cache import Report
from otad.experiments.records import AttackedScore, PotentialRecord, Regularity, RowRecord
from otad.experiments.spec import RANDOM_STEP, AttackSpec, CertifySpec, RowSpec, name_of
from otad.model.account import AccountBuilder
from otad.model.diagnostics import (
    Distribution,
    defended_map,
    local_lipschitz,
    monotonicity_violations,
    neighborhood_smoothness,
    transport_energy,
)
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.scores import Score, is_right, regression_metrics, score_of, share_score
from otad.threat import NORMS

VERSION = 1  # raise it when the same model on the same data would be measured differently
BATCH = 1000
VIOLATION_ROWS = 10_000


def points_of(size: int, points: int, seed: int) -> Tensor:
    """`points` random rows of a test part of `size`: fewer are the first of more."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:points]


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, report: Report = lambda done, total: None) -> Tensor:
    """Outputs for all of x, on the CPU."""
    device = next(model.parameters()).device
    return torch.cat([model(batch).cpu() for batch in _batches(x, device, report)])


def _batches(x: Tensor, device: torch.device, report: Report) -> Iterator[Tensor]:
    done = 0
    for batch in x.split(BATCH):
        yield batch.to(device)
        done += len(batch)
        report(done, len(x))


def measure_row(
    row: RowSpec,
    model: nn.Module,
    backbone: Backbone,
    data: Dataset,
    potential: PotentialRecord | None,
    *,
    seed: int,
    report: Report,
) -> RowRecord:
    """The score of a row's model on the test part, without attacks."""
    started = time.perf_counter()
    account, certified, lipschitz = None, {}, None
    if isinstance(model, OTAD):
        builder = AccountBuilder(model, potentials=True, relative_error=True)
        batches = _batches(data.test_x, backbone.mean.device, report)
        outputs = torch.cat([builder.add(batch).outputs.cpu() for batch in batches])
        account = builder.account()
        if row.certify is not None:
            certified = certified_scores(model, data.test_x, data.test_y, row.certify, report)
    else:
        outputs = predict(model, data.test_x, report)
    if row.lipschitz is not None:
        spec, generator = row.lipschitz, torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(data.test_x), generator=generator)[: spec.points]
        with torch.no_grad():
            points = backbone.embed(data.test_x[chosen].to(backbone.mean.device))
        function = (
            defended_map(model)
            if isinstance(model, OTAD)
            else (lambda embedded: backbone.transport(embedded)[0])
        )
        options: dict[str, Any] = {"radius": spec.radius, "steps": spec.steps}
        found = local_lipschitz(function, points, generator=generator, **options)
        lipschitz = Distribution.of(found)
    return RowRecord(
        score=score_of(outputs, data.test_y),
        account=account,
        lipschitz=lipschitz,
        seconds=time.perf_counter() - started,
        certified=certified,
        potential=potential,
    )


def certified_scores(
    model: OTAD, x: Tensor, y: Tensor, spec: CertifySpec, report: Report
) -> dict[str, Score]:
    """Certified accuracy by radius; in regression, the largest mean squared error in the ball."""
    backbone, device = model.backbone, model.backbone.mean.device
    unit = backbone.std.expand(backbone.input_shape) if spec.unit == "std" else None
    if y.is_floating_point():
        found, x, y = {}, x.to(device), y.to(device)
        for done, radius in enumerate(spec.eps, start=1):
            bound = certify_values(model, x, radius, unit=unit)
            is_low = (bound.low - y).abs() > (bound.high - y).abs()
            found[name_of(radius)] = score_of(torch.where(is_low, bound.low, bound.high), y)
            report(done, len(spec.eps))
        return found
    counts = dict.fromkeys(spec.eps, 0)
    batches = zip(_batches(x, device, report), y.split(BATCH), strict=True)
    for inputs, targets in batches:
        certificate = certify(model, inputs, unit=unit)
        for radius in spec.eps:
            counts[radius] += int(certificate.holds(targets.to(device), radius).sum())
    return {name_of(radius): share_score(count, len(x)) for radius, count in counts.items()}


def measure_regularity(model: OTAD, data: Dataset, *, seed: int, report: Report) -> Regularity:
    """See `Regularity`, with the neighborhoods of the model."""
    started, device = time.perf_counter(), model.backbone.mean.device
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(model.bank_inputs), generator=generator)[:VIOLATION_ROWS]
    train, test = (_batches(part, device, report) for part in (data.train_x, data.test_x))
    energy = torch.cat([transport_energy(model.backbone, batch).cpu() for batch in train])
    least = torch.cat([neighborhood_smoothness(model, batch).cpu() for batch in test])
    return Regularity(
        energy=Distribution.of(energy),
        least_smoothness=Distribution.of(least),
        violations=monotonicity_violations(model, rows),
        violation_rows=len(rows),
        seconds=time.perf_counter() - started,
    )


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


def make_attacks(
    runs: Mapping[str, Mapping[str, Any]], model: nn.Module, train_x: Tensor | None = None
) -> list[Attack]:
    """Attacks with options as a TOML file has them; `train_x`: see `make_attack`."""
    if defended_of(model) is None:
        train_x = None
    attacks = []
    for name, options in runs.items():
        settled: dict[str, Any] = {
            key: tuple(one) if isinstance(one, list) else one for key, one in options.items()
        }
        attacks.append(make_attack(name, model, train_x=train_x, **settled))
    return attacks


def attack_row(
    spec: AttackSpec,
    model: nn.Module,
    backbone: Backbone,
    data: Dataset,
    train_x: Tensor | None,
    *,
    seed: int,
    report: Report,
) -> AttackedScore:
    """The worst case over the attacks of `spec` on a row's model, whose net is `backbone`."""
    started = time.perf_counter()
    chosen = points_of(len(data.test_x), spec.points, seed)
    x, y = data.test_x[chosen], data.test_y[chosen]
    ball, victim = ball_of(spec, backbone), backbone if spec.on == "net" else model
    # On the net itself there is nothing to approximate.
    replaced = {"bpda": "pgd"} if victim is backbone and "bpda" in spec.runs else {}
    runs = {replaced.get(name, name): options for name, options in spec.runs.items()}
    broken, records = torch.zeros(len(x), dtype=torch.bool), list[AttackRecord]()
    if RANDOM_STEP in runs:
        inputs = ball.surface(x, torch.Generator().manual_seed(seed))
    else:
        found = run_attacks(
            victim,
            x.to(backbone.mean.device),
            y.to(backbone.mean.device),
            ball,
            make_attacks(runs, victim, train_x),
            strongest=True,
            seed=seed,
            batch_size=BATCH,
            progress=lambda attack, done, total, worst: report(done, total),
        )
        inputs, broken, records = (
            found.inputs,
            found.right & found.distances.isfinite(),
            found.records,
        )
    clean, outputs = predict(model, x), predict(model, inputs)
    is_value = y.is_floating_point()
    if is_value:
        wrong, score = torch.ones(len(x), dtype=torch.bool), score_of(outputs, y)
    else:
        wrong = ~is_right(outputs, y)
        if victim is model:
            wrong |= broken  # close to a boundary, rounding may differ between batches
        score = share_score(int((~wrong).sum()), len(x))
        wrong &= is_right(clean, y)
    return AttackedScore(
        score=score,
        clean=score_of(clean, y),
        metrics=regression_metrics(outputs, clean, y) if is_value else {},
        distance=Distribution.of(ball.distance(inputs, x)[wrong]),
        threat=ball.describe(),
        forwards=sum(record.forwards for record in records),
        backwards=sum(record.backwards for record in records),
        seconds=time.perf_counter() - started,
        replaced=replaced,
    )
