"""Where commands write: standard output, links, and nothing over what is there."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli.small import QUICK, read_csv, terminal, write_digits

import otad
from otad.cli.outputs import check_out
from otad.errors import InputError
from otad.evaluate import PRESETS
from otad.evaluate.records import Evaluation
from otad.evaluate.suite import Choice
from otad.io.tensor_files import read_tensors

pytestmark = pytest.mark.usefixtures("brief_reports")
ROWS = ("--rows", 3)
NOISE = ("--attack", "noise", "--option", "draws=2")


@pytest.fixture(autouse=True)
def few_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", [Choice("noise", {"draws": 2})])


def test_a_dash_is_standard_output_and_reports_go_to_stderr(nearest: Path) -> None:
    for command, options in (("predict", ()), ("certify", ROWS)):
        terminal.succeed(command, nearest, "test", *options, "--out", "rows.csv")
        result = terminal.succeed(command, nearest, "test", *options, "--out", "-")
        assert list(csv.DictReader(io.StringIO(result.stdout))) == read_csv("rows.csv")
        assert "rows" in result.stderr
        Path("rows.csv").unlink()
        message = terminal.refuse(command, nearest, "test", *options, "--out", "-", "--json")
        assert message.startswith("out: expected")
    assert not list(Path().iterdir())
    assert "out: expected a folder" in terminal.refuse("train", "digits", "--out", "-")


def test_a_reader_that_leaves_ends_a_command_in_silence(nearest: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "otad", "predict", nearest, "test", "--out", "-"]
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert found.returncode == 1
    assert "pipe" not in found.stderr.lower()


def test_records_are_printed_as_json(nearest: Path) -> None:
    def printed(*command: object) -> dict[str, object]:
        return json.loads(terminal.succeed(*command, "--out", "-").stdout)

    explained = printed("explain", nearest, "test")
    assert len(explained["inputs"][0]) == 8
    attacked = printed("attack", nearest, "test", "--eps", 0.5, *NOISE, *ROWS)
    assert len(attacked["adversarial"]) == len(attacked["broken"]) == 3
    options = ("--eps", 0.5, "--suite", "quick", "--no-flags", *ROWS)
    found = printed("evaluate", nearest, "test", *options)
    assert not list(Path().iterdir())
    Path("record.json").write_text(json.dumps(found))
    assert Evaluation.read(Path("record.json")).n == 3


def test_nothing_is_replaced_without_force(workshop: Path, nearest: Path) -> None:
    commands = {
        "p.csv": ("predict", nearest, "test"),
        "c.csv": ("certify", nearest, "test", *ROWS),
        "why.json": ("explain", nearest, "test"),
        "found.npz": ("attack", nearest, "test", "--eps", 0.5, *NOISE, *ROWS),
        "model": ("defend", workshop / "digits-net", "--neighbors", 1),
        "net": ("train", workshop / "digits.npz", *QUICK),
        "evaluation": (
            "evaluate", nearest, "test", "--eps", 0.5, "--suite", "quick", "--no-flags", *ROWS,
        ),
    }  # fmt: skip
    for out, command in commands.items():
        terminal.succeed(*command, "--out", out)
        files = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        message = terminal.refuse(*command, "--out", out)
        assert message.startswith("out: expected a new place, or --force")
        assert f"got {out}" in message
        assert {path: path.read_bytes() for path in files} == files
        terminal.succeed(*command, "--out", out, "--force")
    assert otad.load("model").n_neighbors == 1


def test_force_trains_another_net_and_an_interrupted_one_resumes() -> None:
    write_digits(Path("digits.npz"))
    command = ("train", "digits.npz", "--out", "net", "--epochs", 3, "--blocks")
    terminal.succeed(*command, 1)
    first, _ = read_tensors(Path("net/net.safetensors"))
    assert "epoch 1 of 3" in terminal.text(*command, 2, "--force", "--max-seconds", "0.001")
    assert not Path("net/training.json").exists()
    terminal.succeed(*command, 2)  # which resumes, so it needs no force
    second, _ = read_tensors(Path("net/net.safetensors"))
    assert len(second) > len(first)
    terminal.succeed("train", "digits.npz", "--out", "whole", "--epochs", 3, "--blocks", 2)
    whole, _ = read_tensors(Path("whole/net.safetensors"))
    assert all((whole[name] == tensor).all() for name, tensor in second.items())


def test_force_replaces_a_finished_net_and_an_unfinished_one_of_other_arguments() -> None:
    write_digits(Path("digits.npz"))
    begin = ("train", "digits.npz", "--out", "net", "--blocks", 1, "--max-seconds", 1e-6)
    terminal.succeed(*begin, "--epochs", 1)
    files = {path: path.read_bytes() for path in Path("net").iterdir()}
    terminal.refuse(*begin, "--epochs", 3, "--force", "--patch", 2)
    assert {path: path.read_bytes() for path in Path("net").iterdir()} == files
    record = terminal.json(*begin, "--epochs", 3, "--force")
    assert record["epochs_done"] == 1
    assert "no net.safetensors" in terminal.refuse("defend", "net", "--out", "model")
    message = terminal.refuse(*begin, "--epochs", 3, "--seed", 4)
    assert "differs in config.seed (4 here, 0 there); data.train_x; " in message
    assert "--force of a command starts anew" in message
    assert not re.search("[0-9a-f]{64}", message)
    for done in (1, 2):  # the second time it resumes
        record = terminal.json(*begin, "--epochs", 3, "--seed", 4, "--force")
        assert (record["epochs_done"], record["train_config"]["seed"]) == (done, 4)


def test_links_are_followed_and_devices_refused(nearest: Path) -> None:
    Path("inner").mkdir()
    os.symlink("inner/rows.csv", "link.csv")
    terminal.succeed("predict", nearest, "test", "--out", "link.csv")
    assert Path("link.csv").is_symlink()
    assert len(read_csv("inner/rows.csv")) == 40
    assert "link.csv" in terminal.refuse("predict", nearest, "test", "--out", "link.csv")
    os.mkfifo("pipe")
    for device in (Path("pipe"), Path("/dev/null")):
        for force in (False, True):
            with pytest.raises(InputError, match=r"regular file.* or - for standard output"):
                check_out(device, force)
    assert "regular file" in terminal.refuse("predict", nearest, "test", "--out", "/dev/null")


def test_all_missing_and_wrong_options_are_named_at_once() -> None:
    Path("rows.csv").write_text("a,b\n1,2\n3,4\n")
    message = terminal.refuse("train", "rows.csv", "--out", "net", "--size", 8, "--label", "x")
    for text in ("no --target", "no --task", "--size", "--label", "a CSV file"):
        assert text in message


def test_the_steps_of_the_first_page_can_be_followed_in_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "get_started.md").read_text(encoding="utf-8")
    written = re.findall(r'(?:\.save\("|^otad .* --out )([\w-]+)', page, re.MULTILINE)
    assert len(written) == len({*written}) == 3
