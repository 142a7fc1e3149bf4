"""A model without attack: its score beside those of its relatives, and how it found its answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.base import Target
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import Status
from otad.evaluate.identity import MAJORITY, MEAN_FEATURE, NET, kind_of
from otad.evaluate.records import SolverRecord
from otad.evaluate.suite import backbone_of
from otad.model.diagnostics import (
    Distribution,
    changed_by_potential,
    chooses_potential,
    residual_of,
)
from otad.model.otad import OTAD, Trace
from otad.scores import Score, score_of


@dataclass(frozen=True, eq=False)
class Clean:
    """`right` (n,): answered right (regression: all); `errors` |f - y| (n,), regression only;
    `abstained`: rows without an answer."""

    scores: dict[str, Score]
    right: Tensor
    errors: Tensor
    abstained: int
    solver: SolverRecord | None


def look_at_clean(model: nn.Module, x: Tensor, y: Tensor, ball: LpBall, batch_size: int) -> Clean:
    """Ask the model, and for OTAD its network and its k-NN twins, for the same answers."""
    others = _relatives(model)
    outputs: dict[str, list[Tensor]] = {name: [] for name in (kind_of(model), *others)}
    solver = _SolverAccount(model) if isinstance(model, OTAD) else None
    broken, abstained, gains = [], [], []
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        unattacked = Unattacked()(model, inputs, targets, ball, generator=torch.Generator())
        broken.append(unattacked.broken.cpu())
        abstained.append(unattacked.abstained.cpu())
        gains.append(unattacked.gain.double().cpu())
        with torch.no_grad():
            if solver is None:
                outputs[kind_of(model)].append(model(inputs).cpu())
            else:
                outputs[kind_of(model)].append(solver.add(inputs).outputs.cpu())
            for name, other in others.items():
                outputs[name].append(other(inputs).cpu())
    is_value = y.is_floating_point()
    right = torch.cat(broken).logical_not()
    return Clean(
        scores={name: score_of(torch.cat(parts), y.cpu()) for name, parts in outputs.items()},
        right=torch.ones_like(right) if is_value else right,
        errors=torch.cat(gains) if is_value else torch.zeros(0, dtype=torch.float64),
        abstained=int(torch.cat(abstained).sum()),
        solver=None if solver is None else solver.record(),
    )


class Unattacked(Attack):
    """Leaves every example as it is: the checks and the verdict of an attack, and nothing else."""

    name = "unattacked"
    family = "random"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return x


def _relatives(model: nn.Module) -> dict[str, nn.Module]:
    """What a model is compared with."""
    backbone = backbone_of(model)
    if backbone is None or backbone is model:
        return {}
    relatives: dict[str, nn.Module] = {NET: backbone}
    if isinstance(model, OTAD):
        relatives |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
    return relatives


class _SolverAccount:
    """Gathers, batch by batch, what a `SolverRecord` says."""

    def __init__(self, model: OTAD) -> None:
        self.model = model
        self.status: list[Tensor] = []
        self.smoothness: list[Tensor] = []
        self.residual: list[Tensor] = []
        self.changed: list[Tensor] = []

    def add(self, x: Tensor) -> Trace:
        model = self.model
        trace = model.trace(x)
        embedded, solution = model.backbone.embed(x), trace.solution
        exact = solution.status < int(Status.ESTIMATED)
        self.status.append(solution.status.cpu())
        self.smoothness.append(solution.smoothness.cpu())
        self.residual.append(residual_of(model, embedded, trace)[exact].cpu())
        if chooses_potential(model):
            self.changed.append(changed_by_potential(model, embedded, trace.neighbors).cpu())
        return trace

    def record(self) -> SolverRecord:
        status, residual = torch.cat(self.status), torch.cat(self.residual)
        used = Distribution.of(torch.cat(self.smoothness))
        shares = {one.name.lower(): float((status == one).double().mean()) for one in Status}
        marks = ("least", "median", "quantile_90", "quantile_99", "most")
        return SolverRecord(
            statuses=shares,
            smoothness=() if used is None else tuple(getattr(used, mark) for mark in marks),
            residual=float(residual.max()) if len(residual) else None,
            changed_by_potential=(
                float(torch.cat(self.changed).double().mean()) if self.changed else None
            ),
        )
