"""What the base promises whatever an attack does: nothing can be claimed that was not measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attacks.linear_models import Function, abstains_above
from torch import Tensor, nn

import otad.attacks.adaptive  # noqa: F401  (registers the attacks)
from otad.attacks import ATTACKS
from otad.attacks.base import Attack, AttackResult
from otad.attacks.target import Survivors, Target, gain_of
from otad.errors import InputError
from otad.threat import L2, Linf, LpBall

Script = Callable[[Target, Tensor, LpBall], Tensor]


@dataclass(frozen=True, eq=False)
class Scripted(Attack):
    """Returns whatever a function makes of its arguments."""

    script: Script
    name = "scripted"
    family = "random"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return self.script(target, x, ball)


# Two classes by the sign of the first feature, with logits (-x_0, x_0); a regressor.
SIGN = Function(lambda x: x.flatten(1)[:, :1] * torch.tensor([-1.0, 1.0]))
FIRST = Function(lambda x: x[:, 0])
X = torch.tensor([[0.5, 0.0], [2.0, 0.0], [-1.0, 0.0]])
Y = torch.tensor([1, 1, 1])


def attack(
    script: Script, x: Tensor, y: Tensor, ball: LpBall, model: nn.Module = SIGN, **options: float
) -> AttackResult:
    return Scripted(script)(model, x, y, ball, generator=torch.Generator(), **options)


def test_results_are_projected_and_measured() -> None:
    """An attack that leaves the ball gets no further than the ball."""
    ball = L2(1.0, mutable=torch.tensor([True, False]))
    result = attack(lambda target, x, ball: x - 100.0, X, Y, ball)
    assert result.broken.tolist() == [True, False, True]
    torch.testing.assert_close(result.inputs, torch.tensor([[-0.5, 0.0], [1.0, 0.0], [-1.0, 0.0]]))
    assert bool((result.distance <= 1).all())
    assert result.distance.dtype == torch.float64
    torch.testing.assert_close(result.gain, torch.tensor([1.0, -2.0, 2.0]))
    assert result.accuracy == pytest.approx(1 / 3)
    assert not result.abstained.any()
    assert result.seconds >= 0


def test_rows_wrong_before_the_attack_are_not_attacked() -> None:
    seen = []

    def script(target: Target, x: Tensor, ball: LpBall) -> Tensor:
        seen.append((x, target.y))
        return x + 0.1

    result = attack(script, X, torch.tensor([1, 0, 0]), L2(1.0))
    ((examples, labels),) = seen
    assert torch.equal(examples, X[[0, 2]])
    assert labels.tolist() == [1, 0]
    assert torch.equal(result.inputs[1], X[1])
    assert result.broken.tolist() == [False, True, False]
    assert result.distance[1] == 0
    assert result.forwards.tolist() == [2, 1, 2]
    assert attack(script, X, torch.tensor([0, 0, 1]), L2(1.0)).accuracy == 0
    assert len(seen) == 1  # nothing to attack


def test_what_gains_nothing_leaves_the_example() -> None:
    y = torch.tensor([1, 1, 0])
    result = attack(lambda target, x, ball: x + 0.2, X, y, L2(1.0))
    assert torch.equal(result.inputs[:2], X[:2])  # moved away from the boundary
    assert not torch.equal(result.inputs[2], X[2])  # moved closer to it
    assert not result.broken.any()
    torch.testing.assert_close(result.gain, gain_of(SIGN(result.inputs), y))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_points_that_are_no_numbers_count_for_nothing_and_are_reported(value) -> None:
    def run(target: Target, x: Tensor, ball: LpBall) -> Tensor:
        return x * 0 + torch.tensor([[value], [0.0]])

    with pytest.warns(UserWarning, match="1 of 2 examples"):
        result = attack(run, X[:2], Y[:2], L2(1e-6))
    assert torch.equal(result.inputs[0], X[0])
    assert not result.broken.any()
    assert result.blind.tolist() == [True, False]


def test_abstention_is_an_answer_that_is_not_right() -> None:
    x, y = torch.tensor([[0.5], [1.5]]), torch.tensor([0, 0])
    result = attack(lambda target, x, ball: x + 1.0, x, y, L2(1.0), abstains_above(1.0))
    assert result.broken.tolist() == [True, True]
    assert result.abstained.tolist() == [True, True]
    assert result.gain.tolist() == [math.inf, math.inf]
    assert result.distance.tolist() == [1.0, 0.0]  # the second abstained unattacked


def test_regression_is_broken_by_its_tolerance() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0.0, -0.4, 2.0])
    free, strict = (
        attack(lambda target, x, ball: x + 1.0, x, y, Linf(0.5), FIRST, **options)
        for options in ({}, {"tolerance": 0.6})
    )
    assert not free.broken.any()  # no error is too large unless one says so
    torch.testing.assert_close(free.gain, torch.tensor([0.5, 0.9, 2.0]))
    assert torch.equal(free.inputs[2], x[2])  # it would have made the error smaller
    assert strict.broken.tolist() == [False, True, True]
    assert strict.forwards.tolist() == [2, 2, 1]


def test_every_query_is_counted() -> None:
    def script(target: Target, x: Tensor, ball: LpBall) -> Tensor:
        rows = torch.tensor([1])
        target(x)
        target(x[rows], rows)
        target.evaluate(x, lambda outputs, y: outputs.sum(1))
        target.evaluate(x[rows], lambda outputs, y: outputs.sum(1), rows)
        return x

    result = attack(script, X, Y, L2(1.0))
    assert result.forwards.tolist() == [1 + 2 + 1, 1 + 4 + 1, 1]
    assert result.backwards.tolist() == [1, 2, 0]


def test_gradient_of_a_loss_and_its_absence() -> None:
    target = Target(SIGN, torch.tensor([1, 0]))
    x = torch.tensor([[0.5, 1.0], [-2.0, 1.0]])
    outputs, value, gradient = target.evaluate(x, lambda outputs, y: outputs[:, 1].square())
    assert torch.equal(outputs, SIGN(x))
    assert value.tolist() == [0.25, 4.0]
    assert gradient.tolist() == [[1.0, 0.0], [-4.0, 0.0]]
    assert not x.requires_grad
    assert not target.evaluate(x, lambda outputs, y: outputs.detach().sum(1)).gradient.any()
    *_, broken = target.evaluate(x, lambda outputs, y: (outputs - outputs).sqrt().sum(1))
    assert not broken.any()  # 0 / 0 is no direction


def test_gain_of() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.5], [0.0, 0.0, -1.0], [math.nan, 1.0, 2.0]])
    assert gain_of(logits, torch.tensor([0, 1, 1])).tolist() == [-0.5, 0.0, math.inf]
    endless = torch.tensor([[math.inf, math.inf], [math.inf, 0.0], [0.0, math.inf]])
    assert gain_of(endless, torch.tensor([0, 0, 0])).tolist() == [0.0, -math.inf, math.inf]
    values = torch.tensor([1.0, -3.0, math.nan])
    assert gain_of(values, torch.tensor([2.0, 1.0, 0.0])).tolist() == [1.0, 4.0, math.inf]


def survivors_of(labels: list[int], features: int = 1) -> Survivors:
    """Of a model whose outputs are its inputs."""
    target = Target(nn.Identity(), torch.tensor(labels))
    return Survivors(target, torch.zeros(len(labels), features), L2(9.0))


def test_judged_by_the_model_remembered_by_gain_and_a_tie_that_breaks_is_better() -> None:
    survivors = survivors_of([0, 0, 1])
    assert survivors.rows.tolist() == [0, 1, 2]
    first = torch.tensor([[2.0, 1.0], [1.0, 3.0], [0.0, 9.0]])
    alive = survivors.judge(torch.full((3, 1), 1.0), first, torch.arange(3))
    assert alive.tolist() == [True, False, True]
    assert survivors.rows.tolist() == [0, 2]
    second = torch.tensor([[0.0, 10.0], [2.0, 1.5]])  # a smaller gain, then a larger one
    survivors.judge(torch.full((2, 1), 2.0), second, torch.tensor([2, 0]))
    assert survivors.inputs.flatten().tolist() == [2.0, 1.0, 1.0]
    # Equal logits have gain 0 both times; the first of the classes is the answer.
    survivors, row = survivors_of([1]), torch.tensor([0])
    for value, logits, left in ((1.0, [0.0, 2.0, 2.0], [0]), (2.0, [2.0, 2.0, 0.0], [])):
        survivors.judge(torch.full((1, 1), value), torch.tensor([logits]), row)
        assert survivors.rows.tolist() == left
    assert float(survivors.inputs) == 2.0


def test_offered_inputs_keep_the_first_of_the_best() -> None:
    """The gain with labels 0 is the second logit less the first."""
    survivors = survivors_of([0, 0, 0], features=2)
    survivors.offer(torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.0, 0.0]]), torch.arange(3))
    assert survivors.rows.tolist() == [1, 2]
    survivors.offer(torch.tensor([[4.0, 0.0], [7.0, 8.0]]), torch.tensor([1, 0]))
    assert survivors.gain.tolist() == [1.0, -4.0, 0.0]
    assert survivors.inputs.tolist() == [[0.0, 1.0], [4.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("x", "y", "ball", "model", "message"),
    [
        (X * math.nan, Y, L2(1.0), SIGN, "x: .*finite"),
        (X.half(), Y, L2(1.0), SIGN, "x: .*float32.*float16"),
        (X[0], Y, L2(1.0), SIGN, "x: .*at least one"),
        (X[:0], Y[:0], L2(1.0), SIGN, "x: .*at least one"),
        (X, Y[:2], L2(1.0), SIGN, r"y: .*\(3,\).*\(2,\)"),
        (X, Y.int(), L2(1.0), SIGN, "y: .*int64.*int32"),
        (X, Y + 1, L2(1.0), SIGN, "y: .*0 to 1.*2"),
        (X, -Y, L2(1.0), SIGN, "y: .*0 to 1.*-1"),
        (X, Y.float(), L2(1.0), SIGN, r"model: .*\(3,\).*\(3, 2\)"),
        (X, Y, L2(1.0, bounds=(0.0, 1.0)), SIGN, r"x: .*\(0.0, 1.0\).*-1.0 to 2.0"),
        (X, Y, L2(1.0, scale=torch.ones(3)), SIGN, r"scale: .*\(2,\).*\(3,\)"),
        (X, Y, L2(1.0), nn.Identity().train(), "model: .*training"),
        (X, Y, L2(1.0), lambda x: x, "model: .*function"),
        (X, Y, L2(1.0), FIRST, r"model: .*\(3, C\).*\(3,\)"),
        (X, Y, L2(1.0), Function(lambda x: x.long()), "model: .*floats.*int64"),
        (X[:2], Y[:2], L2(1.0), SIGN, r"scripted.run: .*\(2, 2\)"),
    ],
)
def test_refusals(x, y, ball, model, message) -> None:
    with pytest.raises(InputError, match=message):
        attack(lambda target, x, ball: x[:1], x, y, ball, model)


def test_an_attack_that_works_in_place_changes_nothing_of_the_callers() -> None:
    x, y = torch.full((3, 2), 0.5), torch.ones(3, dtype=torch.int64)
    found = attack(lambda target, x, ball: x.sub_(10.0), x, y, L2(0.1))
    assert torch.equal(x, torch.full((3, 2), 0.5))
    assert float(found.distance.max()) <= 0.1
    assert not found.broken.any()


ASCENT = [{"steps": 0}, {"restarts": -1}, {"restarts": 2, "random_start": False}]
SIZES = [{"step_size": size} for size in (0.0, -1.0, math.inf, math.nan)]
SIDES = [{"x_dimensions": (0.0, 0.1)}, {"y_dimensions": (0.2, 0.1)}]
REFUSED: dict[str, list[dict[str, Any]]] = {
    "pgd": [*ASCENT, *SIZES, {"loss": "hinge"}, {"targets": -1}],
    "apgd": [*ASCENT, {"loss": "hinge"}, {"targets": 0.5}],
    "metric": [{"random_start": False, "metric": nn.Identity()}],
    "bpda": [{"loss": "squared_error", "network": nn.Identity()}],
    "transfer": [{"starts": 0, "source": nn.Identity()}],
    "soft_knn": [{"temperatures": ()}, {"steps": 0}, {"targets": 0}],
    "straight": [{"shares": (2.0,)}],
    "region": [{"rounds": 0}],
    "pull": [{"classes": 0}, {"steps": 0}],
    "bisector": [{"pairs": 0}],
    "keys": [
        *({name: 0} for name in ("steps", "targets", "restarts")),
        *({"losses": losses} for losses in ((), ("rank", "luck"))),
        {"temperatures": (0.0,)},
    ],
    "noise": [{"draws": 0}],
    "random_search": [{"queries": 1}],
    "square": [{"queries": 1}],
    "ngopt": [{"budget": 0}, {"sigma": 0.0}, {"processes": 0}],
    "pixle": [*SIDES, {"restarts": 0}, {"max_iterations": 0}],
    "autoattack": [
        {"variant": "best"},
        {"attacks": ("square",)},
        *({"attacks": attacks, "variant": "custom"} for attacks in ((), ("pgd",))),
    ],
}


@pytest.mark.parametrize(("attack", "options"), [(a, o) for a in REFUSED for o in REFUSED[a]])
def test_refused_settings(attack, options) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(InputError, match=f"{name}.*{re.escape(str(value).strip('(),'))}"):
        ATTACKS[attack](**options)
