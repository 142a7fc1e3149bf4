"""A model of global scope on disk: its levels come back to the bit, and only with their bank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model.test_folder import QUERIES, cut_short, edit, flip, model, part, put_pickle, same
from safetensors.torch import load_file

import otad
from otad.errors import InputError


def one_map(seed: int = 0, **options: Any) -> otad.OTAD:
    return model(seed, **({"scope": "global", "smoothness": None} | options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    one_map().save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "options",
    [{}, {"strong_convexity": -0.3}, {"bank_dtype": torch.bfloat16}, {"smoothness": 1.8}],
)
def test_round_trip_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    ours = one_map(**options)
    card = json.loads(ours.save(tmp_path, classes=["a", "b", "c"]).read_text())
    loaded = otad.load(tmp_path)
    assert same(loaded, ours)
    assert loaded.scope == "global"
    assert torch.equal(loaded.potential.left_out, ours.potential.left_out)
    assert (len(ours.potential.left_out) > 0) == ("smoothness" in options)
    for name in ("smoothness", "strong_convexity", "sweeps", "violation"):
        assert card["potential"][name] == getattr(loaded.potential, name)
        assert getattr(loaded.potential, name) == getattr(ours.potential, name)
    assert card["potential"]["left_out"] == len(ours.potential.left_out)
    assert (card["version"], card["settings"]["scope"]) == (3, "global")
    assert "solver" not in card["settings"]
    mapped = otad.load(tmp_path, resident=False, verify=False)
    assert torch.equal(mapped(QUERIES), ours(QUERIES))


def test_local_models_are_written_as_ever(tmp_path: Path) -> None:
    """Who knows nothing of scopes still reads them, and what they wrote is still read."""
    card = json.loads(model().save(tmp_path).read_text())
    assert card["version"] == 1
    assert set(card["settings"]) == {
        "n_neighbors", "smoothness", "strong_convexity", "search", "solver",
    }  # fmt: skip
    assert not list(tmp_path.glob("levels-*"))


def test_the_scope_of_a_folder_can_change(folder: Path) -> None:
    local = model(seed=1)
    local.save(folder)
    assert same(otad.load(folder), local)
    assert not list(folder.glob("levels-*"))
    one_map(seed=1).save(folder)
    assert same(otad.load(folder), one_map(seed=1))
    assert load_file(part(folder, "levels"))["levels"].dtype == torch.float64


def foreign_levels(folder: Path) -> None:
    """Levels that another bank's model was saved with, in a card that was written to fit them."""
    other = folder.with_name("other")
    one_map(seed=1).save(other)
    shutil.copy(part(other, "levels"), folder)
    theirs = json.loads((other / "card.json").read_text())["potential"]
    edit(folder, lambda card: card.update(potential=theirs), seal=True)


def levels_of_another_precision(folder: Path) -> None:
    """The same net and data, but their bank in half precision has other pairs, and levels."""
    other = folder.with_name("other")
    one_map(bank_dtype=torch.float16).save(other)
    shutil.copy(part(other, "levels"), folder)
    theirs = json.loads((other / "card.json").read_text())["potential"]
    edit(folder, lambda card: card.update(potential=theirs), seal=True)


def swap(folder: Path) -> None:
    one_map(seed=1).save(folder.with_name("other"))
    content = part(folder.with_name("other"), "levels").read_bytes()
    part(folder, "levels").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f, "levels", -1), "the file is damaged"),
        (lambda f: put_pickle(f, "levels"), "expected a whole safetensors file, got"),
        (lambda f: part(f, "levels").unlink(), "expected the file that card.json names, got none"),
        (swap, "expected the contents .* a file of another model"),
        (foreign_levels, "expected a file for the bank .* got one for"),
        (levels_of_another_precision, "expected a file for the bank .* got one for"),
        (
            lambda f: edit(f, lambda c: c["potential"].update(smoothness=1.0)),
            "the card was edited",
        ),
        (
            lambda f: edit(f, lambda c: c["settings"].update(scope="local"), seal=True),
            "potential: expected with scope 'global' alone",
        ),
        (
            lambda f: edit(f, lambda c: c["potential"].pop("sweeps"), seal=True),
            "expected a whole model card, got: .*sweeps",
        ),
        (
            lambda f: edit(f, lambda c: c.pop("potential"), seal=True),
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
    """Before each of the four renames of a save: network, bank, levels, card."""
    with cut_short(before_rename=renames):
        one_map(seed=1).save(folder)
    assert same(otad.load(folder), one_map())
    one_map(seed=2).save(folder)
    assert same(otad.load(folder), one_map(seed=2))
    assert len(list(folder.iterdir())) == 4
