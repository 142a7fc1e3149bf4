"""The page of results says what the records say, and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from otad.environment import Environment
from otad.errors import InputError
from otad.experiments import RunRecord, write_page
from otad.experiments.plots import draw_costs
from otad.experiments.records import (
    Account,
    Candidate,
    CostRecord,
    DataRecord,
    NetRecord,
    Regularity,
    RowRecord,
    read_records,
)
from otad.experiments.tables import render
from otad.regularity import Distribution
from otad.scores import Score

REPOSITORY = Path(__file__).parents[2]
SPREAD = Distribution(100, 2.5, 2.0, 2.25, 3.5, 4.5, math.inf)
STATUSES = {"solved": 0.75, "raised": 0.2, "repaired": 0.0, "infeasible": 0.04, "unsolved": 0.01}


def cost(device: str, bank: int, seconds: float, resident: int) -> CostRecord:
    on_device = 3 * 10**9 if device == "cuda" else None
    return CostRecord(device, bank, 500, 100, 2, 1.0, seconds, resident, on_device, 96.5)


def row(label: str, value: float, **options: object) -> RowRecord:
    filled = {
        "label": label,
        "net": "one",
        "data": "digits",
        "method": "net",
        "settings": {},
        "score": Score("accuracy", value, value - 1, value + 1, 1000),
        "published": {"accuracy": 96.3},
        "published_in": "Table of the paper",
        "at_least": {"accuracy": 95.0},
        "account": None,
        "lipschitz": None,
        "seconds": 1.5,
    }
    return RowRecord(**(filled | options))


@pytest.fixture
def record() -> RunRecord:
    settings = {"n_neighbors": 7, "mode": "paper", "climb": [0.2, 0.0]}
    account = Account(STATUSES, SPREAD, 3e-9, replace(SPREAD, mean=0.1234), 0.0625)
    score = Score("accuracy", 91.5, 90.0, 93.0, 50)
    return RunRecord(
        name="sample",
        title="A sample",
        note="What to know.",
        quick=False,
        config={
            "nets": {"one": {"choose": {"setting": "energy_weight"}}},
            "cost": {"seconds_at_most": 60, "gigabytes_at_most": 1.5},
        },
        seed=5,
        code="c0de" * 16,
        environment=Environment(
            "2024-01-01T00:00:00+00:00",
            None,
            "3.12.1",
            {"torch": "2.11.0"},
            "Linux",
            "a CPU",
            "cuda",
            "a GPU",
            2,
        ),
        data={
            "digits": DataRecord("digits", {"std": 0.3}, 1200, 1000, (1, 8, 8), 10, "f" * 64, "UCI")
        },
        nets={
            "one": NetRecord(
                "digits",
                5,
                True,
                "none",
                {"energy_weight": 0.002, "epochs": 9},
                0.9931,
                "w",
                44.0,
                Regularity(SPREAD, SPREAD, 0.015, 1200, 2.0),
                (Candidate(0.0, score), Candidate(0.002, score)),
            )
        },
        rows={
            "good": row("good | net", 96.55),
            "bad": row("bad", 94.0, lipschitz=SPREAD),
            "otad": row(
                "defended",
                96.0,
                method="otad",
                settings=settings,
                account=account,
                at_least={},
                published={"accuracy": 96.0, "relative_error": 0.4385},
                published_in="another table",
            ),
        },
        seconds={"train one": 44.0, "good": 1.5},
        costs=(
            cost("cpu", 100, 3.0, 5 * 10**8),
            cost("cpu", 1000, 59.0, 14 * 10**8),
            cost("cuda", 100, 0.5, 10**8),
            cost("cuda", 1000, 0.75, 16 * 10**8),
        ),
        missing={"tpu": "none here"},
    )


def cells(page: str, first: str) -> list[str]:
    """The cells of the one line of a table that starts with `first`."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.replace("\\|", "!").strip("|").split("|")]


def test_scores_beside_the_published(record: RunRecord) -> None:
    page = render(record)
    asked = "at least 95"
    good = cells(page, "good \\| net")
    assert good[1:5] == ["-", "96.55 (95.55 to 97.55)", "1,000", "96.3 [a]"]
    assert good[-2:] == [asked, "yes"]
    scores = [line for line in page.splitlines() if line.startswith("| bad |")]
    assert scores[0].endswith(f"{asked} | NO |")
    assert "- [a] Table of the paper" in page
    assert "- [b] another table" in page
    assert "96 [b] | 0.1234 | 0.4385" in page


def test_account_shows_what_the_solver_did(record: RunRecord) -> None:
    page = render(record)
    lines = [line for line in page.splitlines() if line.startswith("| defended |")]
    expected = (
        "paper, steps 0.2 and 0 | 2 / 2.25 / 3.5 / 4.5 / inf | 75.00 | 20.00 | 5.00 | 3.0e-09"
    )
    assert expected in lines[1]
    assert "0.1234 | 6.25 | - |" in lines[1]
    assert "2.25 / inf" in page


def test_where_it_comes_from(record: RunRecord) -> None:
    page = render(record)
    assert "`otad reproduce sample --seed 5` on a GPU and a CPU, torch 2.11.0" in page
    assert "source c0dec0dec0de" in page
    assert "digits (std = 0.3), 1,200 train and 1,000 test points, 1 x 8 x 8, 10 classes" in page
    assert "What to know." in page
    assert "Not run: tpu: none here." in page


def test_choice_and_net(record: RunRecord) -> None:
    page = render(record)
    assert cells(page, "0.002")[1:] == ["91.50 (90.00 to 93.00)", "yes"]
    assert cells(page, "0")[2] == ""
    net = cells(page, "one")
    assert net[1:8] == ["digits", "5", "yes", "0.002", "9", "0.9931", "2.5"]
    assert net[9:] == ["1.50", "44"]


def test_costs_are_judged_at_the_largest_bank(record: RunRecord) -> None:
    page = render(record, "../results")
    judged = [line for line in page.splitlines() if "at most 60 s and 1.5 GB" in line]
    assert [line.rsplit("|", 2)[1].strip() for line in judged] == ["yes", "NO"]
    assert all("| 1,000 | 500 |" in line for line in judged)
    assert "![time and memory](../results/sample.svg)" in page


def test_page_takes_records_only(record: RunRecord, tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    with pytest.raises(InputError, match="expected records of experiments"):
        write_page(results, page)
    replace(record, quick=True, title="in haste").write(results / "sample-quick.json")
    (results / "benchmark.json").write_text(json.dumps({"format": 1}), encoding="utf-8")
    with pytest.raises(InputError, match="expected records of experiments"):
        write_page(results, page)
    record.write(results / "sample.json")
    assert write_page(results, page) == page
    text = page.read_text(encoding="utf-8")
    assert render(record, "../results") in text
    assert "in haste" not in text
    write_page(results, page)
    assert page.read_text(encoding="utf-8") == text


def test_damaged_records_are_refused(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    record.write(path)
    assert RunRecord.read(path) == record
    content = json.loads(path.read_text(encoding="utf-8"))
    content["rows"]["good"]["score"]["value"] = "high"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"rows.good.score.value: expected float, got 'high'"):
        RunRecord.read(path)
    path.write_text(json.dumps({"format": "other"}), encoding="utf-8")
    with pytest.raises(InputError, match="expected a record of format otad-run-1, got other"):
        RunRecord.read(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="expected a record in JSON"):
        RunRecord.read(path)


def test_plot_is_the_same_for_the_same_record(record: RunRecord, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_costs(record.costs, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    texts = {element.text for element in ElementTree.fromstring(drawn).iter() if element.text}
    assert {"cpu, 2 threads", "cuda, on it", "seconds", "500 predictions"} <= texts


def test_published_page_is_rendered_from_the_records(tmp_path: Path) -> None:
    """The page in the repository is never typed: rendering again gives the very same."""
    results, page = REPOSITORY / "results", REPOSITORY / "docs" / "results.md"
    published = [record for record in read_records(results) if not record.quick]
    assert page.exists() == bool(published)
    if published:
        (tmp_path / "docs").mkdir()
        (tmp_path / "results").symlink_to(results)
        again = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
        assert page.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")
