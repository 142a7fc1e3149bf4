"""Pixle: only pixels of the original, within its budget, as strong as another implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attacks.linear_models import (
    AbstainsAbove,
    Linear,
    Recorder,
    assert_legal,
    global_randomness,
    inner_points,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks import L2, Linf, LpBall
from otad.attacks.pixle import Pixle, _most_similar, _spans
from otad.errors import InputError

SHAPE = (3, 9, 7)
EVERYTHING = Linf(1.0, (0.0, 1.0))  # no image of the bounds is outside
QUICK = Pixle(restarts=4, max_iterations=5)


def is_made_of(inputs: Tensor, x: Tensor) -> bool:
    """Whether each pixel of an image, all channels together, is one of the original's."""
    same = (inputs.flatten(2)[:, :, :, None] == x.flatten(2)[:, :, None, :]).all(1)
    return bool(same.any(2).all())


@pytest.mark.parametrize("mapping", ["random", "similarity"])
def test_an_image_is_rearranged_and_nothing_else(mapping: str, generator: torch.Generator) -> None:
    model, x = Linear(SHAPE), inner_points(20, SHAPE)
    attack = Pixle((0.1, 0.4), (0.1, 0.4), mapping, restarts=4, max_iterations=5)
    result = attack(model, x, model(x).argmax(1), EVERYTHING, generator=generator)
    moved = (result.inputs != x).any(1).flatten(1).sum(1)
    assert is_made_of(result.inputs, x)
    assert int(moved.max()) > 1
    # Every restart writes at most one patch, of 4 x 3 pixels here, over what was there before.
    assert int(moved.max()) <= 4 * 4 * 3
    assert bool(result.broken.any())


def test_the_budget_is_kept_and_every_query_counted(generator: torch.Generator) -> None:
    x = inner_points(10, (1, 8, 8))
    model = Recorder(Linear((1, 8, 8)))
    y = model(x).argmax(1)
    model.asked.clear()
    result = QUICK(model, x, y, L2(0.2, (0.0, 1.0)), generator=generator)
    assert torch.equal(result.forwards, model.counts(x))
    assert len(model.asked) == 4 * 5 + 3  # and the image itself, first and last of all attacks
    assert int(result.backwards.max()) == 0


@pytest.mark.parametrize("ball", [L2(0.1, (0.0, 1.0)), Linf(0.05)], ids=lambda ball: ball.norm)
def test_a_small_ball_is_kept_to(ball: LpBall, generator: torch.Generator) -> None:
    model, x = Linear(SHAPE, outputs=1), inner_points(8, SHAPE)
    result = QUICK(model, x, model(x).detach(), ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert bool((result.gain > 0).all())


def test_each_restart_goes_on_from_the_best_of_the_last(generator: torch.Generator) -> None:
    """With one try a restart and a patch of one pixel, an image differs from the best so far in
    one pixel at most."""
    model = Recorder(Linear((1, 6, 6), outputs=1))
    x = inner_points(1, (1, 6, 6))
    y = model(x).detach()
    model.asked.clear()
    Pixle(restarts=40, max_iterations=1)(model, x, y, EVERYTHING, generator=generator)
    best, error = x, 0.0
    for image in model.asked[2:-1]:
        assert int((image != best).sum()) <= 1
        found = float((model.model(image) - y).detach().abs())
        if found > error:
            best, error = image, found
    assert error > 0


def test_patches_have_the_asked_sides_and_lie_inside(generator: torch.Generator) -> None:
    starts, lengths = _spans(28, (0.03, 0.2), 2000, generator)
    assert set(lengths.tolist()) == {1, 2, 3, 4, 5, 6}  # 0.84 and 5.6 pixels, rounded
    assert int(starts.min()) == 0
    assert int((starts + lengths).max()) == 28
    assert set(_spans(5, (1.0, 1.0), 50, generator)[0].tolist()) == {0}


def test_the_most_similar_pixel_by_hand(generator: torch.Generator) -> None:
    shown, pixels = (torch.randint(4, (30, 2, 12), generator=generator).float() for _ in range(2))
    source = torch.randint(12, (30,), generator=generator)
    found = _most_similar(shown, pixels, source)
    for row in range(30):
        wanted = pixels[row, :, source[row]]
        apart = [float((shown[row, :, place] - wanted).abs().mean()) for place in range(12)]
        least = min(distance for distance in apart if distance > 0)
        assert apart[int(found[row])] == least


def test_an_abstention_is_a_success(generator: torch.Generator) -> None:
    x = torch.zeros(3, 1, 4, 4)
    x[:, :, 0, 0] = 1.0  # one bright pixel to copy
    y = torch.zeros(3, dtype=torch.int64)
    attack = Pixle((1.0, 1.0), (1.0, 1.0), restarts=5)
    result = attack(AbstainsAbove(0.07), x, y, EVERYTHING, generator=generator)
    assert bool(result.abstained.all())


def test_all_randomness_comes_from_the_generator() -> None:
    model, x = Linear(SHAPE), inner_points(5, SHAPE)
    y = model(x).argmax(1)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return QUICK(model, x, y, EVERYTHING, generator=generator).inputs

    before = global_randomness()
    first = attacked(3)
    assert global_randomness() == before
    assert torch.equal(attacked(3), first)
    assert not torch.equal(attacked(4), first)


def test_refusals(generator: torch.Generator) -> None:
    model, x = Linear((5,)), inner_points(2, (5,))
    with pytest.raises(InputError, match=r"pixle.*images.*\(5,\)"):
        Pixle()(model, x, model(x).argmax(1), EVERYTHING, generator=generator)
    for wrong in (
        {"x_dimensions": (0.0, 0.1)},
        {"y_dimensions": (0.2, 0.1)},
        {"pixel_mapping": "distance"},
        {"restarts": 0},
        {"max_iterations": 0},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Pixle(**wrong)  # type: ignore[arg-type]


def trained_on_digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A small classifier, and images it answers right."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    first, last = Linear((1, 8, 8), outputs=32), Linear((32,), outputs=10)
    model = nn.Sequential(first, nn.Tanh(), last).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:1000]), y[:1000]).backward()
        optimizer.step()
    right = (model(x).argmax(1) == y).nonzero()[-120:, 0]
    return model.requires_grad_(False), x[right], y[right]


@pytest.mark.parametrize(("restarts", "iterations"), [(3, 5), (8, 2)])
def test_it_is_as_strong_as_the_implementation_of_torchattacks(
    restarts: int, iterations: int
) -> None:
    torchattacks = pytest.importorskip(
        "torchattacks", reason="needs torchattacks, which no extra installs: it pins an old library"
    )
    model, x, y = trained_on_digits()
    sides = {"x_dimensions": (0.03, 0.06), "y_dimensions": (0.03, 0.06)}
    ours, theirs = [], []
    for seed in range(3):
        np.random.seed(seed)
        other = torchattacks.Pixle(model, **sides, restarts=restarts, max_iterations=iterations)
        images = other(x, y)
        assert is_made_of(images, x)
        theirs.append(float((model(images).argmax(1) != y).double().mean()))
        attack = Pixle(**sides, restarts=restarts, max_iterations=iterations)
        generator = torch.Generator().manual_seed(seed)
        ours.append(1 - attack(model, x, y, EVERYTHING, generator=generator).accuracy)
    share = sum(theirs) / 3
    assert 0.1 < share < 0.9
    # 360 images each: two such shares differ by more than 0.15 with a chance below 1 in 10,000.
    assert abs(sum(ours) / 3 - share) < 0.15
