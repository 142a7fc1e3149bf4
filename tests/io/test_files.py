"""Files are whole or not there, whatever happens to the process that writes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import run_script
from safetensors.torch import save_file

from otad.errors import InputError, OtadError
from otad.io.files import replacing
from otad.io.tensor_files import read_tensors, write_sealed, write_tensors

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


KILLS = """
    import json, os, random, signal, sys
    from pathlib import Path
    import torch
    import otad
    from otad.io import files
    from otad.model.bank import FeatureBank
    from otad.nets import fc_resnet

    torch.set_num_threads(1)
    x = torch.rand(300, 8, generator=torch.Generator().manual_seed(0))
    labels = (x[:, 0] > 0.5).long()
    models = [otad.defend(fc_resnet((8,), 2, seed=seed), x, labels) for seed in range(2)]

    def write(version):
        if kind == "model":
            return models[version % 2].save(folder, version=version)
        transport, about = lambda rows: (rows, rows + version), {"fingerprint": str(version)}
        FeatureBank.build(transport, x, labels, **about, batch_size=5, path=folder / "bank")

    def read():
        if kind == "bank":
            bank = FeatureBank.load(folder / "bank")
            version = int(bank.fingerprint)
            return version, torch.equal(bank.inputs, x) and torch.equal(bank.features, x + version)
        model = otad.load(folder)
        version = model.notes["version"]
        expected = models[version % 2].state_dict()
        return version, all(torch.equal(expected[k], v) for k, v in model.state_dict().items())

    def kill_at(number):
        left = number

        def count(*event):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    def attempt(version, die_at_rename=0, die_at_call=0):
        if not (pid := os.fork()):
            rename, last = os.replace, kill_at(die_at_rename)
            files.os.replace = lambda *names: (last(), rename(*names))
            sys.setprofile(kill_at(die_at_call) if die_at_call else None)
            status = 1
            try:
                write(version)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL), status
        names = {entry.name for entry in folder.iterdir()} - {".lock"}
        return [status == signal.SIGKILL, *read(), len(names)]

    def count(*event):
        global calls
        calls += 1

    for kind, renames in (("bank", 1), ("model", 3)):
        folder, dice, calls = Path(sys.argv[1]) / kind, random.Random(0), 0
        write(0)  # imports what it needs
        sys.setprofile(count)
        write(0)
        sys.setprofile(None)
        rows = [attempt(0)]
        for rename in range(1, 1 + renames):
            rows.append(attempt(2 * rename - 1, die_at_rename=rename))
        for version in range(6, 14):
            rows.append(attempt(version, die_at_call=dice.randrange(1, calls - calls // 10)))
        print(json.dumps([*rows, attempt(99)]))
    """


def test_killed_writers_leave_the_old_files_or_the_new(tmp_path: Path) -> None:
    """SIGKILL before each rename, then at a random function call, of a bank (1 file) and a model
    (3, and README.md after them). Forks of one process pay the imports once."""
    for (renames, files), line in zip(((1, 1), (3, 4)), run_script(KILLS, tmp_path), strict=True):
        first, *at_renames = json.loads(line)[:-9]
        *at_random, last = json.loads(line)[-9:]
        assert first == [False, 0, True, files]
        assert last == [False, 99, True, files]  # and what the killed ones left is gone
        # one more whole or partial file each
        assert at_renames == [[True, 0, True, files + 1 + number] for number in range(renames)]
        previous = 0
        for version, (killed, found, whole, _) in enumerate(at_random, start=6):
            assert killed
            assert whole
            assert found in (previous, version)
            previous = found


TWO_SAVERS = """
    import os, sys
    import torch
    import otad
    from otad.nets import fc_resnet

    torch.set_num_threads(1)
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    models = [otad.defend(fc_resnet((4,), 2, seed=seed), x, (x[:, 0] > 0.5).long(), n_neighbors=3)
              for seed in range(2)]
    for _ in range(3):
        child = os.fork()
        models[child == 0].save(sys.argv[1])
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        found = otad.load(sys.argv[1])
        assert any(torch.equal(found(x), model(x)) for model in models)
    print("whole")
    """


def test_of_two_processes_that_save_into_one_folder_the_last_one_wins(tmp_path: Path) -> None:
    assert run_script(TWO_SAVERS, tmp_path) == ["whole"]


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
