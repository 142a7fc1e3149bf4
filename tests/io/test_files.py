"""Files are whole or not there, whatever happens to the process that writes them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from otad.errors import InputError, OtadError
from otad.io.files import replacing
from otad.io.tensor_files import read_tensors, write_sealed, write_tensors


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    layout = {"a": (torch.float32, (2, 2))}
    with pytest.raises(OtadError, match="expected rows up to"):
        write_sealed(tmp_path / "file", layout, {}, [("a", torch.zeros(1, 2))])
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("kind", ["missing", "folder", "pickle", "other"])
def test_other_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "pickle":
        torch.save(TENSORS, path)
    elif kind == "other":
        save_file({"a": torch.zeros(2)}, path, {"format": "pt"})
    with pytest.raises(InputError, match="file: expected"):
        read_tensors(path)


def test_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as partial:
        partial.write_text("new \udcff", encoding="utf-8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


KILLS = textwrap.dedent(
    """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch
    from otad.io import files
    from otad.model.bank import FeatureBank

    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    x = torch.rand(1000, 8, generator=torch.Generator().manual_seed(0))

    def build(version, target=path):
        transport = lambda rows: (rows, rows + version)
        name = str(version)
        FeatureBank.build(transport, x, x[:, 0], fingerprint=name, batch_size=5, path=target)

    def fork(version, at_rename=False):
        pid = os.fork()
        if pid:
            return pid
        if at_rename:
            files.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        build(version)
        os._exit(0)

    def tell(pid):
        _, status = os.waitpid(pid, 0)
        bank = FeatureBank.load(path)
        version = int(bank.fingerprint)
        whole = torch.equal(bank.inputs, x) and torch.equal(bank.features, x + version)
        left = len(list(path.parent.iterdir())) - 1
        print(json.dumps([os.WIFSIGNALED(status), version, whole, left]), flush=True)

    start = time.perf_counter()
    build(0)
    seconds = time.perf_counter() - start
    tell(fork(1))
    tell(fork(2, at_rename=True))
    dice = random.Random(0)
    for version in range(3, 23):
        pid = fork(version)
        time.sleep(dice.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        tell(pid)
    tell(fork(99))
    build(99, path.with_name("again"))
    assert path.read_bytes() == path.with_name("again").read_bytes()
    """
)


def test_killed_builds_leave_a_whole_file_or_the_old_one(tmp_path: Path) -> None:
    """Forks of one process, so that the imports are paid once."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "bank.safetensors")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, unrenamed, *random_kills, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first == [False, 1, True, 0]
    assert unrenamed == [True, 1, True, 1]
    assert last == [False, 99, True, 0]  # and what the killed ones left is gone
    previous = 1
    for version, (_, found, whole, left) in enumerate(random_kills, start=3):
        assert whole
        assert found in (previous, version)
        assert left <= 1
        previous = found
    assert sum(left for *_, left in random_kills) >= 3  # many were killed at work
