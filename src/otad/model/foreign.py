"""Inputs unlike the training data: how far from the bank is too far."""

from __future__ import annotations

import math

import torch

from otad.checks import check_count, require
from otad.errors import InputError
from otad.model.conversion import ArrayLike, Estimator, converted
from otad.model.otad import OTAD


@torch.no_grad()
def distance_threshold(
    model: OTAD | Estimator, x: ArrayLike, *, quantile: float = 0.95, batch_size: int = 1024
) -> float:
    """The distance from the bank beyond which a model may abstain, chosen on held-out inputs x
    (n,*), which are neither in the bank nor were trained on:

        model.abstain_beyond = otad.distance_threshold(model, held_out_x)

    It is the ceil((n + 1) quantile)-th smallest distance of x (see `OTAD.distance`). So of new
    inputs drawn like x, at most a share of 1 - quantile is refused, whatever their distribution:
    a bound for the average over draws of x, as in split conformal prediction. It says nothing about
    how many foreign inputs are refused."""
    given = converted(model, x)
    if not isinstance(given.module, OTAD):
        raise InputError(f"model: expected an OTAD model, got {type(given.module).__name__}")
    rank = conformal_rank(len(given.x), quantile)
    batches = given.x.split(check_count(batch_size, "batch_size"))
    distances = torch.cat([given.module.distance(batch).cpu() for batch in batches])
    threshold = float(distances.sort().values[rank - 1])
    expected = "held-out inputs, some of them at a distance from the bank"
    require(threshold > 0, "x", expected, f"points of the bank, up to number {rank} by distance")
    return threshold


def conformal_rank(count: int, quantile: float) -> int:
    """ceil((n + 1) quantile), which must not exceed the number n of held-out inputs."""
    require(0 < quantile < 1, "quantile", "a number between 0 and 1", quantile)
    rank = math.ceil((count + 1) * quantile)
    least = math.ceil(quantile / (1 - quantile) - 1e-9)
    expected = f"at least {least} held-out inputs for the quantile {quantile:g}"
    require(rank <= count, "x", expected, count)
    return rank
