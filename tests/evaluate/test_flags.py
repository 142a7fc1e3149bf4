"""Every flag is raised by what it is for, and only by that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attacks.test_one_map import lifted_stairs, stairs, two_colors
from evaluate.small import Blind, Plane, Slope, Walk, context_of, plane_data, two_sides, verdicts
from torch import Tensor, nn

from otad.attacks import L2, Attack, Linf, LpBall
from otad.attacks.adaptive import SoftKnn, Straight
from otad.attacks.base import Target
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomNoise
from otad.baselines import MajorityKnn
from otad.certify import Certificate
from otad.evaluate import AttackRecord, Flag, certificate_check, evaluate, strength_flags
from otad.evaluate.certificate_check import certificate_holds, prove
from otad.evaluate.flags import CHECKS, Check, FlagContext, remark_flag
from otad.evaluate.model_flags import (
    batch_independence,
    finite_differences,
    gradient_share,
    neighbor_changes,
    randomness,
)
from otad.evaluate.planted import planted_example
from otad.evaluate.records import FAIL, NOT_RUN, PASS, CertificateRecord
from otad.evaluate.strength_flags import (
    large_eps,
    more_eps,
    more_restarts,
    more_steps,
    white_box_is_strongest,
)


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
    assert len(record.flags) == len(CHECKS)
    assert all(flag.found and flag.meaning and flag.advice for flag in record.flags)


@pytest.mark.parametrize("model", [ZERO_GRADIENT, NAN_GRADIENT], ids=["zero", "nan"])
def test_a_model_without_gradients_is_flagged(model: nn.Module) -> None:
    x, y = plane_data()
    attacks = [Pgd(steps=5, random_start=False), Blind()]
    record = evaluate(model, x, y, L2(0.4, bounds=(-1, 1)), attacks=attacks)
    assert record.attacks[0].broken == ()  # and yet it is no safer than the sound one
    found = verdicts(record)
    assert found["gradients are there"] == FAIL
    assert found["gradients agree with finite differences"] == FAIL
    assert found["white-box at least as strong as black-box"] == FAIL
    assert found["a large eps drives accuracy to chance"] == FAIL
    assert found["the model is not randomized"] == PASS


@pytest.mark.parametrize(
    ("model", "check", "verdict"),
    [
        (OPPOSITE_GRADIENT, finite_differences, FAIL),
        (OPPOSITE_GRADIENT, gradient_share, PASS),
        (RANDOMIZED, randomness, FAIL),
        (DEPENDS_ON_BATCH, batch_independence, FAIL),
        (DEPENDS_ON_BATCH, randomness, PASS),
        (FAILS_IN_DOUBLE, finite_differences, PASS),
        (REFUSES_DOUBLE, finite_differences, PASS),
    ],
)
def test_checks_of_a_model(model: nn.Module, check: Check, verdict: str) -> None:
    flag = check(plane_context(model))
    assert flag.verdict == verdict
    if model in (FAILS_IN_DOUBLE, REFUSES_DOUBLE):
        assert flag.found.endswith("float32")


def test_otad_passes_the_checks_of_its_gradients_and_answers() -> None:
    model, x, y = two_sides()
    context = context_of(model, x, y, L2(0.2, bounds=(-1.0, 1.0)))
    for check in (finite_differences, batch_independence, randomness):
        assert check(context).verdict == PASS
    changes = neighbor_changes(context)
    moved = context.threat.surface(context.sample()[0], context.generator(changes.name))
    ends = context.sample()[0], moved
    before, after = (model.neighbors(points).indices.sort(1).values for points in ends)
    share = (before != after).any(1).double().mean()
    assert changes.found.startswith(f"for {share:.0%} of")


def test_a_wrong_certificate_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = two_sides()
    options = {"attacks": [Straight(points=3)], "flags": False}
    assert evaluate(model, x, y, L2(0.3), **options).is_sound  # type: ignore[arg-type]
    honest = certificate_check.certify

    def boastful(*arguments: object, **named: object) -> Certificate:
        found = honest(*arguments, **named)  # type: ignore[arg-type]
        return replace(found, radius=found.radius + 0.2)

    monkeypatch.setattr(certificate_check, "certify", boastful)
    record = evaluate(model, x, y, L2(0.3), **options)  # type: ignore[arg-type]
    assert not record.is_sound
    (flag,) = record.flags
    assert flag.verdict == FAIL
    assert "within its certified radius" in flag.found


def test_the_check_of_certificates_is_strict_to_the_last_digit() -> None:
    certificate = CertificateRecord((), (), (), ())
    record = record_of("white-box", (3,), (3,))
    for radius, verdict in ((0.4, PASS), (0.4 + 1e-15, FAIL)):
        one = replace(certificate, radius=(radius,) * 40)
        flag = certificate_holds(plane_context(records=(record,), certificate=one))
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


def k_nn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    return MajorityKnn(model).eval(), x, y


@pytest.mark.parametrize(
    "make",
    [
        two_sides,
        lambda: k_nn(*two_sides()),
        lambda: in_double("local"),
        lambda: in_double("global"),
        lambda: (stairs(), *two_colors(40, 2)),
        lambda: (lifted_stairs(), *two_colors(40, 2)),
        lambda: k_nn(stairs(), *two_colors(40, 2)),
    ],
    ids=["local", "knn", "local 64", "global 64", "global", "lifted", "knn of global"],
)
def test_a_planted_weakness_is_found_by_attacks_that_know_the_bank(make: Any) -> None:
    model, x, y = make()
    ball = L2(0.1, (-1.0 if float(x.min()) < 0 else 0.0, 1.0))
    soft = SoftKnn(temperatures=(0.1,), targets=1, steps=5)
    knowing, blind = (Straight(points=2, shares=(1.0, 0.5)), soft), (RandomNoise(draws=1),)
    for attacks, verdict in ((knowing, PASS), (blind, FAIL)):
        context = context_of(model, x, y, ball, attacks=attacks)
        assert planted_example(context).verdict == verdict
    assert planted_example(plane_context(attacks=(Walk(),))).verdict == NOT_RUN


def test_rows_only_black_box_attacks_break_are_counted_where_both_tried() -> None:
    everyone = tuple(range(40))

    def verdict(*records: object) -> Flag:
        return white_box_is_strongest(plane_context(records=records))

    white = record_of("white-box", everyone, (1,))
    assert verdict(white, record_of("black-box", (2, 3), (2,))).verdict == FAIL
    assert verdict(white, record_of("random", everyone, (1,))).verdict == PASS
    # Rows 2 and 3 fell first, so nobody knows what the white-box attack would have done.
    spared = verdict(record_of("random", everyone, (2, 3)), record_of("adaptive", (1, 4), (1,)))
    assert spared.verdict == PASS
    assert "2 times the white-box attacks skipped" in spared.found
    assert verdict(white).verdict == NOT_RUN


@dataclass(frozen=True)
class Tiring(Attack):
    """Breaks fewer rows the more it is given."""

    steps: int = 10
    restarts: int = 1
    name = "tiring"
    family = "white-box"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        share = min(1.0, (10 / self.steps * 0.4 / ball.eps) ** 2 / self.restarts)
        return x + share * ball.eps * (1 - 2 * target.y)[:, None] * torch.tensor([1.0, 0.0, 0.0])


def test_attacks_that_get_weaker_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    context = plane_context()
    for check in (more_steps, more_restarts, more_eps):
        assert check(context).verdict == PASS
    monkeypatch.setattr(strength_flags, "make_attack", lambda *_, **__: Tiring())
    for check in (more_steps, more_restarts, more_eps):
        assert check(context).verdict == FAIL


class Shy(Slope):
    """Has no answer for some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(x[:, 1] > 0, torch.nan)


def test_abstentions_do_not_hide_that_attacks_get_weaker(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = plane_data()
    context = context_of(Shy().eval(), x, Slope()(x).detach(), L2(0.3))
    assert more_steps(context).verdict == PASS
    monkeypatch.setattr(strength_flags, "make_attack", lambda *_, **__: Tiring())
    flag = more_steps(context)
    assert flag.verdict == FAIL
    assert "inf" not in flag.found


def test_attacks_that_fail_with_everything_allowed_are_flagged() -> None:
    assert large_eps(plane_context(attacks=(Walk(),))).verdict == PASS
    assert large_eps(plane_context(attacks=(Walk((0.0, 1.0, 0.0)),))).verdict == FAIL
    assert large_eps(plane_context(attacks=(Blind(),))).verdict == NOT_RUN


def test_a_regression_runs_the_flags_that_make_sense() -> None:
    x, _ = plane_data()
    context = context_of(Slope().eval(), x, 2 * x[:, 0] - 0.5, L2(0.3), attacks=(Walk(),))
    flags = {flag.name: flag.verdict for flag in (check(context) for check in CHECKS)}
    assert FAIL not in flags.values()
    assert flags["more steps never help the defense"] == PASS
    assert flags["gradients agree with finite differences"] == PASS
    assert flags["a large eps drives accuracy to chance"] == NOT_RUN


def test_remarks_of_an_attack_are_shown() -> None:
    flag = remark_flag("autoattack", ["zero gradients", "few classes"])
    assert flag.verdict == FAIL
    assert flag.found == "zero gradients few classes"


def test_nothing_is_claimed_where_no_example_is_right() -> None:
    x, _ = plane_data()
    context = context_of(Plane().eval(), x, (x[:, 0] <= 0).long(), L2(0.1), attacks=(Walk(),))
    assert PASS not in {check(context).verdict for check in CHECKS}
