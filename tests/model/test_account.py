"""The account of a model's answers, against the answers themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import estimated, exact, images

from otad.cip import ExactCip, Status, least_smoothness
from otad.model.account import AccountBuilder, SolverAccount
from otad.model.diagnostics import Distribution, neighborhood_smoothness
from otad.model.otad import OTAD

X = images(14, seed=9)[0]


def account_of(model: OTAD) -> tuple[AccountBuilder, SolverAccount]:
    builder = AccountBuilder(model, potentials=True, relative_error=True, least_smoothness=True)
    for batch in X.split(5):
        builder.add(batch)
    return builder, builder.account()


@pytest.mark.parametrize("kind", ["fc", "vit"])
def test_it_says_what_the_answers_say(kind: str) -> None:
    model = exact(kind, smoothness=0.7)
    builder, account = account_of(model)
    with torch.no_grad():
        trace, embedded = model.trace(X), model.backbone.embed(X)
    solution = trace.solution
    assert (account.n, sum(account.counts.values())) == (14, 14)
    for one in Status:
        share = float((solution.status == one).double().mean())
        assert account.statuses[one.name.lower()] == share
    assert account.statuses["raised"] > 0
    assert account.share_raised == pytest.approx(account.statuses["raised"])
    residual = model.problem(embedded, trace.neighbors.indices).residual(solution)
    assert account.residual == pytest.approx(float(residual.max()))
    torch.testing.assert_close(builder.rows("smoothness"), solution.smoothness)
    learned = model.backbone.transport(embedded)[0]
    error = (learned - solution.image).square().sum(1) / learned.square().sum(1)
    torch.testing.assert_close(builder.rows("relative_error"), error)
    assert account.least_smoothness == Distribution.of(neighborhood_smoothness(model, X))
    solvers = (replace(model.solver, potential=rule) for rule in ("lowest", "highest"))
    low, high = (model.replace(solver=solver)(X).argmax(1) for solver in solvers)
    changed = float((low != high).double().mean())
    assert account.changed_by_potential == pytest.approx(changed)


def test_what_a_global_map_or_an_estimate_does_not_have() -> None:
    _, account = account_of(estimated("fc"))
    assert account.counts == {"estimated": 14}
    assert (account.smoothness, account.residual, account.changed_by_potential) == (None,) * 3
    assert account.relative_error.count == 14
    model = exact("fc", scope="global")
    _, account = account_of(model)
    assert (account.counts, account.share_raised) == ({"solved": 14}, 0.0)
    assert account.smoothness.marks == (model.smoothness,) * 5
    assert account.changed_by_potential is None
    embedded = model.backbone.embed(X)
    nearest = model.problem(embedded, model.neighbors(embedded).indices)
    assert account.least_smoothness == Distribution.of(least_smoothness(nearest))


def test_the_residual_is_that_of_the_rows_that_were_solved() -> None:
    model = exact("fc")
    trace, builder = model.trace(X), AccountBuilder(model)
    status = trace.solution.status.clone()
    status[::2] = int(Status.ESTIMATED)
    builder.add(X, replace(trace, solution=replace(trace.solution, status=status)))
    graded = model.problem(model.backbone.embed(X), trace.neighbors.indices)
    residual = graded.residual(trace.solution)[1::2].max()
    assert builder.account().residual == pytest.approx(float(residual))


def test_only_what_is_asked_for_is_measured() -> None:
    builder = AccountBuilder(exact("fc", solver=ExactCip(on_failure="fallback")))
    trace = builder.add(X)
    account = builder.account()
    assert builder.rows("relative_error") is None
    assert (account.relative_error, account.least_smoothness) == (None, None)
    again = AccountBuilder(builder.model)
    assert again.add(X, trace) is trace
    assert again.account() == account
