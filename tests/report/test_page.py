"""The page: whole by itself, every section there, numbers as measured, safe with any text."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import torch
from PIL import Image
from report.small import Small

from otad.report.blocks import KeyNumber, Section, Table, Text
from otad.report.page import Report
from otad.report.pictures import pixels_uri

SECTIONS = ("model", "training", "accuracy", "answers", "why", "map", "cost")


class Page(HTMLParser):
    """All tags with their attributes, and the text between them; open tags must be closed."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_nothing_is_loaded_from_elsewhere(report: Path) -> None:
    page = Page(report)
    assert not page.open
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object")
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:", "#")), (tag, target)
    content = report.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import", content)
    for image in page.all("img"):
        _, data = (image["src"] or "").split(";base64,")
        plot = base64.b64decode(data)
        links = re.findall(rb'(?:href|src)="([^"]*)"', plot) if plot.startswith(b"<?xml") else []
        assert all(link.startswith(b"#") for link in links)


def test_all_sections_are_there_and_linked(report: Path) -> None:
    page = Page(report)
    assert tuple(section["id"] for section in page.all("section")) == SECTIONS
    assert tuple(link["href"] for link in page.all("a")) == tuple(f"#{name}" for name in SECTIONS)


def test_every_image_has_words_and_a_body(report: Path) -> None:
    images = Page(report).all("img")
    assert len(images) > 20  # two plots, the map, and cards with five neighbors each
    for image in images:
        assert image["alt"]
        assert len(image["src"] or "") > 100


def test_the_numbers_are_those_measured(report: Path, small: Small) -> None:
    text = Page(report).text
    for score in small.assessment.scores.values():
        assert f"{score:.2%}" in text
    for status, count in small.assessment.account.counts.items():
        assert f"{status}: " in text
        assert f"{count / len(small.assessment):.1%}" in text
    assert f"L = {small.model.smoothness:g}" in text
    assert small.dataset.fingerprint()[:16] in text


def test_text_is_never_taken_for_markup(report: Path) -> None:
    assert "On <few> digits & more" in Page(report).text


def test_sections_of_others_fit_in(tmp_path: Path) -> None:
    attacks = Section(
        "attacks",
        "Under attack",
        "What is left.",
        [Text("<b>bold</b>"), Table(("eps", "accuracy"), [("0.5", "90%")], note="lower bound")],
    )
    path = Report("Title", "", [KeyNumber("1", "one")], [attacks]).write(tmp_path / "r.html")
    page = Page(path)
    assert [section["id"] for section in page.all("section")] == ["attacks"]
    for text in ("<b>bold</b>", "0.5", "90%", "lower bound", "Under attack"):
        assert text in page.text


def test_pixels_keep_their_levels() -> None:
    image = torch.tensor([[[0.0, 0.2], [0.4, 1.0]]])
    _, data = pixels_uri(image, (0.0, 1.0)).split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as read:
        assert list(read.tobytes()) == [0, 51, 102, 255]
    color = torch.rand(3, 4, 5)
    _, data = pixels_uri(color).split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as read:
        assert (read.mode, read.size) == ("RGB", (5, 4))
