"""Pixle: only pixels of the original, in patches of the given sizes."""

from __future__ import annotations

import torch
from attacks.linear_models import (
    Linear,
    Recorder,
    inner_points,
)
from torch import Tensor

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
