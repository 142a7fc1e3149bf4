"""HTML and Markdown: complete, the same numbers in both, safe with any text, in a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from report.evaluations import Attacked, Small, by_hand, hand_report, of_values

from otad.evaluate.records import Evaluation
from otad.report.evaluation_report import evaluation_report
from otad.report.page import Facts, Flags, KeyNumber, Report, Section, Table, Text, escape
from otad.report.plots import pixels_uri

SECTIONS = ("model", "training", "accuracy", "answers", "why", "map", "cost")
HOSTILE = '<img src=x onerror=alert(1)>|`*_[a](javascript:b)\n# "quoted" & $\\no$'


class Page(HTMLParser):
    """All tags with their attributes, and the text between them; open tags must be closed."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(content)
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


def cells(line: str) -> list[str]:
    """The cells of a row of a Markdown table, without bold marks."""
    return [cell.strip(" *") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page(report.read_text(encoding="utf-8"))


def test_a_page_is_complete_and_needs_no_other_file(page: Page, report: Path) -> None:
    assert not page.open
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object")
        for name in ("src", "href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:", "#")), (tag, target)
    assert not re.search(r"https?://|url\(|@import", report.read_text(encoding="utf-8"))
    assert tuple(section["id"] for section in page.all("section")) == SECTIONS
    assert tuple(link["href"] for link in page.all("a")) == tuple(f"#{name}" for name in SECTIONS)
    assert len(page.all("img")) > 20  # two plots, the map, and cards with five neighbors each
    for image in page.all("img"):
        assert image["alt"]
        content = base64.b64decode((image["src"] or "").split(";base64,")[1])
        is_plot = content.startswith(b"<?xml")
        links = re.findall(rb'(?:href|src)="([^"]*)"', content) if is_plot else []
        assert all(link.startswith(b"#") for link in links)


def test_the_numbers_are_those_measured(page: Page, small: Small) -> None:
    found = small.assessment
    for score in found.scores.values():
        assert f"{score:.2%}" in page.text
    for status, count in found.account.counts.items():
        assert f"{status}: " in page.text
        assert f"{count / len(found):.1%}" in page.text
    assert f"L = {small.model.smoothness:g}" in page.text
    assert small.dataset.fingerprint()[:16] in page.text
    assert "On <few> digits & more" in page.text


def test_markdown_has_flags_marks_and_words_for_pictures() -> None:
    evaluation, text = by_hand(), hand_report().markdown()
    rows = [cells(line) for line in text.splitlines() if line.startswith("|")]
    for flag in evaluation.flags:
        assert [flag.verdict, flag.name, flag.found, flag.meaning, flag.advice] in rows
    for score in evaluation.clean.values():
        expected = [f"{score.value:.1f}%", f"{score.low:.1f} to {score.high:.1f}%"]
        assert expected in [row[1:] for row in rows]
    assert "| **60.0%** |" in text
    assert text.count("\n## ") == 9
    assert "(accuracy against eps: " in text, "without files, pictures are words"
    assert "![" not in text


@pytest.mark.parametrize("make", [by_hand, of_values])
def test_html_and_markdown_have_the_same_cells(make: Callable[[], Evaluation]) -> None:
    report = hand_report(make)
    page, text = Page(report.html()).text, report.markdown()
    blocks = [block for section in report.sections for block in section.blocks]
    found = [cell for it in blocks if isinstance(it, Table) for row in it.rows for cell in row]
    assert len(found) > 50
    for cell in map(str, found):
        assert cell in page
        assert escape(cell) in text


def test_markdown_has_rectangular_tables_and_picture_files(
    attacked: Attacked, tmp_path: Path
) -> None:
    text, width = attacked.report.write(tmp_path / "my report.md").read_text("utf-8"), 0
    for line in text.splitlines():
        width = (width or len(cells(line))) if line.startswith("|") else 0
        assert len(cells(line)) == width, line
    links = re.findall(r"!\[[^\]]+\]\(my%20report_files/([^)]+)\)", text)
    files = {file.name: file.read_bytes() for file in (tmp_path / "my report_files").iterdir()}
    assert sorted(links) == sorted(files)
    # Curves, radii and cost; before, after and change; an example moved in three ways.
    assert len(links) == 3 + 3 * 4 + 4 * 3
    for name, content in files.items():
        if name.endswith(".svg"):
            assert content.startswith(b"<?xml")
        else:
            with Image.open(io.BytesIO(content)) as image:
                assert min(image.size) == 96


def test_hostile_names_stay_names(attacked: Attacked) -> None:
    known = attacked.evaluation
    evaluation = replace(
        known, missing={HOSTILE: HOSTILE}, attacker_knows=HOSTILE,
        model={HOSTILE: {HOSTILE: HOSTILE}},
        attacks=tuple(replace(it, attack=HOSTILE + it.attack) for it in known.attacks),
        flags=tuple(replace(it, name=HOSTILE, found=HOSTILE) for it in known.flags),
    )  # fmt: skip
    classes = [f"{HOSTILE}{label}" for label in range(10)]
    report = evaluation_report(evaluation, **attacked.known, classes=classes, title=HOSTILE)
    page = Page(report.html())
    assert HOSTILE in page.text
    assert not page.open
    assert {image["src"] for image in page.all("img")}.isdisjoint({"x", None})
    assert all("onerror" not in attributes for _, attributes in page.tags)
    text = report.markdown()
    assert "<" not in text
    assert not re.search(r"(?<!\\)(\]\(|`)", text)
    assert sum(line.startswith("# ") for line in text.splitlines()) == 1


@pytest.mark.parametrize(("text", "expected"), [
    ("a|b", r"a\|b"), ("<b> & ", "&lt;b&gt; &amp;"), ("two\nlines", "two lines"),
    ("# title", r"\# title"), ("- item", r"\- item"), ("-1.5", "-1.5"),
    ("x_1 * `y` \\", r"x\_1 \* \`y\` \\"), ("93.0% (n = 10)", "93.0% (n = 10)"),
])  # fmt: skip
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_chapters_group_sections() -> None:
    table = Table(("eps", "n"), [("1", 2000)], note="note")
    parts = [
        Section("a", "First", "", [Text("<b>bold</b>")], "Chapter 1"),
        Section("b", "Second", "", [Facts({"k": "v"})], "Chapter 1"),
        Section("c", "Third", "", [Flags([]), table], "Chapter 2"),
    ]
    report = Report("Title", "", [KeyNumber("1", "one")], parts)
    text = report.markdown()
    assert re.findall(r"^(#+ .*)", text, re.M) == [
        "# Title", "# Chapter 1", "## First", "## Second", "# Chapter 2", "## Third",
    ]  # fmt: skip
    page = Page(report.html())
    assert page.text.count("Chapter 1") == 2  # above its links and above its sections
    assert "Chapter 1" not in Page(Report("Title", "", [], parts[:2]).html()).text
    for words in ("<b>bold</b>", "2,000", "note"):
        assert words in page.text


def test_pixels_keep_their_levels() -> None:
    _, data = pixels_uri(torch.tensor([[[0.0, 0.2], [0.4, 1.0]]]), (0.0, 1.0)).split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as read:
        assert read.size == (96, 96)
        corners = [(0, 0), (48, 47), (47, 48), (95, 95)]
        assert [read.getpixel(corner) for corner in corners] == [0, 51, 102, 255]
    _, data = pixels_uri(torch.rand(3, 200, 100)).split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as read:
        assert (read.mode, read.size) == ("RGB", (100, 200))


PROBE = """
<script>
const faults = [];
addEventListener("error", event => faults.push(String(event.message || event.target.src)), true);
addEventListener("load", () => {
  const images = [...document.images];
  const size = element => {
    const box = element.getBoundingClientRect();
    return [box.width, box.height];
  };
  const found = {
    images: images.length,
    blank: images.filter(image => !image.complete || image.naturalWidth === 0).length,
    plots: [...document.querySelectorAll("img.plot")].map(size),
    cards: [...document.querySelectorAll(".numbers div")].map(it => it.getBoundingClientRect().top),
    verdicts: [...document.querySelectorAll(".verdict")].map(element => ({
      text: element.textContent, size: size(element),
      color: getComputedStyle(element).backgroundColor,
    })),
    overflow: document.documentElement.scrollWidth - innerWidth,
    beyond: [...document.querySelectorAll(".side, .side *")]
      .filter(it => it.scrollWidth > it.clientWidth + 1 && it.clientWidth > 0).length,
    ground: getComputedStyle(document.body).backgroundColor,
    requests: performance.getEntriesByType("resource").map(entry => entry.name)
      .filter(name => !name.startsWith("data:")),
    faults,
  };
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
});
</script>
"""


def look(browser: str, page: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What a phone's width of the page shows, after all that must hold of any page was checked."""
    probed = folder / "probed.html"
    content = page.read_text(encoding="utf-8")
    probed.write_text(content.replace("<head>", "<head>" + PROBE), encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            "--window-size=500,900", "--virtual-time-budget=5000", "--dump-dom", *options,
            probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert match, done.stderr
    found: dict[str, Any] = json.loads(match[1])
    assert found["images"] == content.count("<img ")
    assert found["overflow"] <= 0
    assert (found["blank"], found["requests"], found["faults"]) == (0, [], [])
    assert "CONSOLE" not in done.stderr
    return found


def brightness(color: str) -> int:
    """The largest of the three levels of rgb(...), 0 to 255."""
    return max(int(level) for level in re.findall(r"\d+", color)[:3])


def test_a_browser_shows_all_of_it(
    browser: str, report: Path, attacked: Attacked, tmp_path: Path
) -> None:
    """Also with names without a space, on cards and in tables, and a title of one word."""
    look(browser, report, tmp_path)
    names = [f"n{number}_" + "wort" * 30 for number in range(10)]
    known = attacked.known | {"classes": names, "title": "m" * 200}
    page = evaluation_report(attacked.evaluation, **known).write(tmp_path / "robust.html")
    found = look(browser, page, tmp_path)
    assert found["beyond"] == 0
    assert len(found["plots"]) == 3
    assert all(width > 300 and height > 80 for width, height in found["plots"])
    assert [it["text"] for it in found["verdicts"]] == ["FAIL", "NOT RUN", "PASS"]
    assert len({it["color"] for it in found["verdicts"]}) == 3
    assert all(min(it["size"]) > 10 for it in found["verdicts"])
    assert brightness(found["ground"]) > 200
    rows = Counter(found["cards"])
    assert [*rows.values()] == [2, 2, 1], "two cards a row on a phone"


def test_a_browser_can_show_it_in_the_dark(browser: str, tmp_path: Path) -> None:
    page = hand_report(of_values).write(tmp_path / "values.html")
    found = look(browser, page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert brightness(found["ground"]) < 60
