"""Pixle: only pixels of the original, within its budget, as strong as another implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attacks.linear_models import (
    Linear,
    Recorder,
    inner_points,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks import Linf
from otad.attacks.pixle import Pixle, _spans

SHAPE = (3, 9, 7)
EVERYTHING = Linf(1.0, (0.0, 1.0))  # no image of the bounds is outside
QUICK = Pixle(restarts=4, max_iterations=5)


def is_made_of(inputs: Tensor, x: Tensor) -> bool:
    """Whether each pixel of an image, all channels together, is one of the original's."""
    same = (inputs.flatten(2)[:, :, :, None] == x.flatten(2)[:, :, None, :]).all(1)
    return bool(same.any(2).all())


def test_an_image_is_rearranged_and_nothing_else(generator: torch.Generator) -> None:
    model, x = Linear(SHAPE), inner_points(20, SHAPE)
    attack = Pixle((0.1, 0.4), (0.1, 0.4), restarts=4, max_iterations=5)
    result = attack(model, x, model(x).argmax(1), EVERYTHING, generator=generator)
    moved = (result.inputs != x).any(1).flatten(1).sum(1)
    assert is_made_of(result.inputs, x)
    assert int(moved.max()) > 1
    # Every restart writes at most one patch, of 4 x 3 pixels here, over what was there before.
    assert int(moved.max()) <= 4 * 4 * 3
    assert bool(result.broken.any())


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
