"""Random numbers for the host out of a generator that may live on a GPU."""

from __future__ import annotations

import random

import torch


def dice(generator: torch.Generator) -> random.Random:
    """Numbers decided by the generator's state, which the host knows: reading a number that was
    drawn on a GPU would stall it. The generator moves on, so that the next dice are others."""
    found = random.Random(generator.get_state().numpy().tobytes())
    torch.rand(1, generator=generator, device=generator.device)
    return found
