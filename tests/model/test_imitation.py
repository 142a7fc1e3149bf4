"""A network in the solver's place: what it learns from a model, and that it is a part of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import BRIEF, K, estimated, exact, images, small_net

from otad.certify import certify
from otad.cip import ExactCip, Status
from otad.cip.surrogate import CipNet, CipNetEpoch, leave_one_out, train_cip_net
from otad.errors import InputError
from otad.io.tensor_files import fingerprint
from otad.model.defend import defend
from otad.model.diagnostics import changed_by_potential
from otad.model.imitation import Imitation, fresh_net, imitate, lessons, recipe_for
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report.assessment import assess

X, Y = images(12, seed=5)


def test_the_net_learns_to_answer_like_the_solver() -> None:
    """On inputs that are in no bank, better than the mean feature of their neighbors does."""
    generator = torch.Generator().manual_seed(0)
    x, unseen = (torch.rand(rows, 3, generator=generator) for rows in (300, 100))
    net = fc_resnet((3,), 2, blocks=2, seed=1, bounds=(0.0, 1.0), mean=0.5, std=0.25)
    model = defend(net, x, (x[:, 0] > 0.5).long(), n_neighbors=4)
    config = replace(BRIEF, epochs=20, batch_size=32, learning_rate=5e-3)
    found = imitate(model, config, net=small_net(model, "hull", width=32), held_out=50)
    with torch.no_grad():
        truth, guess = (one.trace(unseen).solution.image for one in (model, found.model))
        nearest = model.neighbors(model.query_keys(unseen)).indices
        mean = model.bank_features[nearest].mean(1)
    missed, baseline = ((image - truth).square().sum(1).mean() for image in (guess, mean))
    assert missed < 0.6 * baseline
    assert found.result.finished
    first, last = (found.result.history[epoch].held_out_error for epoch in (0, -1))
    assert last == pytest.approx(float(missed) / found.result.unit, rel=0.5)
    assert last < 0.6 * first


@pytest.mark.parametrize("kind", ["fc", "vit"])
def test_lessons_are_the_nearest_others_where_neighbors_are_searched(kind: str) -> None:
    model = exact(kind, strong_convexity=-0.2)
    problem = lessons(model)
    keys = model.bank_points.double()
    distances = torch.cdist(keys, keys).fill_diagonal_(torch.inf)
    assert torch.equal(problem.indices, distances.sort(stable=True).indices[:, :K])
    assert torch.equal(problem.query, model.bank_inputs)
    assert set(problem.smoothness.tolist()) == {2.0}
    assert set(problem.strong_convexity.tolist()) == {-0.2}
    rows = torch.tensor([7, 0, 30])
    some = lessons(model, rows)
    assert torch.equal(some.indices, problem.indices[rows])
    assert torch.equal(some.query, model.bank_inputs[rows])
    if kind == "fc":
        net, recipe = fresh_net(model), recipe_for(model)
        assert (net.dim, net.n_neighbors, net.width, len(net.blocks)) == (64, K, 128, 6)
        assert (recipe.device, recipe.mixed_precision) == ("cpu", False)
        alone = leave_one_out(model.bank_inputs, model.bank_features, K, 2.0, -0.2)
        assert torch.equal(problem.indices, alone.indices)


@pytest.mark.parametrize("alpha", [1.0, 0.3, 0.0])
def test_training_is_that_of_the_lessons(alpha: float) -> None:
    """By the model's own solver, beside the backbone's own features of the bank."""
    model = exact(solver=ExactCip(mode="paper", climb=(0.5, 0.0), on_failure="raise"))
    state = fingerprint(model.state_dict())
    found = imitate(model, BRIEF, net=small_net(model), alpha=alpha)
    by_hand = small_net(model)
    options = {"alpha": alpha, "own_features": model.bank_features}
    teacher = ExactCip(mode="paper", climb=(0.5, 0.0), on_failure="fallback")
    expected = train_cip_net(by_hand, lessons(model), BRIEF, teacher=teacher, **options)
    assert found.result == expected
    assert (found.result.history[0].error is None) == (alpha == 0)
    assert fingerprint(found.model.solver.state_dict()) == fingerprint(by_hand.state_dict())
    assert fingerprint(model.state_dict()) == state


def test_a_caller_without_gradients_and_held_out_points_do_not_matter() -> None:
    """The net never sees the held-out points."""
    model, seen = exact(), []

    class Watching(CipNet):
        def forward(self, problem: Any) -> Any:
            if self.training:
                apart = torch.cdist(problem.query.double(), model.bank_inputs.double())
                seen.extend(apart.argmin(1).tolist())
            return super().forward(problem)

    short, net = replace(BRIEF, epochs=2), Watching(model.backbone.dim, K, width=16, blocks=1)
    imitate(model, short, net=net, held_out=6)
    assert len(seen) == 2 * 30
    assert len(set(seen)) == 30
    plain = imitate(model, short)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            within = imitate(model, short)
        assert within.result == plain.result
        assert torch.equal(within.model(X), plain.model(X))


def test_a_stopped_training_resumes_to_the_same_model(tmp_path: Path) -> None:
    model, places = exact(), [tmp_path / name for name in ("whole", "cut", "short")]

    def run(place: Path, **options: Any) -> Imitation:
        options = {"alpha": 0.5, "held_out": 4, "checkpoint_dir": place} | options
        return imitate(model, BRIEF, net=small_net(model), **options)

    def stop(record: CipNetEpoch) -> None:
        if record.epoch == 2:
            raise RuntimeError("stopped")

    whole = run(places[0])
    for save_seconds in (1000.0, 0.0):  # what was not saved is lost
        with pytest.raises(RuntimeError, match="stopped"):
            run(places[1], progress=stop, save_seconds=save_seconds)
        assert bool(list(places[1].glob("[!.]*"))) == (save_seconds == 0)
    again = run(places[1])
    assert again.result.resumed_after == 2
    for epoch in (1, 2, 3):  # and one that is out of time after every epoch
        late = run(places[2], max_seconds=1e-9)
        assert len(late.result.history) == epoch
        assert late.result.finished == (epoch == 3)
    for other in (again, late):
        assert other.result == whole.result
        assert fingerprint(other.model.state_dict()) == fingerprint(whole.model.state_dict())
    done = run(places[2])
    assert done.result.resumed_after == 3
    assert not done.model.training


def test_the_net_is_a_part_of_the_model() -> None:
    model = estimated()
    state = model.state_dict()
    assert {f"answerer.solver.{name}" for name in model.solver.state_dict()} <= set(state)
    other = exact().replace(solver=small_net(exact()))
    with torch.no_grad():
        assert not torch.equal(other(X), model(X))
        other.load_state_dict(state)
        assert torch.equal(other(X), model(X))
        double = copy.deepcopy(model).double()
        torch.testing.assert_close(double(X.double()).float(), model(X), rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError, match="solver"):
        exact().load_state_dict(state)


@pytest.mark.parametrize("readout", ["free", "hull"])
def test_the_answer_is_the_nets_and_its_account_claims_nothing(readout: str) -> None:
    model = estimated(readout=readout)
    with torch.no_grad():
        trace = model.trace(X)
        embedded = model.backbone.embed(X)
        neighbors = exact().solve(embedded, model.query_keys(X)).neighbors
        by_hand = model.solver(model.problem(embedded, neighbors.indices))
    assert torch.equal(trace.neighbors.indices, neighbors.indices)
    assert torch.equal(trace.solution.image, by_hand.image)
    assert set(trace.solution.status.tolist()) == {int(Status.ESTIMATED)}
    assert bool(trace.solution.residual.isnan().all())
    assert bool(trace.solution.multipliers.isnan().all()) == (readout == "free")
    torch.testing.assert_close(trace.outputs, model.backbone.head(trace.solution.image))
    assert "mode=estimated" in repr(model)
    options = {"n_neighbors": K, "solver": model.solver, "metric": model.metric}
    again = defend(model.backbone, *images(), **options)
    with torch.no_grad():
        assert torch.equal(again(X), trace.outputs)


def test_measures_leave_out_what_a_net_does_not_have() -> None:
    model = estimated("fc")
    with torch.no_grad():
        trace, embedded = model.trace(X), model.backbone.embed(X)
    with pytest.raises(InputError, match=r"answerer: .* SurrogateAnswerer"):
        changed_by_potential(model, embedded, trace.neighbors)
    assert model.answerer.residual(model, embedded, trace).tolist() == [float("inf")] * len(X)
    with pytest.raises(InputError, match="solver: expected ExactCip, got CipNet, an estimate"):
        certify(model, X)
    found = assess(model, X, Y)
    assert found.account.counts == {"estimated": len(X)}
    assert (found.account.residual, found.share_raised) == (None, 0.0)
    assert found.to_dict()["smoothness"] is None
    model.backbone.bounds = None
    with torch.no_grad():
        outputs = model(torch.cat([X[:2], torch.full_like(X[:1], 3e37)]))
    assert outputs.isnan().all(1).tolist() == [False, False, True]  # out of range: an abstention


@pytest.mark.parametrize("make", [exact, estimated, lambda: estimated("fc")])
def test_the_gradient_reaches_the_input(make: Callable[[], OTAD]) -> None:
    """All of it, at fixed neighbors: through the embedding, the map and the head; `exact` has a
    metric, too."""
    model = make().double()
    x = X.double().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (model(x + sign * 1e-6 * step)[:, 0] for sign in (1, -1))
    slopes = (gradient * step).flatten(1).sum(1)
    assert bool((slopes != 0).any())
    torch.testing.assert_close(slopes, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-6)


def tiny(dim: int, n_neighbors: int) -> CipNet:
    return CipNet(dim, n_neighbors, width=16, blocks=1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: imitate(exact("fc", scope="global")), "ExactCip, .* got global scope$"),
        (lambda: imitate(estimated("fc")), "ExactCip, .* local scope and CipNet"),
        (lambda: imitate(exact("fc", solver=ExactCip(spares=1))), "spares: expected 0, .* got 1"),
        (lambda: imitate(exact("fc"), held_out=36), "held_out: expected fewer than all 36 points"),
        (lambda: imitate(exact("fc"), net=tiny(64, 4)), "net: expected 4 .* 64.* got 3 .* 64"),
        (lambda: imitate(exact("fc", n_neighbors=36)), "expected at most 35|n_neighbors|k"),
        (lambda: exact("fc").replace(solver=tiny(9, 3)), "solver: expected 3 .* 9.* got 3 .* 64"),
        (lambda: exact("fc", solver=tiny(64, 5)), "solver: expected 5 neighbors in dimension 64"),
        (lambda: exact("fc", scope="global", solver=tiny(64, 3)), "solver: .*none.* got CipNet"),
        (lambda: exact("fc", scope="global").replace(solver=ExactCip()), "solver: .*none.*global"),
    ],
)
def test_refusals(act: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        act()


def test_a_checkpoint_of_another_bank_is_refused(tmp_path: Path) -> None:
    """The numbers of a bank are not read for it, but its fingerprint, dtype and neighbors are."""
    model, net = exact("fc"), small_net(exact("fc"))
    imitate(model, BRIEF, net=copy.deepcopy(net), checkpoint_dir=tmp_path)
    shifted = images()[0].roll(1, 0), images()[1]
    others = [
        (exact("fc", bank_dtype=torch.float16), {}),
        (defend(model.backbone, *shifted, n_neighbors=K), {}),
        (model, {"held_out": 3}),
    ]
    for other, options in others:
        with pytest.raises(InputError, match=r"differs in .*source"):
            imitate(other, BRIEF, net=copy.deepcopy(net), checkpoint_dir=tmp_path, **options)
