"""A model on disk: what is written comes back to the bit, and nothing else is believed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import otad
from otad.cip import ExactCip
from otad.errors import InputError
from otad.io import files
from otad.model import folder as model_files
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

N, D = 40, 4


def points(rows: int = N, seed: int = 0) -> Tensor:
    return torch.rand(rows, D, generator=torch.Generator().manual_seed(seed))


def labels(rows: int = N) -> Tensor:
    return torch.arange(rows) % 3


def model(seed: int = 0, *, y: Tensor | None = None, **options: Any) -> OTAD:
    net = fc_resnet((D,), 3, blocks=2, seed=seed, bounds=(0, 1), mean=0.5, std=0.25)
    y = labels() if y is None else y
    return defend(net, points(), y, **({"n_neighbors": 5, "smoothness": 1.5} | options))


QUERIES = points(20, seed=9)


def same(one: OTAD, other: OTAD) -> bool:
    """Whether two models have the same state and give the same answers, to the bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return (
        mine.keys() == theirs.keys()
        and all(torch.equal(mine[name].nan_to_num(7), theirs[name].nan_to_num(7)) for name in mine)
        and all(mine[name].dtype == theirs[name].dtype for name in mine)
        and (one.n_neighbors, one.smoothness) == (other.n_neighbors, other.smoothness)
        and (one.strong_convexity, one.search) == (other.strong_convexity, other.search)
        and one.solver == other.solver
        and torch.equal(one(QUERIES), other(QUERIES))
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save(tmp_path / "model")
    return tmp_path / "model"


def part(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}-*.safetensors")
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": ExactCip(mode="paper", climb=(0.2, 0.1), on_failure="abstain")},
        {"solver": ExactCip(max_smoothness=3.5, spares=2, potential="lowest", chunk=7)},
        {"strong_convexity": -0.3, "n_neighbors": 1},
        {"bank_dtype": torch.float16},
        {"bank_dtype": torch.bfloat16},
    ],
)
def test_round_trip_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    ours = model(**options)
    card = ours.save(tmp_path / "deep" / "model", classes=["a", "b", "c"], accuracy=0.1 + 0.2)
    assert card == tmp_path / "deep" / "model" / "card.json"
    loaded = otad.load(card.parent)
    assert same(loaded, ours)
    assert loaded.solver.climb == ours.solver.climb
    assert loaded.notes == {"classes": ["a", "b", "c"], "accuracy": 0.1 + 0.2}
    assert not loaded.training
    assert loaded.backbone.bounds == (0.0, 1.0)
    mapped = otad.load(card.parent, resident=False, verify=False)
    assert torch.equal(mapped(QUERIES), ours(QUERIES))
    assert "bank_inputs" not in mapped.state_dict()


def test_regression_and_a_users_own_layers(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D), nn.Linear(D, 1))
    ours = defend(net, points(), points().sum(1), n_neighbors=3)
    ours.save(tmp_path)
    assert same(otad.load(tmp_path), ours)
    assert otad.load(tmp_path)(QUERIES).shape == (20,)


def test_a_second_save_replaces_the_first(folder: Path) -> None:
    (folder / "bank-0123456789abcdef.safetensors").touch()  # left by kills
    (folder / ".levels-0123456789abcdef.safetensors.fedcba9876543210.partial").touch()
    (folder / "README.txt").write_text("the user's own")
    other = model(seed=1)
    other.notes = {"kept": 1}
    other.save(folder, added=2)
    assert same(otad.load(folder), other)
    assert otad.load(folder).notes == {"kept": 1, "added": 2}
    names = {"card.json", "README.txt", part(folder, "bank").name, part(folder, "backbone").name}
    assert {entry.name for entry in folder.iterdir()} == names
    otad.load(folder, resident=False).save(folder)  # over the file its bank is mapped from
    assert same(otad.load(folder), other)
    assert {entry.name for entry in folder.iterdir()} == names


def test_a_model_in_double_precision_stays_so(tmp_path: Path) -> None:
    net = fc_resnet((D,), 3, blocks=2, bounds=(0, 1)).double()
    written = defend(net, points().double(), labels(), n_neighbors=5)
    written.save(tmp_path)
    read = otad.load(tmp_path)
    assert read.backbone.mean.dtype == torch.float64
    assert torch.equal(read(QUERIES.double()), written(QUERIES.double()))


def test_a_save_leaves_the_users_own_files(folder: Path) -> None:
    """Also those with names that are almost those of a model's files, and folders of such names."""
    theirs = [
        "bank-train.safetensors",
        "keys-of-my-house.safetensors",
        "metric-0123456789abcdef0.safetensors",  # a digit too many
        "metric-0123456789abcde.safetensors",
        "bank-0123456789ABCDEF.safetensors",
        "my-bank-0123456789abcdef.safetensors",
        "bank-0123456789abcdef.safetensors.backup",
        "model-0123456789abcdef.safetensors",
        ".bank-mine.safetensors.0123456789abcdef.partial",
        ".bank-0123456789abcdef.safetensors.mine.partial",
    ]
    for name in theirs:
        (folder / name).write_text("the user's own")
    (folder / f"bank-{16 * '0'}.safetensors").mkdir()
    ours = model(seed=1, bank_path=folder / "bank-train.safetensors", resident=False)
    mapped = (folder / "bank-train.safetensors").read_bytes()
    ours.save(folder)
    assert same(otad.load(folder, resident=False), ours)
    assert (folder / "bank-train.safetensors").read_bytes() == mapped
    assert all((folder / name).read_text() == "the user's own" for name in theirs[1:])
    assert (folder / f"bank-{16 * '0'}.safetensors").is_dir()
    assert len(list(folder.iterdir())) == len(theirs) + 1 + 3


@pytest.mark.parametrize("content", ['{"format": "greeting"}', "[1, 2]", "no JSON", b"\xff"])
def test_a_card_of_the_users_own_is_kept(tmp_path: Path, content: str | bytes) -> None:
    theirs = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "card.json").write_bytes(theirs)
    with pytest.raises(InputError, match=r"card.json: expected no file, or the card of a model"):
        model().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]
    assert (tmp_path / "card.json").read_bytes() == theirs


def test_a_card_that_was_edited_is_replaced(folder: Path) -> None:
    card = folder / "card.json"
    card.write_text(card.read_text().replace("fc_resnet", "fc-resnet"))
    with pytest.raises(InputError, match="the card was edited"):
        otad.load(folder)
    model().save(folder)
    assert same(otad.load(folder), model())


def test_the_card_is_readable(folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text())
    assert card["bank"]["points"] == N
    assert card["bank"]["dim"] == D
    assert card["bank"]["dtype"] == "float32"
    assert card["written_with"]["torch"] == torch.__version__
    assert card["settings"]["smoothness"] == 1.5
    assert card["backbone"]["config"]["kind"] == "fc_resnet"
    assert set(load_file(part(folder, "bank"))) == {"inputs", "features", "labels"}


@pytest.mark.parametrize("note", [object(), float("nan"), {1, 2}, torch.zeros(2)])
def test_notes_that_are_no_json_leave_the_old_model(folder: Path, note: object) -> None:
    before = {entry: entry.read_bytes() for entry in folder.iterdir()}
    with pytest.raises(InputError, match="notes: expected plain JSON values, got"):
        model(seed=1).save(folder, note=note)
    assert {entry: entry.read_bytes() for entry in folder.iterdir()} == before


def test_what_is_no_json_is_named(folder: Path, monkeypatch) -> None:
    ours = model()
    monkeypatch.setattr(ours.backbone, "config", lambda: {"kind": object()})
    with pytest.raises(InputError, match=r"^backbone: expected plain JSON values, got: .*object"):
        ours.save(folder)


def truncate(folder: Path) -> None:
    file = part(folder, "bank")
    file.write_bytes(file.read_bytes()[:-3])


def flip(folder: Path, kind: str, place: int) -> None:
    file = part(folder, kind)
    changed = bytearray(file.read_bytes())
    changed[place] ^= 1
    file.write_bytes(changed)


def swap(folder: Path, kind: str) -> None:
    """Put the file of another model, whole in itself, in the place of ours."""
    model(seed=1).save(folder.with_name("other"))
    part(folder, kind).write_bytes(part(folder.with_name("other"), kind).read_bytes())


class Trap:
    """Whoever unpickles this leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("sprung",))


@contextmanager
def cut_short(*, before_rename: int) -> Iterator[None]:
    """Whatever writes files within is interrupted before the given one takes its place."""
    rename, left = os.replace, before_rename

    def rename_or_stop(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "replace", rename_or_stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def put_folder(folder: Path, kind: str) -> None:
    file = part(folder, kind)
    file.unlink()
    file.mkdir()


def put_pickle(folder: Path, kind: str) -> None:
    part(folder, kind).write_bytes(pickle.dumps([Trap(), list(range(1000))]))


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = False) -> None:
    path = folder / "card.json"
    card = json.loads(path.read_text())
    change(card)
    if seal:
        card.pop("checksum")
        card["checksum"] = model_files._checksum(card)
    path.write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "expected a whole safetensors file, got"),
        (lambda f: flip(f, "bank", -1), "got .*: the file is damaged"),
        (lambda f: flip(f, "bank", -N * D * 8 - 5), "got .*: the file is damaged"),
        (lambda f: flip(f, "backbone", -1), "the file is damaged"),  # no advice to train anew
        (lambda f: swap(f, "bank"), "expected the bank of net and data .* got the bank of"),
        (lambda f: swap(f, "backbone"), "expected the contents .* a file of another model"),
        (lambda f: put_folder(f, "bank"), "bank-.*: expected a safetensors file, got: a folder"),
        (lambda f: put_folder(f, "backbone"), "safetensors file, got: a folder"),
        (lambda f: put_pickle(f, "bank"), "pickles are never read"),
        (lambda f: put_pickle(f, "backbone"), "expected a whole safetensors file, got"),
        (lambda f: save_file({"a": torch.zeros(2)}, part(f, "bank")), "expected a feature bank"),
        (lambda f: part(f, "bank").unlink(), "expected the file that card.json names, got none"),
        (lambda f: (f / "card.json").unlink(), "expected a model folder with card.json, got none"),
        (lambda f: (f / "card.json").write_text("{"), "expected a model card in JSON, got"),
        (lambda f: (f / "card.json").write_bytes(b"\xff"), "expected a model card in JSON, got"),
        (
            lambda f: (f / "card.json").write_text("[1]"),
            "expected otad-model of version 1, 2, 3, 4, got",
        ),
        (lambda f: edit(f, lambda c: c.update(format="x")), r"got \('x', 1\)"),
        (lambda f: edit(f, lambda c: c.update(version=9)), r"got \('otad-model', 9\)"),
        (lambda f: edit(f, lambda c: c["settings"].update(smoothness=9.0)), "the card was edited"),
        (lambda f: edit(f, lambda c: c["notes"].update(accuracy=1.0)), "the card was edited"),
        (lambda f: edit(f, lambda c: c.pop("checksum")), "the card was edited"),
        (lambda f: edit(f, lambda c: c.pop("bank"), seal=True), "a whole model card, got: .*bank"),
        (
            lambda f: edit(f, lambda c: c["backbone"]["config"].update(blocks=3), seal=True),
            "expected weights that fit card.json",
        ),
        (
            lambda f: edit(
                f, lambda c: c["backbone"]["config"].update(kind="unheard_of"), seal=True
            ),
            r"config\['kind'\]: expected one of",
        ),
        (
            lambda f: edit(f, lambda c: c["settings"].update(magic=1), seal=True),
            "expected a whole model card, got",
        ),
        (
            lambda f: edit(f, lambda c: c["settings"].pop("solver"), seal=True),
            "expected a whole model card, got",
        ),
    ],
)
def test_refusals(folder: Path, monkeypatch, damage: Callable[[Path], None], message: str) -> None:
    monkeypatch.chdir(folder)
    otad.load(folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        otad.load(folder)
    assert not Path("sprung").exists()


def test_a_bank_of_other_labels_is_another_file(folder: Path, monkeypatch) -> None:
    """Even the same points and features never take the place of files an old card names."""
    ours, rename = model(), os.replace

    def all_but_the_card(source: Path, target: Path) -> None:
        if Path(target).name == "card.json":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", all_but_the_card)
    with pytest.raises(KeyboardInterrupt):
        model(y=labels().flip(0)).save(folder)
    monkeypatch.undo()
    assert same(otad.load(folder), ours)


KILLS = textwrap.dedent(
    """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch
    import otad
    from otad.nets import fc_resnet
    from otad.io import files

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    x = torch.rand(3000, 8, generator=torch.Generator().manual_seed(0))
    models = [otad.defend(fc_resnet((8,), 2, seed=seed), x, (x[:, 0] > 0.5).long())
              for seed in range(2)]

    def fork(version, die_at_rename=0):
        pid = os.fork()
        if pid:
            return pid
        rename, left = os.replace, die_at_rename

        def rename_or_die(source, target):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        files.os.replace = rename_or_die
        status = 1
        try:
            models[version % 2].save(folder, version=version)
            status = 0
        finally:
            os._exit(status)

    def tell(pid):
        _, status = os.waitpid(pid, 0)
        model = otad.load(folder)
        version = model.notes["version"]
        expected = models[version % 2].state_dict()
        whole = all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
        left = len(list(folder.iterdir()))
        assert status in (0, signal.SIGKILL), status
        print(json.dumps([status == signal.SIGKILL, version, whole, left]), flush=True)

    start = time.perf_counter()
    tell(fork(0))
    seconds = time.perf_counter() - start
    for version in (1, 3, 5):
        tell(fork(version, die_at_rename=1 + version // 2))
    dice = random.Random(0)
    for version in range(6, 14):
        pid = fork(version)
        time.sleep(dice.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        tell(pid)
    tell(fork(99))
    """
)


def test_killed_saves_leave_the_old_model_or_the_new(tmp_path: Path) -> None:
    """SIGKILL before each of the three renames of a save, then at eight random moments."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *others, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first == [False, 0, True, 3]
    assert last == [False, 99, True, 3]  # and what the killed ones left is gone
    at_renames, at_random = others[:3], others[3:]
    assert [row[:3] for row in at_renames] == [[True, 0, True]] * 3
    assert [row[3] for row in at_renames] == [4, 5, 6]  # one more whole or partial file each
    previous = 0
    for version, (_, found, whole, _) in enumerate(at_random, start=6):
        assert whole
        assert found in (previous, version)
        previous = found
    assert len(at_random) == 8
    assert any(killed for killed, *_ in at_random)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_model_put_into_float64_can_be_saved(tmp_path: Path, scope: str, task: str) -> None:
    is_value = task == "regression"
    net = fc_resnet((D,), 1 if is_value else 3, blocks=2, bounds=(0, 1), task=task)
    y = labels().float() / 7 if is_value else labels()
    wide = defend(net, points(), y, n_neighbors=5, scope=scope).double()
    wide.save(tmp_path)
    read = otad.load(tmp_path)
    assert torch.equal(read(QUERIES.double()), wide(QUERIES.double()))
    assert torch.equal(read.bank_labels, y)
