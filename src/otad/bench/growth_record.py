"""What the whole-bank benchmark leaves behind: one JSON file, one figure, one table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, StrMethodFormatter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from otad.bench.plots import GRID, INK
from otad.bench.table import format_seconds, plain_table
from otad.errors import InputError
from otad.io.environment import Environment
from otad.io.files import replacing

FORMAT = 1
TIMES = {
    "potential_seconds": ("potential of least L", "#c8372d", "s"),
    "query_seconds": ("all queries", "#0b5fa5", "o"),
}
NOTES = """\
potential  time to find levels of least L, in so many sweeps over all pairs
in all     time for all queries; rounds: how often every point was priced
gap        the largest, over all points in float64: |z' - exact|^2 <= M gap
memory     peak beyond the bank on a GPU; growth of the process on a CPU"""


@dataclass(frozen=True)
class Growth:
    """One size N. Seconds are in all, not per query; `gap` is the largest of any query, `rounds`
    and `support` are means over the queries, `unsolved` those whose gap did not close."""

    size: int
    queries: int
    smoothness: float
    sweeps: int
    violation: float
    potential_seconds: float
    making_seconds: float
    query_seconds: float
    rounds: float
    most_rounds: int
    support: float
    most_support: int
    gap: float
    unsolved: int
    potential_memory: int
    query_memory: int


@dataclass(frozen=True)
class GrowthRecord:
    """All sizes of one run; `left_out` says why a size is missing."""

    benchmark: str
    source: str
    pricing: str
    dim: int
    seed: int
    environment: Environment
    seconds: float
    left_out: dict[str, str]
    sizes: tuple[Growth, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> GrowthRecord:
        data = json.loads(text)
        found = data.pop("format", None) if isinstance(data, dict) else None
        if found != FORMAT or data.get("benchmark") != "global":
            raise InputError(
                f"record: expected a global benchmark record of format {FORMAT}, got {found}"
            )
        data["environment"] = Environment(**data["environment"])
        data["sizes"] = tuple(Growth(**row) for row in data["sizes"])
        return GrowthRecord(**data)

    def write(self, path: Path) -> None:
        """The whole file or none of it."""
        with replacing(path) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> GrowthRecord:
        return GrowthRecord.from_json(path.read_text(encoding="utf-8"))


def growth_tables(record: GrowthRecord) -> RenderableType:
    """One line per size, what is missing, and what the columns mean."""
    missing = [f"N = {size}: {reason}" for size, reason in record.left_out.items()]
    remarks = [Text(line, style="yellow") for line in missing]
    return Group(_table(record), "", *remarks, Text(NOTES, style="dim"))


def _table(record: GrowthRecord) -> Table:
    name = record.environment.device_name
    table = plain_table(f"One map through N points ({record.source}, d = {record.dim:,}), {name}")
    columns = ("N", "least L", "potential", "sweeps", "queries", "in all")
    for column in (*columns, "rounds", "support", "gap", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in record.sizes:
        memory = max(row.potential_memory, row.query_memory) / 2**30
        table.add_row(
            f"{row.size:,}",
            f"{row.smoothness:.4g}",
            format_seconds(row.potential_seconds),
            str(row.sweeps),
            f"{row.queries:,}",
            format_seconds(row.query_seconds),
            f"{row.rounds:.2f}",
            f"{row.support:.1f}",
            f"{row.gap:.0e}" + (f" ({row.unsolved} open)" if row.unsolved else ""),
            f"{memory:.2f} GiB",
        )
    return table


def plot_growth(record: GrowthRecord, stem: Path) -> list[Path]:
    """Writes `stem`.svg: seconds against N, both axes logarithmic."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.subplots()
    sizes = [row.size for row in record.sizes]
    for field, (label, color, marker) in TIMES.items():
        if field == "query_seconds" and record.sizes:
            label = f"{record.sizes[0].queries:,} queries"
        seconds = [getattr(row, field) for row in record.sizes]
        panel.plot(sizes, seconds, "-", color=color, marker=marker, markersize=5, label=label)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.xaxis.set_major_locator(FixedLocator(sizes))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.yaxis.set_major_formatter(EngFormatter(unit="s"))
    panel.set_xlabel(f"points of the bank, N (d = {record.dim:,})")
    panel.set_ylabel("time (log scale)")
    panel.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, labelcolor=INK)
    where = record.environment
    figure.suptitle(f"One map for the whole bank on {where.device_name}", fontsize=12, color=INK)
    path = stem.with_name(f"{stem.name}.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return [path]
