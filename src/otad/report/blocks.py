"""What a report is made of: sections of blocks, each a small object the page knows how to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from otad.evaluate.records import Flag


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Items:
    """Sentences under a heading, each with a bullet."""

    kind: ClassVar[str] = "items"
    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and values, one below the other."""

    kind: ClassVar[str] = "facts"
    facts: dict[str, str]


@dataclass(frozen=True)
class Table:
    """Columns with a heading; the first holds names, the others numbers. `note` stands below.

    A table with a word in `folded` is closed until a reader opens it by that word; `prose`: the
    cells are sentences.
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong_row: int | None = None
    note: str = ""
    folded: str = ""
    prose: bool = False


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, with the words for those who cannot see it and a caption."""

    kind: ClassVar[str] = "picture"
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
    """One explained prediction."""

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
class Gallery:
    """Explained predictions side by side."""

    kind: ClassVar[str] = "gallery"
    title: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class Comparison:
    """A prediction before and after an attack; `difference` is a picture of what was changed."""

    before: Case
    after: Case
    difference: str
    difference_note: str
    title: str


@dataclass(frozen=True)
class Comparisons:
    """Predictions before and after, one below the other."""

    kind: ClassVar[str] = "comparisons"
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Flags:
    """Red-flag checks, each with its verdict."""

    kind: ClassVar[str] = "flags"
    flags: Sequence[Flag]


Block = Text | Items | Facts | Table | Picture | Gallery | Comparisons | Flags


@dataclass(frozen=True)
class Section:
    """A titled part of a report. `slug` names it in links; `lead` is its message in a sentence.

    Neighboring sections of the same `chapter` stand under its name.
    """

    slug: str
    title: str
    lead: str
    blocks: Sequence[Block]
    chapter: str = ""


def chapter(name: str, sections: Sequence[Section]) -> list[Section]:
    """The sections, as a chapter."""
    return [replace(section, chapter=name) for section in sections]


@dataclass(frozen=True)
class KeyNumber:
    """A number worth a glance, its name, and a remark on it; an `alarm` calls for attention."""

    value: str
    name: str
    remark: str = ""
    alarm: bool = False
