"""Progress bars of all long work, on stderr.

An argument `progress` is a function that the caller draws with; True for bars that appear at once
and stay; False for none; or None, the default, for bars that appear after two seconds on a terminal
or in a notebook and vanish at the end. Where stderr is neither, as in a file, True writes a line at
each tenth of the work, in its first two seconds at the end alone, and None writes nothing.
`OTAD_PROGRESS=0` in the environment turns all of it off.
Work inside other work, and work of other threads at the same time, draws no bars of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from multiprocessing import current_process
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TimeRemainingColumn,
)
from rich.text import Text

from otad.errors import printable
from otad.processes import is_first

VARIABLE = "OTAD_PROGRESS"
SHOW_AFTER = 2.0  # seconds
PartReport = Callable[[str, int, int], None]
"""Called with the name of a part, the steps done and all its steps."""
Draw = Callable[..., None]
"""Called with the name of a part, the steps done, which may be a fraction, all its steps (None if
not known) and, where it changes, the text beside its bar."""
Counter = Callable[[int, int], None]
"""Called with the steps done and all steps."""
AttackReport = Callable[[str, int, int, float], None]
"""Called with the running attack, the steps done, all steps, and the worst case so far: a share of
right answers, or in regression an error."""
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
_running = threading.Lock()


class _Description(ProgressColumn):
    """The text as it is: names in it are neither markup nor commands of the terminal."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


def can_draw() -> bool:
    """Return whether stderr is a terminal or a notebook, and the process is not a worker of another
    one."""
    if current_process().name != "MainProcess":  # a worker of a grid search
        return False
    if Console(stderr=True).is_jupyter:
        return find_spec("ipywidgets") is not None
    return _is_terminal(sys.stderr)


def _is_terminal(stream: object) -> bool:
    return bool(getattr(stream, "isatty", bool)())


def bars(*, passing: bool = False) -> Progress:
    """Return bars with steps and remaining time; `passing` bars vanish at the end."""
    return Progress(
        _Description(),
        BarColumn(10),  # so that the text beside it fits into 80 columns
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        transient=passing,
        redirect_stdout=_is_terminal(sys.stdout),  # what is printed to a file stays there
    )


class _PartBars:
    """A bar for each part, on the screen from `start` to `stop`."""

    def __init__(self, *, passing: bool) -> None:
        self._bars = bars(passing=passing)
        self._tasks: dict[str, TaskID] = {}
        self._lock, self._started, self._ended = threading.Lock(), False, False

    def draw(
        self, part: str, done: float, total: int | None = None, text: str | None = None
    ) -> None:
        if part not in self._tasks:
            self._tasks[part] = self._bars.add_task(part, total=total)
        task, shown = self._tasks[part], part if text is None else text
        self._bars.update(task, completed=done, total=total, description=shown)

    def start(self) -> None:
        with self._lock:
            if not self._ended:
                self._bars.start()
                self._started = True

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            if self._started:  # else rich would write an empty line
                self._bars.stop()


class _PartLines:
    """A line for each tenth of a part, and for its first text."""

    def __init__(self) -> None:
        self._begun, self._shown = time.monotonic(), dict[str, tuple[float, bool]]()

    def draw(
        self, part: str, done: float, total: int | None = None, text: str | None = None
    ) -> None:
        now = 10 * done // total if total else 0, text is not None
        is_new = now > self._shown.get(part, (0, False))
        self._shown[part] = now
        if is_new and (done == total or time.monotonic() >= self._begun + SHOW_AFTER):
            steps = f"{round(done, 1)}" + (f" of {total}" if total else "")
            line = f"otad: {part}, {steps}" + ("" if text is None else f": {text}")
            sys.stderr.write(f"{printable(line)}\n")
            sys.stderr.flush()


def _wanted(progress: bool | None) -> bool:
    if os.environ.get(VARIABLE) == "0" or not is_first():
        return False
    return can_draw() if progress is None else progress


def _nothing(*_: object) -> None: ...


@contextmanager
def part_bars(progress: PartReport | bool | None = None) -> Iterator[Draw]:
    """Yield the function of the caller, a function that shows the progress of each part, or one
    that does nothing."""
    alone = _running.acquire(blocking=False)
    try:
        if callable(progress):
            yield progress
        elif not alone or not _wanted(progress):
            yield _nothing
        elif not can_draw():
            yield _PartLines().draw
        else:
            shown = _PartBars(passing=progress is None)
            later = threading.Timer(SHOW_AFTER, shown.start)
            later.daemon = True
            (shown.start if progress else later.start)()
            try:
                yield shown.draw
            finally:
                later.cancel()
                shown.stop()
    finally:
        if alone:
            _running.release()


@contextmanager
def progress_bar(text: str, progress: Counter | bool | None = None) -> Iterator[Counter]:
    """Yield the function of the caller, a function that draws one bar beside a text, or one that
    does nothing."""
    with part_bars(_silent(progress)) as draw:
        yield progress if callable(progress) else lambda done, total: draw(text, done, total)


def with_attack_bar(evaluate: AnyFunction) -> AnyFunction:
    """Decorate a function (model, x, y, ...) so that its `progress` is by default a bar with the
    running attack and the worst case so far."""

    @wraps(evaluate)
    def call(*args: Any, progress: AttackReport | bool | None = None, **options: Any) -> Any:
        y = args[2] if len(args) > 2 else options.get("y")
        is_value = "float" in str(getattr(y, "dtype", None))
        so_far = "{}: mean error {:.4g}" if is_value else "{}: worst case {:.1%}"

        def draw(label: str, done: int, total: int, worst: float) -> None:
            show("attacking", done, total, so_far.format(label, worst))

        with part_bars(_silent(progress)) as show:
            report = progress if callable(progress) else draw
            return evaluate(*args, progress=report, **options)

    return cast(AnyFunction, call)


def _silent(progress: Callable[..., None] | bool | None) -> bool | None:
    """Return False, for no bars, if the caller has a function of its own."""
    return progress if progress is None or isinstance(progress, bool) else False
