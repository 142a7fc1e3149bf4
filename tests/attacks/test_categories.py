"""Categories in the threat: against brute force over all categories, and closed forms."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator

import factories
import pytest
import torch
from attacks.linear_models import Linear, random_net, run
from torch import Tensor
from torch.testing import assert_close

from otad.attacks import ATTACKS, L2, Categories, Linf, LpBall, Pgd, RandomNoise, RandomSearch
from otad.attacks.adaptive.neighborhood import knowledge_of
from otad.attacks.needs import Setting
from otad.certify import certify
from otad.errors import InputError
from otad.evaluate import evaluate
from otad.evaluate.suite import suite
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

GROUPS = ((1, 2, 4), (3, 5))  # and the numbers 0 and 6
NUMBERS = [0, 6]
CASES = [(kind, eps) for kind in (L2, Linf) for eps in (0.5, 1.0, math.sqrt(2), 2.5)]


def table(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(rows, 7, dtype=torch.float64)
    x[:, NUMBERS] = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    for group in GROUPS:
        drawn = torch.randint(len(group), (rows,), generator=generator)
        x[torch.arange(rows), torch.tensor(group)[drawn]] = 1.0
    return x


def reachable(x: Tensor, ball: LpBall, unit: float = 1.0) -> Iterator[tuple[Tensor, float]]:
    """Of one row x (7,): each legal choice of categories, and what it leaves for the numbers."""
    for chosen in itertools.product(*GROUPS):
        point = x.clone()
        point[[column for group in GROUPS for column in group]] = 0.0
        point[list(chosen)] = 1.0
        switches = int((point != x).sum()) // 2
        if ball.norm == "linf":
            left = ball.eps if not switches or unit * ball.eps >= 1 else -1.0
        else:
            left = ball.eps**2 - 2 * switches / unit**2
            left = math.sqrt(max(left, 0.0)) if left > -1e-12 else -1.0
        if left >= 0:
            yield point, left


@pytest.mark.parametrize(("kind", "eps"), CASES)
@pytest.mark.parametrize("unit", [1.0, 0.7])
def test_projection_is_the_nearest_of_all_combinations(kind, eps, unit, generator) -> None:
    scale = torch.tensor([0.5, unit, unit, unit, unit, unit, 2.0], dtype=torch.float64)
    ball, x = kind(eps, scale=scale, groups=GROUPS), table(12)
    moved = x + 2 * torch.randn(12, 7, generator=generator, dtype=torch.float64)
    found = ball.project(moved, x)
    assert bool((ball.distance(found, x) <= eps).all())
    for row in range(12):
        nearest = math.inf
        for point, left in reachable(x[row], ball, unit):
            step = ((moved - x[row]) / scale)[row, NUMBERS]
            short = step.clamp(-left, left)
            if kind is L2:
                short = step * min(1.0, left / float(step.norm()))
            point[NUMBERS] += short * scale[NUMBERS]
            nearest = min(nearest, float(((point - moved[row]) / scale).norm()))
        assert float(((found - moved)[row] / scale).norm()) == pytest.approx(nearest, abs=1e-6)
    assert_close(ball.project(found, x), found, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "eps"), CASES)
def test_random_points_are_of_the_set_and_reach_every_combination(kind, eps, generator) -> None:
    ball, x = kind(eps, groups=GROUPS), table(1).expand(300, 7)
    for points in (ball.inside(x, generator), ball.surface(x, generator)):
        assert bool((ball.distance(points, x) <= eps).all())
    drawn = {tuple(row) for row in ball.inside(x, generator)[:, 1:6].tolist()}
    assert drawn == {tuple(point[1:6].tolist()) for point, _ in reachable(x[0], ball)}


@pytest.mark.parametrize(
    ("frozen", "most", "here"),
    [([], 2, 2), ([3, 5], 1, 1), ([3], 1, 1), ([1, 4, 5], 0, 0), ([2], 2, 1)],
)
def test_categories_that_cannot_switch_cost_nothing(frozen, most, here, generator) -> None:
    """An input whose own category is frozen, here 2, has fewer switches than others."""
    mutable = torch.ones(7, dtype=torch.bool)
    mutable[frozen] = False
    ball, x = L2(2.0, groups=GROUPS, mutable=mutable), table(1).expand(300, 7)
    assert ball.n_switches == most
    assert (f"up to {most} can switch" if most else "none can switch") in ball.describe()
    drawn = ball.inside(x, generator)
    stays = (drawn == x)[:, 1:6].all(1)
    assert float((ball.distance(drawn, x)[stays]).max()) > 1.9
    share = 1 / (1 + here)  # the number of switches is uniform
    assert float(stays.double().mean()) == pytest.approx(share, abs=0.15)


@pytest.mark.parametrize(("kind", "eps"), CASES)
def test_the_worst_case_of_a_linear_model_is_found_and_never_exceeded(kind, eps) -> None:
    """With labels right, the largest margin over all combinations is known in closed form."""
    model, x = Linear((7,)), table(20)
    y, slope = model(x).argmax(1), model.weight.detach()[1] - model.weight.detach()[0]
    ball, dual = kind(eps, groups=GROUPS), 2 if kind is L2 else 1
    worst = torch.tensor([
        max(
            float((1 - 2 * label) * ((point - 0.5) * slope).sum())
            + left * float(slope[NUMBERS].norm(p=dual))
            for point, left in reachable(row, ball)
        )
        for row, label in zip(x, y.tolist(), strict=True)
    ])  # fmt: skip
    breakable = worst > 0
    found = run(Categories(beam=6, steps=30), model, x, ball)
    if ball.n_switches:  # else pgd is what moves the numbers
        assert found.broken.tolist() == breakable.tolist()
    others = Pgd(steps=10), RandomNoise(draws=5), RandomSearch(queries=10)
    for result in (found, *(run(attack, model, x, ball) for attack in others)):
        assert bool((result.gain <= worst + 1e-6).all())
        assert bool((ball.distance(result.inputs, x) <= eps).all())
        assert not bool((result.broken & ~breakable).any())


def test_a_wide_beam_misses_no_combination_of_a_bent_model() -> None:
    model, x = random_net(7).double(), table(30)
    y, ball = model(x).argmax(1), L2(2.0, groups=GROUPS)  # two switches and no room for numbers
    broken = [
        any(int(model(point[None]).argmax()) != label for point, _ in reachable(row, ball))
        for row, label in zip(x, y.tolist(), strict=True)
    ]
    assert 3 < sum(broken) < 30
    found = run(Categories(beam=6), model, x, ball)
    assert bool((found.broken >= torch.tensor(broken)).all())


def test_no_combination_within_a_certified_radius_changes_the_answer() -> None:
    model, queries = small_model(), table(12, seed=3).float()
    proof = certify(model, queries)
    for row, radius, label in zip(queries, proof.radius, proof.prediction, strict=True):
        ball = L2(0.999 * float(radius), groups=GROUPS)
        for point, left in reachable(row.double(), ball):
            angles = torch.linspace(0, 2 * math.pi, 9)
            grid = point.float().repeat(9, 1)
            grid[:, NUMBERS] += left * torch.stack([angles.cos(), angles.sin()], 1)
            assert bool((model(grid).argmax(1) == label).all())


def test_immutable_categories_stay(generator) -> None:
    x, mutable = table(40), torch.ones(7, dtype=torch.bool)
    mutable[[4, 3]] = False
    ball = L2(5.0, mutable=mutable, groups=GROUPS)
    found = ball.project(x + 3 * torch.randn(40, 7, generator=generator, dtype=torch.float64), x)
    assert bool((ball.distance(found, x) <= 5).all())
    assert_close(found[:, [4, 3]], x[:, [4, 3]])
    changed = (found != x)[:, [1, 2]].any(1)
    assert 0 < int(changed.sum()) < 40
    assert not bool((changed & (x[:, 4] == 1)).any())
    attacked = run(Categories(), Linear((7,)), x, ball)
    assert bool((ball.distance(attacked.inputs, x) <= 5).all())


def small_model() -> OTAD:
    x = table(40).float()
    y = (x[:, 0] + 2 * x[:, 1] > 0.7).long()
    return defend(fc_resnet((7,), 2, blocks=1, hidden=8), x, y, n_neighbors=5)


def test_evaluations_certify_eps_at_which_categories_switch() -> None:
    """Also where none does at the headline eps: all 7 features count for an l-infinity radius."""
    model, queries = small_model(), table(4, seed=5).float()
    attacks = [Categories(beam=2, steps=3), Pgd(steps=3), RandomNoise(draws=3)]
    labels, threat = model(queries).argmax(1), Linf(0.5, groups=GROUPS)
    how = {"attacks": attacks, "eps": (0.5, 1.0), "flags": False}
    found = evaluate(model, queries, labels, threat, **how)
    assert found.is_sound
    assert found.threat["groups"] == [list(group) for group in GROUPS]
    assert found.certificate is not None
    expected = certify(model, queries).radius / math.sqrt(7)
    assert found.certificate.radius == pytest.approx(expected.tolist(), rel=1e-5)


def test_suites_switch_categories_only_where_there_are_some() -> None:
    model = small_model()
    for threat, expected in ((L2(0.5), False), (L2(0.5, groups=GROUPS), True)):
        made, missing = suite(model, "standard", (7,), "classification", threat)
        assert ("categories" in {attack.name for attack in made}) == expected
        assert "categories" not in missing


FEW = {
    "steps": 3, "queries": 6, "draws": 3, "budget": 6, "polish": 2, "restarts": 1, "targets": 1,
    "points": 3, "rounds": 1, "temperatures": (0.1,),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_attacks_return_points_of_the_set_or_say_why_not(name) -> None:
    model, queries = small_model(), table(3, seed=9).float()
    ball, known = L2(1.6, groups=GROUPS), knowledge_of(model)
    if reason := ATTACKS[name].misfit(known, Setting((7,), "classification", ball)):
        assert name in ("pixle", "square", "autoattack", "ngopt")
        assert reason
    else:
        accepted = inspect.signature(ATTACKS[name]).parameters
        few = {option: value for option, value in FEW.items() if option in accepted}
        found = run(ATTACKS[name].for_model(known, **few), model, queries, ball)
        assert bool((ball.distance(found.inputs, queries) <= 1.6).all())


def test_wrong_groups_and_inputs_are_refused() -> None:
    x = table(3)
    for groups in ([[0, 0]], [[0], [0]], [[-1, 2]], [[]]):
        factories.refuses(L2, 0.5, groups=groups, match="groups")
    scale = torch.tensor([1.0, 1.0, 2.0])
    factories.refuses(L2, 0.5, scale=scale, groups=[[0, 2]], match="scale.*same unit")
    factories.refuses(L2, 0.5, scale=scale, groups=[[0, 3]], match="groups.*3")
    ball = L2(0.5, groups=[[0, 1]])
    factories.refuses(ball.check_inputs, x, match="x: expected exactly one 1")
    with pytest.raises(InputError, match=r"groups.*9"):
        L2(0.5, groups=[[1, 9]]).check_inputs(x)
    assert ball.distance(x, x).tolist() == [math.inf] * 3
    ball = L2(2.0, groups=GROUPS)
    assert "2 categorical features" in ball.describe()
    assert (ball.n_switches, ball.with_eps(1.4).n_switches) == (2, 0)
    assert "groups" not in L2(0.5).to_dict()
