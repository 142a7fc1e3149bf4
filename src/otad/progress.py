"""The progress bars of all long work: on stderr, in one look."""

from __future__ import annotations

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
