"""The page: sections to one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from otad.report.blocks import KeyNumber, Section
from otad.transport.files import replacing


@dataclass(frozen=True)
class Report:
    """A title, the numbers worth a glance, and sections; `footer` says how it was made."""

    title: str
    subtitle: str
    numbers: Sequence[KeyNumber]
    sections: Sequence[Section]
    footer: str = ""

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
