"""Markdown: the same numbers, pictures as files, and no text taken for markup."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from report.evaluations import Attacked, by_hand, hand_report, of_values
from report.small import Small
from report.test_page import Page

from otad.report.blocks import Facts, Flags, KeyNumber, Section, Table, Text
from otad.report.evaluation_report import evaluation_report
from otad.report.page import Report, escape

HOSTILE = '<img src=x onerror=alert(1)>|`*_[a](javascript:b)\n# "quoted" & $\\no$'


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_has_the_numbers_of_the_record() -> None:
    evaluation = by_hand()
    text = hand_report().markdown()
    lines = text.splitlines()
    for eps in evaluation.eps:
        worst, proved = evaluation.worst_case(eps), evaluation.certified_accuracy(eps)
        assert proved is not None
        (row,) = (
            found for found in map(cells, lines) if found and found[0].strip("*") == f"{eps:g}"
        )
        assert row[1].strip("*") == f"{worst.value:.1f}%"
        assert row[2].strip("*") == f"{worst.low:.1f} to {worst.high:.1f}%"
        assert row[3].strip("*") == f"{proved.value:.1f}%"
    for flag in evaluation.flags:
        assert [flag.verdict, flag.name, flag.found, flag.meaning, flag.advice] in map(cells, lines)
    for score in evaluation.clean.values():
        assert f"| {score.value:.1f}% | {score.low:.1f} to {score.high:.1f}% |" in text.replace(
            "*", ""
        )
    assert "| **60.0%** |" in text
    assert text.count("\n## ") == 9
    assert "data:" not in text


@pytest.mark.parametrize("evaluation", [by_hand(), of_values()], ids=["classes", "values"])
def test_page_and_markdown_tell_the_same_cells(evaluation, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    report = evaluation_report(evaluation)
    page, text = Page(report.write(tmp_path / "r.html")).text, report.markdown()
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Table):
                for cell in (cell for row in block.rows for cell in row):
                    assert cell in page
                    assert escape(cell) in text


def test_every_table_is_a_rectangle(attacked: Attacked) -> None:
    width = 0
    for line in attacked.report.markdown().splitlines():
        if line.startswith("|"):
            width = width or len(cells(line))
            assert len(cells(line)) == width, line
        else:
            width = 0


def test_pictures_become_files_that_can_be_seen(attacked: Attacked, tmp_path: Path) -> None:
    path = attacked.report.write(tmp_path / "my report.md")
    links = re.findall(r"!\[[^\]]+\]\(my%20report_files/([^)]+)\)", path.read_text("utf-8"))
    files = {file.name: file.read_bytes() for file in (tmp_path / "my report_files").iterdir()}
    assert sorted(links) == sorted(files)
    assert len(links) == 3 + 3 * 4  # curves, radii and cost; before, after and change
    for name, content in files.items():
        if name.endswith(".svg"):
            assert content.startswith(b"<?xml")
            continue
        with Image.open(io.BytesIO(content)) as image:
            assert min(image.size) == 96


def test_without_files_pictures_are_words() -> None:
    text = hand_report().markdown()
    assert "(accuracy against eps: " in text
    assert "![" not in text


def test_hostile_names_stay_names(small: Small, attacked: Attacked, tmp_path: Path) -> None:
    evaluation = replace(
        attacked.evaluation,
        missing={HOSTILE: HOSTILE},
        attacker_knows=HOSTILE,
        model={HOSTILE: {HOSTILE: HOSTILE}},
        attacks=tuple(
            replace(it, attack=HOSTILE + it.attack) for it in attacked.evaluation.attacks
        ),
        flags=tuple(replace(it, name=HOSTILE, found=HOSTILE) for it in attacked.evaluation.flags),
    )
    classes = [f"{HOSTILE}{label}" for label in range(10)]
    report = evaluation_report(
        evaluation, model=small.model, x=attacked.x, y=attacked.y, classes=classes,
        adversarial=attacked.adversarial, title=HOSTILE,
    )  # fmt: skip
    page = Page(report.write(tmp_path / "r.html"))
    assert HOSTILE in page.text
    assert not page.open
    assert {image["src"] for image in page.all("img")}.isdisjoint({"x", None})
    assert all("onerror" not in attributes for _, attributes in page.tags)
    text = report.markdown()
    assert "<" not in text
    assert not re.search(r"(?<!\\)\]\(", text)
    assert not re.search(r"(?<!\\)`", text)
    assert sum(line.startswith("# ") for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("<b> & ", "&lt;b&gt; &amp;"),
        ("two\nlines", "two lines"),
        ("# title", r"\# title"),
        ("- item", r"\- item"),
        ("-1.5", "-1.5"),
        ("x_1 * `y` \\", r"x\_1 \* \`y\` \\"),
        ("93.0% (n = 10)", "93.0% (n = 10)"),
    ],
)
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_chapters_part_the_sections(tmp_path: Path) -> None:
    parts = [
        Section("a", "First", "", [Text("one")], "Chapter 1"),
        Section("b", "Second", "", [Facts({"k": "v"})], "Chapter 1"),
        Section("c", "Third", "", [Flags([])], "Chapter 2"),
    ]
    report = Report("Title", "", [KeyNumber("1", "one")], parts)
    text = report.markdown()
    assert re.findall(r"^(#+ .*)", text, re.M) == [
        "# Title", "# Chapter 1", "## First", "## Second", "# Chapter 2", "## Third",
    ]  # fmt: skip
    page = Page(report.write(tmp_path / "r.html"))
    assert page.text.count("Chapter 1") == 2  # above its links and above its sections
    single = Report("Title", "", [], parts[:2]).write(tmp_path / "s.html")
    assert "Chapter 1" not in Page(single).text
