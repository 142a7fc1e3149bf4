"""One line of a table: a method's answers on the test part, their score and their account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import Status
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.potential import BankPotential
from otad.data import Dataset
from otad.experiments.certified import certified_scores
from otad.experiments.config import LipschitzSpec, RowSpec
from otad.experiments.potentials import PotentialFound
from otad.experiments.records import Account, Regularity, RowRecord
from otad.io.codec import to_plain
from otad.model.answerer_options import solver_for
from otad.model.diagnostics import (
    Distribution,
    changed_by_potential,
    chooses_potential,
    defended_map,
    local_lipschitz,
    monotonicity_violations,
    neighborhood_smoothness,
    transport_energy,
)
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.scores import score_of

Report = Callable[[int, int], None]
BATCH = 1000
OTAD_SETTINGS = ("n_neighbors", "scope", "smoothness", "strong_convexity", "mode", "climb")
SEARCH_SETTINGS = ("metric", "surrogate", "per_class", "central")
KNN = {"mean_feature_knn": MeanFeatureKnn, "majority_knn": MajorityKnn}


def defended(
    base: OTAD,
    row: RowSpec,
    potential: BankPotential | None = None,
    surrogate: CipNet | None = None,
) -> OTAD:
    """OTAD with the settings of a row, on the net, the bank and the metric of another.

    In global scope with the potential given, or one that is found here; in local scope by the
    exact solver, or a surrogate.
    """
    return base.replace(
        scope=row.scope,
        n_neighbors=row.n_neighbors,
        smoothness=row.smoothness,
        strong_convexity=row.strong_convexity,
        potential=potential,
        solver=surrogate or solver_for(row.scope, mode=row.mode, climb=row.climb),
    )


def predictor(
    base: OTAD,
    row: RowSpec,
    potential: BankPotential | None = None,
    surrogate: CipNet | None = None,
) -> nn.Module:
    """What answers in a row: the defense, the net alone or a k-NN over the same bank."""
    if row.method == "otad":
        return defended(base, row, potential, surrogate)
    if row.method == "net":
        return base.backbone.eval()
    return KNN[row.method](base, row.n_neighbors).eval()


def evaluate_row(
    row: RowSpec,
    base: OTAD,
    data: Dataset,
    data_key: str,
    *,
    seed: int,
    report: Report,
    potential: PotentialFound | None = None,
    surrogate: CipNet | None = None,
) -> RowRecord:
    started = time.perf_counter()
    model = predictor(base, row, None if potential is None else potential.potential, surrogate)
    backbone, x = base.backbone, data.test_x
    settings, account, lipschitz, certified = {}, None, None, {}
    if isinstance(model, OTAD):
        outputs, account = _account(model, x, report)
        settings = {name: to_plain(getattr(row, name)) for name in OTAD_SETTINGS}
        if row.certify is not None:
            certified = certified_scores(model, data, row.certify, report)
            settings |= {"certify": to_plain(row.certify)}
    else:
        outputs = predict(model, x, report)
        if row.method != "net":
            settings = {"n_neighbors": row.n_neighbors}
    named = {name: getattr(row, name) for name in SEARCH_SETTINGS}
    settings |= {name: value for name, value in named.items() if value not in (None, False)}
    if row.lipschitz is not None:
        function = (
            defended_map(model)
            if isinstance(model, OTAD)
            else (lambda embedded: backbone.transport(embedded)[0])
        )
        generator = torch.Generator().manual_seed(seed)
        lipschitz = _lipschitz(function, backbone, x, row.lipschitz, generator)
        settings = settings | {"lipschitz": to_plain(row.lipschitz)}
    return RowRecord(
        label=row.label,
        net=row.net,
        data=data_key,
        method=row.method,
        settings=settings,
        score=score_of(outputs, data.test_y),
        published=row.published,
        published_in=row.published_in,
        at_least=row.at_least,
        account=account,
        lipschitz=lipschitz,
        seconds=time.perf_counter() - started,
        certified=certified,
        potential=None if potential is None else potential.record,
    )


def measure_regularity(
    model: OTAD, data: Dataset, bank_rows: Tensor, *, report: Report
) -> Regularity:
    """See `Regularity`; `bank_rows` are those whose neighbor pairs are looked at."""
    started = time.perf_counter()
    device = model.backbone.mean.device
    energies, least = [], []
    parts = (data.train_x.split(BATCH), data.test_x.split(BATCH))
    total = sum(map(len, parts)) + 1
    for done, batch in enumerate(parts[0], start=1):
        energies.append(transport_energy(model.backbone, batch.to(device)).cpu())
        report(done, total)
    for done, batch in enumerate(parts[1], start=len(parts[0]) + 1):
        least.append(neighborhood_smoothness(model, batch.to(device)).cpu())
        report(done, total)
    violations = monotonicity_violations(model, bank_rows)
    report(total, total)
    return Regularity(
        energy=Distribution.of(torch.cat(energies)),
        least_smoothness=Distribution.of(torch.cat(least)),
        violations=violations,
        violation_rows=len(bank_rows),
        seconds=time.perf_counter() - started,
    )


def _batches(x: Tensor, device: torch.device, report: Report) -> Iterator[Tensor]:
    done = 0
    for batch in x.split(BATCH):
        yield batch.to(device)
        done += len(batch)
        report(done, len(x))


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, report: Report = lambda done, total: None) -> Tensor:
    """Outputs for all of x, on the CPU."""
    device = next(model.parameters()).device
    return torch.cat([model(batch).cpu() for batch in _batches(x, device, report)])


@torch.no_grad()
def _account(model: OTAD, x: Tensor, report: Report) -> tuple[Tensor, Account]:
    """Outputs of the model and how it came to them; neighbors are sought once for all potentials"""
    outputs, errors, statuses, smoothness, residuals = [], [], [], [], []
    changed = 0
    backbone = model.backbone
    is_choice = chooses_potential(model)
    for batch in _batches(x, backbone.mean.device, report):
        embedded = backbone.embed(backbone.check_inputs(batch))
        learned = backbone.transport(embedded)[0]
        keys = None if model.metric is None else model.query_keys(batch)
        answer = model.solve(embedded, keys)
        neighbors, solution = answer.neighbors, answer.solution
        outputs.append(backbone.head(solution.image).cpu())
        error = (learned - solution.image).square().sum(1) / learned.square().sum(1)
        errors.append(error.cpu())
        statuses.append(solution.status.cpu())
        smoothness.append(solution.smoothness.cpu())
        residuals.append(solution.residual[solution.status < int(Status.ESTIMATED)].cpu())
        if is_choice:
            changed += int(changed_by_potential(model, embedded, neighbors).sum())
    status, residual = torch.cat(statuses), torch.cat(residuals)
    account = Account(
        statuses={one.name.lower(): float((status == one).float().mean()) for one in Status},
        smoothness=Distribution.of(torch.cat(smoothness)),
        residual=float(residual.max()) if len(residual) else None,
        relative_error=Distribution.of(torch.cat(errors)),
        changed_by_potential=changed / len(x) if is_choice else None,
    )
    return torch.cat(outputs), account


def _lipschitz(
    function: Callable[[Tensor], Tensor],
    backbone: Backbone,
    x: Tensor,
    spec: LipschitzSpec,
    generator: torch.Generator,
) -> Distribution | None:
    chosen = torch.randperm(len(x), generator=generator)[: spec.points]
    with torch.no_grad():
        points = backbone.embed(x[chosen].to(backbone.mean.device))
    found = local_lipschitz(
        function, points, radius=spec.radius, steps=spec.steps, generator=generator
    )
    return Distribution.of(found)
