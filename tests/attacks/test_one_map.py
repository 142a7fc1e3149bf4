"""Attacks on a global map: tangents agree with the potential, and are found."""

from __future__ import annotations

import pytest
import torch
from attacks.bank_models import BANK_ATTACKS, BOX, stairs, true_distances
from attacks.bank_models import blobs as two_colors
from torch.nn import functional

from otad.attacks import L2, Linf
from otad.attacks.adaptive import Region
from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.pgd import Pgd
from otad.baselines import MajorityKnn
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import lifted_net


def lifted_stairs() -> OTAD:
    x, y = two_colors(60, 0)
    net = lifted_net((2,), 2, hidden=(4,), bounds=BOX)
    inputs = functional.pad(x, (0, 2))
    features = torch.cat([x, 0.05 * functional.one_hot(y, 2).float()], 1)
    potential = lifted_potential(inputs, features, 2, 3.0)
    bank = FeatureBank(inputs, features, y, "lifted stairs")
    return OTAD(net.eval(), bank, scope="global", potential=potential, n_neighbors=3).eval()


MODELS = {"stairs": stairs, "some left out": lambda: stairs(flipped=4), "lifted": lifted_stairs}


@pytest.mark.parametrize("name", MODELS)
def test_the_first_tangent_is_the_highest_and_touches_the_potential(name) -> None:
    model = MODELS[name]()
    views = Neighborhood.views(model, torch.zeros(1))
    assert [view.by_tangents for view in views] == [False, True]
    assert len(Neighborhood.views(MajorityKnn(model).eval(), torch.zeros(1))) == 1
    potential = model.whole_bank.potential
    kept = ~potential.levels.isnan()
    assert all(len(view.sites) == int(kept.sum()) for view in views)
    x, z = model.bank_inputs[kept].double(), model.bank_features[kept].double()
    bend = potential.strong_convexity
    levels = potential.levels[kept] - bend / 2 * x.square().sum(1)
    e = model.backbone.embed(two_colors(20, 3)[0]).double()
    lines = levels + ((e[:, None] - x) * (z - bend * x)).sum(2)
    ranks = views[1].ranks(views[1].embed(two_colors(20, 3)[0])).double()
    torch.testing.assert_close(ranks, 2 * (lines.amax(1, keepdim=True) - lines), rtol=0, atol=1e-3)
    value = model.solve(e.float()).solution.value.double() - bend / 2 * e.square().sum(1)
    assert bool((lines.amax(1) <= value + 1e-4).all()), "the potential lies above its tangents"
    shown = views[1].ranks_of(views[1].embed(two_colors(20, 3)[0]), torch.arange(5).expand(20, 5))
    differences = (shown[:, 1:] - shown[:, :1]).double()
    torch.testing.assert_close(differences, 2 * (lines[:, :1] - lines[:, 1:5]), rtol=0, atol=1e-3)


def test_far_from_the_origin_both_views_rank_as_the_differences_do() -> None:
    """A table that is not normalized: in float32 its distances drown in squares of 1e8."""
    corner, lift = 1e4, 2
    x, y = two_colors(60, 0)
    inputs = functional.pad(x + corner, (0, lift))
    features = inputs.clone()
    features[:, -lift:] = 0.05 * functional.one_hot(y, 2)
    net = lifted_net((2,), 2, hidden=(4,)).eval()
    bank = FeatureBank(inputs, features, y, "far off")
    potential = lifted_potential(inputs, features, lift, 3.0)
    model = OTAD(net, bank, scope="global", potential=potential, n_neighbors=3)
    queries = two_colors(20, 3)[0] + corner
    neighbors, tangents = Neighborhood.views(model, queries)
    kept = ~potential.levels.isnan()
    apart = (queries.double()[:, None] - inputs.double()[kept, :-lift]).square().sum(2)
    torch.testing.assert_close(
        neighbors.ranks(neighbors.embed(queries)).double(), apart, rtol=0, atol=1e-5
    )
    # u_i = |x_i|^2 / 2 and z~_i = (k x_i, g_i): tangents fall as (k / 2) |x' - x_i|^2 rises
    fall = 2 * 3.0 / 2 * apart
    fall -= fall.amin(1, keepdim=True)
    torch.testing.assert_close(
        tangents.ranks(tangents.embed(queries)).double(), fall, rtol=0, atol=1e-4
    )
    aims = neighbors.inputs(neighbors.embed(queries), queries)
    torch.testing.assert_close(aims, queries, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_where_the_gradient_is_zero_the_others_are_found(name, generator) -> None:
    """In flat places PGD from the example stays where it is; attacks on tangents do not."""
    model = MODELS[name]()
    x, y = two_colors(60, 2)
    right = model(x).argmax(1) == y
    x, y = x[right], y[right]
    ball = L2(0.25, BOX)
    reachable = int((true_distances(model, x, y, 250) < 0.24).sum())
    assert reachable > 10
    for attack in BANK_ATTACKS:
        result = attack(model, x, y, ball, generator=generator)
        assert float(result.distance.max()) <= ball.eps
        assert int(result.broken.sum()) >= 0.9 * reachable, attack.name
    blind = Pgd(steps=20, random_start=False)(model, x, y, ball, generator=generator)
    if name == "stairs":
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved)[:, 1].sum(), moved)
        assert float((gradient == 0).all(1).double().mean()) > 0.5
        assert int(blind.broken.sum()) < 0.5 * reachable


def test_with_tangents_alone_the_distance_of_a_fine_grid_is_found(generator) -> None:
    """Half-way between two features tangents meet, and the head of the stairs turns there."""
    model = stairs(15, smoothness=100.0)
    x, y = two_colors(6, 4)
    y = model(x).argmax(1)
    attack = Region(singles=15, opponents=15, classes=1, sizes=(1,), rounds=1, polish=0)
    for row, true in enumerate(true_distances(model, x, y, 250).tolist()):
        one = slice(row, row + 1)
        above = L2(1.05 * true + 0.005, BOX)
        below = L2(max(0.0, 0.97 * true - 0.006), BOX)
        assert bool(attack(model, x[one], y[one], above, generator=generator).broken)
        assert not bool(attack(model, x[one], y[one], below, generator=generator).broken)


@pytest.mark.parametrize("attack", BANK_ATTACKS, ids=lambda attack: attack.name)
def test_linf_and_immutable_features(attack, generator) -> None:
    model = stairs()
    x, y = two_colors(25, 5)
    ball = Linf(0.3, BOX, mutable=torch.tensor([True, False]))
    result = attack(model, x, y, ball, generator=generator)
    assert torch.equal(result.inputs[:, 1], x[:, 1])
    assert float(result.distance.max()) <= ball.eps
    shares = torch.linspace(-0.3, 0.3, 201)[:, None]
    ways = torch.stack([(x[:, 0] + shares).clamp(0, 1), x[:, 1].expand(201, -1)], 2)
    wrong = model(ways.flatten(0, 1)).argmax(1).view(201, -1) != y
    assert torch.equal(result.broken, wrong.any(0))


def test_a_regression_is_pushed(generator) -> None:
    model = stairs(task="regression", smoothness=10.0)
    x = two_colors(25, 6)[0]
    y = model(x).detach()
    far = (x[:, 0] - 0.5).abs() < 0.15
    for attack in BANK_ATTACKS:
        result = attack(model, x, y, L2(0.3, BOX), generator=generator)
        assert float(result.gain[far].min()) > 0.5, attack.name
