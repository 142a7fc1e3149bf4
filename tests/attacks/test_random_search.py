"""Random noise and random search: success rates and gains that are known."""

from __future__ import annotations

import math

import pytest
import torch
from attacks.linear_models import Linear, inner_points
from torch import Tensor, nn

from otad.attacks import RandomNoise, RandomSearch
from otad.threat import L2


class Shell(nn.Module):
    """A regressor whose error is the length of the step, and a record of those lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x.norm(dim=1)
        self.lengths.append(found.clone())
        return found


@pytest.mark.parametrize("draws", [1, 5, 8])
def test_half_on_the_surface_half_within(draws, generator) -> None:
    model = Shell().eval()
    found = RandomNoise(draws)(
        model, torch.zeros(50, 3), torch.zeros(50), L2(2.0), generator=generator
    )
    lengths = torch.stack(model.lengths[1:-1])
    assert len(lengths) == draws
    on_surface = lengths > 2 * (1 - 1e-5)
    assert on_surface[::2].all()
    assert not on_surface[1::2].any()
    assert found.forwards.tolist() == [draws + 2] * 50
    torch.testing.assert_close(found.gain, lengths.amax(0))


class HalfSpace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 0.5), x[:, 0]], 1)


def test_success_rate_is_the_share_of_the_ball(generator) -> None:
    """In the plane, x_0 > 1/2 is 1/3 of the unit circle: the surface draw wins that often."""
    x, y = torch.zeros(20000, 2), torch.zeros(20000, dtype=torch.int64)
    once = RandomNoise(1)(HalfSpace().eval(), x, y, L2(1.0), generator=generator)
    assert 1 - once.accuracy == pytest.approx(1 / 3, abs=0.015)
    # and 1/3 - sqrt(3) / (4 pi) of the disk: two draws, one of each
    disk = 1 / 3 - math.sqrt(3) / (4 * math.pi)
    twice = RandomNoise(2)(HalfSpace().eval(), x, y, L2(1.0), generator=generator)
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
