"""How tensor work is run: in blocks of rows, on threads, in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from otad.cip.protocols import RowProblem

Part = TypeVar("Part")
Result = TypeVar("Result")
_BLOCK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # measured best


def blocks(count: int, size: int) -> list[slice]:
    """Consecutive blocks of at most `size` rows."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def problem_blocks(problem: RowProblem, chunk: int | None) -> list[slice]:
    """Blocks of `chunk` rows, or of as many as fill the default working memory of the device."""
    batch, count, dim = problem.shape
    budget = _BLOCK_BYTES.get(problem.query.device.type, 2**26)
    fitting = max(1, budget // (2 * count * dim * problem.query.element_size()))
    return blocks(batch, chunk or fitting)


def run_parts(
    parts: Sequence[Part], work: Callable[[Part], Result], device: torch.device
) -> list[Result]:
    """`work` on every part, without gradients, in full precision. On the CPU on as many threads as
    torch may use: its own batched products of small matrices run on one."""
    allowed = torch.get_num_threads()
    threads = min(allowed, len(parts)) if device.type == "cpu" else 1
    without_gradients = torch.no_grad()(work)  # a setting of each thread
    with full_precision(device):
        if threads == 1:
            return [without_gradients(part) for part in parts]
        try:
            with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
                return list(pool.map(without_gradients, parts))
        finally:
            torch.set_num_threads(allowed)  # a thread's setting is the default of new threads


@contextmanager
def one_thread() -> Iterator[None]:
    """For small matrices, where synchronizing threads takes many times as long as the work."""
    allowed = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, and no oneDNN, whose kernels for small batched products are reduced in
    precision on some processors and many times slower than BLAS on others."""
    precision, onednn = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.mkldnn.enabled = onednn
