"""`otad reproduce`: several experiments by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.toml_files import WINE
from typer.testing import CliRunner

from otad.cli.main import main
from otad.experiments import names


@pytest.fixture
def experiments(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for path in paths:
        path.write_text(WINE, encoding="utf-8")
    return [str(path) for path in paths]


def test_records_of_one_or_several_and_their_page(experiments: list[str], tmp_path: Path) -> None:
    out, page = tmp_path / "results", tmp_path / "results.md"
    command = ["reproduce", *experiments, "--out", str(out), "--page", str(page), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert [record["name"] for record in printed] == ["one", "two"]
    assert printed == [json.loads((out / f"{name}.json").read_text()) for name in ("one", "two")]
    shown = page.read_text(encoding="utf-8")
    assert "`otad reproduce one --seed 0`" in shown
    assert "`otad reproduce two --seed 0`" in shown
    result = CliRunner().invoke(main, ["reproduce", experiments[0], *command[3:5], "--json"])
    assert json.loads(result.stdout)["name"] == "one", result.stderr


def test_all_is_alone_and_none_lists_them(experiments: list[str]) -> None:
    assert CliRunner().invoke(main, ["reproduce"]).stdout.split() == list(names())
    result = CliRunner().invoke(main, ["reproduce", "all", experiments[0]])
    assert result.exit_code == 2
    assert f"'all' alone, got all, {experiments[0]}" in result.stderr
