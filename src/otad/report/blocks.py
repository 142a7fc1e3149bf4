"""What a report is made of: sections of blocks. The templates have one macro per kind of block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from otad.evaluate.records import Flag
from otad.report.formatting import Cell, as_text


class Block:
    """A part of a section; `kind` is the name of its macro in the templates."""

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Text(Block):
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Facts(Block):
    """Names and values."""

    facts: dict[str, str]


@dataclass(frozen=True)
class Table(Block):
    """Columns with headings; the first column holds names, the rest hold texts or numbers.

    `strong_row` is highlighted and `note` is shown below. A table with a `summary` is collapsed
    behind it in HTML. `prose`: the cells are sentences.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    strong_row: int | None = None
    note: str = ""
    summary: str = ""
    prose: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [tuple(map(as_text, row)) for row in self.rows])


@dataclass(frozen=True)
class Picture(Block):
    """An image as a data URI, with its text alternative and a caption."""

    uri: str
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Vote:
    """A training point behind a prediction: its picture, label and weight (0 to 1), if known."""

    uri: str
    label: str
    weight: float | None
    agrees: bool
    title: str


@dataclass(frozen=True)
class Case:
    """One explained prediction; `account` says how the solver found it."""

    uri: str
    prediction: str
    truth: str
    certainty: str
    account: str
    votes: Sequence[Vote]

    @property
    def right(self) -> bool:
        return self.prediction == self.truth


@dataclass(frozen=True)
class Gallery(Block):
    """Explained predictions side by side."""

    title: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class Comparison(Block):
    """A prediction before and after an attack; `difference` is a picture of the change."""

    before: Case
    after: Case
    difference: str
    difference_note: str
    title: str


@dataclass(frozen=True)
class Flags(Block):
    """Red-flag checks with their verdicts."""

    flags: Sequence[Flag]


@dataclass(frozen=True)
class Section:
    """A titled part of a report. `slug` is the target of links, `lead` the message in a sentence.

    Consecutive sections with the same `chapter` are shown under its name.
    """

    slug: str
    title: str
    lead: str
    blocks: Sequence[Block]
    chapter: str = ""


def chapter(name: str, sections: Sequence[Section]) -> list[Section]:
    """The sections as a chapter."""
    return [replace(section, chapter=name) for section in sections]


@dataclass(frozen=True)
class KeyNumber:
    """A number for the top of a report, with its name and a remark; an `alarm` is highlighted."""

    value: str
    name: str
    remark: str = ""
    alarm: bool = False
