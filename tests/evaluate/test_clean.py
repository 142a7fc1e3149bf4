"""The account of the solver in a record: both scopes, and networks that stand in for a solver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from otad.attacks import L2
from otad.cip import CipSolution, ExactCip, Status
from otad.cip.protocols import RowProblem
from otad.evaluate.clean import look_at_clean
from otad.evaluate.identity import MAJORITY, MEAN_FEATURE, NET, model_card
from otad.model.defend import defend
from otad.model.diagnostics import problem_of
from otad.model.otad import OTAD
from otad.nets import fc_resnet


def points(rows: int, seed: int) -> Tensor:
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(seed))


def model(task: str = "classification", **options: Any) -> OTAD:
    x = points(60, 0)
    y = (3 * x[:, 0]).long() if task == "classification" else x.sum(1)
    net = fc_resnet((4,), 3 if task == "classification" else 1, blocks=2, task=task, mean=0.5)
    return defend(net, x, y, **({"n_neighbors": 5} | options))


X = points(30, 1)
Y = (3 * X[:, 0]).long()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_one_map_has_one_potential_and_its_own_gap(task: str) -> None:
    ours = model(task, scope="global")
    y = Y if task == "classification" else X.sum(1)
    clean = look_at_clean(ours, X, y, L2(0.1), 7)
    with torch.no_grad():
        trace = ours.trace(X)
    assert clean.solver.statuses["solved"] == 1.0
    assert set(clean.solver.smoothness) == {ours.smoothness}
    assert clean.solver.residual == pytest.approx(float(trace.solution.residual.max()), abs=1e-13)
    assert clean.solver.residual < 1e-11
    assert clean.solver.changed_by_potential is None
    assert {NET, MAJORITY, MEAN_FEATURE} < set(clean.scores)


@dataclass(frozen=True)
class HalfGuessed(ExactCip):
    """Answers every second row as a network would: by an image, and nothing else."""

    def __call__(self, problem: RowProblem) -> CipSolution:
        solution = super().__call__(problem)
        guessed = torch.arange(len(solution.status)) % 2 == 0
        return replace(
            solution,
            status=solution.status.masked_fill(guessed, int(Status.ESTIMATED)),
            value=solution.value.masked_fill(guessed, torch.nan),
            residual=solution.residual.masked_fill(guessed, torch.nan),
        )


def test_the_residual_is_over_the_rows_that_were_solved() -> None:
    ours = model(solver=HalfGuessed())
    clean = look_at_clean(ours, X, Y, L2(0.1), len(X))
    assert clean.solver.statuses["estimated"] == 0.5
    with torch.no_grad():
        trace = ours.trace(X)
        problem = problem_of(ours, ours.backbone.embed(X), trace.neighbors.indices)
        residual = problem.residual(trace.solution)
    assert clean.solver.residual == pytest.approx(float(residual[1::2].max()))
    assert not bool(residual[::2].isfinite().any())


def test_the_card_tells_the_scope_and_one_potential_from_another() -> None:
    local, one_map = model_card(model()), model_card(model(scope="global"))
    assert (local["scope"], one_map["scope"]) == ("local", "global")
    assert "solver" in local
    assert "potential" not in local
    assert one_map["potential"]["left_out"] == []
    assert one_map == model_card(model(scope="global"))
    other = model_card(model(scope="global", smoothness=2 * one_map["smoothness"]))
    assert other["fingerprint"] != one_map["fingerprint"]
    assert other["potential"]["levels"] != one_map["potential"]["levels"]
