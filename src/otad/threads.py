"""Runs parts of work at the same time, each on one of the threads that torch may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Part = TypeVar("Part")
Result = TypeVar("Result")


def run_on_threads(parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
    """Return the results of `work` on every part, without gradients.

    Threads that work on parts of their own do not wait for each other after every operation."""
    allowed = torch.get_num_threads()
    threads = min(allowed, len(parts))
    without_gradients = torch.no_grad()(work)  # every thread has its own setting
    if threads <= 1:
        return [without_gradients(part) for part in parts]
    try:
        with (
            _numpy_blas().limit(limits=1),
            ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool,
        ):
            return list(pool.map(without_gradients, parts))
    finally:
        torch.set_num_threads(allowed)  # a thread's setting is the default of new threads


@cache
def _numpy_blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
