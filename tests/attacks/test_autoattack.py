"""AutoAttack by its library: exact on linear models, its warnings kept, no side effects."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from attacks import linear_models as models
from attacks.linear_models import inner_points, run
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
def test_breaks_a_linear_model_exactly_where_it_can_be_broken(kind, part) -> None:
    model, x = models.Linear(SHAPE, outputs=4), inner_points(15, SHAPE)
    radius = model.radius(x, models.DUAL[kind.norm])
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    result = run(AutoAttackSuite("custom", (part,)), model, x, ball)
    models.assert_legal(result.inputs, x, ball)
    clear = (radius / ball.eps - 1).abs() > 0.03
    assert bool((radius > ball.eps)[clear].any())
    assert torch.equal(result.broken[clear], (radius < ball.eps)[clear])


def test_the_standard_version_runs_in_other_bounds_and_double_precision() -> None:
    linear = models.Linear(SHAPE, outputs=10).double()

    def stretched(x: Tensor) -> Tensor:
        assert x.dtype == torch.float64
        return linear((x + 1) / 2)

    x = inner_points(6, SHAPE).double()
    ball = L2(2.2 * float(linear.radius(x, 2.0).max()), (-1.0, 1.0))  # one unit is two here
    attack = AutoAttackSuite()
    result = run(attack, models.Function(stretched), 2 * x - 1, ball)
    models.assert_legal(result.inputs, 2 * x - 1, ball)
    assert bool(result.broken.all())
    assert attack.remarks == []


def test_queries_are_right_in_total() -> None:
    x, linear = inner_points(7, SHAPE), models.Linear(SHAPE, outputs=3)
    model, attack = models.Recorder(linear), AutoAttackSuite("custom", ("fab", "square"))
    result = run(attack, model, x, L2(0.4, UNIT), linear(x).argmax(1))
    assert int(result.forwards.sum()) == sum(len(batch) for batch in model.asked)
    assert int(result.backwards.sum()) == model.gradients > 0
    assert int(result.forwards.max() - result.forwards.min()) <= 1


def test_too_few_classes_are_reported() -> None:
    model, x = models.Linear(SHAPE), inner_points(4, SHAPE)
    attack = AutoAttackSuite()
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)
    assert run(attack, model, x, ball).accuracy == 0
    assert attack.remarks == [
        "left out, as there are only 2 classes: apgd-t",
        "1 target classes instead of 9, as there are no more",
    ]
    with pytest.raises(InputError, match="2 classes, got apgd-dlr"):
        run(AutoAttackSuite("custom", ("apgd-dlr",)), model, x, ball)


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
def test_what_the_library_finds_suspicious_is_reported(answer, attacks, expected) -> None:
    linear, x = models.Linear(SHAPE, outputs=4), inner_points(5, SHAPE)
    y = linear(x).argmax(1)
    ball = L2(3 * float(linear.radius(x, 2.0).max()), UNIT)
    attack = AutoAttackSuite("custom", attacks)
    run(attack, models.Function(partial(answer, linear)), x, ball, y)
    assert any(expected in remark for remark in attack.remarks), attack.remarks
    # Nothing of it sticks to the next model.
    run(FAST, linear, x, ball, y)
    assert FAST.remarks == []


def test_abstentions_are_reported() -> None:
    x, y = inner_points(3, SHAPE), torch.zeros(3, dtype=torch.int64)
    run(FAST, models.abstains_above(0.55), x, Linf(0.2, UNIT), y)
    (remark,) = FAST.remarks
    assert remark.startswith("the model abstained on ")


def test_nothing_is_left_behind() -> None:
    model, x = models.Linear(SHAPE, outputs=4), inner_points(3, SHAPE)
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)

    def tracer(*_: object) -> None:
        return None

    outer = sys.gettrace()
    sys.settrace(tracer)
    try:
        run(AutoAttackSuite("custom", ("fab-t",)), model, x, ball)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(outer)
    assert model.weight.grad is None
    assert model.weight.requires_grad


def test_regressions_are_refused() -> None:
    with pytest.raises(InputError, match=r"autoattack.*regression"):
        run(FAST, models.Linear(SHAPE, outputs=1), inner_points(2, SHAPE), L2(0.1, UNIT))


BALLS = [L2(0.3, UNIT), Linf(0.03, UNIT)]


def test_one_survivor_is_attacked_alone() -> None:
    model, x = models.Linear(LARGER), inner_points(40, LARGER)
    x = x[model.radius(x, 2.0).argsort()[[0, 1, -1]]]
    ball = L2(float(model.radius(x, 2.0)[-1]) * 0.9, UNIT)
    assert run(Square(queries=40), model, x, ball).broken.tolist() == [True, True, False]


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_other_bounds_are_the_same_attack_in_another_unit(ball) -> None:
    model, x = models.Linear(LARGER).double(), inner_points(12, LARGER).double()
    wide = type(ball)(5 * ball.eps, (-2.0, 3.0))
    attack, stretched = Square(queries=30), models.Function(lambda x: model((x + 2) / 5))
    here, there = run(attack, model, x, ball), run(attack, stretched, 5 * x - 2, wide)
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
