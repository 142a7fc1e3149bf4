"""The page: sections to one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from otad.io.files import replacing
from otad.report.blocks import KeyNumber, Section
from otad.report.markdown import Markdown


@dataclass(frozen=True)
class Report:
    """A title, the numbers worth a glance, and sections; `footer` says how it was made."""

    title: str
    subtitle: str
    numbers: Sequence[KeyNumber]
    sections: Sequence[Section]
    footer: str = ""

    @property
    def chapters(self) -> list[tuple[str, list[Section]]]:
        """Sections by chapter, in their order."""
        groups = groupby(self.sections, key=lambda section: section.chapter)
        return [(chapter, list(sections)) for chapter, sections in groups]

    def render(self) -> str:
        loader = PackageLoader("otad.report", "page")
        page = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        style, _, _ = loader.get_source(page, "style.css")
        return page.get_template("page.html").render(report=self, style=Markup(style))

    def write(self, path: Path) -> Path:
        """Put the whole page in place of the one before."""
        with replacing(path) as partial:
            partial.write_text(self.render(), encoding="utf-8")
        return path

    def markdown(self) -> str:
        """The same in Markdown, with the words of each picture in its place."""
        return self._in(Markdown())

    def write_markdown(self, path: Path) -> Path:
        """The same in Markdown; the pictures become files of the folder NAME_files beside it."""
        writer = Markdown(path.parent / f"{path.stem}_files")
        content = self._in(writer)
        with replacing(path) as partial:
            partial.write_text(content, encoding="utf-8")
        return path

    def _in(self, writer: Markdown) -> str:
        opening = writer.opening(self.title, self.subtitle, self.numbers)
        sections = [writer.section(section) for section in self.sections]
        return "\n\n".join([opening, *sections, writer.closing(self.footer)]).strip() + "\n"
