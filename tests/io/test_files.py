"""Files are whole or not there, whatever happens to the process that writes them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from together import forked
from torch import Tensor

from otad.errors import InputError, OtadError
from otad.io.files import _lock, locked, replacing
from otad.io.tensor_files import read_tensors, write_sealed, write_tensors
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.loading import load
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.training import TrainConfig, train

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "levels": torch.arange(5, dtype=torch.float64).view(1, 5).T,
    "state": torch.arange(7, dtype=torch.uint8),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
}


def test_tensors_and_header_come_back_and_equal_contents_are_equal_files(tmp_path: Path) -> None:
    header = {"b": [1, None], "a": {"text": "\u00e9", "x": 0.1}}
    write_tensors(tmp_path / "one", TENSORS, header)
    write_tensors(tmp_path / "two", dict(reversed(TENSORS.items())), dict(reversed(header.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = read_tensors(tmp_path / "one")
    assert found.header == header
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, TENSORS, {"name": "x"})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InputError, match="file: expected"):
            read_tensors(path)


def test_files_of_the_first_format_are_read_and_checked(tmp_path: Path) -> None:
    """Whose one entry of metadata is a checksum of tensors and header, and the header."""
    path, text = tmp_path / "file", json.dumps({"epoch": 3})
    digest = hashlib.sha256()
    for name in sorted(TENSORS):
        tensor = TENSORS[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    checksum = hashlib.sha256((digest.hexdigest() + text).encode()).hexdigest()
    stored = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(stored, path, {"otad-checkpoint-1": checksum + text})
    assert read_tensors(path).header == {"epoch": 3}
    save_file(stored, path, {"otad-checkpoint-1": checksum + text.replace("3", "4")})
    with pytest.raises(InputError, match="damaged"):
        read_tensors(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: torch.save(TENSORS, path),  # a pickle
        lambda path: save_file({"a": torch.zeros(2)}, path, {"format": "pt"}),
    ],
)
def test_other_files_are_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "file")
    with pytest.raises(InputError, match="file: expected"):
        read_tensors(tmp_path / "file")


def test_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as partial:
        partial.write_text("new \udcff", encoding="utf-8")
    layout = {"a": (torch.float32, (2, 2))}
    with pytest.raises(OtadError, match="expected rows up to"):  # too few
        write_sealed(path, layout, {}, [("a", torch.zeros(1, 2))])
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def kill_at(number: int) -> Callable[..., None]:
    """Return a function whose call of that number kills the process."""
    left = number

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def two_models(rows: int) -> tuple[Tensor, Tensor, list[OTAD]]:
    x = torch.rand(rows, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5).long()
    return x, y, [defend(fc_resnet((8,), 2, seed=seed), x, y) for seed in range(2)]


@pytest.mark.parametrize(("kind", "renames", "count"), [("bank", 1, 1), ("model", 3, 4)])
def test_killed_writers_leave_the_old_files_or_the_new(
    kind: str, renames: int, count: int, tmp_path: Path
) -> None:
    """SIGKILL before each rename, then at a random function call, of a bank (1 file) and a model
    (3, and README.md after them)."""
    x, y, models = two_models(300)

    def write(version: int) -> None:
        if kind == "model":
            models[version % 2].save(tmp_path, version=version)
            return
        transport = lambda rows: (rows, rows + version)  # noqa: E731
        options = {"fingerprint": str(version), "batch_size": 5, "path": tmp_path / "bank"}
        FeatureBank.build(transport, x, y, **options)

    def read() -> tuple[int, bool]:
        if kind == "bank":
            bank = FeatureBank.load(tmp_path / "bank")
            version = int(bank.fingerprint)
            return version, torch.equal(bank.inputs, x) and torch.equal(bank.features, x + version)
        model = load(tmp_path)
        version = model.notes["version"]
        expected = models[version % 2].state_dict()
        return version, all(torch.equal(expected[k], v) for k, v in model.state_dict().items())

    def attempt(version: int, rename: int = 0, call: int = 0) -> tuple[int | None, int, bool, int]:
        """Write until killed. Return how it ended, what is there, and the number of files."""

        def work(_: int) -> None:
            replace, last = os.replace, kill_at(rename)
            os.replace = lambda *names: (last(), replace(*names))
            sys.setprofile(kill_at(call) if call else None)
            write(version)

        (ended,) = forked(work, 1)
        return ended, *read(), len({entry.name for entry in tmp_path.iterdir()} - {".lock"})

    write(0)  # imports what it needs
    calls: list[object] = []
    sys.setprofile(lambda *call: calls.append(call[1]))
    write(0)
    sys.setprofile(None)
    killed, dice = -signal.SIGKILL, random.Random(0)
    assert attempt(0) == (0, 0, True, count)
    for rename in range(1, 1 + renames):  # one more whole or partial file each
        assert attempt(2 * rename - 1, rename=rename) == (killed, 0, True, count + rename)
    previous = 0
    for version in range(6, 14):
        call = dice.randrange(1, len(calls) - len(calls) // 10)
        ended, found, whole, _ = attempt(version, call=call)
        assert (ended, whole) == (killed, True)
        assert found in (previous, version)
        previous = found
    assert attempt(99) == (0, 99, True, count)  # and what the killed ones left is gone


def test_of_two_processes_that_save_into_one_folder_the_last_one_wins(tmp_path: Path) -> None:
    x, _, models = two_models(40)
    for _ in range(3):
        assert forked(lambda rank: models[rank].save(tmp_path), 2) == [0, 0]
        found = load(tmp_path)
        assert any(torch.equal(found(x), model(x)) for model in models)


def test_two_writers_of_one_file_both_succeed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes, links and pipes")
def test_links_are_followed_modes_kept_and_other_kinds_refused(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with replacing(link) as partial:
        partial.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match=f"{path}: expected a regular file"), replacing(path):
            pass


def test_a_place_that_takes_no_file_is_refused_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "new", tmp_path / ("n" * 250)):  # the hidden name is longer
        expected = f"^{path}: expected a place for a file, got: "
        with pytest.raises(InputError, match=expected) as refused, replacing(path):
            pass
        assert "partial" not in str(refused.value)


def test_a_lock_that_cannot_be_written_is_refused_by_its_folder(tmp_path: Path) -> None:
    """As in a folder that is read-only, which no folder is for root."""
    x, y, (model, _) = two_models(10)
    config = TrainConfig(epochs=1)
    places: dict[str, Callable[[Path], object]] = {
        ".lock": model.save,
        ".training.lock": lambda it: train(fc_resnet((8,), 2), (x, y), config, checkpoint_dir=it),
        "any.lock": lambda it: locked(it / "any.lock").__enter__(),
    }
    for name, write in places.items():
        (tmp_path / name).mkdir()
        expected = f"^{tmp_path}: expected a folder in which {name} can be written, got: "
        with pytest.raises(InputError, match=expected):
            write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*places}


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be removed there")
def test_a_leftover_is_removed_while_its_lock_is_held(tmp_path: Path, monkeypatch) -> None:
    """Else a writer that has just made the file could lock it, and then lose it."""
    leftover, unlink, held = tmp_path / ".file.0.partial", Path.unlink, []

    def noting(path: Path, missing_ok: bool = False) -> None:
        if path == leftover:
            with path.open("rb") as file:
                held.append(not _lock(file))
        unlink(path, missing_ok)

    leftover.touch()
    monkeypatch.setattr(Path, "unlink", noting)
    with replacing(tmp_path / "file") as partial:
        partial.write_text("new")
    assert held == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
