"""Every flag is raised by what it is for, and only by that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from evaluate.small import (
    Blind,
    Plane,
    Slope,
    Walk,
    context_of,
    plane_data,
    record_of,
    two_sides,
)
from torch import Tensor, nn

from otad.attacks import L2, Attack, Linf, LpBall
from otad.attacks.adaptive import SoftKnn, Straight
from otad.attacks.base import Target
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomNoise
from otad.baselines import MajorityKnn
from otad.certify import Certificate
from otad.evaluate import Evaluation, Flag, certificate_check, evaluate, strength_flags
from otad.evaluate.certificate_check import certificate_holds, prove
from otad.evaluate.flags import CHECKS, FlagContext, remark_flag
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
from otad.model.otad import OTAD

CERTAIN = (1e6,) * 40


def plane_context(model: nn.Module | None = None, **options: Any) -> FlagContext:
    x, y = plane_data()
    return context_of((model or Plane()).eval(), x, y, L2(0.4), **options)


def verdicts(record: Evaluation) -> dict[str, str]:
    return {flag.name: flag.verdict for flag in record.flags}


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


def test_gradients_of_another_function_are_flagged() -> None:
    context = plane_context(OPPOSITE_GRADIENT)
    assert finite_differences(context).verdict == FAIL
    assert gradient_share(context).verdict == PASS


@pytest.mark.parametrize("model", [FAILS_IN_DOUBLE, REFUSES_DOUBLE], ids=["fails", "refuses"])
def test_a_model_that_insists_on_float32_is_compared_in_float32(model: nn.Module) -> None:
    found = finite_differences(plane_context(model))
    assert found.verdict == PASS
    assert found.found.endswith("float32")


def test_a_randomized_model_is_flagged() -> None:
    x, y = plane_data()
    record = evaluate(RANDOMIZED, x, y, L2(0.4), attacks=[Walk()])
    assert verdicts(record)["the model is not randomized"] == FAIL


def test_a_model_that_looks_at_the_whole_batch_is_flagged() -> None:
    context = plane_context(DEPENDS_ON_BATCH)
    assert batch_independence(context).verdict == FAIL
    assert randomness(context).verdict == PASS


def test_otad_passes_the_checks_of_its_gradients_and_answers() -> None:
    model, x, y = two_sides()
    context = context_of(model, x, y, L2(0.2, bounds=(-1.0, 1.0)))
    for check in (finite_differences, batch_independence, randomness):
        assert check(context).verdict == PASS
    changes = neighbor_changes(context)
    moved = context.threat.surface(context.sample()[0], context.generator(changes.name))
    before, after = (
        model.neighbors(points).indices.sort(1).values for points in (context.sample()[0], moved)
    )
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
    certificate = CertificateRecord(CERTAIN, (), (), (), 0.0)
    record = record_of("white-box", (3,), (3,))
    for radius, verdict in ((0.4, PASS), (0.4 + 1e-15, FAIL)):
        one = replace(certificate, radius=(radius,) * 40)
        assert (
            certificate_holds(plane_context(records=(record,), certificate=one)).verdict == verdict
        )
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


@pytest.mark.parametrize("scope", ["local", "global"])
def test_weaknesses_are_planted_in_double_precision_too(scope: str) -> None:
    model, x, y = two_sides()
    twin = OTAD(model.backbone, model.bank, n_neighbors=3, smoothness=1.5, scope=scope).double()
    context = context_of(twin.eval(), x.double(), y, L2(0.2), attacks=(Straight(points=8),))
    assert planted_example(context).verdict == PASS


@pytest.mark.parametrize("rule", ["otad", "knn"])
def test_a_planted_weakness_is_found_by_attacks_that_know_the_bank(rule: str) -> None:
    otad, x, y = two_sides()
    model = otad if rule == "otad" else MajorityKnn(otad).eval()
    soft = SoftKnn(temperatures=(0.1,), targets=1, steps=5)
    for attacks, verdict in (
        ((Straight(points=2, shares=(1.0,)), soft), PASS),
        ((RandomNoise(draws=1),), FAIL),
    ):
        context = context_of(model, x, y, L2(0.1), attacks=attacks)
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
    raised = [check(context) for check in CHECKS]
    flags = {flag.name: flag.verdict for flag in raised}
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
