"""Attacks on the choice of neighbors: exact where theory is exact, and never out of the ball."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attacks.bank_models import (
    BANK_ATTACKS,
    BOX,
    blobs,
    first_feature_net,
    local_model,
    true_distances,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn

from otad.attacks import L2, Linf
from otad.attacks.adaptive import Bisector, Region, SoftKnn, Straight
from otad.attacks.adaptive.ascent import _advantage
from otad.attacks.adaptive.lines import shortest_step
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.errors import InputError
from otad.model.defend import defend

FIRST = torch.tensor([True, False])
EACH = pytest.mark.parametrize("attack", BANK_ATTACKS, ids=lambda attack: attack.name)


def test_with_one_neighbor_region_finds_the_distance_of_a_fine_grid(generator) -> None:
    model = local_model(size=15)
    x = blobs(5, seed=1)[0]
    y = model(x).argmax(1)
    attack = Region(singles=15, opponents=15, classes=1, sizes=(1,), rounds=1, polish=0)
    for one, true in zip(range(5), true_distances(model, x, y, 160).tolist(), strict=True):
        for eps, breaks in ((1.05 * true, True), (0.97 * true - 0.006, False)):
            found = attack(model, x[[one]], y[[one]], L2(eps, BOX), generator=generator)
            assert bool(found.broken) == breaks


def test_where_gradients_are_blind_the_neighbor_attacks_are_not(generator) -> None:
    model = local_model()  # one neighbor: the map is piecewise constant
    x, y = blobs(30, seed=2)
    moved = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(moved).sum(), moved)
    assert float(gradient.abs().max()) == 0.0
    reachable = float((true_distances(model, x, y, 150) < 0.19).double().mean())
    for attack in BANK_ATTACKS:
        broken = 1 - attack(model, x, y, L2(0.2, BOX), generator=generator).accuracy
        assert broken > 0.8 * reachable, attack.name
    x, y = blobs(40, seed=0)  # the bank itself: the nearest neighbor is at distance 0
    assert SoftKnn(steps=15)(model, x, y, L2(0.3, BOX), generator=generator).accuracy < 0.8


@EACH
@pytest.mark.parametrize("ball", [L2(0.3, BOX, mutable=FIRST), Linf(0.2, BOX)])
def test_stays_in_the_ball_and_counts(attack, ball, generator) -> None:
    model = local_model(neighbors=5)
    x, y = blobs(25, seed=3)
    result = attack(model, x, y, ball, generator=generator)
    assert float(result.distance.max()) <= ball.eps
    assert ball.mutable is None or torch.equal(result.inputs[:, 1], x[:, 1])
    assert bool(((result.inputs >= 0) & (result.inputs <= 1)).all())
    assert bool((result.broken == (model(result.inputs).argmax(1) != y)).all())
    right = model(x).argmax(1) == y
    assert bool((result.forwards[right] > 2).all())
    polished = getattr(attack, "polish", 0)
    assert int(result.backwards.max()) <= polished  # nothing else asks the model for a gradient
    assert bool((result.backwards[~right] == 0).all())
    assert result.accuracy < float(right.double().mean())


@pytest.mark.parametrize("rule", [MajorityKnn, MeanFeatureKnn])
def test_attacks_k_nn_on_the_same_bank(rule, generator) -> None:
    model = rule(local_model(neighbors=5), 5).eval()
    x, y = blobs(25, seed=5)
    for attack in BANK_ATTACKS:
        assert attack(model, x, y, L2(0.4, BOX), generator=generator).accuracy < 0.6


def test_regression_error_only_grows(generator) -> None:
    model = local_model(neighbors=5, task="regression")
    x, y = blobs(25, seed=6, task="regression")
    clean = (model(x) - y).abs().detach()
    for attack in BANK_ATTACKS:
        result = attack(model, x, y, L2(0.2, BOX), generator=generator)
        assert bool((result.gain >= clean).all())
        # the value is the first feature, so a step of 0.2 should buy an error near 0.2
        assert float(result.gain.median()) > 0.1, attack.name


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), drawn=st.integers(1, 3), fled=st.integers(1, 4))
def test_shortest_step_is_the_projection_an_independent_solver_finds(seed, drawn, fled) -> None:
    generator = torch.Generator().manual_seed(seed)
    near = torch.randn(1, fled, 6, generator=generator, dtype=torch.float64)
    far = 2 * torch.randn(1, drawn, 6, generator=generator, dtype=torch.float64)
    gaps = (far[:, :, None] - near[:, None]).flatten(1, 2)
    needs = (far.square().sum(2)[:, :, None] - near.square().sum(2)[:, None]).flatten(1)
    step = shortest_step(gaps, needs)[0].numpy()
    # The same projection as nonnegative least squares (Lawson and Hanson, chapter 23): with the
    # residual r of min |E u - f|, E = [2 G^T; needs^T] and f = (0, 1), it is -r[:-1] / r[-1].
    stacked = np.vstack([2 * gaps[0].numpy().T, needs[0].numpy()])
    unit = np.eye(7)[-1]
    residual = stacked @ nnls(stacked, unit)[0] - unit
    assume(bool(abs(residual[-1]) > 1e-6))  # it can be met
    expected = -residual[:-1] / residual[-1]
    assert bool((2 * gaps[0].numpy() @ expected >= needs[0].numpy() - 1e-6).all())
    assert np.linalg.norm(step) == pytest.approx(np.linalg.norm(expected), rel=0.05, abs=1e-3)


def test_the_gradient_of_the_smooth_vote_is_that_of_finite_differences(generator) -> None:
    points = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    wrong, right = (torch.tensor([[side, -side, 0] * 4]) > 0 for side in (1, -1))
    start = torch.randn(1, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def advantage(x: Tensor) -> Tensor:
        return _advantage(-(x[:, None] - points).square().sum(2), wrong, right)

    assert torch.autograd.gradcheck(advantage, start)


@EACH
@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_bank_of_one_place_has_nothing_to_find(attack, scope, generator) -> None:
    x, y = torch.full((3, 2), 0.25), torch.zeros(3).long()
    one_place = defend(first_feature_net(), x, y, n_neighbors=2, scope=scope)
    found = attack(one_place, x, y, L2(0.2, BOX), generator=generator)
    assert not found.broken.any()
    assert found.inputs.isfinite().all()
    net = nn.Linear(2, 2).eval()
    with pytest.raises(InputError, match=r"model.*OTAD.*Linear"):
        attack(net, x, net(x).argmax(1), L2(0.3), generator=generator)


@pytest.mark.parametrize(
    "attack",
    [Bisector(1, polish=10), SoftKnn((0.1,), 5, 1, polish=10), Region(1, 1, (1,), polish=10)],
    ids=lambda attack: attack.name,
)
def test_the_gradient_continues_where_neighbor_attacks_end(attack, generator) -> None:
    model = local_model(neighbors=8)
    x, y = blobs(20, seed=8)
    ball = L2(0.02, BOX)
    plain = replace(attack, polish=0)(model, x, y, ball, generator=generator)
    polished = attack(model, x, y, ball, generator=generator)
    assert bool((plain.backwards == 0).all())
    survivors = ~polished.broken
    assert bool((polished.gain >= plain.gain)[survivors].all())
    assert bool((polished.gain > plain.gain)[survivors].any())
    assert bool((polished.broken >= plain.broken).all())


@pytest.mark.parametrize("attack", [SoftKnn(polish=0), Region(singles=0, polish=0)])
def test_a_regression_is_pushed_both_ways(attack, generator) -> None:
    """The value is the first feature: near a bound there is room for an error on one side only."""
    model = local_model(150, neighbors=3, task="regression")
    x = torch.tensor([[0.97, 0.5], [0.03, 0.5]])
    y = model(x).detach() + torch.tensor([-0.01, 0.01])  # the error so far is on the other side
    assert float(attack(model, x, y, L2(0.2, BOX), generator=generator).gain.min()) > 0.15


def test_an_adapted_net_that_only_flattens_is_attacked_all_the_same(generator) -> None:
    x, y = blobs(40, seed=0)
    model = defend(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), x, y, n_neighbors=3)
    y = model(x).argmax(1)
    for attack in (attack for attack in BANK_ATTACKS if not isinstance(attack, SoftKnn)):
        result = attack(model, x[:4], y[:4], L2(0.1), generator=generator)
        assert bool((result.forwards > 1).all())


def test_neighbors_are_attacked_where_they_are_searched(generator) -> None:
    """A metric that sees the second feature alone: moving the first one, as the embedding
    would have it, changes no neighbor."""
    x = blobs(60, seed=9)[0]
    net, metric = first_feature_net(), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.head.weight.copy_(net.head.weight.flip(1))  # reads the second feature
        metric.weight.copy_(torch.tensor([[0.0, 1.0]]))
    model = defend(net, x, (x[:, 1] > 0.5).long(), n_neighbors=3, metric=metric)
    one = torch.tensor([[0.5, 0.35]])
    case = model, one, model(one).argmax(1), L2(0.25, BOX)
    result = SoftKnn(steps=10, polish=0)(*case, generator=generator)
    assert bool(result.broken)
    step = (result.inputs - one)[0].abs()
    assert float(step[0]) < 1e-6 < float(step[1])
    # the inputs are known, as they were only normalized
    assert bool(Straight()(*case, generator=generator).broken)
    with pytest.raises(InputError, match=r"model.*Linear"):
        Bisector()(*case, generator=generator)
