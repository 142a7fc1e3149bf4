"""The page of results says what the records say, and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from otad.errors import InputError
from otad.evaluate import Flag
from otad.experiments import RunRecord, write_page
from otad.experiments.attack_records import (
    AttackedScore,
    Goal,
    SuiteCost,
    SuiteLine,
    SuiteRecord,
)
from otad.experiments.plots import draw_costs, draw_curve
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
from otad.io.environment import Environment
from otad.model.diagnostics import Distribution
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


def attacked(value: float, metric: str = "accuracy", **options: object) -> AttackedScore:
    filled = {
        "label": "",
        "score": Score(metric, value, value - 1, value + 1, 50),
        "clean": Score(metric, 90.0, 80.0, 95.0, 50),
        "metrics": {},
        "distance": replace(SPREAD, most=2.0),
        "eps": 2.0,
        "threat": "l2, eps = 2, inputs in (0.0, 1.0)",
        "settings": {"attacks": {"bpda": {"steps": 100}}, "on": "model", "unit": "input"},
        "forwards": 5150,
        "backwards": 5000,
        "seconds": 12.4,
    }
    return AttackedScore(**(filled | options))


def with_attacks(record: RunRecord, **attacks: dict[str, AttackedScore]) -> RunRecord:
    rows = {key: replace(one, attacks=attacks.get(key, {})) for key, one in record.rows.items()}
    return replace(record, rows=rows)


def test_scores_under_attack_beside_the_published(record: RunRecord) -> None:
    box = {"eps": None, "label": "anywhere", "distance": None}
    worst = {"attacks": {"pgd": {}, "straight": {}}, "on": "net", "unit": "input"}
    record = with_attacks(
        record,
        good={"push": attacked(40.0)},
        otad={"push": attacked(60.0), "box": attacked(10.0, settings=worst, **box)},
    )
    record.rows["otad"].published["push"] = 95.2
    page = render(record)
    lines = [line for line in page.splitlines() if line.startswith("| push |")]
    assert "| good \\| net | 50 | 90.00 | 40.00 (39.00 to 41.00) | - |" in lines[0]
    assert "| defended | 50 | 90.00 | 60.00 (59.00 to 61.00) | 95.2 |" in lines[1]
    assert lines[1].endswith("| 2.25 / 2.00 | 103 | 100 | 12 |")
    assert cells(page, "anywhere")[1:7] == [
        "defended", "50", "90.00", "10.00 (9.00 to 11.00)", "-", "-"
    ]  # fmt: skip
    assert "- push: l2, eps = 2, inputs in (0.0, 1.0); bpda (steps = 100)" in page
    expected = (
        "- anywhere: anywhere in the box; pgd and straight, for each point the worst; found on"
    )
    assert expected in page


def test_regressions_have_three_measures(record: RunRecord) -> None:
    found = attacked(0.5, "mse", metrics={"E": 0.0861, "SMAPE": 0.319})
    record = with_attacks(record, otad={"push": found})
    record.rows["otad"].published.update({"push": 0.507, "push E": 0.086, "push SMAPE": 0.32})
    page = render(record)
    assert "| 0.500 (-0.500 to 1.500) | 0.507 | 0.086 | 0.086 | 0.319 | 0.32 | 103 |" in page


@pytest.mark.parametrize("first", ["accuracy", "mse"])
def test_accuracies_and_errors_have_tables_of_their_own(record: RunRecord, first: str) -> None:
    share = row("shares", 96.0, attacks={"push": attacked(40.0)})
    measured = attacked(0.5, "mse", metrics={"E": 0.0861, "SMAPE": 0.319})
    error = row(
        "errors",
        0.4,
        score=Score("mse", 0.4, 0.3, 0.5, 320),
        published={},
        at_least={},
        attacks={"push": measured},
    )
    rows = {"a": share, "b": error} if first == "accuracy" else {"b": error, "a": share}
    page = render(replace(record, rows=rows))
    for table in page.split("\n\n"):
        assert "| shares |" not in table or "| accuracy % (95 %)" in table
        assert "| errors |" not in table or "| mean squared error (95 %)" in table
    assert page.count("| shares |") == page.count("| errors |") == 2
    assert page.count("- push: ") == 1


def test_records_from_before_there_were_attacks(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    record.write(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["suite"]
    for one in content["rows"].values():
        del one["attacks"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert RunRecord.read(path) == record
    assert "under attack" not in render(record)


@pytest.fixture
def suite() -> SuiteRecord:
    def score(value: float) -> Score:
        return Score("accuracy", value, value - 3, value + 3, 1000)

    return SuiteRecord(
        row="defended",
        threat="l2, eps = 2, inputs in (0.0, 1.0)",
        attacker_knows="everything",
        clean={"otad": score(97.0), "net": score(98.0)},
        lines=(
            SuiteLine(0.5, score(90.0), {"K = 1": score(86.5)}, {"K = 1": Goal(86.0, False)}, 3.0),
            SuiteLine(2.0, score(70.0), {"K = 1": score(9.0)}, {"worst": Goal(66.0, True)}, 9.6),
        ),
        costs=(SuiteCost("square", "black-box", 1900, 20, 3_800_000, 0, 61.25),),
        flags=(Flag("white-box against black-box", "PASS", "none", "it means", "do this"),),
        folder="sample",
        seconds=99.6,
        missing={"pixle": "no images"},
    )


def test_the_suite_with_what_was_asked_for(record: RunRecord, suite: SuiteRecord) -> None:
    page = render(replace(record, suite=suite), "../results")
    assert "[the whole evaluation](../results/sample/report.html)" in page
    assert cells(page, "0.5")[1:] == [
        "97.00", "90.00 (87.00 to 93.00)", "86.50 (83.50 to 89.50)",
        "certified, K = 1 at least 86", "yes", "3",
    ]  # fmt: skip
    assert cells(page, "2")[-3:] == ["worst case at most 66", "NO", "10"]
    assert cells(page, "square")[1:] == ["black-box", "1,900", "20", "3,800,000", "0", "61.2"]
    assert cells(page, "white-box against black-box")[1:] == ["PASS", "none"]
    assert "Not run: pixle: no images." in page
    assert "otad 97.00 (94.00 to 100.00), net 98.00" in page


def test_the_suite_survives_the_file(record: RunRecord, suite: SuiteRecord, tmp_path: Path) -> None:
    whole = with_attacks(replace(record, suite=suite), good={"push": attacked(40.0)})
    whole.write(tmp_path / "sample.json")
    assert RunRecord.read(tmp_path / "sample.json") == whole


def test_figure_over_the_curvature(record: RunRecord, tmp_path: Path) -> None:
    rows = []
    for smoothness in (8.0, 2.0):
        settings = {"smoothness": smoothness, "strong_convexity": 0.5}
        one = replace(record.rows["otad"], settings=settings, lipschitz=SPREAD)
        rows.append(replace(one, attacks={"push": attacked(10 * smoothness, label="a push")}))
    path = tmp_path / "one.svg"
    draw_curve([record.rows["good"], *rows], "over L - l", path)
    drawn = path.read_bytes()
    draw_curve(rows[::-1], "over L - l", path)
    assert path.read_bytes() == drawn, "nets are left out, and the order is that of L - l"
    texts = {element.text for element in ElementTree.fromstring(drawn).iter() if element.text}
    panels = {"accuracy %", "local Lipschitz constant", "relative error"}
    assert panels | {"clean", "a push", "median", "over L - l"} <= texts
    shown = render(replace(record, config=record.config | {"curve": {"title": "over L"}}), "..")
    assert "![over L](../sample.svg)" in shown


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
