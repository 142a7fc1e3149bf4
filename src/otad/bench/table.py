"""A benchmark record as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from otad.bench.peers import MAP, OURS_32, OURS_64, POTENTIALS, QUESTIONS, STRONG_MAP
from otad.bench.record import BenchmarkRecord, Measurement

OURS = (OURS_32, OURS_64)
TITLES = {
    MAP: "z' by eq. (3), l = 0",
    STRONG_MAP: "z' by eq. (3), l = 0.1",
    POTENTIALS: "potentials by eq. (2)",
}
NOTES = """\
time     per query, median of the repeats. Ours finds the potentials too (eq. 2)
         and checks its input; the others are given our potentials. POT solves
         two conic problems a query, for a lower and an upper bound.
own      what the solver claims for itself, without the modeling around it
timed    different queries that were timed
vs f32   how many times faster ours is in float32; vs f64: in float64
differs  largest deviation from ours in float64, relative to our largest entry"""


def format_seconds(seconds: float) -> str:
    """Three digits and a unit, e.g. "68.2 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_ratio(ratio: float) -> str:
    """Two digits, more only before the point, e.g. "2,180x"."""
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def solver_tables(record: BenchmarkRecord) -> RenderableType:
    """All of a record: one table per question, the bank case, and who is missing."""
    tables = [_question_table(record, question) for question in QUESTIONS]
    if record.bank:
        tables.append(_bank_table(record))
    parts: list[RenderableType] = []
    for table in tables:
        parts += [table, ""]
    for name, reason in record.missing.items():
        parts.append(Text(f"{name}: {reason}", style="yellow"))
    return Group(*parts, Text(NOTES, style="dim"))


def _question_table(record: BenchmarkRecord, question: str) -> Table:
    table = plain_table(TITLES[question])
    for name in ("B", "K", "d"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("solver", no_wrap=True)
    for name in ("time", "own", "timed", "vs f32", "vs f64", "differs"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [row for row in record.measurements if row.question == question]
    for cell in dict.fromkeys(row.cell for row in rows):
        beside = {row.peer: row for row in rows if row.cell == cell}
        for number, (name, row) in enumerate(beside.items()):
            size = [f"{part:,}" for part in cell] if number == 0 else ["", "", ""]
            table.add_row(*size, *_cells(row, beside), style="green" if name in OURS else None)
        table.add_section()
    return table


def plain_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def _cells(row: Measurement, beside: dict[str, Measurement]) -> Iterator[str]:
    yield row.peer
    yield format_seconds(row.seconds)
    yield "" if row.own_seconds is None else format_seconds(row.own_seconds)
    yield f"{row.queries:,}"
    for ours in OURS:
        yield "" if row.peer in OURS else format_ratio(row.seconds / beside[ours].seconds)
    difference = "" if row.difference is None else f"{row.difference:.0e}"
    yield f"{difference} ({row.failed} failed)" if row.failed else difference


def _bank_table(record: BenchmarkRecord) -> Table:
    case = record.config["bank"]
    title = (
        f"{case['batch']:,} queries, K = {case['neighbors']}, d = {case['dim']:,}, "
        f"gathered from a bank of {case['size']:,}"
    )
    table = plain_table(title)
    table.add_column("bank")
    for name in ("chunk", "in all", "floor", "ratio", "copy", "extra memory", "residual"):
        table.add_column(name, justify="right")
    for row in record.bank:
        memory = "" if row.extra_bytes is None else f"{row.extra_bytes / 2**30:.2f} GiB"
        table.add_row(
            row.dtype,
            "auto" if row.chunk is None else str(row.chunk),
            format_seconds(row.seconds),
            format_seconds(row.floor_seconds),
            f"{row.ratio:.2f}",
            f"{row.bandwidth / 1e12:.2f} TB/s",
            memory,
            f"{row.residual:.0e}",
        )
    answer = record.bank[0].answer_bytes / 2**30
    table.caption = f"The answer itself takes {answer:.2f} GiB of the extra memory."
    return table
