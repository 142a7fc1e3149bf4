"""The certificate of a global map: closed forms, soundness under search, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attacks.bank_models import first_feature_net
from certify.small import answers_around, bank_of, best_gain, global_model, on_global_map, queries
from factories import refuses
from torch import Tensor
from torch.nn import functional

from otad.certify import certify, certify_values
from otad.certify.input_reach import InputReach, Reach, input_reach
from otad.certify.lipschitz_map import Lipschitz
from otad.cip import Status
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.cip.whole_bank.map import GAP, ColumnGeneration
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import potential_lines
from otad.cip.whole_bank.pricing import Prices
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import lifted_net

SETTINGS: dict[str, dict[str, Any]] = {
    "least L": {},
    "larger L": {"smoothness": 20.0},
    "curved down": {"bend": -1.5, "noise": 0.1},
    "curved up": {"bend": 0.2},
    "points left out": {"noise": 0.4, "smoothness": 8.0},
    "other scales": {"std": (0.4, 2.5)},
    "ten dimensions": {"dim": 10, "points": 60},
    "two points": {"points": 2},
    "as steep down as up": {"bend": -6.0, "smoothness": 6.0, "noise": 0.2},
}


def two_point_model(smoothness: float, bend: float = 0.0) -> OTAD:
    """z = x at -1 and +1 on the first axis of the plane; logits -z_1 and z_1."""
    points = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    bank = FeatureBank(points, points, torch.tensor([0, 1]), "two points")
    return on_global_map(first_feature_net(bounds=None), bank, bend, smoothness)


def rule_of(model: OTAD, stretch: Tensor | None = None) -> Lipschitz:
    if stretch is None:
        return Lipschitz(input_reach(model, None, None, None))
    reach = Reach(stretch.double(), 0.0)
    return Lipschitz(InputReach(model, reach, reach, (), torch.ones(())))


@pytest.mark.parametrize("smoothness", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("bend", [0.0, -0.5, 0.5])
def test_two_points_in_closed_form(smoothness: float, bend: float) -> None:
    """The map is clamp(L t, l t -+ (1 - l)) along the axis and l t across it, and the margin is
    twice its first coordinate: radius = |T_1| / L, the whole truth where the map is steep."""
    model = two_point_model(smoothness, bend)
    across = torch.tensor([[0.1, 3.0], [0.1, -2.0]])
    x = torch.cat([torch.stack([torch.linspace(-2, 2, 41), torch.zeros(41)], 1), across])
    along = x[:, 0].double()
    steep = smoothness * along
    expected = torch.clamp(steep, bend * along - (1 - bend), bend * along + (1 - bend))
    torch.testing.assert_close(model(x)[:, 1].double().detach(), expected, rtol=0, atol=1e-5)
    found = certify(model, x)
    top = max(smoothness, abs(bend))
    torch.testing.assert_close(found.radius, expected.abs() / top, rtol=1e-3, atol=2e-5)
    assert bool((found.radius <= along.abs()).all()), "the border is where the first feature is 0"
    tight = expected == steep
    torch.testing.assert_close(found.radius[tight], along.abs()[tight], rtol=1e-3, atol=2e-5)
    assert set(found.rules) - {"none"} == {"lipschitz"}


@pytest.mark.parametrize("name", SETTINGS)
def test_strong_search_breaks_no_radius(name: str) -> None:
    model = global_model(0, **SETTINGS[name])
    x = queries(model, 30, 0)
    found = certify(model, x)
    assert torch.equal(found.prediction, model(x).argmax(1))
    gain = best_gain(model, x, found.radius)
    assert float(gain[found.radius > 0].max()) <= 0
    assert int((found.radius > 0.01).sum()) >= 10, "radii of 0 prove nothing"


def test_radii_that_are_too_large_are_broken() -> None:
    """The search finds what is there: with half the L, many radii are refuted."""
    model = global_model(0)
    x = queries(model, 90, 0)
    found = certify(model, x)
    rows = found.radius > 0.02
    gain = best_gain(model, x, 2 * found.radius)
    assert int((gain > 0)[rows].sum()) > 0.2 * int(rows.sum()) > 0


@pytest.mark.parametrize("bend", [0.0, -1.0, 0.2])
def test_outputs_change_no_faster_than_the_slope(bend: float) -> None:
    """Over random pairs of inputs, and pairs found by the power method on the difference."""
    model = global_model(4, dim=4, points=60, bend=bend, noise=0.05 if bend < 0 else 0.0).double()
    rule = rule_of(model, torch.linspace(0.5, 2.0, 4))
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    slopes = rule.slope(rows)
    start = queries(model, 40, 5).double()
    step = torch.randn(40, 4, generator=torch.Generator().manual_seed(6)).double()
    before, closest = model.solve(start).solution.image.detach(), 0.0
    for row, slope in zip(rows, slopes, strict=True):
        for size in (3.0, 1e-3):
            for _ in range(4):
                step = (size * step / step.norm(dim=1, keepdim=True)).detach().requires_grad_()
                moved = model.solve(start + rule.stretch * step).solution.image
                value = ((moved - before) @ row).abs()
                assert bool((value <= slope * size + 1e-9).all())
                closest = max(closest, float(value.detach().max() / size / slope))
                (gradient,) = torch.autograd.grad(value.sum(), step)
                step = torch.where(gradient.norm(dim=1, keepdim=True) > 0, gradient, step)
    assert closest > 0.6, "the search comes near the bound"


@pytest.mark.parametrize("name", ["least L", "curved down", "other scales", "points left out"])
def test_every_answer_is_in_its_interval(name: str) -> None:
    reached, model = 0.0, global_model(0, task="regression", **SETTINGS[name])
    x = queries(model, 20, 0)
    slope = float(rule_of(model).slope(model.backbone.head.weight.detach().double()))
    for eps in (0.0, 0.05, 0.5):
        found, answers = certify_values(model, x, eps), answers_around(model, x, eps)
        assert bool((answers.amin(1) >= found.low).all())
        assert bool((answers.amax(1) <= found.high).all())
        assert bool((found.high - found.low <= 2 * eps * slope + 2e-3).all())
        span = (answers.amax(1) - answers.amin(1)) / (found.high - found.low)
        reached = max(reached, float(span.max()) if eps else 0.0)
    assert reached > 0.25, "a quarter of such an interval would not hold"


def test_violated_levels_keep_the_proof_and_miss_the_pairs_by_no_more_than_they_say() -> None:
    """Levels moved at random: still one smooth convex potential, so the same slope; at bank points
    the map is off by at most sqrt(M violation)."""
    model = global_model(1)
    potential = model.whole_bank.potential
    drawn_by = torch.Generator().manual_seed(2)
    moved = potential.levels + 0.05 * torch.randn(40, generator=drawn_by).double()
    x, z = (part.double() for part in (model.bank_inputs, model.bank_features))
    bends = torch.cdist(z, z).square() / (2 * potential.modulus)
    sides = moved[None] + (x[:, None] - x[None]).mul(z[None]).sum(2) + bends
    violation = float((sides - moved[:, None]).max())
    assert violation > 0.05
    spoiled = replace(potential, levels=moved, violation=violation)
    other = model.replace(potential=spoiled)
    off = (other.solve(model.bank_inputs).solution.image - model.bank_features).norm(dim=1)
    assert float(off.max()) <= (potential.modulus * violation) ** 0.5
    assert float(off.max()) > 0.01
    inputs = queries(other, 60, 3)
    found = certify(other, inputs)
    assert float(best_gain(other, inputs, found.radius).max()) <= 0
    (words,) = (words for words in found.assumptions if "violate" in words)
    assert f"{violation:.3g}" in words


def test_rows_that_were_not_solved_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = global_model(0), global_model(0, task="regression")
    x = queries(model, 6, 0)
    assert bool((certify(model, x).radius > 0).any())
    for one in (model, values):
        honest = one.trace

        def doubtful(rows: Tensor, honest: Any = honest) -> Any:
            trace = honest(rows)
            status = trace.solution.status.clone()
            status[::2] = int(Status.UNSOLVED)
            return replace(trace, solution=replace(trace.solution, status=status))

        monkeypatch.setattr(one, "trace", doubtful)
    found = certify(model, x)
    assert found.radius[::2].tolist() == [0.0, 0.0, 0.0]
    assert set(found.rules[::2]) == {"none"}
    interval = certify_values(values, x, 0.1)
    assert bool(interval.low[::2].isinf().all())
    assert bool(interval.high[1::2].isfinite().all())


def test_rounding_is_taken_off() -> None:
    """A margin that errors could have made is none; in float64 nearly all of it counts."""
    model = global_model(0)
    with torch.no_grad():
        model.backbone.head.weight[1] = model.backbone.head.weight[0] * (1 + 1e-7)
        model.backbone.head.weight[2] = 0.0
        model.backbone.head.bias.copy_(torch.tensor([0.0, 0.0, -100.0]))
    x = queries(model, 20, 0)
    assert bool((certify(model, x).radius == 0).all())
    exact = certify(global_model(0).double(), x.double()).radius
    rounded = certify(global_model(0), x).radius
    assert bool((rounded <= exact * (1 + 1e-5)).all())
    torch.testing.assert_close(rounded, exact, rtol=5e-3, atol=1e-4)


def test_the_gap_that_is_taken_off_is_the_one_the_solver_allows() -> None:
    model = global_model(2, bend=0.2)
    embedded = model.backbone.embed(queries(model, 30, 2))
    rule = rule_of(model)
    drift, growth = rule.drift(embedded.double())
    potential = model.whole_bank.potential
    pairs = Pairs(model.bank_inputs, model.bank_features, potential.strong_convexity)
    lines = potential_lines(pairs, potential)
    points = embedded.double() - pairs.center
    scale = ColumnGeneration(pairs, lines, potential.modulus, points, Prices(pairs)).scale
    allowed = (potential.modulus * GAP * scale).sqrt()
    assert bool((drift >= allowed).all())
    assert bool((drift <= 1.1 * allowed).all())
    for distance in (0.1, 10.0, 1e4):
        far = embedded.double() + distance / 2**0.5
        assert bool((rule.drift(far)[0] <= drift + distance * growth * 1.0001).all())


def lifted_model(
    seed: int, *, lipschitz: float | None = None, task: str = "classification"
) -> OTAD:
    """Random points of the plane with random answers in three lifted coordinates."""
    drawn_by = torch.Generator().manual_seed(seed)
    outputs = 3 if task == "classification" else 1
    net = lifted_net((2,), outputs, hidden=(4,), task=task, mean=0.3, std=[0.7, 0.7])
    points = torch.randn(30, 2, generator=drawn_by)
    answers = points @ torch.randn(2, outputs, generator=drawn_by)
    answers = (2 * answers).sin() + 0.2 * torch.randn(30, outputs, generator=drawn_by)
    pairs = functional.pad(points, (0, outputs)), torch.cat([points, answers], 1)
    potential = lifted_potential(*pairs, outputs, lipschitz)
    return on_global_map(net, bank_of(*pairs, task), potential=potential)


@pytest.mark.parametrize("lipschitz", [None, 3.0])
def test_a_lift_is_certified_by_its_own_constant(lipschitz: float | None) -> None:
    """Answers are k-Lipschitz and the head reads them as they are: margin / (k sqrt 2 / std)."""
    model = lifted_model(0, lipschitz=lipschitz)
    x = queries(model, 40, 0)
    found = certify(model, x)
    top = model(x).detach().double().topk(2).values
    expected = (top[:, 0] - top[:, 1]) / (2**0.5 * (model.smoothness - 1) / 0.7)
    torch.testing.assert_close(found.radius, expected, rtol=1e-3, atol=1e-4)
    assert bool((found.radius <= expected).all())
    assert float(best_gain(model, x, found.radius)[found.radius > 0].max()) <= 0
    assert float(best_gain(model, x, 3 * found.radius).max()) > 0


def test_values_of_a_lift() -> None:
    model = lifted_model(0, task="regression")
    x = queries(model, 30, 0)
    found = certify_values(model, x, 0.2)
    width = torch.full_like(found.low, 2 * 0.2 * (model.smoothness - 1) / 0.7)
    torch.testing.assert_close(found.high - found.low, width, rtol=1e-3, atol=1e-3)
    answers = answers_around(model, x, 0.2)
    assert bool((answers.amin(1) >= found.low).all())
    assert bool((answers.amax(1) <= found.high).all())


def test_an_embedding_of_its_own_needs_a_constant() -> None:
    class Turned(type(global_model(0).backbone)):  # type: ignore[misc]
        def embed(self, x: Tensor) -> Tensor:
            return 1.3 * super().embed(x).flip(1)

    model = global_model(0)
    model.backbone.__class__ = Turned
    x = queries(model, 30, 0)
    refuses(certify, model, x, match=r"embedding_lipschitz.*Turned")
    found = certify(model, x, embedding_lipschitz=1.3001)
    assert any("1.3" in words for words in found.assumptions)
    assert float(best_gain(model, x, found.radius).max()) <= 0
    assert int((found.radius > 0.01).sum()) > 10
