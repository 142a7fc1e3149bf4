"""Attacks on a global map: tangents agree with the potential, and are found."""

from __future__ import annotations

import pytest
import torch
from attacks.bank_models import BANK_ATTACKS, BOX, blobs, stairs, true_distances
from torch import Tensor
from torch.nn import functional

from otad.attacks import L2, Bpda, Linf, Pgd
from otad.attacks.adaptive import Region
from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.baselines import MajorityKnn
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import lifted_net

LIFT = 2


def lifted_stairs(corner: float = 0.0, bounds: tuple[float, float] | None = BOX) -> OTAD:
    x, y = blobs(60, 0)
    inputs = functional.pad(x + corner, (0, LIFT))
    features = torch.cat([x + corner, 0.05 * functional.one_hot(y, 2).float()], 1)
    net = lifted_net((2,), 2, hidden=(4,), bounds=bounds)
    potential = lifted_potential(inputs, features, LIFT, 3.0)
    bank = FeatureBank(inputs, features, y, "lifted stairs")
    return OTAD(net.eval(), bank, scope="global", potential=potential, n_neighbors=3).eval()


MODELS = {"stairs": stairs, "some left out": lambda: stairs(flipped=4), "lifted": lifted_stairs}


def assert_near(found: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_tangents_are_those_of_the_potential(name) -> None:
    model, queries = MODELS[name](), blobs(20, 3)[0]
    views = Neighborhood.views(model, torch.zeros(1))
    assert [view.by_tangents for view in views] == [False, True]
    assert len(Neighborhood.views(MajorityKnn(model).eval(), torch.zeros(1))) == 1
    potential = model.whole_bank.potential
    used = ~potential.levels.isnan()
    assert all(len(view.sites) == int(used.sum()) for view in views)
    x, z = model.bank_inputs[used].double(), model.bank_features[used].double()
    bend = potential.strong_convexity
    levels = potential.levels[used] - bend / 2 * x.square().sum(1)
    e, embedded = model.backbone.embed(queries).double(), views[1].embed(queries)
    lines = levels + ((e[:, None] - x) * (z - bend * x)).sum(2)
    assert_near(views[1].ranks(embedded), 2 * (lines.amax(1, keepdim=True) - lines), 1e-3)
    value = model.solve(e.float()).solution.value.double() - bend / 2 * e.square().sum(1)
    assert bool((lines.amax(1) <= value + 1e-4).all()), "the potential is above its tangents"
    shown = views[1].ranks_of(embedded, torch.arange(5).expand(20, 5))
    assert_near(shown[:, 1:] - shown[:, :1], 2 * (lines[:, :1] - lines[:, 1:5]), 1e-3)


def test_far_from_the_origin_both_views_rank_as_the_differences_do() -> None:
    """A table that is not normalized: in float32 its distances drown in squares of 1e8."""
    model = lifted_stairs(1e4, bounds=None)
    queries = blobs(20, 3)[0] + 1e4
    neighbors, tangents = Neighborhood.views(model, queries)
    used = ~model.whole_bank.potential.levels.isnan()
    points = model.bank_inputs[used, :-LIFT].double()
    apart = (queries.double()[:, None] - points).square().sum(2)
    assert_near(neighbors.ranks(neighbors.embed(queries)), apart, 1e-5)
    # u_i = |x_i|^2 / 2 and z~_i = (k x_i, g_i): tangents fall as (k / 2) |x' - x_i|^2 rises
    fall = 2 * 3.0 / 2 * apart
    fall -= fall.amin(1, keepdim=True)
    assert_near(tangents.ranks(tangents.embed(queries)), fall, 1e-4)
    assert_near(neighbors.inputs(neighbors.embed(queries), queries), queries, 2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_where_the_gradient_is_zero_bank_attacks_and_bpda_succeed(name, generator) -> None:
    """In flat places PGD from the example does not move; attacks on tangents do, and so does BPDA
    with the gradient of the network."""
    model = MODELS[name]()
    x, y = blobs(30, 2)
    right = model(x).argmax(1) == y
    x, y = x[right], y[right]
    ball = L2(0.25, BOX)
    reachable = int((true_distances(model, x, y, 120) < 0.24).sum())
    assert reachable > 5
    attacks = [*BANK_ATTACKS, *([Bpda(model.backbone, steps=10)] if name == "stairs" else [])]
    for attack in attacks:
        result = attack(model, x, y, ball, generator=generator)
        assert float(result.distance.max()) <= ball.eps
        assert int(result.broken.sum()) >= 0.9 * reachable, attack.name
    if name == "stairs":
        blind = Pgd(steps=20, random_start=False)(model, x, y, ball, generator=generator)
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved)[:, 1].sum(), moved)
        assert float((gradient == 0).all(1).double().mean()) > 0.5
        assert int(blind.broken.sum()) < 0.5 * reachable


def test_with_tangents_alone_the_distance_of_a_fine_grid_is_found(generator) -> None:
    """Half-way between two features tangents meet, and the head of the stairs turns there."""
    model = stairs(15, smoothness=100.0)
    x = blobs(3, 4)[0]
    y = model(x).argmax(1)
    attack = Region(singles=15, opponents=15, classes=1, sizes=(1,), rounds=1, polish=0)
    for one, true in zip(range(3), true_distances(model, x, y, 160).tolist(), strict=True):
        for eps, breaks in ((1.05 * true + 0.005, True), (max(0.0, 0.97 * true - 0.006), False)):
            found = attack(model, x[[one]], y[[one]], L2(eps, BOX), generator=generator)
            assert bool(found.broken) == breaks


@pytest.mark.parametrize("attack", BANK_ATTACKS, ids=lambda attack: attack.name)
def test_linf_and_immutable_features(attack, generator) -> None:
    model = stairs()
    x, y = blobs(12, 5)
    ball = Linf(0.3, BOX, mutable=torch.tensor([True, False]))
    result = attack(model, x, y, ball, generator=generator)
    assert torch.equal(result.inputs[:, 1], x[:, 1])
    assert float(result.distance.max()) <= ball.eps
    shares = torch.linspace(-0.3, 0.3, 101)[:, None]
    ways = torch.stack([(x[:, 0] + shares).clamp(0, 1), x[:, 1].expand(101, -1)], 2)
    wrong = model(ways.flatten(0, 1)).argmax(1).view(101, -1) != y
    assert torch.equal(result.broken, wrong.any(0))


def test_a_regression_is_pushed(generator) -> None:
    model = stairs(task="regression", smoothness=10.0)
    x = blobs(40, 6)[0]
    x = x[(x[:, 0] - 0.5).abs() < 0.15][:8]
    for attack in BANK_ATTACKS:
        result = attack(model, x, model(x).detach(), L2(0.3, BOX), generator=generator)
        assert float(result.gain.min()) > 0.5, attack.name
