"""Tables of metrics, surrogates and speed say what the records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tomllib import loads

import pytest
from experiments.small_vision import VISION

from otad.experiments import RunRecord, reproduce
from otad.experiments.learned_records import SpeedRecord
from otad.experiments.learned_tables import metrics, speeds, surrogates
from otad.experiments.tables import render

SPEED = """
[speed]
rows = ["net", "exact"]
published = { exact = 1964 }
published_in = "a table"
ratio_at_most = { exact = 2.0 }
gigabytes_at_most = { exact = 3.0 }
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("tables")
    path = folder / "vision.toml"
    path.write_text(VISION, encoding="utf-8")
    found = reproduce(path, out=folder)
    assert RunRecord.read(folder / "vision.json") == found
    return found


def cells(text: str, first: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_metrics(record: RunRecord) -> None:
    learned, found = cells(metrics(record), "learned: cnn"), record.metrics["learned"]
    assert learned[1:3] == ["4", f"{found.parameters:,}"]
    assert learned[3:6] == ["neighborhood, temperature 0.1", "eps 0.1, 1 steps", "2"]
    assert learned[6] == f"{found.train_score:.4f}"
    adversary = {"eps": 0.5, "steps": 2, "weight_share": 0.005}
    hard = replace(found, train=found.train | {"adversary": adversary})
    moved = metrics(replace(record, metrics={"hard": hard}))
    assert cells(moved, "hard: cnn")[4] == "eps 0.5, 2 steps, weights 0.5%"
    assert cells(metrics(record), "pixels: pixels")[1:8] == ["64", "0", *["-"] * 5]


def test_surrogates(record: RunRecord) -> None:
    line, found = cells(surrogates(record), "imitation"), record.surrogates["imitation"]
    assert found.held_out_error is not None
    assert line[1:5] == ["exact", "1", f"{found.parameters:,}", "2"]
    assert line[6] == f"{found.held_out_error:.4f}"


def test_rows_name_what_they_answer_by(record: RunRecord) -> None:
    assert record.rows["few"].settings["per_class"] == 2
    assert record.rows["exact"].settings["metric"] == "learned"
    assert "surrogate" not in record.rows["exact"].settings
    assert "CIP-net imitation" in render(record)


def test_goals_may_be_scores_under_attack(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    attack = (
        '[attacks.push]\nname = "pgd"\neps = 9.0\npoints = 9\noptions = { steps = 1 }\n[rows]\n'
    )
    text = VISION.replace("[rows]\n", attack)
    asked = 'method = "net", attacks = ["push"], at_least = { push = 99, accuracy = 0 } }'
    path.write_text(text.replace('method = "net" }', asked), encoding="utf-8")
    goals = reproduce(path, out=tmp_path).rows["net"].goals
    assert goals == {"push at least 99": False, "at least 0": True}


def speed(row: str, place: str | None, milliseconds: float, resident: int) -> SpeedRecord:
    steps = {} if place is None else {"search": 0.25}
    cost = (milliseconds, 1.0, resident, 2 * 10**9, 90.0)
    return SpeedRecord(row, place, "cuda", 0 if place is None else 50, 10, 5, 2, *cost, steps)


def test_speeds(record: RunRecord) -> None:
    lines = (
        speed("net", None, 0.5, 10**9),
        speed("exact", "memory", 1.5, 4 * 10**9),
        speed("exact", "disk", 2.0, 2 * 10**9),
    )
    config = record.config | loads(SPEED)
    table = speeds(replace(record, speeds=lines, config=config))
    body = [line for line in table.splitlines() if line.startswith("| exact")]
    net, (memory, disk) = cells(table, "net"), (line.split(" | ") for line in body)
    assert net[1:3] == ["-", "-"]
    assert net[7:9] == ["1.00", "-"]
    assert memory[5:9] == ["1.5000", "1964", "3.00", "0.2500"]
    assert memory[-2:] == ["at most 2 times the first", "NO |"]
    assert disk[-2:] == ["at most 3 GB resident", "yes |"]
    assert "Published: a table." in table
    assert speeds(record) == ""
