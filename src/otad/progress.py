"""The progress bars of all long work: on stderr, in one look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
)
from rich.text import Text

from otad.errors import printable


class _Description(ProgressColumn):
    """The text as it is: names in it are neither markup nor commands of the terminal."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


def bars(*, passing: bool = False) -> Progress:
    """Bars with steps and time left; `passing` ones vanish and show on a terminal alone."""
    console = Console(stderr=True)
    return Progress(
        _Description(),
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
