"""A report as one HTML file that needs no network, or as Markdown with its pictures as files."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from otad.io.files import replacing
from otad.report.blocks import KeyNumber, Section

SUFFIXES = {"image/svg+xml": "svg", "image/png": "png"}


@dataclass(frozen=True)
class Report:
    """A title, key numbers and sections; `footer` says how the report was made."""

    title: str
    subtitle: str
    numbers: Sequence[KeyNumber]
    sections: Sequence[Section]
    footer: str = ""

    @property
    def chapters(self) -> list[tuple[str, list[Section]]]:
        """Consecutive sections by chapter."""
        groups = groupby(self.sections, key=lambda section: section.chapter)
        return [(chapter, list(sections)) for chapter, sections in groups]

    def html(self) -> str:
        environment = _environment()
        style = Markup(environment.get_template("style.css").render())
        return environment.get_template("page.html").render(report=self, style=style)

    def markdown(self, folder: Path | None = None) -> str:
        """Markdown; pictures become files in `folder`, or their text alternatives without one."""
        environment = _environment(finalize=_escaped, lstrip_blocks=True)
        environment.globals["image"] = _PictureFiles(folder)
        text = environment.get_template("page.md").render(report=self)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write(self, path: Path) -> Path:
        """Replace the file at once: Markdown for the suffix .md, with pictures in the folder
        NAME_files beside it, otherwise HTML."""
        is_markdown = path.suffix == ".md"
        folder = path.parent / f"{path.stem}_files"
        content = self.markdown(folder) if is_markdown else self.html()
        with replacing(path) as partial:
            partial.write_text(content, encoding="utf-8")
        return path


def _environment(finalize: Callable[[Any], Any] | None = None, **options: Any) -> Environment:
    return Environment(
        loader=PackageLoader("otad.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=finalize,
        **options,
    )


def escape(text: str) -> str:
    """Any text as one line that Markdown shows unchanged."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$]|^[#+-](?=\s))", r"\\\1", plain)


def _escaped(value: Any) -> Markup:
    """What the Markdown template inserts: macros and images unchanged, everything else escaped."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


class _PictureFiles:
    """Writes pictures to numbered files of a folder and links to them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.count = 0

    def __call__(self, uri: str, alt: str) -> Markup:
        if self.folder is None:
            return _escaped(f"({alt})")
        kind, _, data = uri.removeprefix("data:").partition(";base64,")
        self.count += 1
        name = f"picture-{self.count}.{SUFFIXES[kind]}"
        with replacing(self.folder / name) as partial:
            partial.write_bytes(base64.b64decode(data))
        return Markup(f"![{escape(alt)}]({self.folder.name.replace(' ', '%20')}/{name})")
