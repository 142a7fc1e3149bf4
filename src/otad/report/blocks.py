"""What a report is made of: sections of blocks, each a small object the page knows how to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Facts:
    """Names and values, one below the other."""

    kind: ClassVar[str] = "facts"
    facts: dict[str, str]


@dataclass(frozen=True)
class Table:
    """Columns with a heading; the first holds names, the others numbers. `note` stands below."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong_row: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, with the words for those who cannot see it and a caption."""

    kind: ClassVar[str] = "picture"
    uri: str
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Vote:
    """A training point behind a prediction: its picture, label and weight (0 to 1)."""

    uri: str
    label: str
    weight: float
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


Block = Text | Facts | Table | Picture | Gallery


@dataclass(frozen=True)
class Section:
    """A titled part of a report. `slug` names it in links; `lead` is its message in a sentence."""

    slug: str
    title: str
    lead: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class KeyNumber:
    """A number worth a glance, its name, and a remark on it."""

    value: str
    name: str
    remark: str = ""
