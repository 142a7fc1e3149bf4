"""AutoAttack by its library: exact on linear models, its warnings kept, no side effects."""

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
from otad.attacks.autoattack import AutoAttackSuite
from otad.errors import InputError

pytest.importorskip("pyautoattack", reason="needs the extra attacks")
SHAPE = (1, 6, 6)
UNIT = (0.0, 1.0)
FAST = AutoAttackSuite("custom", ("apgd-ce",))


@pytest.mark.parametrize(("kind", "part"), [(L2, "apgd-t"), (Linf, "fab-t")])
def test_breaks_a_linear_model_exactly_where_it_can_be_broken(
    kind: type[LpBall], part: str, generator: torch.Generator
) -> None:
    model, x = Linear(SHAPE, outputs=4), inner_points(15, SHAPE)
    y, radius = model(x).argmax(1), model.radius(x, DUAL[kind.norm])
    ball = halving_ball(kind, model, x, bounds=UNIT)
    result = AutoAttackSuite("custom", (part,))(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    clear = (radius / ball.eps - 1).abs() > 0.03
    assert bool((radius > ball.eps)[clear].any())
    assert torch.equal(result.broken[clear], (radius < ball.eps)[clear])


def test_the_standard_version_runs_in_other_bounds_and_double_precision(
    generator: torch.Generator,
) -> None:
    linear = Linear(SHAPE, outputs=10).double()

    class Stretched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float64
            return linear((x + 1) / 2)

    x = inner_points(6, SHAPE).double()
    y, radius = linear(x).argmax(1), linear.radius(x, 2.0)
    ball = L2(2.2 * float(radius.max()), (-1.0, 1.0))  # one unit is two here
    attack = AutoAttackSuite()
    result = attack(Stretched().eval(), 2 * x - 1, y, ball, generator=generator)
    assert_legal(result.inputs, 2 * x - 1, ball)
    assert bool(result.broken.all())
    assert attack.remarks == []


def test_queries_are_right_in_total(generator: torch.Generator) -> None:
    x = inner_points(7, SHAPE)
    model = Recorder(Linear(SHAPE, outputs=3))
    y = model(x).argmax(1)
    model.asked.clear()
    attack = AutoAttackSuite("custom", ("fab", "square"))
    result = attack(model, x, y, L2(0.2, UNIT), generator=generator)
    assert int(result.forwards.sum()) == sum(len(batch) for batch in model.asked)
    assert int(result.backwards.sum()) == model.gradients > 0
    assert int(result.forwards.max() - result.forwards.min()) <= 1


def test_too_few_classes_are_told(generator: torch.Generator) -> None:
    model, x = Linear(SHAPE), inner_points(4, SHAPE)
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


class Flat(nn.Module):
    """The same logits in steps: right, and without any slope."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).detach() + 0.0 * x.flatten(1).sum(1, keepdim=True)


class Detached(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).detach()


class Noisy(Flat):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits + 0.1 * torch.randn_like(logits)


class Probabilities(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).softmax(1)


class Dynamic(Flat):
    """Follows a gradient of its own before it answers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.model(moved).sum(), moved)
        return self.model(x + 0.0 * gradient)


@pytest.mark.parametrize(
    ("kind", "attacks", "expected"),
    [
        (Flat, ("apgd-t",), "there are 5 points with zero gradient"),
        (Detached, ("apgd-ce",), "the model has no gradient"),
        (Noisy, ("apgd-ce",), "randomized defense"),
        (Probabilities, ("apgd-ce",), "the output is a probability distribution"),
        (Dynamic, ("apgd-ce",), "dynamic defense"),
        (Flat, ("apgd-ce", "apgd-t", "square"), "Square Attack has decreased"),
    ],
)
def test_what_the_library_finds_suspicious_is_kept(
    kind: type[Flat], attacks: tuple[str, ...], expected: str, generator: torch.Generator
) -> None:
    linear, x = Linear(SHAPE, outputs=4), inner_points(5, SHAPE)
    y = linear(x).argmax(1)
    ball = L2(3 * float(linear.radius(x, 2.0).max()), UNIT)
    attack = AutoAttackSuite("custom", attacks)
    attack(kind(linear).eval(), x, y, ball, generator=generator)
    assert any(expected in remark for remark in attack.remarks), attack.remarks
    # Nothing of it sticks to the next model.
    FAST(linear, x, y, ball, generator=generator)
    assert FAST.remarks == []


def test_abstentions_are_told(generator: torch.Generator) -> None:
    x, y = inner_points(3, SHAPE), torch.zeros(3, dtype=torch.int64)
    FAST(AbstainsAbove(0.55), x, y, Linf(0.2, UNIT), generator=generator)
    (remark,) = FAST.remarks
    assert remark.startswith("the model abstained on ")


def test_nothing_is_left_behind() -> None:
    model, x = Linear(SHAPE, outputs=4), inner_points(3, SHAPE)
    y = model(x).argmax(1)
    attack = AutoAttackSuite("custom", ("fab-t",))
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return attack(model, x, y, ball, generator=generator).inputs

    def tracer(*_: object) -> None:
        return None

    before, outer = global_randomness(), sys.gettrace()
    sys.settrace(tracer)
    try:
        first = attacked(3)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(outer)
    assert global_randomness() == before
    assert model.weight.grad is None
    assert model.weight.requires_grad
    torch.rand(1)  # the global state plays no part
    assert torch.equal(attacked(3), first)


def test_regressions_are_refused(generator: torch.Generator) -> None:
    model, x = Linear(SHAPE, outputs=1), inner_points(2, SHAPE)
    with pytest.raises(InputError, match=r"autoattack.*regression"):
        FAST(model, x, model(x).detach(), L2(0.1, UNIT), generator=generator)
