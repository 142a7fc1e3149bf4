"""Square Attack by its library: in the ball, every query known by its example, no side effects."""

from __future__ import annotations

import sys

import pytest
import torch
from attacks.linear_models import (
    DUAL,
    AbstainsAbove,
    Linear,
    Recorder,
    assert_legal,
    global_randomness,
    halving_ball,
    inner_points,
)
from torch import Tensor, nn

from otad.attacks import L2, Linf, LpBall
from otad.attacks.square import Square, windows_misfit
from otad.errors import InputError, MissingExtraError

library = pytest.importorskip("pyautoattack.square", reason="needs the extra attacks")
SHAPE = (1, 10, 10)
BALLS = [L2(0.3, (0.0, 1.0)), Linf(0.03, (0.0, 1.0))]


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_breaks_what_can_be_broken_with_ease_and_nothing_that_cannot(
    kind: type[LpBall], loss: str, generator: torch.Generator
) -> None:
    model, x = Linear(SHAPE), inner_points(40, SHAPE)
    y, radius = model(x).argmax(1), model.radius(x, DUAL[kind.norm])
    ball = halving_ball(kind, model, x, bounds=(0.0, 1.0))
    result = Square(queries=150, loss=loss)(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert int((radius < 0.3 * ball.eps).sum()) > 5
    assert int((radius > ball.eps).sum()) > 2
    assert bool(result.broken[radius < 0.3 * ball.eps].all())
    assert not bool(result.broken[radius > ball.eps].any())
    assert int(result.forwards.max()) == 150 + 2  # and the first and last answer of every attack
    assert int(result.backwards.max()) == 0


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_each_query_is_counted_for_its_example(ball: LpBall, generator: torch.Generator) -> None:
    x = inner_points(30, SHAPE)
    model = Recorder(Linear(SHAPE))
    y = model(x).argmax(1)
    model.asked.clear()
    apart = torch.cdist(x.flatten(1), x.flatten(1)).fill_diagonal_(torch.inf).amin()
    assert float(apart) > 2 * 0.3  # the nearest example is the one that was attacked
    result = Square(queries=50, restarts=2)(model, x, y, ball, generator=generator)
    assert torch.equal(result.forwards, model.counts(x))
    assert result.forwards.unique().numel() > 3  # some broke early
    assert int(result.forwards.max()) == 2 * 50 + 2


def test_one_left_standing_is_attacked_alone(generator: torch.Generator) -> None:
    model, x = Linear(SHAPE), inner_points(40, SHAPE)
    order = model.radius(x, 2.0).argsort()
    x = x[order[[0, 1, -1]]]
    ball = L2(float(model.radius(x, 2.0)[-1]) * 0.9, (0.0, 1.0))
    result = Square(queries=40)(model, x, model(x).argmax(1), ball, generator=generator)
    assert result.broken.tolist() == [True, True, False]


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_other_bounds_are_the_same_attack_in_another_unit(ball: LpBall) -> None:
    model, x = Linear(SHAPE).double(), inner_points(12, SHAPE).double()
    y = model(x).argmax(1)

    class Stretched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model((x + 2) / 5)

    wide = type(ball)(5 * ball.eps, (-2.0, 3.0))
    attack = Square(queries=30)
    here = attack(model, x, y, ball, generator=torch.Generator().manual_seed(1))
    there = attack(
        Stretched().eval(), 5 * x - 2, y, wide, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(here.broken, there.broken)
    torch.testing.assert_close((there.inputs + 2) / 5, here.inputs)


def test_all_randomness_comes_from_the_generator_and_none_leaks() -> None:
    model, x = Linear(SHAPE), inner_points(10, SHAPE)
    y = model(x).argmax(1)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return Square(queries=30)(model, x, y, BALLS[0], generator=generator).inputs

    before = global_randomness()
    first = attacked(3)
    assert global_randomness() == before
    torch.rand(1)  # the global state plays no part
    assert torch.equal(attacked(3), first)
    assert not torch.equal(attacked(4), first)


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_a_regression_is_driven_towards_the_largest_error(
    ball: LpBall, generator: torch.Generator
) -> None:
    model, x = Linear(SHAPE, outputs=1), inner_points(8, SHAPE)
    y = model(x).detach()
    largest = ball.eps * float(torch.linalg.vector_norm(model.weight.detach(), DUAL[ball.norm]))
    result = Square(queries=200)(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert 0.3 * largest < float(result.gain.min())
    assert float(result.gain.max()) <= largest * 1.001
    assert not bool(result.broken.any())


@pytest.mark.parametrize("loss", ["margin", "ce"])
def test_an_abstention_is_a_success(loss: str, generator: torch.Generator) -> None:
    x = inner_points(6, SHAPE)
    y = torch.zeros(6, dtype=torch.int64)
    ball = Linf(0.2, (0.0, 1.0))
    attack = Square(queries=150, loss=loss)
    result = attack(AbstainsAbove(0.55), x, y, ball, generator=generator)
    assert bool(result.broken.all())
    assert bool(result.abstained.all())


def test_the_sizes_refused_are_those_the_library_fails_on() -> None:
    """Its first l2 step, tried with every size: it raises exactly where we refuse."""

    def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones(len(units)), torch.zeros(len(units))

    for height, width in [(n, n) for n in range(1, 33)] + [(28, w) for w in range(24, 36)]:
        engine = library.SquareAttack(None, norm="L2", n_queries=1, eps=0.1)
        engine.margin_and_loss = judge
        x = torch.rand(2, 1, height, width)
        engine.init_hyperparam(x)
        try:
            engine.attack_single_run(x, torch.arange(2))
            works = True
        except (RuntimeError, ZeroDivisionError):
            works = False
        allowed = windows_misfit(x.shape[1:], BALLS[0]) is None
        assert works == allowed, (height, width)


@pytest.mark.parametrize(
    ("shape", "ball", "message"),
    [
        ((5,), Linf(0.1, (0.0, 1.0)), r"square.*images.*\(5,\)"),
        (SHAPE, Linf(0.1), "square.*bounds"),
        (SHAPE, Linf(0.1, (0.0, 1.0), scale=torch.ones(SHAPE)), "square.*scale"),
        (SHAPE, L2(0.1, (0.0, 1.0), mutable=torch.ones(SHAPE) > 0), "square.*mutable"),
        ((1, 14, 14), L2(0.1, (0.0, 1.0)), "got 14 x 14; random_search"),
    ],
)
def test_refusals(
    shape: tuple[int, ...], ball: LpBall, message: str, generator: torch.Generator
) -> None:
    model, x = Linear(shape), inner_points(2, shape)
    with pytest.raises(InputError, match=message):
        Square()(model, x, model(x).argmax(1), ball, generator=generator)


def test_settings_are_checked() -> None:
    for wrong in ({"queries": 1}, {"restarts": 0}, {"loss": "dlr"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Square(**wrong)  # type: ignore[arg-type]


def test_without_the_library_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack.square", None)
    model, x = Linear(SHAPE), inner_points(2, SHAPE)
    with pytest.raises(MissingExtraError, match=r"otad\[attacks\]"):
        Square()(model, x, model(x).argmax(1), BALLS[0], generator=generator)
