"""How commands report: results on stdout, progress and notes on stderr, tables as CSV files."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from otad.cli.outputs import STDOUT
from otad.errors import printable
from otad.io.codec import to_plain
from otad.io.files import replacing
from otad.processes import is_first
from otad.progress import can_draw
from otad.scores import Score


def remark(message: str) -> None:
    if is_first():
        typer.echo(f"otad: {printable(message)}", err=True)


def usual_progress() -> bool | None:
    """Return what `progress` is for: bars that vanish on a terminal, and lines elsewhere."""
    return None if can_draw() else True


def show(
    record: Mapping[str, Any],
    as_json: bool,
    *,
    title: str,
    facts: Mapping[str, str],
    out: Path | None = None,
    verdict: Sequence[str] = (),
) -> None:
    """Print the result of a command to stdout: the whole record as JSON, or the facts as a table
    below the sentences of a `verdict`. If `out` is stdout, print to stderr instead."""
    if as_json:
        typer.echo(json.dumps(to_plain(dict(record)), allow_nan=False))
        return
    # Names of files and classes may contain brackets, which are not markup, and commands.
    table = Table(show_header=False, title_justify="left", title_style="bold")
    table.title = escape(printable(title))
    for fact in facts.items():
        table.add_row(*(escape(printable(text)) for text in fact))
    console = Console(stderr=out == STDOUT)
    for sentence in verdict:
        console.print(escape(printable(sentence)), highlight=False)
    console.print(table)


def write_csv(out: Path, lines: Iterable[Sequence[str]]) -> None:
    """Write the whole file, or leave no file if writing fails."""
    if out == STDOUT:
        csv.writer(sys.stdout).writerows(map(_as_text, line) for line in lines)
        return
    with replacing(out) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(map(_as_text, line) for line in lines)


def _as_text(cell: str) -> str:
    """Return the cell, with an apostrophe before what a spreadsheet would read as a formula."""
    if not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def describe_score(score: Score) -> str:
    """Return the value with its 95% interval; a single error has no interval."""
    form, unit = (".1f", "%") if score.metric == "accuracy" else (".4g", "")
    interval = "" if math.isinf(score.high) else f" [{score.low:{form}}, {score.high:{form}}]"
    return f"{score.value:{form}}{unit}{interval}, n = {score.n:,}"


def describe_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def describe_quantiles(quantiles: Mapping[str, float | None], digits: int = 4) -> str:
    """Return the quantiles as text; None stands for infinity."""
    return ", ".join(
        f"{name} " + ("infinite" if value in (None, math.inf) else f"{value:.{digits}g}")
        for name, value in quantiles.items()
    )
