"""Every flag is raised by what it is for, and only by that."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from attacks.bank_models import SHAPE, blobs, keyed_model, lifted_stairs, stairs, tiles, token_net
from evaluate.small import Blind, Plane, Slope, Walk, context_of, plane_data, two_sides, verdicts
from torch import Tensor, nn

from otad.attacks import L2, Attack, Linf, LpBall
from otad.attacks.adaptive import Keys, SoftKnn, Straight
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomNoise, RandomSearch
from otad.attacks.target import Target
from otad.baselines import MajorityKnn
from otad.evaluate import AttackRecord, Flag, attack_flags, flags, make_attack
from otad.evaluate import evaluate as evaluate_both
from otad.evaluate.certificate_check import certificate_holds, prove
from otad.evaluate.flags import CHECKS, Check, FlagContext, remark_flag
from otad.evaluate.records import FAIL, NOT_RUN, PASS, CertificateRecord
from otad.evaluate.suite import suite
from otad.model.defend import defend
from otad.model.otad import OTAD

BOX = (0.0, 1.0)
evaluate = partial(evaluate_both, undefended=False)  # flags are those of the model
QUICK = Keys(steps=10, targets=1, temperatures=(0.1,), restarts=1, polish=5)


def plane_context(model: nn.Module | None = None, **options: Any) -> FlagContext:
    x, y = plane_data()
    return context_of((model or Plane()).eval(), x, y, L2(0.4), **options)


def record_of(family: str, attacked: tuple[int, ...], broken: tuple[int, ...]) -> AttackRecord:
    """An attack that broke these rows, all at distance 0.4."""
    rows = {"attacked": attacked, "broken": broken, "distances": (0.4,) * len(broken)}
    return AttackRecord(attack=f"some {family}", family=family, eps=0.4, settings={}, **rows)


Forward = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plane(change: Forward) -> nn.Module:
    """The model of `Plane` with another forward pass: a function of the old one and the inputs."""

    class Changed(Plane):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward, x)

    return Changed().eval()


def only_single(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise ValueError("inputs must be float32")
    return forward(x)


ZERO_GRADIENT = plane(lambda forward, x: forward(x.detach()) + 0 * x.sum())
NAN_GRADIENT = plane(lambda forward, x: forward(x) + (0 * x).sum(1, keepdim=True).sqrt())
OPPOSITE_GRADIENT = plane(lambda forward, x: 2 * forward(x.detach()) - forward(x))
FAILS_IN_DOUBLE = plane(lambda forward, x: forward(x) @ torch.eye(2))
REFUSES_DOUBLE = plane(only_single)
RANDOMIZED = plane(lambda forward, x: forward(x) + 0.01 * torch.randn(len(x), 2))
DEPENDS_ON_BATCH = plane(lambda forward, x: forward(x - x.mean(0)))


def test_a_sound_model_raises_no_flag() -> None:
    x, y = plane_data()
    record = evaluate(Plane().eval(), x, y, L2(0.4, bounds=(-1, 1)), attacks=[Walk(), Blind()])
    assert FAIL not in verdicts(record).values()
    assert len(record.flags) == len(CHECKS) - 1  # the model is not randomized
    assert all(flag.found and flag.meaning and flag.advice for flag in record.flags)


@pytest.mark.usefixtures("brief_flags")
def test_every_flag_has_a_verdict_on_a_sound_model() -> None:
    model, x, y = two_sides(scope="global", points=30, examples=8)
    soft = SoftKnn(temperatures=(0.1,), targets=1, steps=5, polish=5)
    attacks = [Straight(points=3), soft, Pgd(steps=5), RandomSearch(queries=10)]
    record = evaluate(model, x, y, L2(0.2), attacks=attacks)
    assert len(record.flags) == len(CHECKS) - 2  # not randomized, and inputs are only normalized
    assert not {FAIL, NOT_RUN} & {*verdicts(record).values()}
    assert record.certificate is not None
    assert set(record.certificate.rules) <= {"lipschitz", "none"}
    assert record.is_sound
    proved = record.certified_accuracy(0.2)
    assert proved is not None
    assert 0 < proved.value / 100 <= record.worst_case_accuracy < 1
    assert record.solver is not None
    assert record.solver.statuses["solved"] == 1.0
    assert record.solver.residual < 1e-11


@pytest.mark.parametrize("model", [ZERO_GRADIENT, NAN_GRADIENT], ids=["zero", "nan"])
def test_a_model_without_gradients_is_flagged(model: nn.Module) -> None:
    x, y = plane_data()
    attacks = [Pgd(steps=5, random_start=False), Blind()]
    is_nan = model is NAN_GRADIENT
    with pytest.warns(UserWarning, match="pgd.* NaN .* 35 of 35") if is_nan else nullcontext():
        record = evaluate(model, x, y, L2(0.4, bounds=(-1, 1)), attacks=attacks)
    assert record.attacks[0].broken == ()  # and yet it is no safer than the sound one
    failed = {name for name, verdict in verdicts(record).items() if verdict == FAIL}
    assert failed == {
        "gradients are there", "gradients agree with finite differences", flags.HIDDEN,
        "white-box at least as strong as black-box", "a large eps drives accuracy to chance",
    } | ({"pgd has remarks on the model"} if is_nan else set())  # fmt: skip


def test_a_single_gradient_that_is_nan_is_flagged() -> None:
    """Half of the examples may have no gradient, but none a broken one."""
    x, y = plane_data()
    one = plane(lambda forward, at: forward(at) + ((at - x[2]).square().sum(1)[:, None]).sqrt())
    found = flags.gradient_share(context_of(one, x[1:8], y[1:8], L2(0.4)))
    assert found.verdict == FAIL
    assert found.found.endswith("infinite on 1 that are answered")


@pytest.mark.parametrize(
    ("model", "check", "verdict"),
    [
        (OPPOSITE_GRADIENT, flags.finite_differences, FAIL),
        (OPPOSITE_GRADIENT, flags.gradient_share, PASS),
        (RANDOMIZED, flags.randomness, FAIL),
        (DEPENDS_ON_BATCH, flags.batch_independence, FAIL),
        (DEPENDS_ON_BATCH, flags.randomness, PASS),
        (FAILS_IN_DOUBLE, flags.finite_differences, PASS),
        (REFUSES_DOUBLE, flags.finite_differences, PASS),
    ],
)
def test_checks_of_a_model(model: nn.Module, check: Check, verdict: str) -> None:
    flag = check(plane_context(model))
    assert flag.verdict == verdict
    if model in (FAILS_IN_DOUBLE, REFUSES_DOUBLE):
        assert flag.found.endswith("float32")


@pytest.mark.parametrize(
    "make",
    [
        lambda: two_sides(examples=12),
        lambda: two_sides(scope="global", points=60, examples=12),
        lambda: (stairs(), *blobs(12, 2)),
        lambda: (keyed_model()[0], *tiles(12, 7)),
    ],
    ids=["local", "global", "stairs", "keys"],
)
def test_otad_passes_the_checks_of_its_gradients_and_answers(make: Any) -> None:
    """Neighbors by key, and points with weight in a global map, are compared one by one."""
    model, x, y = make()
    context = context_of(model, x, y, L2(0.3, model.backbone.bounds))
    for check in (flags.finite_differences, flags.batch_independence, flags.randomness):
        assert check(context).verdict == PASS
    assert flags.finite_differences(context).found.endswith("float64")
    changes = flags.neighbor_changes(context)
    before = context.sample()[0]
    after = context.threat.surface(before, context.generator(changes.name))

    def neighbors(x: Tensor) -> set[int]:
        trace = model.trace(x)
        counted = (trace.solution.multipliers > 0) | (model.scope == "local")
        return {*trace.neighbors.indices[counted].tolist()}

    pairs = zip(before.split(1), after.split(1), strict=True)
    changed = sum(neighbors(one) != neighbors(other) for one, other in pairs)
    assert changed > 0
    assert changes.found.startswith(f"for {changed / len(before):.0%} of {len(before)} examples")
    assert ("points with weight" in changes.found) == (model.scope == "global")
    none = flags.neighbor_changes(context_of(model, x, y, L2(1e-9)))
    assert re.match("for 0% of .*attacks may change them", none.found)


def test_flat_places_are_reported_and_explained() -> None:
    """Where one point has all the weight the gradient is an honest zero: the flag says which."""
    found = flags.gradient_share(context_of(stairs(), *blobs(40, 2), L2(0.2, BOX)))
    assert found.verdict == FAIL
    single, blind = re.findall(r"(\d+) of these (\d+) rest on a single", found.found)[0]
    assert int(single) == int(blind) > 20
    assert flags.gradient_share(context_of(*two_sides(scope="global"), L2(0.2))).verdict == PASS


def test_the_check_of_certificates_is_strict_to_the_last_digit() -> None:
    record = record_of("white-box", (3,), (3,))
    for radius, verdict in ((0.4, PASS), (0.4 + 1e-15, FAIL)):
        proof = CertificateRecord((radius,) * 40, (), (), ())
        flag = certificate_holds(plane_context(records=(record,), certificate=proof))
        assert flag.verdict == verdict
    assert certificate_holds(plane_context(records=(record,))).verdict == NOT_RUN


def test_certified_errors_of_a_regression_are_checked() -> None:
    model, x, y = two_sides(task="regression")
    attack = Straight(points=3, shares=(1.0,))
    record = evaluate(model, x, y, L2(0.2), attacks=[attack], flags=False)
    assert record.certificate is not None
    assert record.is_sound
    worst = torch.tensor(record.worst_errors())
    proved = torch.tensor(record.certificate.worst_errors)
    assert (worst <= proved + 1e-6).all()
    assert (worst > torch.tensor(record.clean_errors)).any()
    less = replace(record.certificate, worst_errors=tuple((worst / 2).tolist()))
    context = context_of(model, x, y, L2(0.2), records=record.attacks, certificate=less)
    assert certificate_holds(context).verdict == FAIL


def test_linf_radii_hold_in_linf() -> None:
    model, x, y = two_sides()
    scale = torch.tensor([2.0, 0.5])
    balls = (L2(0.2), Linf(0.2), L2(0.2, scale=scale))
    radii, in_linf, in_units = (torch.tensor(prove(model, x, y, ball).radius) for ball in balls)
    torch.testing.assert_close(in_linf, radii / 2**0.5)
    # The first feature moves by up to 2 for each unit, the second by half of one.
    assert (in_units >= radii / 2 - 1e-6).all()
    assert (in_units <= radii * 2 + 1e-6).all()


def in_double(scope: str) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = two_sides(scope=scope)
    return model.double().eval(), x.double(), y


@pytest.mark.parametrize(
    "make",
    [
        two_sides,
        lambda: (MajorityKnn((made := two_sides())[0]).eval(), *made[1:]),
        lambda: in_double("local"),
        lambda: in_double("global"),
        lambda: (stairs(), *blobs(40, 2)),
        lambda: (lifted_stairs(), *blobs(40, 2)),
        lambda: (MajorityKnn(stairs()).eval(), *blobs(40, 2)),
    ],
    ids=["local", "knn", "local 64", "global 64", "global", "lifted", "knn of global"],
)
@pytest.mark.usefixtures("brief_flags")
def test_a_planted_weakness_is_found_by_attacks_that_know_the_bank(make: Any) -> None:
    model, x, y = make()
    ball = L2(0.1, (-1.0 if float(x.min()) < 0 else 0.0, 1.0))
    soft = SoftKnn(temperatures=(0.1,), targets=1, steps=5)
    knowing, blind = (Straight(points=2, shares=(1.0, 0.5)), soft), (RandomNoise(draws=1),)
    for attacks, verdict in ((knowing, PASS), (blind, FAIL)):
        context = context_of(model, x, y, ball, attacks=attacks)
        assert attack_flags.planted_example(context).verdict == verdict
    assert attack_flags.planted_example(plane_context(attacks=(Walk(),))).verdict == NOT_RUN


@pytest.mark.parametrize("ball", [L2(0.1, BOX), Linf(0.05, BOX)], ids=["l2", "linf"])
@pytest.mark.parametrize("kind", ["stairs", "lifted", "left out"])
def test_plants_hold_by_construction(kind: str, ball: LpBall) -> None:
    """The example and its aim are answered as planted, by a map as Lipschitz as its L says."""
    model = lifted_stairs() if kind == "lifted" else stairs(flipped=4 * (kind == "left out"))
    x, y = blobs(30, 2)
    context = context_of(model, x, y, ball, attacks=(Straight(),))
    examples, answers = context.sample(6)
    planted = list(attack_flags.plant(context, model, examples, answers))
    held = 0
    for copy, one, label, aim, _ in planted:
        assert isinstance(copy, OTAD)
        assert float(ball.distance(aim, one)) <= ball.eps / 2 * (1 + 1e-6)
        if float(ball.distance(aim, one)) < 0.3 * ball.eps:
            continue  # in a corner of the box
        held += bool((copy(one).argmax(1) == label) & (copy(aim).argmax(1) != label))
        moved = blobs(200, 9)[0]
        first, second = copy.backbone.embed(moved), copy.backbone.embed(moved.flip(0))
        images = [copy.solve(part).solution.image for part in (first, second)]
        run, rise = (first - second).norm(dim=1), (images[0] - images[1]).norm(dim=1)
        steepest = max(abs(copy.strong_convexity), copy.smoothness)
        assert bool((rise <= steepest * run * 1.001 + 1e-4).all())
    assert held >= 4


def test_gradient_attacks_alone_miss_what_is_planted_in_flat_places() -> None:
    """So the flag tells an evaluation by blind attacks from one that sees."""
    x, y = blobs(40, 2)
    blind = Pgd(steps=5, random_start=False)
    context = context_of(stairs(), x, y, L2(0.1, BOX), attacks=(blind,))
    assert attack_flags.planted_example(context).verdict == FAIL


def test_rows_only_black_box_attacks_break_are_counted_where_both_tried() -> None:
    everyone = tuple(range(40))

    def verdict(*records: object) -> Flag:
        return attack_flags.white_box_is_strongest(plane_context(records=records))

    white = record_of("white-box", everyone, (1,))
    assert verdict(white, record_of("black-box", (2, 3), (2,))).verdict == FAIL
    assert verdict(white, record_of("random", everyone, (1,))).verdict == PASS
    # Rows 2 and 3 fell first, so nobody knows what the white-box attack would have done.
    skipped = verdict(record_of("random", everyone, (2, 3)), record_of("adaptive", (1, 4), (1,)))
    assert skipped.verdict == PASS
    assert "2 times the white-box attacks skipped" in skipped.found
    assert verdict(white).verdict == NOT_RUN


@dataclass(frozen=True)
class Tiring(Attack):
    """Breaks fewer rows the more it is given."""

    steps: int = 10
    restarts: int = 1
    name, family = "tiring", "white-box"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        share = min(1.0, (10 / self.steps * 0.4 / ball.eps) ** 2 / self.restarts)
        return x + share * ball.eps * (1 - 2 * target.y)[:, None] * torch.tensor([1.0, 0.0, 0.0])


class Shy(Slope):
    """Has no answer for some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(x[:, 1] > 0, torch.nan)


def test_attacks_that_get_weaker_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a regression, where abstentions must not hide it."""
    context, x = plane_context(), plane_data()[0]
    values = context_of(Shy().eval(), x, Slope()(x).detach(), L2(0.3))
    cases = [
        (check, context)
        for check in (attack_flags.more_steps, attack_flags.more_restarts, attack_flags.more_eps)
    ]
    for check, given in (*cases, (attack_flags.more_steps, values)):
        assert check(given).verdict == PASS
        with monkeypatch.context() as patch:
            patch.setattr(attack_flags, "make_attack", lambda *_, **__: Tiring())
            flag = check(given)
        assert flag.verdict == FAIL
        assert "inf" not in flag.found


def test_attacks_that_fail_with_everything_allowed_are_flagged() -> None:
    assert attack_flags.large_eps(plane_context(attacks=(Walk(),))).verdict == PASS
    assert attack_flags.large_eps(plane_context(attacks=(Walk((0.0, 1.0, 0.0)),))).verdict == FAIL
    assert attack_flags.large_eps(plane_context(attacks=(Blind(),))).verdict == NOT_RUN


def test_a_regression_runs_the_flags_that_make_sense() -> None:
    x, _ = plane_data()
    context = context_of(Slope().eval(), x, 2 * x[:, 0] - 0.5, L2(0.3), attacks=(Walk(),))
    found = {flag.name: flag.verdict for flag in (check(context) for check in CHECKS)}
    assert FAIL not in found.values()
    assert found["more steps never help the defense"] == PASS
    assert found["gradients agree with finite differences"] == PASS
    assert found["a large eps drives accuracy to chance"] == NOT_RUN


def test_remarks_of_an_attack_are_shown() -> None:
    flag = remark_flag("autoattack", ["zero gradients", "few classes"])
    assert flag.verdict == FAIL
    assert flag.found == "zero gradients few classes"


def test_nothing_is_claimed_where_no_example_is_right() -> None:
    x, _ = plane_data()
    context = context_of(Plane().eval(), x, (x[:, 0] <= 0).long(), L2(0.1), attacks=(Walk(),))
    assert PASS not in {check(context).verdict for check in CHECKS}


@pytest.mark.parametrize("rule", ["otad", "k-nn"])
def test_planted_keys_are_found_by_who_looks_for_them_alone(rule: str) -> None:
    model, train_x = keyed_model()
    attacked = model if rule == "otad" else MajorityKnn(model, 5).eval()
    x, y = tiles(30, 5)
    ball = L2(0.1, BOX)
    if rule == "otad":
        context = context_of(model, x, y, ball, train_x=train_x)
        (planted,) = attack_flags.plant(context, model, *context.sample(4))
        assert len(planted.train_x) == len(planted.model.bank_labels) > 90
        keys, embedded = model.query_keys(planted.train_x), model.backbone.embed(planted.train_x)
        torch.testing.assert_close(keys, planted.model.bank_keys)
        torch.testing.assert_close(embedded, planted.model.bank_inputs)
    for attack in (QUICK, Straight(points=12, train_x=train_x), make_attack("soft_knn", model)):
        context = context_of(attacked, x, y, ball, attacks=(attack,), train_x=train_x)
        flag = attack_flags.planted_example(context)
        assert flag.verdict == PASS, (attack.name, flag.found)
    blind = context_of(attacked, x, y, ball, attacks=(RandomNoise(draws=1),))
    assert attack_flags.planted_example(blind).verdict == FAIL


def test_one_map_behind_an_embedding_is_attacked_the_same_way() -> None:
    x, y = tiles(60, 0)
    model = defend(token_net(x, y), x, y, scope="global")
    attacks, _ = suite(model, "quick", SHAPE, "classification", L2(0.15, BOX), x)
    assert {"straight", "keys"} <= {attack.name for attack in attacks}
    context = context_of(model, *tiles(30, 9), L2(0.15, BOX), train_x=x)
    for attack in (QUICK, Straight(points=6, train_x=x)):
        result = attack(model, *context.sample(), L2(1.5, BOX), generator=torch.Generator())
        assert result.accuracy < 0.7, attack.name
    for planted in attack_flags.plant(context, model, *context.sample(2)):
        assert planted.train_x is not None
        embedded = model.backbone.embed(planted.train_x)
        torch.testing.assert_close(embedded, planted.model.bank_inputs)
