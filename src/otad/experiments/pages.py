"""Pages of tables in Markdown: layouts in TOML files, every figure read from a record.

An address leads to a figure: the name of a record and then keys or attributes, as in
"mnist/rows/OTAD consistent/score". "NAME/evaluation" is the evaluation in the folder NAME, whose
methods take a radius: "suite/evaluation/worst_case/2". In a list, "key=value;key=value" selects.
"NAME/experiment" has the settings of the record; a text has planned ones where there is none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from otad.checks import require
from otad.evaluate.records import FORMAT as EVALUATION_FORMAT
from otad.evaluate.records import Evaluation
from otad.experiments.experiment import names, read_experiment
from otad.experiments.records import FORMAT as RUN_FORMAT
from otad.experiments.records import RunRecord
from otad.io.codec import from_plain, read_json, read_toml
from otad.io.files import replacing

_FOLDER = Path(__file__).parent / "layouts"
LAYOUTS = ("paper", "paper_appendix", "beyond_paper", "benchmarks")
NONE = "-"
UNBROKEN = 6  # most columns whose cells, ours / paper, are not broken into lines
_KINDS: dict[Any, Any] = {RUN_FORMAT: RunRecord, EVALUATION_FORMAT: Evaluation}


@dataclass(frozen=True)
class Row:
    """`paper`: published figures, separated by spaces. `ours`: addresses, one for each column, or
    one that is followed by the path of each column; an empty one asks for nothing. `why`: the
    reason where a record has no such figure, which is an error without one; it is not given while
    there is no record at all. A row with a name alone is a heading."""

    name: str
    paper: str = ""
    ours: tuple[str, ...] = ()
    why: str = ""
    times: float | None = None
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """`columns`: paths by heading. Figures are multiplied by `times` and shown with `digits`, by
    default as many as the published figure has, or 1. `text` stands below the table."""

    page: str
    title: str
    columns: dict[str, str]
    rows: tuple[Row, ...]
    head: str = ""
    label: str = ""  # of the paper
    text: str = ""
    picture: str = ""
    command: str = ""
    times: float = 1.0
    digits: int | None = None

    def addresses(self, row: Row) -> list[str]:
        """One for each column; none for a heading."""
        if len(row.ours) != 1:
            return list(row.ours)
        return [f"{row.ours[0]}/{path}".rstrip("/") for path in self.columns.values()]

    def cells(self, row: Row) -> list[tuple[str, str]]:
        """The address of our figure and the published figure, for each column."""
        addresses, published = self.addresses(row), row.paper.split()
        count = max(len(addresses), len(published))
        nothing = [""] * count, [NONE] * count
        return list(zip(addresses or nothing[0], published or nothing[1], strict=True))

    @property
    def wanted(self) -> list[str]:
        """The addresses of all cells for which a figure is planned or published."""
        cells = [cell for row in self.rows for cell in self.cells(row)]
        return [address for address, paper in cells if address or paper != NONE]

    @property
    def records(self) -> list[str]:
        """The records that its cells are read from, without their ending."""
        return list(dict.fromkeys(_document(one) for one in self.wanted if one))

    @property
    def experiments(self) -> list[str]:
        """The experiments that make these records."""
        made = dict.fromkeys(experiment_of(name) for name in self.records)
        return [name for name in made if name in names()]

    @property
    def heading(self) -> str:
        return f"{self.title} (`{self.label}`)" if self.label else self.title

    @property
    def anchor(self) -> str:
        """The name that GitHub and Sphinx give to the heading."""
        return re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Page:
    """A page without tables lists those of the pages in the folder of its name."""

    title: str
    text: str = ""


@dataclass(frozen=True)
class Layout:
    pages: dict[str, Page] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()


@cache
def layout() -> Layout:
    """All pages, and their tables in the order of the paper."""
    pages, tables = dict[str, Page](), list[Table]()
    for name in LAYOUTS:
        found: Layout = from_plain(Layout, read_toml(_FOLDER / f"{name}.toml"), f"{name}.toml")
        pages, tables = pages | found.pages, [*tables, *found.tables]
    return Layout(pages, tuple(tables))


def _document(address: str) -> str:
    """The file of an address in the folder of results, without its ending."""
    first, _, rest = address.partition("/")
    second = rest.partition("/")[0]
    return f"{first}/{second}" if first == "benchmarks" or second == "evaluation" else first


def experiment_of(address: str) -> str:
    """The experiment whose record has the figure at an address."""
    return re.sub(r"-\d+$", "", address.partition("/")[0])


class Figures:
    """The figures of the records in a folder."""

    def __init__(self, results: Path) -> None:
        self.results, self._read = results, cache(self._document)

    def _document(self, name: str) -> Any:
        path = self.results / f"{name}.json"
        if not path.is_file():
            return None
        content = read_json(path)
        kind = _KINDS.get(content.get("format")) if isinstance(content, dict) else None
        return content if kind is None else kind.read(path)

    def has(self, address: str) -> bool:
        """Whether there is the record that an address leads to."""
        return self._read(_document(address)) is not None

    def look(self, address: str, *, optional: bool = False, planned: bool = False) -> Any:
        """What is at an address, or None where there is no such record, unless it is a `planned`
        setting; where the record has no such part, None if that is `optional`."""
        name = _document(address)
        value = self._read(name)
        if value is None and planned and address.startswith(f"{name}/experiment/"):
            value = {"experiment": read_experiment(name)}
        if value is None:
            return None
        try:
            for part in address[len(name) + 1 :].split("/"):
                value = _step(value, part)
            if isinstance(value, list):
                (value,) = value
        except (AttributeError, LookupError, TypeError, ValueError):
            value = None
        value = getattr(value, "score", value)  # of a row or an attack
        require(optional or value is not None, "layout", "the address of a figure", address)
        return getattr(value, "value", value)  # of a score

    def count(self, addresses: Iterable[str]) -> int:
        """The number of addresses at which there is a figure."""
        return sum(self.look(one, optional=True) is not None for one in addresses)

    def fill(self, text: str) -> str:
        """The text with what is at each "{address}", or as "{address:format}" has it."""
        return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", self._figure, text)

    def _figure(self, match: re.Match[str]) -> str:
        value = self.look(match[1], planned=True)
        if value is None or isinstance(value, str):
            return value or NONE
        return format(value, match[2] or ".1f")


def _step(value: Any, part: str) -> Any:
    if isinstance(value, (list, tuple)):
        if "=" in part:
            asked = dict(one.split("=", 1) for one in part.split(";"))
            return [one for one in value if all(str(_step(one, k)) == asked[k] for k in asked)]
        (value,) = value
    if isinstance(value, dict):
        return value[part]
    return value(float(part)) if callable(value) else getattr(value, part)


def write_pages(results: str | Path, folder: str | Path) -> list[Path]:
    """Write the pages of tables, as Markdown files from records, and return their paths.

    They have the paper's tables with our figures beside the published ones, our own tables, and
    benchmarks. A cell whose record is missing says so.

    Parameters
    ----------
    results : str or Path
        The folder of the records.
    folder : str or Path
        The folder of the pages.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.experiments import reproduce, write_pages
    >>> _ = Path("points.toml").write_text('''
    ... title = "Points"
    ... data.points = {name = "synthetic", options = {dim = 8, train_size = 100, test_size = 20}}
    ... nets.small = {data = "points", train.epochs = 1}
    ... rows.otad = {net = "small", method = "otad"}
    ... ''')
    >>> _ = reproduce("points.toml", out="results")
    >>> write_pages("results", "docs")[0].read_text().splitlines()[0]
    "# The paper's tables"
    """
    results, folder = Path(results), Path(folder)
    require(any(results.glob("*.json")), str(results), "records of experiments (NAME.json)", "none")
    figures, written = Figures(results), []
    for name in layout().pages:
        path = folder / f"{name}.md"
        link = Path(os.path.relpath(results, path.parent)).as_posix()
        with replacing(path) as partial:
            partial.write_text(render(name, figures, link), encoding="utf-8")
        written.append(path)
    return written


def render(name: str, figures: Figures, link: str) -> str:
    """A page; `link` leads from it to the folder of results."""
    page = layout().pages[name]
    tables = [table for table in layout().tables if table.page == name]
    blocks = [f"# {page.title}", figures.fill(page.text.strip())]
    if not tables:
        blocks.append(_contents(name, figures))
    for table in tables:
        rows = [_cells(table, row, figures) for row in table.rows]
        blocks += [f"## {table.heading}", _markdown([table.head, *table.columns], rows)]
        if table.picture:
            blocks.append(f"![{table.title}]({link}/{table.picture})")
        blocks.append(_below(table, figures, link))
    blocks.append("<!-- Written by `otad reproduce --pages docs --force` from the records. -->")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _contents(name: str, figures: Figures) -> str:
    rows = []
    for table in (one for one in layout().tables if one.page.startswith(f"{name}/")):
        filled = f"{figures.count(table.wanted)} of {len(table.wanted)}"
        rows.append(
            [f"`{table.label}`", f"[{table.title}]({table.page}.md#{table.anchor})", filled]
        )
    contents = _markdown(["Table", "What it measures", "Our figures"], rows)
    children = "\n".join(page for page in layout().pages if page.startswith(f"{name}/"))
    return f"{contents}\n\n```{{toctree}}\n:hidden:\n\n{children}\n```"  # of the sidebar


def _cells(table: Table, row: Row, figures: Figures) -> list[str]:
    """The name of a row, then ours / paper; ours alone where nothing is published."""
    asked = table.cells(row)
    if not asked:
        return [f"*{row.name}*", *("" for _ in table.columns)]
    found = [figures.look(address, optional=bool(row.why)) for address, _ in asked]
    is_run = not any(row.ours) or any(figures.has(address) for address, _ in asked if address)
    why = f" ({row.why if row.why and is_run else 'not run'})"
    nothing = found.count(None) == len(found)
    space = " " if len(found) > UNBROKEN else "\u00a0"
    cells = []
    for value, (address, paper) in zip(found, asked, strict=True):
        ours = NONE if nothing else NONE + why
        if value is not None:
            ours = _number(value * (row.times or table.times), row.digits or table.digits, paper)
        elif not address and paper == NONE and not row.why:
            ours = ""
        cells.append(ours if paper == NONE else f"{ours}{space}/{space}{paper}")
    return [row.name + why if nothing else row.name, *cells]


def _number(value: float, digits: int | None, paper: str) -> str:
    if digits is None:
        digits = 1 if paper == NONE else len(paper.partition(".")[2])
    else:  # fewer of large numbers
        digits = max(0, digits + 1 - len(str(int(abs(value)))))
    return f"{value:,.{digits}f}"


def _below(table: Table, figures: Figures, link: str) -> str:
    days: dict[str, list[str]] = {}
    for name in table.records:
        if started := figures.look(f"{name}/environment/started"):
            shown = name.removeprefix("benchmarks/").replace("/", ", ")
            days.setdefault(started[:10], []).append(f"[{shown}]({link}/{name}.json)")
    several = "s" * (sum(map(len, days.values())) > 1)
    listed = "; ".join(f"of {day}: {', '.join(links)}" for day, links in days.items())
    records = listed and f"Record{several} {listed}."
    command = table.command
    if table.experiments and not command:
        command = f"otad reproduce {table.label or ' '.join(table.experiments)}"
    repeat = command and f"Repeat it with `{command}`."
    return " ".join(part for part in (figures.fill(table.text.strip()), records, repeat) if part)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---" for _ in heads], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
