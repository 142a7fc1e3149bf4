"""A report: sections of blocks, written as one HTML file or as Markdown with picture files. The
templates have one macro for each kind of block, with the name of its class in lower case."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from otad.evaluate.records import Flag
from otad.io.files import replacing
from otad.report.formatting import Cell, as_text

SUFFIXES = {"image/svg+xml": "svg", "image/png": "png"}


class Text(NamedTuple):
    text: str


class Facts(NamedTuple):
    facts: dict[str, str]


@dataclass(frozen=True)
class Table:
    """The first column holds names. The row named `strong` is highlighted, `note` is shown below. A
    table with a `summary` is collapsed behind it in HTML. `prose`: the cells are sentences."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    strong: str | None = None
    note: str = ""
    summary: str = ""
    prose: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [tuple(map(as_text, row)) for row in self.rows])


class Picture(NamedTuple):
    """An image as a data URI, with its text alternative and a caption."""

    uri: str
    alt: str
    caption: str = ""


class Pictures(NamedTuple):
    """Rows of small images under the same columns: for each a data URI and a caption."""

    columns: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    note: str


class Vote(NamedTuple):
    """A training point behind a prediction: its picture, label, weight (0 to 1) and contribution,
    if known."""

    uri: str
    label: str
    weight: float | None
    agrees: bool
    title: str
    contribution: float | None = None


class Case(NamedTuple):
    """One explained prediction; `account` says how the solver found it, `reasons` what the training
    points contribute."""

    uri: str
    prediction: str
    truth: str
    certainty: str
    account: str = ""
    votes: Sequence[Vote] = ()
    reasons: Sequence[str] = ()

    @property
    def right(self) -> bool:
        return self.prediction == self.truth


class Gallery(NamedTuple):
    title: str
    cases: Sequence[Case]


class Comparison(NamedTuple):
    """A prediction before and after an attack; `difference` is a picture of the change."""

    before: Case
    after: Case
    difference: str
    difference_note: str
    title: str


class Flags(NamedTuple):
    flags: Sequence[Flag]


Block = Text | Facts | Table | Picture | Pictures | Gallery | Comparison | Flags


class Section(NamedTuple):
    """A part of a report. `slug` is the target of links, `lead` the message in a sentence, and
    consecutive sections with the same `chapter` are shown under its name."""

    slug: str
    title: str
    lead: str
    blocks: Sequence[Block]
    chapter: str = ""


class KeyNumber(NamedTuple):
    """A number at the top of a report. An `alarm` is highlighted; a `plain` number is one that
    others are compared with."""

    value: str
    name: str
    remark: str = ""
    alarm: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Report:
    """A title, key numbers and sections; `footer` says how the report was made. The `verdict`, in
    sentences, comes first."""

    title: str
    subtitle: str
    numbers: Sequence[KeyNumber]
    sections: Sequence[Section]
    footer: str = ""
    verdict: Sequence[str] = ()

    @property
    def chapters(self) -> list[tuple[str, list[Section]]]:
        groups = groupby(self.sections, key=lambda section: section.chapter)
        return [(chapter, list(sections)) for chapter, sections in groups]

    def html(self) -> str:
        environment = page_templates()
        style = Markup(environment.get_template("style.css").render())
        return environment.get_template("page.html").render(report=self, style=style)

    def markdown(self, folder: Path | None = None) -> str:
        """Markdown; pictures become files in `folder`, or their text alternatives without one."""
        page = page_templates(finalize=_escaped, lstrip_blocks=True).get_template("page.md")
        text = page.render(report=self, image=partial(_write_image, folder, count(1)))
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write(self, path: Path) -> Path:
        """Markdown for the suffix .md, with pictures in a folder NAME_files, otherwise HTML."""
        folder = path.parent / f"{path.stem}_files"
        content = self.markdown(folder) if path.suffix == ".md" else self.html()
        with replacing(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
        return path


@cache
def page_templates(*packages: str, **options: Any) -> Environment:
    """The templates in the folder `page` of some packages and of this one, which has the look that
    all pages share."""
    loader = ChoiceLoader([PackageLoader(name, "page") for name in (*packages, "otad.report")])
    options |= {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True}
    return Environment(loader=loader, **options)


def escape(text: str) -> str:
    """Any text as one line that Markdown shows unchanged."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$]|^[#+-](?=\s))", r"\\\1", plain)


def _escaped(value: Any) -> Markup:
    """What the Markdown template inserts: macros and images unchanged, all else escaped."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def _write_image(folder: Path | None, numbers: Iterator[int], uri: str, alt: str) -> Markup:
    """A link to the picture, which is written to a numbered file of the folder."""
    if folder is None:
        return _escaped(f"({alt})")
    kind, _, data = uri.removeprefix("data:").partition(";base64,")
    name = f"picture-{next(numbers)}.{SUFFIXES[kind]}"
    with replacing(folder / name) as temporary:
        temporary.write_bytes(base64.b64decode(data))
    return Markup(f"![{escape(alt)}]({folder.name.replace(' ', '%20')}/{name})")
