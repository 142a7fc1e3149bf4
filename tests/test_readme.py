"""The README is one page, and what it states is recorded. Pages of the docs are short, link to the
glossary and to what exists, and show what their code has printed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import draw_comparison
import pytest
import record_outputs
from draw_gain import RECORD, caption, draw_gain
from PIL import Image

import otad
from otad.evaluate.records import Evaluation
from otad.report.verdict import verdict

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")
CERTIFIED = (ROOT / "docs" / "certified_accuracy.md").read_text(encoding="utf-8")
MOST_WORDS, MOST_WORDS_OF_A_PAGE = 700, 1500
GLOSSARY = ROOT / "docs" / "glossary.md"
OTHER = ("decisions", "api", "api.md", "changelog.md", "auto_examples")  # have their own form
TEXTS = [
    ROOT / f"{page.stem.upper()}.md" if page.name in ("contributing.md", "security.md") else page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.relative_to(ROOT / "docs").parts[0] not in OTHER
]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.-])\d(?:[\d.]*\d)?")  # not the 10 of CIFAR-10
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_it_is_one_page() -> None:
    words = [part for part in README.split() if any(letter.isalnum() for letter in part)]
    assert len(words) <= MOST_WORDS


def test_every_number_is_recorded(tmp_path: Path) -> None:
    found = Evaluation.read(RECORD)
    picture = ROOT / "docs" / "images" / "gain.png"
    draw_gain(tmp_path / "gain.png", found)
    with Image.open(picture) as committed, Image.open(tmp_path / "gain.png") as drawn:
        assert committed.text["Description"] == drawn.text["Description"] == caption(found)
        assert committed.size == drawn.size
    assert f"![{caption(found)}](docs/images/gain.png)\n" in README

    stated = CODE.sub("", README).replace(caption(found), "")
    stated = stated.replace(draw_comparison.caption(), "")
    stated = stated.replace(" ".join(verdict(found, "test digits")), "")
    stated = re.sub(r"`[^`]*`|\]\([^)]*\)", "", stated).replace(proofs(), "")
    python = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert python is not None
    assert {*NUMBER.findall(stated)} <= {python[1], "2024", "2408.00329"}


def proofs() -> str:
    record = json.loads((ROOT / "results/mnist_orthogonal.json").read_text())
    proved = record["rows"]["global map, unread 0.1"]["certified"]["1.58"]["value"]
    published = "73.0"
    assert f"models without randomness certify {published} %" in CERTIFIED
    return f"{proved:.1f}% of the test answers within l2 1.58 (published prototypes: {published}%)"


def test_methods_are_compared_as_recorded(tmp_path: Path) -> None:
    """A method appears with its record, and disappears without it."""
    draw_comparison.draw_comparison(tmp_path / "drawn.png")
    text = draw_comparison.caption()
    drawings = ROOT / "docs" / "images" / "comparison.png", tmp_path / "drawn.png"
    with Image.open(drawings[0]) as committed, Image.open(drawings[1]) as drawn:
        assert committed.text["Description"] == drawn.text["Description"] == text, "make pictures"
        assert committed.size == drawn.size, "make pictures"
    assert f"![{text}](docs/images/comparison.png)\n" in README

    panel = draw_comparison.PANELS[1]
    found = {one.name: one for one in draw_comparison.methods(panel)}
    ours, trained = found["OTAD-T, robust metric"], found["PGD training, ResNet-18"]
    suite = Evaluation.read(ROOT / "results/cifar10_robust_moved/evaluation.json")
    assert ours.worst == suite.worst_case(0.5).value
    row = json.loads((ROOT / "results/cifar10_at.json").read_text())["rows"]["PGD, l2, ResNet-18"]
    assert trained.worst == row["attacks"]["autoattack 0.5"]["score"]["value"]
    assert trained.clean == row["score"]["value"]
    strongest = [found["OTAD-T-NN"].strongest, ours.strongest, trained.strongest]
    assert strongest == [False, True, True]
    assert ours.worst < trained.worst, "as the README says"

    shutil.copy(ROOT / "results" / "cifar10_at.json", tmp_path)
    alone = draw_comparison.methods(panel, tmp_path)
    assert alone == [found[f"PGD training{awp}, ResNet-18"] for awp in ("", " with AWP")]


def test_a_record_without_a_gain_is_refused() -> None:
    alone = Evaluation.read(RECORD).undefended
    assert alone is not None
    with pytest.raises(ValueError, match="undefended network"):
        caption(alone)


def test_commands_are_targets() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert {*commands} <= {*targets}


def test_extras_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project[project.index("[project.optional-dependencies]") :].split("\n\n")[0]
    extras = {*re.findall(r"^(\w+) = \[", section, re.MULTILINE)} - {"dev", "docs"}
    (line,) = (line for line in README.splitlines() if line.startswith("Extras"))
    assert {*re.findall(r"`(\w+)` \(", line)} == extras
    page = (ROOT / "docs/how_to/platforms.md").read_text(encoding="utf-8").partition("## Extras")[2]
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == extras | {"dev", "docs"}


def words_of(text: str) -> list[str]:
    """Without code and formulas."""
    prose = re.sub(r"^\$\$.*?^\$\$$", "", CODE.sub("", text), flags=re.MULTILINE | re.DOTALL)
    return [part for part in prose.split() if any(letter.isalnum() for letter in part)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_and_link_to_the_glossary(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(words_of(text)) <= MOST_WORDS_OF_A_PAGE
    assert page == GLOSSARY or re.search(r"\]\([./a-z]*glossary\.md[#)]", text)


def test_every_picture_is_shown() -> None:
    links = {link for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))}
    shown = {Path(link).name for link in links}
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} <= shown


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^### (.*)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)


def test_the_first_steps_print_what_they_show() -> None:
    page = record_outputs.PAGE.read_text(encoding="utf-8")
    shown = [text or "" for _, text in record_outputs.SHOWN.findall(page)]
    record = json.loads(record_outputs.RECORD.read_text(encoding="utf-8"))
    assert shown == record["outputs"]
    assert sum(map(bool, shown)) > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    listed = {docs / f"{line}.md" for line in (docs / "index.md").read_text().splitlines()}
    pages = [page for folder in ("", "how_to", "theory") for page in (docs / folder).glob("*.md")]
    assert {*pages} - {docs / "index.md"} <= listed
    assert all(f"]({name}.md)" in README for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))


def test_changelog_and_citation_are_in_form() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    released = r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(released, version) for version in versions[1:])
    assert {*re.findall(r"^### (.*)$", changelog, re.MULTILINE)} <= KINDS
    assert f"\nversion: {otad.__version__}\n" in (ROOT / "CITATION.cff").read_text()
