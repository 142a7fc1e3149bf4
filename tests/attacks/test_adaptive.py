"""Attacks on the choice of neighbors and on the tangents of a global map: exact where theory is
exact, and never out of the ball."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attacks.bank_models import (
    BANK_ATTACKS,
    BOX,
    LIFT,
    blobs,
    first_feature_net,
    lifted_stairs,
    local_model,
    stairs,
    true_distances,
)
from attacks.linear_models import assert_legal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn

from otad.attacks import L2, Bpda, Linf, Pgd
from otad.attacks.adaptive import Bisector, Pull, Region, SoftKnn, Straight
from otad.attacks.adaptive.class_means import BetweenClasses
from otad.attacks.adaptive.lines import shortest_step
from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.errors import InputError
from otad.model.defend import defend
from otad.nets import fc_resnet

FIRST = torch.tensor([True, False])
EACH = pytest.mark.parametrize("attack", BANK_ATTACKS, ids=lambda attack: attack.name)
GLOBAL = {"stairs": stairs, "some left out": lambda: stairs(flipped=4), "lifted": lifted_stairs}
EVERY = GLOBAL | {"local": local_model}  # with one neighbor: the map is piecewise constant


@pytest.mark.parametrize(
    ("make", "rows", "seed", "slack"),
    [(local_model, 3, 1, 0.0), (partial(stairs, smoothness=100.0), 2, 4, 0.005)],
    ids=["local", "global"],
)
def test_region_finds_the_distance_of_a_fine_grid(make, rows, seed, slack, generator) -> None:
    """With one neighbor, and with tangents alone: they meet half-way between two features, where
    the head of the stairs turns."""
    model, x = make(10), blobs(rows, seed)[0]
    y = model(x).argmax(1)
    attack = Region(singles=10, opponents=10, classes=1, sizes=(1,), rounds=1, polish=0)
    for one, true in enumerate(true_distances(model, x, y, 160).tolist()):
        for eps, breaks in ((1.05 * true + slack, True), (max(0.0, 0.97 * true - 0.006), False)):
            found = attack(model, x[[one]], y[[one]], L2(eps, BOX), generator=generator)
            assert bool(found.broken) == breaks


def test_a_pull_computes_the_ranks_of_the_whole_bank_once(monkeypatch, generator) -> None:
    model, (x, y), calls = local_model(), blobs(8, 2), []
    ranks = Neighborhood.ranks
    monkeypatch.setattr(
        Neighborhood, "ranks", lambda self, e: calls.append(len(e)) or ranks(self, e)
    )
    attack = Pull(classes=1, sizes=(1,), steps=4, polish=0)
    attack(model, x, y, L2(1e-6, BOX), generator=generator)
    assert len(calls) == 1, "its steps need the points of two classes"


@pytest.mark.parametrize("name", ["stairs", "lifted", "local"])
def test_where_the_gradient_is_zero_bank_attacks_and_bpda_succeed(name, generator) -> None:
    """In flat places PGD from the example does not move; attacks on neighbors and tangents do, and
    so does BPDA with the gradient of the network."""
    model, ball = EVERY[name](), L2(0.25, BOX)
    x, y = blobs(16, 2)
    right = model(x).argmax(1) == y
    x, y = x[right], y[right]
    reachable = int((true_distances(model, x, y, 120) < 0.24).sum())
    assert reachable > 5
    for attack in [*BANK_ATTACKS, *([Bpda(model.backbone, steps=10)] if name == "stairs" else [])]:
        result = attack(model, x, y, ball, generator=generator)
        assert_legal(result.inputs, x, ball)
        assert int(result.broken.sum()) >= 0.9 * reachable, attack.name
    if name in ("stairs", "local"):
        blind = Pgd(steps=20, random_start=False)(model, x, y, ball, generator=generator)
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved)[:, 1].sum(), moved)
        assert float((gradient == 0).all(1).double().mean()) >= (1.0 if name == "local" else 0.5)
        assert int(blind.broken.sum()) < 0.5 * reachable


def test_copies_of_bank_points_are_attacked(generator) -> None:
    """Their nearest neighbor is at distance 0."""
    found = SoftKnn(steps=15)(local_model(), *blobs(40, 0), L2(0.3, BOX), generator=generator)
    assert found.accuracy < 0.8


@EACH
def test_linf_and_immutable_features(attack, generator) -> None:
    model = stairs()
    x, y = blobs(12, 5)
    ball = Linf(0.3, BOX, mutable=FIRST)
    result = attack(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
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


@EACH
def test_stays_in_the_ball_and_counts(attack, generator) -> None:
    model, ball = local_model(neighbors=5), L2(0.3, BOX, mutable=FIRST)
    x, y = blobs(25, seed=3)
    result = attack(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert bool((result.broken == (model(result.inputs).argmax(1) != y)).all())
    right = model(x).argmax(1) == y
    assert bool((result.forwards[right] > 2).all())
    climbs = 1 + len(attack.sizes) if isinstance(attack, Pull) else 1
    polished = climbs * getattr(attack, "polish", 0)
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


@pytest.mark.parametrize(
    ("shares", "y", "aims", "groups"),
    [
        ([0.3, 0.3], [0, 0, 1, 1, 2, 2], [1, 2, 2, 0, 0, 1], {3}),
        ([0.3, 0.3], [0, 0, 1, 1, 3, 3], [3, 1, 2, 3, 0, 1], {3, 4}),
        ([0.8, 0.1], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], {1}),
        ([0.8, 0.1], [0, 0, 0, 0, 0, 1], [1, 2, 1, 2, 1, 2], {1, 2}),
        ([0.8, 0.1], [0, 0, 1, 1, 2, 2], [1, 2, 2, 0, 0, 1], {1}),
        ([0.3, 0.3], [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], {3}),
    ],
    ids=["each", "an empty one", "a large one", "a large one and small ones", "much memory", "y"],
)
@pytest.mark.parametrize("view", [0, 1], ids=["neighbors", "tangents"])
def test_ways_between_classes_are_those_of_their_points_one_by_one(
    view, shares, y, aims, groups, generator
) -> None:
    points = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    net = fc_resnet((3,), 4, blocks=1, hidden=8).double()
    model = defend(net, points, torch.arange(60) % 3, scope="global")
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    bank = Neighborhood.views(model, x)[view]
    ends = len(bank.votes) * torch.tensor(shares).cumsum(0)
    bank = replace(bank, votes=(torch.arange(len(bank.votes)) >= ends[:, None]).sum(0))
    width = 1 + torch.rand(6, 1, generator=generator, dtype=torch.float64)
    sides = torch.tensor([aims, y])

    def ranks(at: Tensor) -> Tensor:
        lengths = 0 if bank.by_tangents else at.square().sum(1, keepdim=True)
        return bank.offsets + lengths - 2 * at @ bank.sites.T

    def advantage(at: Tensor) -> Tensor:
        weights = (-ranks(at) / width).exp()
        sums = (((bank.votes == side[:, None]) * weights).sum(1) for side in sides)
        towards, away = (torch.where(total > 0, total, 1.0).log() for total in sums)
        return towards.masked_fill(sides[0] == sides[1], 0.0) - away

    def near(row: int, label: int, count: int) -> Tensor:
        voting = (bank.votes == label).nonzero()[:, 0]
        if not len(voting):
            return torch.zeros(3, dtype=x.dtype)
        first = voting[ranks(x)[row, voting].argsort()[:count]]
        return bank.sites[first].mean(0) - (0 if bank.by_tangents else x[row])

    between, start = BetweenClasses(bank, *sides), x.clone().requires_grad_()
    found = {len(side.sites) for side in (between._aims, between._own)}
    assert found == groups, "one for each class, or one of all points"
    (slope,) = torch.autograd.grad(advantage(start).sum(), start)
    torch.testing.assert_close(2 / width * between.soft(x, width), slope)
    for count in (4, 30):  # more than a small class has
        ways = [
            (near(row, aim, count) if aim != own else 0) - near(row, own, count)
            for row, (aim, own) in enumerate(zip(aims, y, strict=True))
        ]
        torch.testing.assert_close(between.near(x, count), torch.stack(ways))


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


def assert_near(found: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", GLOBAL)
def test_ranks_of_tangents_are_those_of_the_potential(name) -> None:
    model, queries = GLOBAL[name](), blobs(20, 3)[0]
    views = Neighborhood.views(model, torch.zeros(1))
    assert [view.by_tangents for view in views] == [False, True]
    assert len(Neighborhood.views(MajorityKnn(model).eval(), torch.zeros(1))) == 1
    potential = model.whole_bank.potential
    used = views[0].members
    assert torch.equal(used.sort().values, (~potential.levels.isnan()).nonzero()[:, 0])
    assert all(torch.equal(view.members, used) for view in views)
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


def test_points_are_sorted_by_the_class_they_vote_for() -> None:
    model, x = stairs(), blobs(12, 5)[0]
    bank = Neighborhood.of(model, x)
    assert torch.equal(bank.votes, model.backbone.head(model.bank_features).argmax(1)[bank.members])
    assert torch.equal(bank.votes, bank.votes.sort().values)
    assert torch.equal(bank.members.sort().values, torch.arange(len(model.bank_inputs)))


@pytest.mark.parametrize("seed", range(40))
def test_nearest_classes_and_points_are_those_of_a_search_point_by_point(seed) -> None:
    """Some banks have classes without a point, fewer points than are asked for, or ties."""
    generator = torch.Generator().manual_seed(seed)
    classes, size, count = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((2, 8), (1, 40), (1, 50))
    )
    votes = torch.randint(classes, (size,), generator=generator).sort().values
    if seed % 3 == 0:
        votes = votes // 2 * 2
    ranks = torch.rand(6, size, generator=generator)
    if seed % 4 == 0:
        ranks = (4 * ranks).floor()
    zeros, outputs = torch.zeros(size), torch.zeros(size, classes)
    view = zeros[:, None], zeros, votes, outputs
    bank = Neighborhood(local_model(), *view, 3, center=zeros[:1], members=torch.arange(size))
    y = torch.randint(classes, (6,), generator=generator)
    found = bank.nearest_classes(ranks, y)
    assert found.shape == (6, classes - 1)
    for row in range(6):
        others = {int(vote) for vote in votes} - {int(y[row])}
        least = {vote: float(ranks[row, votes == vote].min()) for vote in others}
        seen = found[row, : len(others)].tolist()
        assert {*seen} == others
        assert [least[vote] for vote in seen] == sorted(least.values())
        assert bool((found[row, len(others) :] == found[row, 0]).all())
    aims = votes[torch.randint(size, (6,), generator=generator)]
    chosen = bank.lowest_of_class(ranks, count, aims)
    for row in range(6):
        own = ranks[row, votes == aims[row]].sort().values
        there = min(len(own), chosen.shape[1])
        assert bool((votes[chosen[row]] == aims[row]).all())
        assert torch.equal(ranks[row, chosen[row, :there]], own[:there])
        assert there == min(len(own), count)
        assert len({*chosen[row, :there].tolist()}) == there
        assert bool((chosen[row, there:] == chosen[row, 0]).all())


def test_far_from_the_origin_both_views_rank_as_the_differences_do() -> None:
    """A table that is not normalized: in float32 its distances drown in squares of 1e8."""
    model = lifted_stairs(1e4, bounds=None)
    queries = blobs(20, 3)[0] + 1e4
    neighbors, tangents = Neighborhood.views(model, queries)
    points = model.bank_inputs[neighbors.members, :-LIFT].double()
    apart = (queries.double()[:, None] - points).square().sum(2)
    assert_near(neighbors.ranks(neighbors.embed(queries)), apart, 1e-5)
    # u_i = |x_i|^2 / 2 and z~_i = (k x_i, g_i): tangents fall as (k / 2) |x' - x_i|^2 rises
    fall = 2 * 3.0 / 2 * apart
    fall -= fall.amin(1, keepdim=True)
    assert_near(tangents.ranks(tangents.embed(queries)), fall, 1e-4)
    assert_near(neighbors.inputs(neighbors.embed(queries), queries), queries, 2e-3)
