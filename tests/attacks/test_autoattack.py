"""AutoAttack by its library: exact on linear models, its warnings kept, no side effects."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from attacks import linear_models as models
from torch import Tensor, nn

from otad.attacks import L2, Linf
from otad.attacks.library_attacks import AutoAttackSuite, Square
from otad.attacks.needs import Setting
from otad.errors import InputError

square = pytest.importorskip("pyautoattack.square", reason="needs the extra attacks")
SHAPE, LARGER = (1, 6, 6), (1, 10, 10)
UNIT = (0.0, 1.0)
FAST = AutoAttackSuite("custom", ("apgd-ce",))


@pytest.mark.parametrize(("kind", "part"), [(L2, "apgd-t"), (Linf, "fab-t")])
def test_breaks_a_linear_model_exactly_where_it_can_be_broken(kind, part, generator) -> None:
    model, x = models.Linear(SHAPE, outputs=4), models.inner_points(15, SHAPE)
    y, radius = model(x).argmax(1), model.radius(x, models.DUAL[kind.norm])
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    result = AutoAttackSuite("custom", (part,))(model, x, y, ball, generator=generator)
    models.assert_legal(result.inputs, x, ball)
    clear = (radius / ball.eps - 1).abs() > 0.03
    assert bool((radius > ball.eps)[clear].any())
    assert torch.equal(result.broken[clear], (radius < ball.eps)[clear])


def test_the_standard_version_runs_in_other_bounds_and_double_precision(generator) -> None:
    linear = models.Linear(SHAPE, outputs=10).double()

    def stretched(x: Tensor) -> Tensor:
        assert x.dtype == torch.float64
        return linear((x + 1) / 2)

    x = models.inner_points(6, SHAPE).double()
    y, radius = linear(x).argmax(1), linear.radius(x, 2.0)
    ball = L2(2.2 * float(radius.max()), (-1.0, 1.0))  # one unit is two here
    attack = AutoAttackSuite()
    result = attack(models.Function(stretched), 2 * x - 1, y, ball, generator=generator)
    models.assert_legal(result.inputs, 2 * x - 1, ball)
    assert bool(result.broken.all())
    assert attack.remarks == []


def test_queries_are_right_in_total(generator) -> None:
    x = models.inner_points(7, SHAPE)
    model = models.Recorder(models.Linear(SHAPE, outputs=3))
    y = model(x).argmax(1)
    model.asked.clear()
    attack = AutoAttackSuite("custom", ("fab", "square"))
    result = attack(model, x, y, L2(0.2, UNIT), generator=generator)
    assert int(result.forwards.sum()) == sum(len(batch) for batch in model.asked)
    assert int(result.backwards.sum()) == model.gradients > 0
    assert int(result.forwards.max() - result.forwards.min()) <= 1


def test_too_few_classes_are_told(generator) -> None:
    model, x = models.Linear(SHAPE), models.inner_points(4, SHAPE)
    attack = AutoAttackSuite()
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)
    assert attack(model, x, model(x).argmax(1), ball, generator=generator).accuracy == 0
    assert attack.remarks == [
        "left out, as there are only 2 classes: apgd-t",
        "1 target classes instead of 9, as there are no more",
    ]
    with pytest.raises(InputError, match="2 classes, got apgd-dlr"):
        AutoAttackSuite("custom", ("apgd-dlr",))(
            model, x, model(x).argmax(1), ball, generator=generator
        )


def flat(model: nn.Module, x: Tensor) -> Tensor:
    """The same logits in steps: right, and without any slope."""
    return model(x).detach() + 0.0 * x.flatten(1).sum(1, keepdim=True)


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits + 0.1 * torch.randn_like(logits)


def dynamic(model: nn.Module, x: Tensor) -> Tensor:
    """Follows a gradient of its own before it answers."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved).sum(), moved)
    return model(x + 0.0 * gradient)


@pytest.mark.parametrize(
    ("answer", "attacks", "expected"),
    [
        (flat, ("apgd-t",), "there are 5 points with zero gradient"),
        (lambda model, x: model(x).detach(), ("apgd-ce",), "the model has no gradient"),
        (noisy, ("apgd-ce",), "randomized defense"),
        (lambda model, x: model(x).softmax(1), ("apgd-ce",), "the output is a probability"),
        (dynamic, ("apgd-ce",), "dynamic defense"),
        (flat, ("apgd-ce", "apgd-t", "square"), "Square Attack has decreased"),
    ],
)
def test_what_the_library_finds_suspicious_is_kept(answer, attacks, expected, generator) -> None:
    linear, x = models.Linear(SHAPE, outputs=4), models.inner_points(5, SHAPE)
    y = linear(x).argmax(1)
    ball = L2(3 * float(linear.radius(x, 2.0).max()), UNIT)
    attack = AutoAttackSuite("custom", attacks)
    attack(models.Function(partial(answer, linear)), x, y, ball, generator=generator)
    assert any(expected in remark for remark in attack.remarks), attack.remarks
    # Nothing of it sticks to the next model.
    FAST(linear, x, y, ball, generator=generator)
    assert FAST.remarks == []


def test_abstentions_are_told(generator) -> None:
    x, y = models.inner_points(3, SHAPE), torch.zeros(3, dtype=torch.int64)
    FAST(models.abstains_above(0.55), x, y, Linf(0.2, UNIT), generator=generator)
    (remark,) = FAST.remarks
    assert remark.startswith("the model abstained on ")


def test_nothing_is_left_behind() -> None:
    model, x = models.Linear(SHAPE, outputs=4), models.inner_points(3, SHAPE)
    y = model(x).argmax(1)
    attack = AutoAttackSuite("custom", ("fab-t",))
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return attack(model, x, y, ball, generator=generator).inputs

    def tracer(*_: object) -> None:
        return None

    before, outer = models.global_randomness(), sys.gettrace()
    sys.settrace(tracer)
    try:
        first = attacked(3)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(outer)
    assert models.global_randomness() == before
    assert model.weight.grad is None
    assert model.weight.requires_grad
    torch.rand(1)  # the global state plays no part
    assert torch.equal(attacked(3), first)


def test_regressions_are_refused(generator) -> None:
    model, x = models.Linear(SHAPE, outputs=1), models.inner_points(2, SHAPE)
    with pytest.raises(InputError, match=r"autoattack.*regression"):
        FAST(model, x, model(x).detach(), L2(0.1, UNIT), generator=generator)


BALLS = [L2(0.3, (0.0, 1.0)), Linf(0.03, (0.0, 1.0))]


def test_one_left_standing_is_attacked_alone(generator) -> None:
    model, x = models.Linear(LARGER), models.inner_points(40, LARGER)
    order = model.radius(x, 2.0).argsort()
    x = x[order[[0, 1, -1]]]
    ball = L2(float(model.radius(x, 2.0)[-1]) * 0.9, (0.0, 1.0))
    result = Square(queries=40)(model, x, model(x).argmax(1), ball, generator=generator)
    assert result.broken.tolist() == [True, True, False]


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_other_bounds_are_the_same_attack_in_another_unit(ball) -> None:
    model, x = models.Linear(LARGER).double(), models.inner_points(12, LARGER).double()
    y = model(x).argmax(1)
    wide = type(ball)(5 * ball.eps, (-2.0, 3.0))
    attack, stretched = Square(queries=30), models.Function(lambda x: model((x + 2) / 5))
    here = attack(model, x, y, ball, generator=torch.Generator().manual_seed(1))
    there = attack(stretched, 5 * x - 2, y, wide, generator=torch.Generator().manual_seed(1))
    assert torch.equal(here.broken, there.broken)
    torch.testing.assert_close((there.inputs + 2) / 5, here.inputs)


def test_the_sizes_refused_are_those_the_library_fails_on() -> None:
    """Its first l2 step, tried with every size: it raises exactly where we refuse."""

    def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones(len(units)), torch.zeros(len(units))

    for height, width in [(n, n) for n in range(1, 33)] + [(28, w) for w in range(24, 36)]:
        engine = square.SquareAttack(None, norm="L2", n_queries=1, eps=0.1)
        engine.margin_and_loss = judge
        x = torch.rand(2, 1, height, width)
        engine.init_hyperparam(x)
        try:
            engine.attack_single_run(x, torch.arange(2))
            works = True
        except (RuntimeError, ZeroDivisionError):
            works = False
        allowed = Square.needs.unmet_in(Setting(x.shape[1:], "classification", BALLS[0])) is None
        assert works == allowed, (height, width)
