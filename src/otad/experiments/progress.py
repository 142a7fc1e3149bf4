"""One line for each part of a run: what it is and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from otad.progress import bars

Report = Callable[[str, int, int], None]
"""Called with the name of a part, the steps done and all its steps."""


@contextmanager
def reporting(progress: Report | bool) -> Iterator[Report]:
    """The caller's function, lines with bars on stderr for True, or nothing for False."""
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
