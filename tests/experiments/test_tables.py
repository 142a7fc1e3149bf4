"""The page of results says what the records say, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from otad.errors import InputError
from otad.evaluate import Evaluation
from otad.experiments import RunRecord, write_page
from otad.experiments.records import read_records
from otad.experiments.tables import draw_costs, draw_curve, render

REPOSITORY = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "sample"


@pytest.fixture
def record() -> RunRecord:
    return RunRecord.read(SAMPLE / "sample.json")


def test_every_table(record: RunRecord) -> None:
    """All figures of the record, made up and each of its own, are where they belong."""
    page = (SAMPLE / "sample.md").read_text(encoding="utf-8")
    assert render(record, SAMPLE, "../results") == page


def test_goals_that_are_met_and_missed(record: RunRecord) -> None:
    table = render(record, SAMPLE).split("\n\n")[4]
    assert [line.rsplit("|", 2)[1].strip() for line in table.splitlines()[2:]] == [
        "yes, NO", "NO", "yes", "-",
    ]  # fmt: skip
    rows = record.rows | {"bad": replace(record.rows["bad"], score=record.rows["good"].score)}
    table = render(replace(record, rows=rows), SAMPLE).split("\n\n")[4]
    assert table.splitlines()[3].endswith("| at least 95 | yes |")


def test_empty_tables_are_left_out(record: RunRecord) -> None:
    less = replace(record, speeds=(), costs=(), metrics={}, surrogates={}, suites=(), jobs=1)
    page = render(less, SAMPLE)
    for head in ("| a query |", "| device |", "| metric |", "| CIP-net |", "| eps |", "processes"):
        assert head not in page
        assert head in render(record, SAMPLE)


def test_a_suite_shows_the_undefended_network(record: RunRecord, tmp_path: Path) -> None:
    found = Evaluation.read(SAMPLE / "sample" / "evaluation.json")
    alone = replace(found, attacks=(), clean_right=found.clean_right[:3])
    replace(found, undefended=alone).write(tmp_path / "sample" / "evaluation.json")
    (table,) = (it for it in render(record, tmp_path).split("\n\n") if it.startswith("| eps |"))
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    column = head.index("undefended network %")
    assert [row[column].partition(" ")[0] for row in rows] == [f"{300 / found.n:.2f}"] * len(rows)


def texts(path: Path) -> set[str]:
    root = ElementTree.fromstring(path.read_bytes())
    return {element.text for element in root.iter() if element.text}


def test_figures_are_the_same_for_the_same_record(record: RunRecord, tmp_path: Path) -> None:
    one, two, curve = (tmp_path / name for name in ("one.svg", "two.svg", "curve.svg"))
    for path in (one, two):
        draw_costs(record.costs, 2, path)
    assert one.read_bytes() == two.read_bytes()
    assert {"cpu, 2 threads", "cuda, on it", "seconds", "500 predictions"} <= texts(one)
    draw_curve(record, "over L - l", curve)
    panels = {"accuracy %", "local Lipschitz constant", "relative error"}
    assert panels | {"clean", "push", "median", "over L - l"} <= texts(curve)


def test_page_takes_records_only(record: RunRecord, tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    record = replace(record, suites=())
    replace(record, quick=True).write(results / "sample-quick.json")
    (results / "benchmark.json").write_text(json.dumps({"format": 1}), encoding="utf-8")
    with pytest.raises(InputError, match="expected records of experiments"):
        write_page(results, page)
    record.write(results / "sample.json")
    assert write_page(results, page) == page
    text = page.read_text(encoding="utf-8")
    assert render(record, results, "../results") in text
    assert "quick run" not in text
    assert "quick run" in render(replace(record, quick=True), results)


def test_damaged_records_are_refused(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    record.write(path)
    assert RunRecord.read(path) == record
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rows"]["good"]["score"]["value"] = "high"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"rows.good.score.value: expected float, got 'high'"):
        RunRecord.read(path)
    path.write_text(json.dumps({"format": "otad-run-1"}), encoding="utf-8")
    for read in (RunRecord.read, lambda path: read_records(path.parent)):
        with pytest.raises(InputError, match="format otad-run-2, got 'otad-run-1'"):
            read(path)


def test_published_page_is_rendered_from_the_records(tmp_path: Path) -> None:
    """The page in the repository is never typed: rendering again gives the very same."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").symlink_to(REPOSITORY / "results")
    again = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    page = REPOSITORY / "docs" / "results.md"
    assert page.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")
