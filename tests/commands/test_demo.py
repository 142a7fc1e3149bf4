"""`otad demo`, shortened: every file it promises, and a report of what was measured."""

from __future__ import annotations

import csv
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands.small import Terminal

import otad
import otad.demo
from otad.commands import demo


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs, and a coarse grid for the picture."""
    monkeypatch.setattr(demo, "RECIPE", replace(demo.RECIPE, epochs=2))
    coarse = functools.partial(otad.demo.interpolate_grid, lines=5, every=2)
    monkeypatch.setattr(otad.demo, "interpolate_grid", coarse)


@pytest.mark.usefixtures("short")
def test_the_demo_leaves_report_model_and_predictions(terminal: Terminal) -> None:
    result = terminal.succeed("demo", "--out", "there", "--seed", 1, "--json")
    record = json.loads(result.stdout)
    page = Path(record["report"]).read_text(encoding="utf-8")
    assert f"{record['otad']:.1%}" in page
    assert f"{record['share_raised']:.1%}" in page
    assert "seed 1" in page
    model = otad.load(record["model"])
    assert model.notes["metrics"]["otad"] == record["otad"]
    with Path(record["predictions"]).open(newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 360
    assert Path("there/net/training.json").is_file()
    assert Path("there/map.png").read_bytes().startswith(b"\x89PNG")
    # What the summary proposes next works on what was left behind.
    terminal.succeed("explain", record["model"], "test", "--row", 0)


@pytest.mark.usefixtures("short")
def test_the_demo_ends_by_saying_where_things_are(terminal: Terminal) -> None:
    result = terminal.succeed("demo")
    for text in ("demo-output/report.html", "demo-output/model", "demo-output/predictions.csv"):
        assert text in result.stdout


@pytest.mark.usefixtures("short")
def test_seeds_are_not_negative(terminal: Terminal) -> None:
    assert "seed: expected" in terminal.refuse("demo", "--seed", -1)
    assert not list(Path().iterdir())
