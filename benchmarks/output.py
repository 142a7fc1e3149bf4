"""What the benchmarks share: options, the JSON record, and the style of tables and plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, StrMethodFormatter
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

try:
    from otad.io.environment import Environment
except ModuleNotFoundError:  # PYTHONPATH names another version of the package
    Environment = None

Record = dict[str, Any]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    device = {"choices": ("cpu", "cuda"), "default": "cpu", "help": "Where our own solver runs."}
    parser.add_argument("--device", **device)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for every solver.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the random instances.")
    where = "Folder of the record and the plot."
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"), help=where)
    return parser


def checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    given = parser.parse_args(arguments)
    for name, least in (("threads", 1), ("seed", 0)):
        if getattr(given, name) < least:
            parser.error(f"{name}: expected at least {least}, got {getattr(given, name)}")
    if given.budget is not None and not 0 < given.budget < float("inf"):
        parser.error(f"budget: expected a positive number of seconds, got {given.budget}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("device: expected a CUDA device for 'cuda', got none")
    return given


def environment(device: torch.device, threads: int) -> Record:
    if Environment is None:
        return {"device": device.type, "device_name": device.type, "threads": threads}
    return asdict(Environment.now(device, threads))


def steps(items: Iterable[Any], title: str) -> Iterable[Any]:
    """Yield the items, with a progress bar on stderr."""
    return track(list(items), title, console=Console(stderr=True))


def finish(record: Record, tables: Iterable[Table | str], figure: Figure, stem: Path) -> None:
    """Print the tables, and write `stem`.json and the figure as PNG and SVG."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "png", "svg")]
    text = json.dumps({"format": 1} | record, indent=1, allow_nan=False) + "\n"
    paths[0].write_text(text, encoding="utf-8")
    for path in paths[1:]:
        figure.savefig(path, dpi=160)
    for part in (*tables, *(f"wrote {path}" for path in paths)):
        Console().print(part, soft_wrap=isinstance(part, str), highlight=False)


def table(title: str, rows: Iterable[dict[str, str]]) -> Table:
    """Return a table with one column for every key."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for row in rows:
        if not made.columns:
            for name in row:
                made.add_column(name, justify="left" if name == "solver" else "right", no_wrap=True)
        made.add_row(*row.values())
    return made


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits and a unit, such as "68.2 µs"."""
    return f"{EngFormatter(unit='s', places=2)(seconds)}"


def log_axes(panel: Axes, ticks: list[int], label: str) -> None:
    """Make both axes logarithmic, with a tick at every measured size."""
    panel.set(xscale="log", yscale="log", xlabel=label)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.yaxis.set_major_formatter(EngFormatter(unit="s"))
    panel.grid(True, color="#e4e4e4")
