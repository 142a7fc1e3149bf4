"""`otad demo`, shortened: every file it promises, and a report of what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli.small import Terminal, read_csv

import otad
from otad import data
from otad.cli import demo
from otad.cli.console import show
from otad.evaluate import PRESETS
from otad.evaluate.records import Evaluation
from otad.evaluate.suite import Choice
from otad.report import map_pictures


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few digits and epochs, a coarse grid for the picture, and two attacks."""
    whole = data.load("digits", seed=1)
    few = {name: getattr(whole, name)[:300] for name in ("train_x", "train_y")}
    few |= {name: getattr(whole, name)[:60] for name in ("test_x", "test_y")}
    monkeypatch.setattr(data, "load", lambda *given, **options: replace(whole, **few))
    monkeypatch.setattr(demo, "RECIPE", replace(demo.RECIPE, epochs=12))
    monkeypatch.setattr(demo, "ATTACKED", 6)
    monkeypatch.setattr(demo, "RADII", (0.5, 2.0))
    monkeypatch.setitem(PRESETS, "quick", [Choice("straight"), Choice("noise")])
    monkeypatch.setattr(map_pictures, "LINES", 5)


@pytest.mark.usefixtures("short")
def test_the_demo_leaves_report_model_and_predictions(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: dict[str, str] = {}
    monkeypatch.setattr(
        demo, "show", lambda *args, **shown: facts.update(shown["facts"]) or show(*args, **shown)
    )
    record = terminal.json("demo", "--out", "there", "--seed", 1)
    for name, path in (("report", "report.html"), ("robustness", "robustness.md")):
        assert f"there/{path}" in facts[name]
    assert "2 attacks on 6 digits" in facts["under attack"]
    page = Path(record["report"]).read_text(encoding="utf-8")
    for text in (f"{record['otad']:.1%}", f"{record['share_raised']:.1%}", "seed 1"):
        assert text in page
    model = otad.load(record["model"])
    assert model.notes["metrics"]["otad"] == record["otad"]
    assert len(read_csv(record["predictions"])) == 60
    assert Path("there/net/training.json").is_file()
    assert Path("there/map.png").read_bytes().startswith(b"\x89PNG")

    assert not Path("there/evaluation/parts").exists()

    # The robustness is in the record, on the page and in Markdown alike.
    assert record["evaluation"] == "there/evaluation/evaluation.json"
    evaluation = Evaluation.read(Path(record["evaluation"]))
    assert (evaluation.n, evaluation.eps, evaluation.seed) == (6, (0.5, 2.0), 1)
    assert record["worst_case_accuracy"] == evaluation.worst_case_accuracy
    proved = evaluation.certified_accuracy(0.5)
    assert proved is not None
    assert record["certified_accuracy"] == proved.value / 100
    text = Path(record["robustness"]).read_text(encoding="utf-8")
    worst = evaluation.worst_case(2.0)
    assert worst.value < evaluation.worst_case_accuracy * 100  # else the next line says little
    for content in (page, text):
        assert f"{worst.value:.1f}%" in content
        for flag in evaluation.flags:
            assert flag.verdict in content
            assert flag.name in content
    assert page.index('id="cost"') < page.index('id="threat"') < page.index('id="examples"')
    assert len(list(Path("there/robustness_files").iterdir())) > 3

    # The same net in global scope beside it.
    beside = record["global"]
    one_map = otad.load(beside["model"])
    assert (one_map.scope, beside["scope"]) == ("global", "global")
    assert one_map.bank_fingerprint == model.bank_fingerprint
    assert one_map.notes["metrics"]["otad"] == beside["otad"]
    assert beside["attacks"] == ["noise"]
    figures = [beside[name] for name in ("certified_accuracy", "worst_case_accuracy")]
    for content in (page, text):
        section = content[content.index("Local maps or a global map") :]
        assert f"{beside['potential']['smoothness']:.3g}, through all points" in section
        for figure in (*figures, record["points"]["certified_accuracy"]):
            assert f"{100 * figure:.1f}%" in section
    assert record["points"]["certified_accuracy"] <= record["points"]["worst_case_accuracy"]

    # What the summary proposes next works on what was left behind.
    terminal.succeed("explain", record["model"], "test", "--row", 0)
