"""A report in Markdown, from the blocks the page is made of."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from otad.io.files import replacing
from otad.report.blocks import (
    Case,
    Comparison,
    Comparisons,
    Facts,
    Flags,
    Gallery,
    Items,
    KeyNumber,
    Picture,
    Section,
    Table,
    Text,
)

SMALLEST_SIDE = 96  # of a picture in a file: Markdown cannot enlarge one
SUFFIXES = {"image/svg+xml": "svg", "image/png": "png"}


def escape(text: str) -> str:
    """Any text as one line that Markdown shows as it is."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$]|^[#+-](?=\s))", r"\\\1", plain)


class Markdown:
    """Writes sections. Pictures go to `folder`, or without one their words take their place."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._slug = ""
        self._count = 0
        self._chapter = ""

    def opening(self, title: str, subtitle: str, numbers: Sequence[KeyNumber]) -> str:
        rows = [(it.name, it.value, it.remark) for it in numbers]
        parts = [f"# {escape(title)}", escape(subtitle)]
        return "\n\n".join(parts + ([_table(("", "", ""), rows)] if rows else []))

    def closing(self, footer: str) -> str:
        return f"---\n\n{escape(footer)}" if footer else ""

    def section(self, section: Section) -> str:
        self._slug, self._count = section.slug, 0
        parts = [f"## {escape(section.title)}", escape(section.lead)]
        if section.chapter and section.chapter != self._chapter:
            parts.insert(0, f"# {escape(section.chapter)}")
        self._chapter = section.chapter
        write: dict[str, Callable[[Any], str]] = {
            "text": self.text, "items": self.items, "facts": self.facts, "table": self.table,
            "picture": self.picture, "gallery": self.gallery, "comparisons": self.comparisons,
            "flags": self.flags,
        }  # fmt: skip
        return "\n\n".join(parts + [write[block.kind](block) for block in section.blocks])

    def text(self, block: Text) -> str:
        return escape(block.text)

    def items(self, block: Items) -> str:
        lines = "\n".join(f"- {escape(item)}" for item in block.items)
        return f"### {escape(block.title)}\n\n{lines}"

    def facts(self, block: Facts) -> str:
        return "\n".join(f"- {escape(name)}: {escape(it)}" for name, it in block.facts.items())

    def table(self, block: Table) -> str:
        parts = [f"**{escape(block.folded)}**"] if block.folded else []
        parts.append(_table(block.columns, block.rows, block.strong_row))
        return "\n\n".join(parts + ([escape(block.note)] if block.note else []))

    def picture(self, block: Picture) -> str:
        parts = [self._image(block.uri, block.alt)]
        return "\n\n".join(parts + ([escape(block.caption)] if block.caption else []))

    def gallery(self, block: Gallery) -> str:
        columns = ("input", "answer", "truth", "training points behind it")
        rows = [
            (self._image(it.uri, f"an input, truly {it.truth}"), *map(escape, _cells(it)))
            for it in block.cases
        ]
        return f"### {escape(block.title)}\n\n" + _raw_table(columns, rows)

    def comparisons(self, block: Comparisons) -> str:
        return "\n\n".join(map(self._comparison, block.comparisons))

    def _comparison(self, it: Comparison) -> str:
        columns = ("", "input", "answer", "truth", "training points behind it")
        rows = [
            (when, self._image(case.uri, f"the input {when}"), *map(escape, _cells(case)))
            for when, case in (("before", it.before), ("attacked", it.after))
        ]
        change = self._image(it.difference, "what the attack changed")
        rows.append(("change", change, escape(it.difference_note), "", ""))
        return f"### {escape(it.title)}\n\n" + _raw_table(columns, rows)

    def flags(self, block: Flags) -> str:
        columns = ("verdict", "check", "found", "meaning", "what to do")
        rows = [(it.verdict, it.name, it.found, it.meaning, it.advice) for it in block.flags]
        return _table(columns, rows)

    def _image(self, uri: str, words: str) -> str:
        if self.folder is None:
            return escape(f"({words})")
        kind, _, data = uri.removeprefix("data:").partition(";base64,")
        content = base64.b64decode(data)
        self._count += 1
        name = f"{self._slug}-{self._count}.{SUFFIXES[kind]}"
        with replacing(self.folder / name) as partial:
            partial.write_bytes(_enlarged(content) if kind == "image/png" else content)
        return f"![{escape(words)}]({self.folder.name.replace(' ', '%20')}/{name})"


def _cells(case: Case) -> tuple[str, str, str]:
    votes = ", ".join(
        vote.label if vote.weight is None else f"{vote.label} ({vote.weight:.0%})"
        for vote in case.votes
    )
    return f"{case.prediction} {case.certainty}".strip(), case.truth, votes


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], strong_row: int | None = None
) -> str:
    cells = [[escape(cell) for cell in row] for row in rows]
    if strong_row is not None:
        cells[strong_row] = [f"**{cell}**" if cell else "" for cell in cells[strong_row]]
    return _raw_table([escape(name) for name in columns], cells)


def _raw_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _enlarged(content: bytes) -> bytes:
    """A PNG file whose pixels are whole squares, so that its shorter side can be seen."""
    with Image.open(io.BytesIO(content)) as image:
        factor = -(-SMALLEST_SIDE // min(image.size))
        if factor == 1:
            return content
        width, height = image.size
        large = image.resize((factor * width, factor * height), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    large.save(stream, format="PNG", optimize=True)
    return stream.getvalue()
