"""The whole evaluation on a global map: every flag has something to say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attacks.test_one_map import lifted_stairs, stairs, two_colors
from evaluate.small import context_of, two_sides, verdicts
from torch import Tensor

from otad.attacks import L2, Linf, LpBall
from otad.attacks.adaptive import SoftKnn, Straight
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomSearch
from otad.errors import InputError
from otad.evaluate import evaluate
from otad.evaluate.flags import CHECKS
from otad.evaluate.identity import Identity
from otad.evaluate.model_flags import finite_differences, gradient_share, neighbor_changes
from otad.evaluate.planted import plant, planted_example
from otad.evaluate.records import FAIL, NOT_RUN, PASS
from otad.model.otad import OTAD

BOX = (0.0, 1.0)


def smooth_model(smoothness: float = 1.5) -> tuple[OTAD, Tensor, Tensor]:
    return two_sides(scope="global", points=120, examples=40, smoothness=smoothness)


def test_every_flag_has_a_verdict_on_a_sound_model() -> None:
    model, x, y = smooth_model()
    soft = SoftKnn(temperatures=(0.1,), targets=1, steps=5, polish=5)
    attacks = [Straight(points=6), soft, Pgd(steps=10), RandomSearch(queries=20)]
    record = evaluate(model, x, y, L2(0.2), attacks=attacks)
    assert len(record.flags) == len(CHECKS)
    assert not {FAIL, NOT_RUN} & {*verdicts(record).values()}
    assert record.certificate is not None
    assert set(record.certificate.rules) <= {"lipschitz", "none"}
    assert record.is_sound
    proved = record.certified_accuracy(0.2)
    assert proved is not None
    assert 0 < proved.value / 100 <= record.worst_case_accuracy < 1
    assert record.solver is not None
    assert record.solver.statuses["solved"] == 1.0
    assert record.solver.smoothness.least == record.solver.smoothness.most == model.smoothness
    with torch.no_grad():
        gap = float(model.trace(x).solution.residual.max())
    assert record.solver.residual == pytest.approx(gap, abs=1e-13)
    assert record.solver.residual < 1e-11
    assert record.solver.changed_by_potential is None


def test_the_card_tells_scopes_and_potentials_apart() -> None:
    global_map, again = (Identity().model(smooth_model()[0]) for _ in range(2))
    local = Identity().model(two_sides()[0])
    assert (local["scope"], global_map["scope"]) == ("local", "global")
    assert "solver" in local
    assert "potential" not in local
    assert global_map["potential"]["left_out"] == []
    assert global_map == again
    other = Identity().model(smooth_model(smoothness=3.0)[0])
    assert other["fingerprint"] != global_map["fingerprint"]


def test_flat_places_are_reported_and_explained() -> None:
    """Where one point has all the weight the gradient is an honest zero: the flag says which."""
    x, y = two_colors(40, 2)
    context = context_of(stairs(), x, y, L2(0.2, BOX))
    found = gradient_share(context)
    assert found.verdict == FAIL
    single, blind = re.findall(r"(\d+) of these (\d+) rest on a single", found.found)[0]
    assert int(single) == int(blind) > 20
    assert "neighbors" in found.advice
    model, x, y = smooth_model()
    assert gradient_share(context_of(model, x, y, L2(0.2))).verdict == PASS


def test_differences_are_taken_where_the_same_points_have_weight() -> None:
    for model, x, y in (smooth_model(), (stairs(), *two_colors(40, 2))):
        found = finite_differences(context_of(model, x, y, L2(0.1, model.backbone.bounds)))
        assert found.verdict == PASS
        assert found.found.endswith("float64")


def test_changes_of_weight_are_counted() -> None:
    model, x, y = smooth_model()
    context = context_of(model, x, y, L2(0.3, model.backbone.bounds))
    found = neighbor_changes(context)
    before = context.sample()[0]
    after = context.threat.surface(before, context.generator(found.name))

    def weighted(x: Tensor) -> set[int]:
        trace = model.trace(x)
        return {*trace.neighbors.indices[trace.solution.multipliers > 0].tolist()}

    pairs = zip(before.split(1), after.split(1), strict=True)
    changed = sum(weighted(one) != weighted(other) for one, other in pairs)
    assert found.found.startswith(f"for {changed / len(before):.0%} of {len(before)}")
    assert "points with weight" in found.found
    assert "continuous" in found.meaning


@pytest.mark.parametrize("ball", [L2(0.1, BOX), Linf(0.05, BOX)], ids=["l2", "linf"])
@pytest.mark.parametrize("kind", ["stairs", "lifted", "left out"])
def test_plants_hold_by_construction(kind: str, ball: LpBall) -> None:
    """The example keeps its feature, the aim at half the eps has another class's, and the planted
    map is as Lipschitz as its L says."""
    model = lifted_stairs() if kind == "lifted" else stairs(flipped=4 * (kind == "left out"))
    x, y = two_colors(30, 2)
    context = context_of(model, x, y, ball, attacks=(Straight(),))
    examples, answers = context.sample(6)
    planted = list(plant(context, model, examples, answers))
    held = 0
    for copy, one, label, aim, _ in planted:
        assert isinstance(copy, OTAD)
        assert float(ball.distance(aim, one)) <= ball.eps / 2 * (1 + 1e-6)
        if float(ball.distance(aim, one)) < 0.3 * ball.eps:
            continue  # in a corner of the box
        held += bool((copy(one).argmax(1) == label) & (copy(aim).argmax(1) != label))
        moved = two_colors(200, 9)[0]
        first, second = copy.backbone.embed(moved), copy.backbone.embed(moved.flip(0))
        images = [copy.solve(part).solution.image for part in (first, second)]
        run, rise = (first - second).norm(dim=1), (images[0] - images[1]).norm(dim=1)
        steepest = max(abs(copy.strong_convexity), copy.smoothness)
        assert bool((rise <= steepest * run * 1.001 + 1e-4).all())
    assert held >= 4


def test_gradient_attacks_alone_miss_what_is_planted_in_flat_places() -> None:
    """So the flag tells an evaluation by blind attacks from one that sees."""
    x, y = two_colors(40, 2)
    blind = Pgd(steps=5, random_start=False)
    context = context_of(stairs(), x, y, L2(0.1, BOX), attacks=(blind,))
    assert planted_example(context).verdict == FAIL


def test_expensive_attacks_skip_what_is_proved_and_nothing_else() -> None:
    model, x, y = smooth_model()
    attacks = [Straight(points=6), Pgd(steps=10), RandomSearch(queries=20)]
    settings = {"eps": (0.1, 0.2, 0.3), "attacks": attacks, "flags": False}
    assert evaluate(model, x, y, L2(0.2), **settings).spared_proved == ()
    spared_twice = ["pgd", "random_search", "pgd"]
    record = evaluate(model, x, y, L2(0.2), spare_proved=spared_twice, **settings)
    assert record.spared_proved == ("pgd", "random_search")
    assert record.certificate is not None
    radius, spared = record.certificate.radius, 0
    nearest = replace(record, attacks=()).distances()
    for one in record.attacks:
        standing = [row for row in record.clean_right if nearest[row] > one.eps]
        unproved = [row for row in standing if radius[row] <= one.eps]
        assert list(one.attacked) == (standing if one.attack == "straight" else unproved)
        spared += len(standing) - len(one.attacked)
        for row, distance in zip(one.broken, one.distances, strict=True):
            nearest[row] = min(nearest[row], distance)
    assert spared > 20
    assert sum(len(one.broken) for one in record.attacks if one.attack != "straight") > 0
    proved = sum(radius[row] > 0.2 for row in record.clean_right)
    assert 0 < proved <= record.worst_case(0.2).value / 100 * len(x)


def test_what_cannot_be_skipped_is_refused() -> None:
    examples, values = smooth_model(), two_sides(task="regression")
    for data, change, message in (
        (examples, {"spare_proved": ["square"]}, r"spare_proved.*pgd.*square"),
        (examples, {"certificate": False}, r"spare_proved.*certificate=False.*pgd"),
        (values, {}, r"spare_proved.*regression.*pgd"),
    ):
        options = {"attacks": [Pgd(steps=1)], "spare_proved": ["pgd"]} | change
        with pytest.raises(InputError, match=message):
            evaluate(*data, L2(0.2), **options)
