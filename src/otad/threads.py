"""Runs parts of work at the same time, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import Generic, TypeVar

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Part = TypeVar("Part")
Result = TypeVar("Result")
Value = TypeVar("Value")


class ProcessWide(Generic[Value]):
    """A setting of the whole process: the first thread that needs it makes it, the last undoes it.

    If each thread restored what it has found, a setting of another one could stay forever."""

    def __init__(self, make: Callable[[], AbstractContextManager[Value]]) -> None:
        self._make, self._lock, self._users = make, Lock(), 0

    def __enter__(self) -> Value:
        with self._lock:
            if self._users == 0:
                self._made = self._make()
                self._value = self._made.__enter__()
            self._users += 1
            return self._value

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._made.__exit__(None, None, None)


def run_on_threads(parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
    """Return the results of `work` on every part, without gradients.

    Threads that work on parts of their own do not wait for each other after every operation. There
    are as many as torch may use."""
    threads = min(torch.get_num_threads(), len(parts))
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

    with _ONE_THREAD_EACH as allowed:
        try:
            with ThreadPoolExecutor(threads - 1) as pool:
                others = [pool.submit(take_parts) for _ in range(threads - 1)]
                take_parts()  # here too, because a thread takes long to start on a busy machine
                for other in others:
                    other.result()
        finally:
            torch.set_num_threads(allowed)
    return [found[place] for place in range(len(parts))]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let the operations of torch use so many threads.

    A thread that begins in the meantime keeps this number, because torch counts by thread."""
    allowed = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """Limit NumPy to one thread, and yield how many torch may use: a thread's setting is also the
    default of new threads."""
    allowed, limited = torch.get_num_threads(), _numpy_blas().limit(limits=1)
    try:
        yield allowed
    finally:
        _let_any_thread_limit()  # perhaps not the thread that made the limit
        limited.restore_original_limits()
        _let_any_thread_limit()
        torch.set_num_threads(allowed)


def _let_any_thread_limit() -> None:
    """Undo that recent versions of threadpoolctl let one thread alone limit OpenBLAS."""
    for library in _numpy_blas().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


_ONE_THREAD_EACH = ProcessWide(_one_thread_each)


@cache
def _numpy_blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
