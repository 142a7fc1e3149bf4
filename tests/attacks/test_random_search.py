"""Random noise and random search: success rates and gains that are known."""

from __future__ import annotations

import math

import pytest
import torch
from attacks.linear_models import Function, Linear, Recorder, inner_points
from torch import Tensor

from otad.attacks import Pixle, RandomNoise, RandomSearch
from otad.threat import L2, Linf


@pytest.mark.parametrize("draws", [1, 5, 8])
def test_half_on_the_surface_half_within(draws, generator) -> None:
    model = Recorder(Function(lambda x: x.norm(dim=1)))
    found = RandomNoise(draws)(
        model, torch.zeros(50, 3), torch.zeros(50), L2(2.0), generator=generator
    )
    lengths = torch.stack(model.asked[1:-1]).norm(dim=2)
    assert len(lengths) == draws
    on_surface = lengths > 2 * (1 - 1e-5)
    assert on_surface[::2].all()
    assert not on_surface[1::2].any()
    assert found.forwards.tolist() == [draws + 2] * 50
    torch.testing.assert_close(found.gain, lengths.amax(0))


def test_success_rate_is_the_share_of_the_ball(generator) -> None:
    """In the plane, x_0 > 1/2 is 1/3 of the unit circle: the surface draw wins that often."""
    model = Function(lambda x: torch.stack([torch.full_like(x[:, 0], 0.5), x[:, 0]], 1))
    x, y = torch.zeros(20000, 2), torch.zeros(20000, dtype=torch.int64)
    once = RandomNoise(1)(model, x, y, L2(1.0), generator=generator)
    assert 1 - once.accuracy == pytest.approx(1 / 3, abs=0.015)
    # and 1/3 - sqrt(3) / (4 pi) of the disk: two draws, one of each
    disk = 1 / 3 - math.sqrt(3) / (4 * math.pi)
    twice = RandomNoise(2)(model, x, y, L2(1.0), generator=generator)
    assert twice.accuracy == pytest.approx(2 / 3 * (1 - disk), abs=0.015)
    assert int(twice.forwards.min()) == 3  # broken by the first draw
    assert int(twice.forwards.max()) == 4


def test_more_queries_never_get_less_far() -> None:
    model, x = Linear((30,), outputs=1), inner_points(6, (30,))
    y = model(x).detach()
    gains = [
        RandomSearch(queries=queries)(
            model, x, y, L2(0.3), generator=torch.Generator().manual_seed(2)
        ).gain
        for queries in (5, 40, 200)
    ]
    assert bool((gains[0] < gains[1]).all())
    assert bool((gains[1] < gains[2]).all())


SHAPE = (3, 9, 7)
EVERYTHING = Linf(1.0, (0.0, 1.0))  # no image of the bounds is outside


def is_made_of(inputs: Tensor, x: Tensor) -> bool:
    """Whether each pixel of an image, all channels together, is one of the original's."""
    same = (inputs.flatten(2)[:, :, :, None] == x.flatten(2)[:, :, None, :]).all(1)
    return bool(same.any(2).all())


def test_an_image_is_rearranged_and_nothing_else(generator) -> None:
    model, x = Linear(SHAPE), inner_points(20, SHAPE)
    attack = Pixle((0.1, 0.4), (0.1, 0.4), restarts=4, max_iterations=5)
    result = attack(model, x, model(x).argmax(1), EVERYTHING, generator=generator)
    moved = (result.inputs != x).any(1).flatten(1).sum(1)
    assert is_made_of(result.inputs, x)
    assert int(moved.max()) > 1
    # Every restart writes at most one patch, of 4 x 3 pixels here, over what was there before.
    assert int(moved.max()) <= 4 * 4 * 3
    assert bool(result.broken.any())


def test_each_restart_goes_on_from_the_best_of_the_last(generator) -> None:
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
