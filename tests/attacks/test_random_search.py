"""Random search: any shape, any ball, classifiers and regressions, against closed forms."""

from __future__ import annotations

import torch
from attacks.linear_models import (
    Linear,
    inner_points,
)

from otad.attacks import L2
from otad.attacks.random_search import RandomSearch

SHAPES = [(12,), (1, 5, 7)]


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
