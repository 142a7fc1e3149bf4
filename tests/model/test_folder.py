"""A model of any kind comes back from its folder to the bit, or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import KINDS, D, N, model, net, points, queries
from safetensors.torch import save_file
from torch import nn

import otad
from otad.cip import ExactCip
from otad.errors import InputError
from otad.io import files
from otad.model import folder as model_files
from otad.model.defend import defend
from otad.model.otad import OTAD

FILES = {
    "local": {"backbone", "bank"},
    "global": {"backbone", "bank", "levels"},
    "metric": {"backbone", "bank", "metric", "keys"},
    "surrogate": {"backbone", "bank", "surrogate"},
}
VERSIONS = {"local": 1, "global": 3, "metric": 2, "surrogate": 4}


def same(one: OTAD, other: OTAD) -> bool:
    """Whether two models have the same state and give the same answers, to the bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    settings = ("n_neighbors", "smoothness", "strong_convexity", "search", "scope", "notes")
    x = queries(one).to(one.backbone.mean)
    return (
        mine.keys() == theirs.keys()
        and all(torch.equal(mine[name].nan_to_num(7), theirs[name].nan_to_num(7)) for name in mine)
        and all(mine[name].dtype == theirs[name].dtype for name in mine)
        and all(getattr(one, name) == getattr(other, name) for name in settings)
        and one.answerer.describe() == other.answerer.describe()
        and torch.equal(one(x), other(x))
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder of a model by kind and seed, which is made once and never changed."""

    @cache
    def folder_of(kind: str, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "model"
        KINDS[kind](seed).save(folder)
        return folder

    return folder_of


@pytest.fixture
def folder(saved: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved("local"), tmp_path / "model"))


def part(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}-*.safetensors")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_exact(tmp_path: Path, kind: str) -> None:
    ours = KINDS[kind](0)
    ours.notes = {"classes": ["a", "b", "c"], "accuracy": 0.1 + 0.2}
    path = ours.save(tmp_path / "deep" / "model")
    folder = path.parent
    assert path == tmp_path / "deep" / "model" / "card.json"
    loaded = otad.load(folder)
    assert same(loaded, ours)
    assert not any(module.training for module in loaded.modules())
    assert loaded.backbone.bounds == ours.backbone.bounds
    mapped = otad.load(folder, resident=False, verify=False)
    assert torch.equal(mapped(queries(ours)), ours(queries(ours)))
    assert "bank_inputs" not in mapped.state_dict()
    card = json.loads(path.read_text())
    assert (card["bank"]["points"], card["bank"]["dim"]) == tuple(ours.bank_inputs.shape)
    assert card["written_with"]["torch"] == torch.__version__
    assert ("scope" in card["settings"]) == ("potential" in card) == (ours.scope == "global")
    if kind in FILES:
        assert {file.name.split("-")[0] for file in folder.glob("*-*")} == FILES[kind]
        assert card["version"] == VERSIONS[kind]


@pytest.mark.parametrize(
    "solver",
    [
        ExactCip(mode="paper", climb=(0.2, 0.1), on_failure="abstain"),
        ExactCip(max_smoothness=3.5, spares=2, potential="lowest", chunk=7),
    ],
)
def test_the_settings_of_the_solver_come_back(tmp_path: Path, solver: ExactCip) -> None:
    ours = model(solver=solver, search="torch", n_neighbors=1)
    ours.save(tmp_path)
    assert otad.load(tmp_path).solver == solver
    layers = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D), nn.Linear(D, 1))
    defended = defend(layers, points(), points().sum(1), n_neighbors=3, solver=solver)
    for one in (ours, defended):
        one.save(tmp_path)
        assert same(otad.load(tmp_path), one)


def test_models_in_double_precision_stay_so(tmp_path: Path) -> None:
    """Made in float64, or put into it afterwards: the bank is stored in float32."""
    made = defend(net().double(), points().double(), torch.arange(N) % 3, n_neighbors=5)
    for wide in (made, *(KINDS[kind](0).double() for kind in ("local", "global", "regression"))):
        wide.save(tmp_path)
        read = otad.load(tmp_path)
        assert read.backbone.mean.dtype == torch.float64
        assert torch.equal(read(queries(read).double()), wide(queries(wide).double()))


@pytest.mark.parametrize(("before", "after"), list(pairwise([*FILES, "local"])))
def test_a_second_save_replaces_the_first(tmp_path: Path, before: str, after: str) -> None:
    KINDS[before](0).save(tmp_path)
    edit(tmp_path, lambda card: card["notes"].update(edited=True))  # which a load would refuse
    (tmp_path / "bank-0123456789abcdef.safetensors").touch()  # left by kills
    (tmp_path / ".levels-0123456789abcdef.safetensors.fedcba9876543210.partial").touch()
    (tmp_path / "README.txt").write_text("the user's own")
    other = KINDS[after](1)
    other.notes = {"first": 1}
    other.save(tmp_path, added=2)
    other.notes["added"] = 2
    names = {"card.json", "README.md", ".lock", "README.txt"}
    names |= {part(tmp_path, kind).name for kind in FILES[after]}
    for _ in range(2):
        assert same(otad.load(tmp_path), other)
        assert {entry.name for entry in tmp_path.iterdir()} == names
        otad.load(tmp_path, resident=False).save(tmp_path)  # over the file of its mapped bank


def test_a_save_leaves_the_users_own_files(folder: Path) -> None:
    """Also those with names almost like a model's files, and folders of such names."""
    ours = "bank-0123456789abcdef.safetensors"
    theirs = [
        "bank-train.safetensors", "keys-of-my-house.safetensors", f"my-{ours}", f"{ours}.backup",
        ours.replace("f.", "f0."), ours.replace("f.", "."), ours.replace("cdef", "CDEF"),
        ours.replace("bank", "model"), f".bank-mine.safetensors.{ours[5:21]}.partial",
        f".{ours}.mine.partial",
    ]  # fmt: skip
    for name in theirs[1:]:
        (folder / name).write_text("the user's own")
    (folder / f"bank-{16 * '0'}.safetensors").mkdir()
    ours = model(seed=1, bank_path=folder / "bank-train.safetensors", resident=False)
    mapped = (folder / "bank-train.safetensors").read_bytes()
    ours.save(folder)
    assert torch.equal(otad.load(folder)(queries(ours)), ours(queries(ours)))
    assert (folder / "bank-train.safetensors").read_bytes() == mapped
    assert all((folder / name).read_text() == "the user's own" for name in theirs[1:])
    assert (folder / f"bank-{16 * '0'}.safetensors").is_dir()
    assert len(list(folder.iterdir())) == len(theirs) + 1 + 3 + 2  # the lock and the model card


@pytest.mark.parametrize("content", ['{"format": "greeting"}', "[1, 2]", "no JSON", b"\xff"])
def test_a_card_of_the_users_own_is_not_replaced(tmp_path: Path, content: str | bytes) -> None:
    theirs = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "card.json").write_bytes(theirs)
    with pytest.raises(InputError, match=r"card.json: expected no file"):
        model().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]
    assert (tmp_path / "card.json").read_bytes() == theirs


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(InputError, match=r"file: expected a folder, or none, got a file"):
            model().save(folder)
    assert (tmp_path / "file").read_text() == "theirs"


@pytest.mark.parametrize("note", [object(), float("nan"), {1, 2}, torch.zeros(2)])
def test_notes_that_are_no_json_leave_the_old_model(folder: Path, note: object) -> None:
    before = {entry: entry.read_bytes() for entry in folder.iterdir()}
    with pytest.raises(InputError, match="notes: expected plain JSON values, got"):
        model(seed=1).save(folder, note=note)
    ours = model()
    ours.backbone.config = lambda: {"kind": note}
    with pytest.raises(InputError, match=r"^backbone: expected plain JSON values, got"):
        ours.save(folder)
    assert {entry: entry.read_bytes() for entry in folder.iterdir()} == before


def rewrite(folder: Path, kind: str, change: Callable[[bytes], bytes]) -> None:
    file = part(folder, kind)
    file.write_bytes(change(file.read_bytes()))


def flip(whole: bytes, place: int = -1) -> bytes:
    changed = bytearray(whole)
    changed[place] ^= 1
    return bytes(changed)


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


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = False) -> None:
    path = folder / "card.json"
    card = json.loads(path.read_text())
    change(card)
    if seal:
        card.pop("checksum")
        card["checksum"] = model_files._checksum(card)
    path.write_text(json.dumps(card))


def other_levels(folder: Path, **options: Any) -> None:
    """Levels of another bank's model, in a card that was written to fit them."""
    other = folder.with_name("other")
    model(scope="global", **options).save(other)
    shutil.copy(part(other, "levels"), folder)
    theirs = json.loads((other / "card.json").read_text())["potential"]
    edit(folder, lambda card: card.update(potential=theirs), seal=True)


def sealed(*places: str, **changes: Any) -> Callable[[Path], None]:
    """Change the entry at these places of the card, as if it had been written so."""

    def change(card: dict[str, Any]) -> None:
        for place in places:
            card = card[place]
        for name, value in changes.items():
            if value is None:
                del card[name]
            else:
                card[name] = value

    return lambda folder: edit(folder, change, seal=True)


BLOCKS = [(kind, block) for kind, blocks in FILES.items() for block in sorted(blocks)]


@pytest.mark.parametrize(("kind", "block"), BLOCKS)
@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "pickle", "folder", "absent"])
def test_damaged_files_are_refused(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch, kind: str, block: str, damage: str
) -> None:
    """`swap` puts the file of another model, whole in itself, in the place of ours."""
    folder = Path(shutil.copytree(saved(kind), tmp_path / "model"))
    monkeypatch.chdir(folder)
    trap = pickle.dumps([Trap(), list(range(1000))])
    does: dict[str, tuple[Callable[[Path], object], str]] = {
        "flip": (lambda f: rewrite(f, block, flip), "the file is damaged"),
        "truncate": (lambda f: rewrite(f, block, lambda whole: whole[:-3]), "a whole safetensors"),
        "swap": (
            lambda f: rewrite(f, block, lambda _: part(saved(kind, 1), block).read_bytes()),
            "expected the (contents|bank)",
        ),
        "pickle": (lambda f: rewrite(f, block, lambda _: trap), "pickles are never read"),
        "folder": (lambda f: put_folder(f, block), "regular file inside the folder"),
        "absent": (lambda f: part(f, block).unlink(), "expected the file that card.json names"),
    }
    change, message = does[damage]
    change(folder)
    with pytest.raises(InputError, match=message):
        otad.load(folder)
    assert not Path("sprung").exists()


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("local", lambda f: rewrite(f, "bank", lambda b: flip(b, -N * D * 8 - 5)), "is damaged"),
        ("local", lambda f: save_file({"a": torch.zeros(2)}, part(f, "bank")), "a feature bank"),
        ("local", lambda f: (f / "card.json").unlink(), "a model folder with card.json, got none"),
        ("local", lambda f: (f / "card.json").write_text("{"), "card.json: expected JSON"),
        ("local", lambda f: (f / "card.json").write_bytes(b"\xff"), "card.json: expected JSON"),
        ("local", lambda f: (f / "card.json").write_text("[1]"), r"1, 2, 3, 4, got \[1\]$"),
        ("local", lambda f: edit(f, lambda c: c.update(format="x")), r"got \('x', 1\)"),
        ("local", lambda f: edit(f, lambda c: c.update(version=9)), r"got \('otad-model', 9\)"),
        ("local", lambda f: edit(f, lambda c: c["settings"].update(smoothness=9.0)), "was edited"),
        ("local", lambda f: edit(f, lambda c: c.pop("checksum")), "the card was edited"),
        ("local", sealed(bank=None), "a whole model card, got: .*bank"),
        ("local", sealed("backbone", "config", blocks=3), "expected weights that fit its config"),
        ("local", sealed("backbone", "config", kind="unheard_of"), r"config\['kind'\]: expected"),
        ("local", sealed("settings", magic=1), "a whole model card, got: .*magic"),
        ("local", sealed("settings", solver=None), "a whole model card, got: .*solver"),
        ("global", lambda f: other_levels(f, seed=1), "file for the bank .* got one for"),
        ("global", lambda f: other_levels(f, bank_dtype=torch.float16), "file for the bank"),
        ("global", sealed("settings", scope="local"), "potential: expected with scope 'global'"),
        ("global", sealed("potential", sweeps=None), "a whole model card, got: .*sweeps"),
        ("global", sealed(potential=None), "a whole model card, got"),
        ("surrogate", sealed("surrogate", "config", blocks=1), "weights that fit its config"),
        ("surrogate", sealed("surrogate", "config", magic=1), "config: expected the options"),
        ("surrogate", sealed("surrogate", config=None), "a whole model card, got: .*config"),
        ("surrogate", sealed("surrogate", file=None), "a whole model card, got: .*file"),
        ("surrogate", sealed("settings", n_neighbors=5), "solver: expected 3 neighbors"),
        ("surrogate", sealed(surrogate=None), "a whole model card, got"),
    ],
)
def test_wrong_cards_are_refused(
    saved: Callable[..., Path], tmp_path: Path, kind: str, damage: Callable[[Path], object],
    message: str,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(saved(kind), tmp_path / "model"))
    damage(folder)
    with pytest.raises(InputError, match=message):
        otad.load(folder)


@pytest.mark.parametrize("kind", FILES)
def test_a_save_that_is_cut_short_leaves_the_old_model(tmp_path: Path, kind: str) -> None:
    """Before each rename of a save: its files and the card."""
    old, new = KINDS[kind](0), KINDS[kind](1)
    for rename in range(1, 2 + len(FILES[kind])):
        old.save(tmp_path)
        with cut_short(before_rename=rename):
            new.save(tmp_path)
        assert same(otad.load(tmp_path), old)
    new.save(tmp_path)
    assert same(otad.load(tmp_path), new)
    assert len(list(tmp_path.iterdir())) == len(FILES[kind]) + 3  # card, model card and lock


def test_a_bank_of_other_labels_is_another_file(folder: Path) -> None:
    """Even the same points and features never replace files that an old card names."""
    ours = model()
    labels = ours.bank_labels.flip(0)
    with cut_short(before_rename=3):
        defend(ours.backbone, points(), labels, n_neighbors=6).save(folder)
    assert same(otad.load(folder), ours)
