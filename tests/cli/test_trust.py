"""Commands and what strangers or machines do to them: forged notes and nets, control characters, a
full memory or disk, a second training in the same folder, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.small import QUICK, terminal, write_digits, write_image
from factories import KINDS
from filelock import FileLock

import otad
from otad import progress
from otad.cli.console import remark
from otad.cli.main import RESUMING
from otad.cli.sources import DataChoice, training_inputs
from otad.errors import InputError, printable
from otad.io.tensor_files import read_tensors, write_tensors
from otad.training import TrainConfig, loop, train

EVIL = "\x1b[2J\x9b31m\u202ename\udcff"


def changed(tree: Any, place: str, value: object) -> Any:
    """A copy in which the value at a place, with dots between levels, is another one or gone."""
    tree = json.loads(json.dumps(tree))
    *parents, last = place.split(".")
    inner = tree
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return tree


NOTES = [
    ("data.choice", 5, "notes.data.choice: expected a table, got 5"),
    ("data.choice.data", 5, "notes.data.choice.data: expected str, got 5"),
    ("data.choice.data", None, "choice: expected a value for 'data'"),
    ("data.choice.seed", "x", "choice.seed: expected int, got 'x'"),
    ("data.choice.options", [1], "choice.options: expected"),
    ("data.choice.magic", 1, "unknown key 'magic'"),
    ("data.fingerprint", None, "notes.data: expected a value for 'fingerprint'"),
    ("data.kept", {"per_class": "all"}, "notes.data.kept.per_class: expected int"),
    ("classes", ["a"], "notes.classes: expected 10 names"),
    ("classes", {"a": 1}, "notes.classes: expected 10 names"),
    ("classes", [[1]] * 10, "notes.classes: expected 10 names"),
    ("feature_names", 5, "notes.feature_names: expected 0 names"),
]


@pytest.mark.parametrize(("place", "value", "message"), NOTES)
def test_forged_notes_are_one_error(
    digits_model: otad.OTAD,
    place: str,
    value: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits_model.notes = changed(digits_model.notes, place, value)
    monkeypatch.setattr("otad.model.folder.check_names", lambda *_: None)
    digits_model.save("model")
    refused = terminal.refuse("predict", "model", "test", "--out", "answers.csv")
    assert re.search(message, refused)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("config", None, "expected a network with its config and data, got: KeyError"),
        ("config", [1], "config: expected .*got .1"),
        ("config.blocks", 10**7, "blocks: expected an integer of at most"),
        ("config.blocks", 3, "net: expected weights that fit its config"),
        ("config.input_shape", "ab", "input_shape: "),
        ("about", 5, "expected a network with its config and data"),
        ("about.data", None, "notes of its data, got none"),
        ("about.classes", None, "notes of its classes, got none"),
        ("about.data.choice.data", 5, "choice.data: expected str"),
    ],
)
def test_forged_nets_are_one_error(workshop: Path, place: str, value: object, message: str) -> None:
    tensors, header = read_tensors(workshop / "digits-net" / "net.safetensors")
    write_tensors(Path("net/net.safetensors"), tensors, changed(header, place, value))
    assert re.search(message, terminal.refuse("defend", "net", "--out", "model"))


def test_a_model_opens_no_data_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where the user asks for its test data, or names the folder it is in."""
    model, opened = KINDS["metric"](0), []
    path = tmp_path / "private.csv"
    path.write_text("a\n1\n")
    monkeypatch.setattr(DataChoice, "load", lambda choice, *where: opened.append(choice.data))
    model.notes["data"] = {"choice": {"data": str(path)}, "fingerprint": "0"}
    for folder in (None, tmp_path / "other"):
        assert training_inputs(model, folder, "mine.csv") is None
        assert "private.csv, which the model names, is not read" in capsys.readouterr().err
    assert opened == []
    for source, folder in (("test", None), ("mine.csv", tmp_path)):
        with pytest.raises(AttributeError):  # of the data set, which is none
            training_inputs(model, folder, source)
    assert opened == [str(path)] * 2


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")
def test_data_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(InputError, match=r"pipe\.npz: expected an NPZ file, got a device, a pipe"):
        DataChoice(str(tmp_path / "pipe.npz")).load()


def test_control_characters_are_written_out() -> None:
    assert printable(EVIL) == r"\x1b[2J\x9b31m\u202ename\udcff"
    assert printable("Größe\t1\n二\u3000三") == "Größe\t1\n二\u3000三"
    assert str(InputError(EVIL)) == printable(EVIL)


def test_names_from_files_never_command_the_terminal(
    digits_model: otad.OTAD, capsys: pytest.CaptureFixture[str]
) -> None:
    digits_model.notes["classes"] = [f"{EVIL}{digit}" for digit in range(10)]
    digits_model.save("model")
    shown = terminal.succeed("explain", "model", "test").stdout
    write_image(Path("images", "a\x1b[2J\x07", "one.png"), np.zeros((8, 8)))
    Path("images", "a\x1b[2J\x07", "two.png").write_bytes(b"")
    shown += terminal.refuse("predict", "model", "images", "--out", "answers.csv")
    shown += terminal.refuse("predict", "model", EVIL, "--out", "answers.csv")
    remark(EVIL)
    shown += capsys.readouterr().err
    bars = progress.bars()
    bars.add_task(f"{EVIL}[red]", total=2)
    described = bars.columns[0](bars.tasks[0])
    assert str(described) == printable(f"{EVIL}[red]")
    assert shown.count(r"\x1b") >= 4
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*args: object, **options: object) -> Any:
        raise error

    return failing


@pytest.mark.parametrize(
    "fault",
    [
        fail(MemoryError()),
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda *args, **options: torch.empty(2**60),
        lambda *args, **options: np.empty(2**50),
    ],
)
def test_a_full_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(otad.data, "load", fault)
    message = terminal.refuse("train", "digits", "--out", "net")
    assert message.startswith("out of memory: try a smaller --batch-size")
    assert message.count("\n") == 1


def test_a_full_disk_names_the_file(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(OSError(errno.ENOSPC, "No space left on device")))
    for command in (["predict", "digits-model", "test"], ["defend", "digits-net"]):
        name, folder, *rest = command
        message = terminal.refuse(name, workshop / folder, *rest, "--out", "full/place")
        assert re.search(r"No space left on device: '\S*full/place\S*'", message)
        assert not list(Path("full").rglob("*.partial"))
        shutil.rmtree("full")


def test_one_training_at_a_time_in_a_folder() -> None:
    write_digits(Path("digits.npz"))
    command = ("train", "digits.npz", "--out", "net", *QUICK)
    Path("net").mkdir()
    with FileLock(Path("net", loop.LOCK)):
        message = terminal.refuse(*command)
    assert "checkpoint_dir: expected no other training, got net, in which another" in message
    terminal.succeed(*command)

    x = torch.rand(20, 3)
    run = {"net": otad.nets.fc_resnet((3,), 2, blocks=1), "data": (x, (x[:, 0] > 0.5).long())}
    run |= {"config": TrainConfig(epochs=1), "checkpoint_dir": "other"}

    def again(record: object) -> None:
        with pytest.raises(InputError, match=r"checkpoint_dir: .*other"):
            train(**run)

    train(**run, progress=again)
    assert train(**run | {"net": otad.nets.fc_resnet((3,), 2, blocks=1)}).resumed_after == 1


def test_an_interruption_says_how_to_resume(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Training, "run_epoch", fail(KeyboardInterrupt()))
    monkeypatch.setattr(otad.OTAD, "trace", fail(KeyboardInterrupt()))
    commands = [("train", "wine"), ("predict", workshop / "digits-model", "test")]
    for command in commands:
        result = terminal.run(*command, "--out", f"{command[0]}-out")
        assert result.exit_code == 130, result.output
        again = "resumes from the last saved step" if command[0] in RESUMING else "starts again"
        assert result.stderr.endswith(
            f"otad: interrupted: all files are complete, and the same command {again}\n"
        )
