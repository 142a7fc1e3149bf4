"""Square Attack by its library: in the ball, every query known by its example, no side effects."""

from __future__ import annotations

import pytest
import torch
from attacks.linear_models import (
    Linear,
    inner_points,
)
from torch import Tensor, nn

from otad.attacks import L2, Linf, LpBall, Square

library = pytest.importorskip("pyautoattack.square", reason="needs the extra attacks")
SHAPE = (1, 10, 10)
BALLS = [L2(0.3, (0.0, 1.0)), Linf(0.03, (0.0, 1.0))]


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
        allowed = Square.windows_misfit(x.shape[1:], BALLS[0]) is None
        assert works == allowed, (height, width)
