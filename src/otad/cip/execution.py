"""How work on tensors is run: in blocks of rows, on threads, in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.cip.protocols import RowProblem
from otad.io.environment import has_numba
from otad.precision import FULL_PRODUCTS
from otad.progress import Draw, part_bars
from otad.threads import Part, ProcessWide, Result, run_on_threads

_FEWEST_ROWS = 512  # fewer rows do not get a thread of their own: threads wait for the interpreter
_BLOCK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # the fastest in measurements


def blocks(count: int, size: int) -> list[slice]:
    """Return consecutive blocks of at most `size` rows."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def row_blocks(rows: Tensor) -> list[slice]:
    """Return a block of the rows (B,...) for each thread that is worth it."""
    count = rows.shape[0]
    return shares(count, _FEWEST_ROWS) if rows.is_cpu else [slice(0, count)]


def shares(count: int, fewest: int) -> list[slice]:
    """Return a block of rows for each thread, or for as many as have about the `fewest` rows.

    They are about equally long: NumPy adds the numbers of a single row in another order."""
    if count <= fewest:
        return [slice(0, count)]
    number = min(torch.get_num_threads(), -(-count // fewest))
    return blocks(count, -(-count // number))


def problem_blocks(problem: RowProblem, chunk: int | None) -> list[slice]:
    """Return blocks of `chunk` rows, or of as many as fill the working memory of the device."""
    batch, count, dim = problem.shape
    budget = _BLOCK_BYTES.get(problem.query.device.type, 2**26)
    fitting = max(1, budget // (2 * count * dim * problem.query.element_size()))
    return blocks(batch, chunk or fitting)


def run_parts(
    parts: Sequence[Part], work: Callable[[Part], Result], device: torch.device
) -> list[Result]:
    """Return the results of `work` on every part, without gradients and on a GPU without TF32.

    On the CPU the parts run on as many threads as torch may use, because batched products of small
    matrices run on one thread."""
    if device.type == "cpu":
        return run_on_threads(parts, work)
    with torch.no_grad(), full_precision(device):
        return [work(part) for part in parts]


def matmul(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products of two batches of small matrices, without gradients.

    On the CPU, those of NumPy have full precision, and those of torch take several times longer."""
    if left.device.type != "cpu":
        return torch.matmul(left, right, out=out)
    with np.errstate(all="ignore"):
        to = None if out is None else out.numpy()
        return torch.from_numpy(np.matmul(left.numpy(), right.numpy(), out=to))


def can_compile(tensor: Tensor) -> bool:
    return tensor.is_cpu and has_numba()


@cache
def compiled_code(name: str) -> ModuleType:
    """Return a module of `otad.cip.kernels` that needs Numba, whose import takes long."""
    show_compiling()
    return import_module(f"otad.cip.kernels.{name}")


@cache
def show_compiling() -> None:
    """From now on draw a bar while Numba compiles code of this package, which takes it seconds."""
    try:
        from numba.core import event
    except ImportError:
        return
    bars: list[AbstractContextManager[Draw]] = []  # one function may compile another

    class Bar(event.Listener):
        def on_start(self, event: Any) -> None:
            if is_ours(event):
                bars.append(part_bars())
                bars[-1].__enter__()("compiling the solver, once", 0)

        def on_end(self, event: Any) -> None:
            if is_ours(event):
                bars.pop().__exit__(None, None, None)

    def is_ours(event: Any) -> bool:
        code = getattr(event.data.get("dispatcher"), "py_func", None)
        return str(getattr(code, "__module__", "")).startswith("otad.")

    event.register("numba:compile", Bar())  # type: ignore[no-untyped-call]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Turn off autocast, TF32 and oneDNN for the products of torch.

    The kernels of oneDNN for small batched products have reduced precision on some processors, and
    are many times slower than BLAS on others."""
    with FULL_PRODUCTS, _WITHOUT_ONEDNN, torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


_WITHOUT_ONEDNN = ProcessWide(_without_onednn)
