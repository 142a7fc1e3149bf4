"""Training in mixed precision, whatever the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def precision(device: torch.device | str, *, mixed: bool) -> Iterator[None]:
    """Within it layers compute in bfloat16 where autocast finds it safe, or as they are.

    Casts of weights are forgotten at both ends. torch itself keeps them where this is within
    another autocast, and every step would see the weights of the first one.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed):
            yield
    finally:
        torch.clear_autocast_cache()
