"""Runs parts of work at the same time, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Part = TypeVar("Part")
Result = TypeVar("Result")


def run_on_threads(
    parts: Sequence[Part], work: Callable[[Part], Result], most: int = 0
) -> list[Result]:
    """Return the results of `work` on every part, without gradients.

    Threads that work on parts of their own do not wait for each other after every operation. There
    are as many as torch may use, or up to `most` if that is more."""
    allowed = torch.get_num_threads()
    threads = min(max(allowed, most), len(parts))
    without_gradients = torch.no_grad()(work)  # every thread has its own setting
    if threads <= 1:
        return [without_gradients(part) for part in parts]
    found, rest = dict[int, Result](), iter([*enumerate(parts)])

    def take_parts() -> None:
        torch.set_num_threads(1)
        try:
            for place, part in rest:
                found[place] = without_gradients(part)
        finally:
            list(rest)  # after an error, nobody starts another part

    try:
        with _numpy_blas().limit(limits=1), ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(take_parts) for _ in range(threads - 1)]
            take_parts()  # here too, because a thread takes long to start on a busy machine
            for other in others:
                other.result()
    finally:
        torch.set_num_threads(allowed)  # a thread's setting is the default of new threads
    return [found[place] for place in range(len(parts))]


@cache
def _numpy_blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
