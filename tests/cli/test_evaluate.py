"""`otad evaluate`: record, report, exit codes, resuming, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.small import Terminal
from PIL import Image

import otad
from otad.data import Dataset
from otad.evaluate import PRESETS, Evaluation, runner
from otad.evaluate.records import CERTIFICATE_CHECK
from otad.evaluate.suite import Choice
from otad.nets import LipschitzMetric, vision_transformer

TWO = ("--attack", "straight", "--attack", "region", "--no-flags")
FILES = ("evaluation.json", "report.html", "report.md")


def test_record_report_and_figures(terminal: Terminal, nearest: Path) -> None:
    options = ("--eps", "0.4,0.2", "--rows", 20, "--seed", 2, "--json", *TWO)
    result = terminal.succeed("evaluate", nearest, "test", *options)
    printed = json.loads(result.stdout)
    written = Evaluation.read(Path(printed["evaluation"]))
    assert (written.n, written.seed, written.eps) == (20, 2, (0.2, 0.4))
    assert written.headline_eps == 0.4
    assert written.threat["bounds"] == [0.0, 1.0]
    assert {record.attack for record in written.attacks} == {"straight", "region"}
    for eps in (0.2, 0.4):
        assert printed["worst_case"][f"{eps:g}"]["value"] == written.worst_case(eps).value
        proved = written.certified_accuracy(eps)
        assert proved is not None
        assert printed["certified"][f"{eps:g}"]["value"] == proved.value
        assert 0 < proved.value <= written.worst_case(eps).value
    assert printed["per_attack"] == written.per_attack
    assert printed["flags"][CERTIFICATE_CHECK] == "PASS"
    assert printed["is_sound"]
    for name in FILES:
        assert Path("evaluation", name).stat().st_size > 1000
    for name in FILES[1:]:
        page = Path("evaluation", name).read_text(encoding="utf-8")
        assert f"{written.worst_case().value:.1f}%" in page


def test_the_images_it_reads_stay_readable(terminal: Terminal, nearest: Path) -> None:
    Path("images/0").mkdir(parents=True)
    Image.new("L", (8, 8), 51).save("images/0/one.png")
    options = ("--eps", 0.2, *TWO, "--out")
    for out in ("images", "images/found"):
        assert f"got {out}, which would" in terminal.refuse(
            "evaluate", nearest, "images", *options, out
        )
    assert [path.name for path in Path("images").iterdir()] == ["0"]
    terminal.succeed("evaluate", nearest, "images", *options, "found")


def test_failing_flags_are_named(terminal: Terminal, nearest: Path) -> None:
    options = ("--eps", "0.5", "--rows", 4, "--out", "there", "--attack", "straight")
    result = terminal.succeed("evaluate", nearest, "test", *options)
    written = Evaluation.read(Path("there/evaluation.json"))
    assert len(written.flags) > 5
    failing = [flag.name for flag in written.flags if flag.verdict == "FAIL"]
    assert failing  # one neighbor: no gradient to follow, which is reported
    shown = " ".join(result.stdout.split())
    assert f"{len(failing)} FAIL" in shown
    for name in failing:
        assert f"FAIL: {name}" in shown
    assert "worst case at 0.5 (headline)" in shown
    assert "there/report.html" in shown


def test_a_refuted_certificate_is_exit_code_1(
    terminal: Terminal, nearest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = runner.prove

    def exaggerate(*arguments: Any, **named: Any) -> Any:
        proof = prove(*arguments, **named)
        return replace(proof, radius=tuple(radius + 2 for radius in proof.radius))

    monkeypatch.setattr(runner, "prove", exaggerate)
    options = ("--eps", "1.5", "--rows", 20, *TWO)
    result = terminal.run("evaluate", nearest, "test", *options)
    assert result.exit_code == 1
    assert f"FAIL: {CERTIFICATE_CHECK}" in " ".join(result.stdout.split())
    assert not Evaluation.read(Path("evaluation/evaluation.json")).is_sound
    assert Path("evaluation/report.html").is_file()


def test_what_is_finished_is_not_run_again(terminal: Terminal, nearest: Path) -> None:
    options = ("--eps", "1.5", "--rows", 20, "--batch-size", 10, "--all-rows", "--json", *TWO)
    command = ("evaluate", nearest, "test", *options)
    first = terminal.json(*command)
    parts = {path: path.stat().st_mtime_ns for path in Path("evaluation/parts").iterdir()}
    assert parts
    Path("evaluation/evaluation.json").unlink()  # as if killed before the end
    second = terminal.json(*command)
    assert {path: path.stat().st_mtime_ns for path in Path("evaluation/parts").iterdir()} == parts
    for name in ("worst_case", "certified", "per_attack", "flags", "clean"):
        assert first[name] == second[name]
    written = Evaluation.read(Path("evaluation/evaluation.json"))
    assert [record.attacked for record in written.attacks] == [written.clean_right] * 2
    assert written.attacks[0].broken  # else survivors and all would be the same rows


def test_a_table_with_units_and_immutable_features(
    terminal: Terminal, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", [Choice("pgd", {"steps": 5}), Choice("square")])
    options = ("--norm", "linf", "--eps", "0.1,0.2", "--headline", 0.2, "--unit", "std")
    more = ("--immutable", "age,sex", "--suite", "quick", "--rows", 8, "--no-flags")
    result = terminal.succeed(
        "evaluate", workshop / "body-model", "test", *options, *more, "--json"
    )
    printed = json.loads(result.stdout)
    assert printed["threat"]["mutable"] == [False, False, True, True]
    assert printed["threat"]["norm"] == "linf"
    assert printed["threat"]["eps"] == 0.2
    errors = printed["mean_worst_error"]
    assert 0 < errors["0.1"] <= errors["0.2"] <= printed["mean_certified_error"]
    assert "images" in printed["missing"]["square"]
    shown = terminal.succeed("evaluate", workshop / "body-model", "test", *options, *more)
    text = " ".join(shown.stdout.split())
    for words in ("not run: square", "clean mse, otad", "certified |f - y| at 0.2"):
        assert words in text, words


def test_training_inputs_a_vision_transformer_hides_are_read_from_its_data(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    net = vision_transformer((1, 8, 8), 10, patch=4, width=8, blocks=1, heads=2, bounds=(0.0, 1.0))
    metric = LipschitzMetric((1, 8, 8), widths=(16,), depth=1, key_dim=8, bounds=(0.0, 1.0))
    model = otad.defend(net, digits.train_x, digits.train_y, n_neighbors=3, metric=metric)
    model.notes = dict(otad.load(workshop / "digits-model").notes)
    model.save("known")
    model.notes = {}
    model.save("unknown")
    options = ("--eps", "0.5", "--no-flags", "--rows", 20, "--attack", "straight", "--json")
    printed = terminal.json("evaluate", "known", "test", *options)
    assert list(printed["per_attack"]) == ["straight"]
    assert printed["is_sound"]
    page = Path("evaluation/report.html").read_text(encoding="utf-8")
    votes = re.findall(r'<ol class="votes.*?</ol>', page, re.DOTALL)
    assert votes, "examples are shown with their training points"
    assert all("<img" in each for each in votes)
    command = ("attack", "known", "test", "--attack", "straight", "--eps", 0.5, "--rows", 20)
    record = terminal.json(*command, "--json")
    assert record["forwards"] > 20 * 10
    archive = ("attack", "unknown", workshop / "digits.npz", *command[3:])
    assert "train_x" in terminal.refuse(*archive)
    terminal.succeed("explain", "known", "test", "--out", "why.png")
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    terminal.succeed("explain", "known", "test", "--out", "why.json")
    for neighbor in json.loads(Path("why.json").read_text())["neighbors"]:
        assert torch.equal(torch.tensor(neighbor["inputs"]), digits.train_x[neighbor["index"]])
