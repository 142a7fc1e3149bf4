"""Batches of work on several processes: those of this machine, or of any executor.

A value that all batches need, such as a model with its bank and the examples, is shared: see
`otad.io.sharing`. A batch itself carries no more than its own arguments."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from otad.checks import check_count
from otad.errors import InputError, OtadError
from otad.io.sharing import Shared, SharedFiles, Sharing, pack, unpack
from otad.precision import Precision, product_precision, set_product_precision
from otad.progress import Counter

Result = TypeVar("Result")
Task = tuple[Any, ...]

# A GPU's driver does not survive a fork, so processes are forked from a server that only imports
# modules, where there can be one.
_METHODS = multiprocessing.get_all_start_methods()
START_METHOD = "forkserver" if "forkserver" in _METHODS else "spawn"
MOST_PROCESSES = 1024
MOST_KILLS = 3  # in a row without a finished batch; more are no accident


class Workers:
    """Where batches are computed: in this process, or by an executor.

    `count` is the number of processes, as far as it is known."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor
        self._files: SharedFiles | None = None
        self._share: Sharing | None = None
        known = getattr(executor, "workers", None) or getattr(executor, "_max_workers", None)
        self.count: int = 1 if executor is None else known or os.cpu_count() or 1

    def run(
        self, function: Callable[..., Result], values: Sequence[Any], tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield the number of each task with `function(*values, *task)`, as soon as it is finished.

        The values are sent once, and each task when a worker will soon be free. One process works
        in order. An error of the function ends the rest. A task starts again if its worker was
        killed."""
        if self._executor is not None:
            yield from self._run(self._executor, function, values, tasks)
            return
        for number, task in enumerate(tasks):
            yield number, function(*values, *task)

    def in_order(
        self, function: Callable[..., Result], values: Sequence[Any], tasks: Iterable[Task]
    ) -> Iterator[Result]:
        """Yield `function(*values, *task)` in the order of the tasks."""
        early: dict[int, Result] = {}
        following = 0
        for number, result in self.run(function, values, tasks):
            early[number] = result
            while following in early:
                yield early.pop(following)
                following += 1

    def all(
        self,
        function: Callable[..., Result],
        values: Sequence[Any],
        tasks: Iterable[Task],
        finished: Callable[[int], None],
    ) -> list[Result]:
        """Return all results in the order of the tasks, and report how many are finished."""
        found: dict[int, Result] = {}
        for number, result in self.run(function, values, tasks):
            found[number] = result
            finished(len(found))
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _run(
        self,
        executor: Executor,
        function: Callable[..., Result],
        values: Sequence[Any],
        tasks: Iterable[Task],
    ) -> Iterator[tuple[int, Result]]:
        pickler = getattr(executor, "pickler", pickle.Pickler)
        if self._share is None:
            share = getattr(executor, "share", None)
            if share is None:
                self._files = SharedFiles()
                share = self._files.share
            self._share = Sharing(share, pickler)
        about = tuple(map(self._share, values)), _Settings.now()
        packed = enumerate(pack((function, task), pickler) for task in tasks)
        lost: deque[tuple[int, bytes]] = deque()
        running: dict[Future[bytes], tuple[int, bytes, int]] = {}
        kills = in_a_row = 0
        try:
            while True:
                while len(running) < 2 * self.count:
                    job = lost.popleft() if lost else next(packed, None)
                    if job is None:
                        break
                    running[_submit(executor, *about, job[1])] = (*job, kills)
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, content, kills_before = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenExecutor as error:
                        lost.append((number, content))
                        if kills_before == kills:  # one kill fails all tasks that were running
                            kills, in_a_row = kills + 1, in_a_row + 1
                        if in_a_row == MOST_KILLS:
                            what = f"a process was killed {MOST_KILLS} times in a row"
                            hint = "try fewer processes or smaller batches, and in a script call"
                            hint = f'{hint} this below `if __name__ == "__main__":`'
                            raise _killed(what, hint) from error
                        continue
                    in_a_row = 0
                    yield number, _result_of(outcome)
        finally:
            for future in running:
                future.cancel()


@contextmanager
def working(executor: Executor | Workers | int | None) -> Iterator[Workers]:
    """Yield the workers of an executor. A number is that of processes of this machine, which are
    started and ended here, and replaced if they are killed."""
    if isinstance(executor, Workers):
        yield executor
        return
    if isinstance(executor, ThreadPoolExecutor):
        why = "which share the precision that the solver sets for the whole process"
        raise InputError(f"executor: expected processes, got threads, {why}")
    if executor is not None and not isinstance(executor, Executor):
        if check_count(executor, "executor", most=MOST_PROCESSES) > 1:
            with LocalProcesses(executor) as pool, working(pool) as workers:
                yield workers
            return
        executor = None
    workers = Workers(executor)
    try:
        yield workers
    finally:
        workers.close()


def in_batches(
    function: Callable[[Any, Tensor], Result],
    value: Any,
    x: Tensor,
    rows: int,
    executor: Executor | Workers | int | None,
    progress: Counter,
) -> list[Result]:
    """Return `function(value, batch)` for all batches of x (n,*), in order, and report how many of
    the n rows are done."""
    tasks = ((batch,) for batch in x.split(rows))
    with working(executor) as workers:
        return workers.all(
            function, (value,), tasks, lambda done: progress(min(done * rows, len(x)), len(x))
        )


class LocalProcesses(Executor):
    """Processes of this machine. If one is killed, all are replaced at the next task."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._files = SharedFiles()
        self.share = self._files.share
        self._others = multiprocessing.active_children()
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context(START_METHOD)
        context.set_forkserver_preload(["otad.evaluate"])
        threads = max(1, torch.get_num_threads() // self.workers)
        return ProcessPoolExecutor(self.workers, context, _begin, (threads, self._files.folder))

    def submit(self, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
        try:
            return self._pool.submit(function, *args, **options)
        except BrokenExecutor:
            self._pool.shutdown()
            self._pool = self._started()
            return self._pool.submit(function, *args, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)
        self._files.close()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:  # nobody will read what is running now
            for child in multiprocessing.active_children():
                if child not in self._others:
                    child.terminate()
        self.shutdown(cancel_futures=True)


class _Settings(NamedTuple):
    """What a process sets for all its work, and the versions that results depend on."""

    dtype: torch.dtype
    precision: Precision
    folder: str
    versions: tuple[str, str]

    @staticmethod
    def now() -> _Settings:
        return _Settings(
            torch.get_default_dtype(), product_precision(), os.getcwd(), _versions(),
        )  # fmt: skip

    def apply(self) -> None:
        if self.versions != _versions():
            there = "otad {} and torch {}, got otad {} and torch {}"
            there = there.format(*self.versions, *_versions())
            raise OtadError(f"executor: expected workers with {there}")
        torch.set_default_dtype(self.dtype)
        set_product_precision(self.precision)
        with suppress(OSError):  # relative paths mean what they mean to the caller
            os.chdir(self.folder)


@cache
def _versions() -> tuple[str, str]:
    return sys.modules["otad"].__version__, torch.__version__  # works without an installation too


class _Outcome(NamedTuple):
    result: Any
    error: Exception | None
    warned: list[tuple[str, type[Warning], str, int]]


def work(values: tuple[Shared, ...], settings: _Settings, job: bytes) -> bytes:
    """In a worker: return the packed outcome of a packed function and its arguments."""
    result, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # the caller has filters of its own
        try:
            settings.apply()
            function, task = unpack(job)
            result = function(*(value.open() for value in values), *task)
        except Exception as raised:
            error = _sendable(raised)
    warned = [(str(one.message), one.category, one.filename, one.lineno) for one in caught]
    return pack(_Outcome(result, error, warned))


def _submit(executor: Executor, *job: Any) -> Future[bytes]:
    try:
        return executor.submit(work, *job)
    except BrokenExecutor as error:
        kind = type(executor).__name__
        hint = f"give a new {kind}, or a number of processes, which are replaced"
        raise _killed(f"a process of the {kind} was killed", hint) from error


def _killed(what: str, hint: str) -> OtadError:
    saved = "what was saved until then is not computed again"
    return OtadError(f"{what}, perhaps for lack of memory: {hint}; {saved}")


def _result_of(content: bytes) -> Any:
    outcome: _Outcome = unpack(content)
    for message, category, filename, line in outcome.warned:
        warnings.warn_explicit(message, category, filename, line)
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


def _sendable(error: Exception) -> Exception:
    """Return the error, or its text if it cannot be pickled, with the traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # any error of a class that pickles badly
        error = OtadError(str(error))
    error.add_note(f"In a worker:\n{text}")
    return error


def _begin(threads: int, folder: Path) -> None:
    """Start a process, which ends with its parent: otherwise it would hold locks. The parent alone
    is interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
