"""Which bank points to leave out where pairs of them contradict each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otad.errors import SolverError

MOST_PAIRS = 2**26  # contradictions that are listed


def fewest_points(pairs: Tensor, count: int) -> Tensor:
    """Points (n,) of 0..count-1 that meet every pair (m,2): few, not always the fewest.

    Whoever is in most of the pairs that are left goes next; of equals, the first.
    """
    one, other = pairs.cpu().numpy().T
    points, partners = np.concatenate([one, other]), np.concatenate([other, one])
    partners = partners[points.argsort(kind="stable")]  # those of one point after those of another
    left = np.bincount(points, minlength=count)  # in how many pairs each point is
    stops = left.cumsum()
    starts = stops - left
    gone = np.zeros(count, dtype=bool)
    while left[worst := left.argmax()] > 0:
        left[partners[starts[worst] : stops[worst]]] -= 1
        left[worst] = 0
        gone[worst] = True
    return torch.from_numpy(gone.nonzero()[0]).to(pairs.device)


def check_listed(count: int, name: str, value: float) -> None:
    """Refuse a curvature that too many pairs contradict to list them."""
    if count > MOST_PAIRS:
        raise SolverError(
            f"{name}: expected one that most pairs keep, got {value}, which more than "
            f"{MOST_PAIRS} pairs exceed"
        )
