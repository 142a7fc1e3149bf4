"""Gradient attacks on linear models in a box, where the distance to another answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attacks.linear_models import Linear, assert_legal, run
from torch import Tensor

from otad.attacks import Apgd, Attack, Pgd
from otad.evaluate.suite import PRESETS
from otad.threat import L2, Linf, LpBall

SHAPE = (30,)


def distance_in_box(kind: type[LpBall], gap: Tensor, slope: Tensor, x: Tensor) -> Tensor:
    """The least change (B,) of x (B,d) within [0, 1] that raises a linear function by `gap` (B,).

    A feature with slope s (B,d) moves by min(level |s|, room) in l2, and by min(level, room) in
    l-infinity. The level is found by bisection."""
    room = torch.where(slope > 0, 1 - x, x)
    pace = slope.abs() if kind is L2 else torch.ones_like(slope)
    low, high = torch.zeros_like(gap), torch.full_like(gap, 1e6)
    for _ in range(100):
        middle = (low + high) / 2
        enough = (torch.minimum(middle[:, None] * pace, room) * slope.abs()).sum(1) >= gap
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    steps = torch.minimum(high[:, None] * pace, room)
    reached = (steps * slope.abs()).sum(1) >= gap * (1 - 1e-9)
    order = 2.0 if kind is L2 else torch.inf
    return torch.linalg.vector_norm(steps, order, dim=1).masked_fill(~reached, torch.inf)


@torch.no_grad()
def distances_to_classes(kind: type[LpBall], model: Linear, x: Tensor) -> Tensor:
    """The distance (B,C) of x (B,d) to each other answer, infinite for its own."""
    logits, weights = model(x), model.weight.to(x)
    y = logits.argmax(1)
    gaps = logits.gather(1, y[:, None]) - logits
    found = [
        distance_in_box(kind, gaps[:, c], weights[c] - weights[y], x) for c in range(len(weights))
    ]
    return torch.stack(found, 1).scatter(1, y[:, None], torch.inf)


def points_in_box(count: int) -> Tensor:
    """A third of the features are at a bound, so the box cuts most steps."""
    drawn = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(3)).double()
    return (1.5 * drawn - 0.25).clamp(0, 1)


def assert_breaks_at(
    distances: Tensor, attack: Attack, model: Linear, x: Tensor, kind: type[LpBall]
) -> None:
    """Each of x (B,d) alone: broken at 1.001 times its distance (B,), not at 0.999 times."""
    for one, distance in zip(x.split(1), distances.tolist(), strict=True):
        assert run(attack, model, one, kind(1.001 * distance, (0.0, 1.0))).accuracy == 0
        assert run(attack, model, one, kind(0.999 * distance, (0.0, 1.0))).accuracy == 1


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_shorter_change_grows_as_much_as_the_furthest_point(kind, dtype, generator) -> None:
    """Also where the gradient is large in features that cannot follow it."""
    x = points_in_box(12).to(dtype)
    gradient = torch.randn(x.shape, generator=generator, dtype=dtype)
    gradient = torch.where((x == 0) & (gradient < 0), 100 * gradient, gradient)
    ball = kind(0.3, (0.0, 1.0))
    moved = ball.furthest(gradient, x)
    assert_legal(moved, x, ball)
    gained = ((moved - x) * gradient).double().sum(1)
    needed = distance_in_box(kind, gained, gradient.double(), x.double())
    torch.testing.assert_close(needed, torch.full_like(needed, 0.3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [L2, Linf])
def test_two_classes_break_just_beyond_their_distance(kind) -> None:
    """By the PGD of the preset "quick", from a random start."""
    model, x = Linear(SHAPE), points_in_box(12)
    distances = distances_to_classes(kind, model, x).amin(1)
    quick = next(one.options for one in PRESETS["quick"] if one.name == "pgd")
    assert_breaks_at(distances, Pgd(**quick), model, x, kind)


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize("attack", [Pgd(steps=10, targets=9), Apgd(steps=20, targets=9)])
def test_the_nearest_class_is_found_where_another_has_a_higher_logit(kind, attack) -> None:
    model, x = Linear(SHAPE, 10), points_in_box(40)
    model.weight.data *= torch.linspace(0.3, 3.0, 10)[:, None]
    distances, nearest = distances_to_classes(kind, model, x).min(1)
    hidden = nearest != model(x).topk(2).indices[:, 1]
    distances, x = distances[hidden], x[hidden]
    assert_breaks_at(distances, attack, model, x, kind)
    with pytest.raises(AssertionError):  # other ascents end at the class of the higher logit
        assert_breaks_at(distances, replace(attack, targets=0), model, x, kind)
