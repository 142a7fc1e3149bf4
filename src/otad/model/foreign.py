"""Inputs unlike the training data: from which distance on a model should abstain."""

from __future__ import annotations

import math

import torch

from otad.checks import check_count, require
from otad.errors import InputError
from otad.model.conversion import ArrayLike, Estimator, converted_inputs
from otad.model.otad import OTAD


@torch.no_grad()
def distance_threshold(
    model: OTAD | Estimator, x: ArrayLike, *, quantile: float = 0.95, batch_size: int = 1024
) -> float:
    """Return a distance from the bank beyond which a model may abstain.

    It is the ceil((n + 1) quantile)-th smallest distance of n held-out inputs (see
    `OTAD.distance`). So the model refuses at most a share of 1 - quantile of new inputs from the
    same distribution, whatever it is. This bound holds on average over held-out samples, as in
    split conformal prediction. It does not say how many inputs from elsewhere are refused.

    Parameters
    ----------
    model : OTAD or estimator
        The model.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Held-out inputs, which are neither in the bank nor were used for training.
    quantile : float
        The share of inputs to answer, between 0 and 1.
    batch_size : int
        How many inputs are used at a time.

    Returns
    -------
    float
        The distance, for `model.abstain_beyond`.

    Raises
    ------
    InputError
        If there are too few inputs for the quantile, or they are points of the bank.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> held_out = torch.eye(3) + torch.tensor([[0.1], [0.2], [0.3]])
    >>> threshold = otad.distance_threshold(model, held_out, quantile=0.5)
    >>> round(threshold, 3)
    0.346
    >>> model.abstain_beyond = threshold
    >>> model(torch.full((1, 3), 9.0)).isnan().all().item()
    True
    """
    given = converted_inputs(model, x)
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
    """Return ceil((n + 1) quantile), which must not exceed the number n of held-out inputs."""
    require(0 < quantile < 1, "quantile", "a number between 0 and 1", quantile)
    rank = math.ceil((count + 1) * quantile)
    least = math.ceil(quantile / (1 - quantile) - 1e-9)
    expected = f"at least {least} held-out inputs for the quantile {quantile:g}"
    require(rank <= count, "x", expected, count)
    return rank
