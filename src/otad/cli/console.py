"""How commands speak: results on stdout, progress and remarks on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from otad.progress import bars

Advance = Callable[[int, int], None]
"""Called after every step with the steps done and all steps."""


@contextmanager
def progress_bar(description: str) -> Iterator[Advance]:
    """A bar on stderr that leaves nothing behind; none where stderr is no terminal."""
    with bars(passing=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def remark(message: str) -> None:
    typer.echo(f"otad: {message}", err=True)


def show(record: Mapping[str, Any], as_json: bool, *, title: str, facts: Mapping[str, str]) -> None:
    """The result of a command on stdout: the whole record in JSON, or the facts in a table."""
    if as_json:
        typer.echo(json.dumps(record, allow_nan=False))
        return
    # Names of files and classes may hold brackets, which are no markup.
    table = Table(title=escape(title), show_header=False, title_justify="left", title_style="bold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    Console().print(table)
