"""The progress bars of all long work: on stderr, in one look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def bars(*, passing: bool = False) -> Progress:
    """Bars with steps and time left; `passing` ones vanish and show on a terminal alone."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=passing,
        disable=passing and not console.is_terminal,
    )


PartReport = Callable[[str, int, int], None]
"""Called with the name of a part, the steps done and all its steps."""


@contextmanager
def part_bars(progress: PartReport | bool) -> Iterator[PartReport]:
    """The caller's function, a bar for each part on stderr for True, or nothing for False."""
    if callable(progress):
        yield progress
    elif progress:
        with bars() as lines:
            tasks = {}

            def draw(part: str, done: int, total: int) -> None:
                if part not in tasks:
                    tasks[part] = lines.add_task(part, total=total)
                lines.update(tasks[part], completed=done, total=total)

            yield draw
    else:
        yield lambda part, done, total: None
