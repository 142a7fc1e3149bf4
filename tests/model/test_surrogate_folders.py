"""A model with a network for a solver on disk: it comes back to the bit, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from imitated import estimated, exact, images
from model.test_folder import cut_short, edit, flip, part, put_pickle

import otad
from otad.cip.surrogate import CipNet
from otad.errors import InputError
from otad.model.otad import OTAD

X, _ = images(10, seed=6)


def other() -> OTAD:
    model = estimated("fc")
    with torch.no_grad():
        next(model.solver.parameters()).mul_(2)
    return model


def same(one: OTAD, another: OTAD) -> bool:
    mine, theirs = one.state_dict(), another.state_dict()
    with torch.no_grad():
        return (
            mine.keys() == theirs.keys()
            and all(torch.equal(mine[name], theirs[name]) for name in mine)
            and torch.equal(one(X), another(X))
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    estimated("fc").save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["fc", "vit"])
@pytest.mark.parametrize("readout", ["free", "hull"])
def test_round_trip_is_exact(tmp_path: Path, kind: str, readout: str) -> None:
    ours = estimated(kind, readout)
    card = json.loads(ours.save(tmp_path, note="kept").read_text())
    assert card["version"] == 4
    assert card["surrogate"]["config"] == ours.solver.config()
    assert "solver" not in card["settings"]
    assert ("metric" in card) == (kind == "vit")
    loaded = otad.load(tmp_path)
    assert isinstance(loaded.solver, CipNet)
    assert same(loaded, ours)
    assert loaded.notes == {"note": "kept"}
    assert not loaded.solver.training
    mapped = otad.load(tmp_path, resident=False, verify=False)
    with torch.no_grad():
        assert torch.equal(mapped(X), ours(X))
    assert any(name.startswith("answerer.solver.") for name in mapped.state_dict())


def test_the_solver_of_a_folder_can_change(folder: Path) -> None:
    exact("fc").save(folder)
    assert same(otad.load(folder), exact("fc"))
    assert not list(folder.glob("surrogate-*"))
    assert json.loads((folder / "card.json").read_text())["version"] == 1
    other().save(folder)
    assert same(otad.load(folder), other())


def swap(folder: Path) -> None:
    other().save(folder.with_name("other"))
    foreign = part(folder.with_name("other"), "surrogate").read_bytes()
    part(folder, "surrogate").write_bytes(foreign)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f, "surrogate", -1), "the file is damaged"),
        (lambda f: put_pickle(f, "surrogate"), "expected a whole safetensors file, got"),
        (lambda f: part(f, "surrogate").unlink(), "expected the file that card.json names"),
        (swap, "expected the contents .* a file of another model"),
        (
            lambda f: edit(f, lambda c: c["surrogate"]["config"].update(blocks=1), seal=True),
            "expected weights that fit card.json",
        ),
        (
            lambda f: edit(f, lambda c: c["surrogate"]["config"].update(magic=1), seal=True),
            "config: expected the options of a CipNet",
        ),
        (
            lambda f: edit(f, lambda c: c["surrogate"].pop("config"), seal=True),
            "expected a whole model card, got: .*config",
        ),
        (
            lambda f: edit(f, lambda c: c["surrogate"].pop("file"), seal=True),
            "expected a whole model card, got: .*file",
        ),
        (
            lambda f: edit(f, lambda c: c["settings"].update(n_neighbors=5), seal=True),
            "solver: expected 3 neighbors in dimension 64",
        ),
        (lambda f: edit(f, lambda c: c["surrogate"].update(file="x")), "the card was edited"),
        (
            lambda f: edit(f, lambda c: c.pop("surrogate"), seal=True),
            "expected a whole model card, got",
        ),
    ],
)
def test_refusals(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    otad.load(folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        otad.load(folder)


@pytest.mark.parametrize("renames", range(1, 5))
def test_a_save_that_is_cut_short_leaves_the_old_model(folder: Path, renames: int) -> None:
    """Before each of the four renames of a save: network, bank, surrogate, card."""
    with cut_short(before_rename=renames):
        other().save(folder)
    assert same(otad.load(folder), estimated("fc"))
    other().save(folder)
    assert same(otad.load(folder), other())
    assert len(list(folder.iterdir())) == 4
