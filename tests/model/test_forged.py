"""A model folder from a stranger opens nothing but its own files, and builds nothing larger."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import KINDS, images, model, queries

import otad
from otad.errors import InputError
from otad.io.codec import digest_of, read_json
from otad.model.bank import FeatureBank


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save(tmp_path / "model")
    return tmp_path / "model"


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the card, and give it a checksum that fits."""
    path = folder / "card.json"
    card = json.loads(path.read_text())
    del card["checksum"]
    change(card)
    path.write_text(json.dumps(card | {"checksum": digest_of(card, length=64)}))


@pytest.mark.parametrize(("verify", "older"), [(True, False), (False, False), (True, True)])
def test_a_card_binds_the_contents_of_its_bank(folder: Path, verify: bool, older: bool) -> None:
    path = next(folder.glob("bank-*"))
    bank = FeatureBank.load(path, mmap=False)
    rolled = [part.roll(30, 0) for part in (bank.features, bank.labels)]
    FeatureBank(bank.inputs, *rolled, bank.fingerprint).save(path)
    if older:  # which had neither
        forge(folder, lambda card: [card["bank"].pop(name) for name in ("checksum", "sample")])
    with pytest.raises(InputError, match=f"{path.name}: expected"):
        otad.load(folder, verify=verify)


def test_a_sample_of_the_bank_is_compared_without_verification(folder: Path) -> None:
    path = next(folder.glob("bank-*"))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1  # the last feature of the last point
    path.write_bytes(whole)
    with pytest.raises(InputError, match="points with the fingerprint"):
        otad.load(folder, verify=False)


@pytest.mark.parametrize("name", ["../bank", "/etc/passwd", "bank.safetensors", "", "card.json"])
def test_names_of_files_outside_are_refused(folder: Path, name: str) -> None:
    for entry in ("bank", "backbone"):
        forge(folder, lambda card, entry=entry: card[entry].update(file=name))
        with pytest.raises(InputError, match=r"card\.json: expected the name of a model's file"):
            otad.load(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX links and pipes")
def test_a_card_that_has_no_end_is_refused(folder: Path) -> None:
    (folder / "card.json").unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(folder / "card.json")
        with pytest.raises(InputError, match=r"card\.json: expected .* a device or a pipe"):
            otad.load(folder)
        (folder / "card.json").unlink()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX links and pipes")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_outside_and_pipes_are_refused(folder: Path, kind: str) -> None:
    path = next(folder.glob("bank-*"))
    path.rename(folder.parent / "elsewhere")
    if kind == "link":
        path.symlink_to(folder.parent / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(InputError, match="regular file inside the folder"):
        otad.load(folder)


@pytest.mark.parametrize(
    ("kind", "place", "changes"),
    [
        ("local", ("backbone",), {"blocks": 10**7}),
        ("local", ("backbone",), {"hidden": 10**8}),
        ("local", ("backbone",), {"input_shape": [10**5, 10**6]}),
        ("metric", ("backbone",), {"blocks": 10**7}),
        ("metric", ("backbone",), {"width": 10**7}),
        ("metric", ("metric",), {"key_dim": 10**9}),
        ("surrogate", ("surrogate",), {"blocks": 10**7}),
        ("surrogate", ("surrogate",), {"width": 10**7}),
        ("prototypes", ("backbone",), {"n_outputs": 10**9}),
        ("prototypes", ("backbone",), {"n_points": 10**9}),
    ],
)
def test_declared_sizes_are_bounded_by_the_weights(
    tmp_path: Path, kind: str, place: tuple[str], changes: dict[str, Any]
) -> None:
    KINDS[kind](0).save(tmp_path)

    def enlarge(card: dict[str, Any]) -> None:
        for name in place:
            card = card[name]
        card["config"].update(changes)

    forge(tmp_path, enlarge)
    with pytest.raises(InputError, match="expected"):
        otad.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"head": "0"},
        {"head": "elsewhere"},
        {"head": 10**9},
        {"input_shape": [10**5, 10**6]},
        {"net": {"class": "os.system"}},
        {"net": {"layer": "os.system"}},
        {"net": {"layer": "Sequential", "layers": [{"layer": "Linear", "in_features": 5}]}},
        {"layers": [{"layer": "Upsample", "scale_factor": 10**4}]},
        {"layers": [{"layer": "Upsample", "scale_factor": 50}] * 4},
        {"layers": [{"layer": "AdaptiveAvgPool2d", "output_size": 10**5}]},
        {"layers": [{"layer": "ZeroPad2d", "padding": 10**5}]},
    ],
)
def test_forged_layers_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    layers = torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 36, 3)
    x, y = images()
    otad.defend(torch.nn.Sequential(*layers), x, y).save(tmp_path)

    def replace(card: dict[str, Any]) -> None:
        features = card["backbone"]["config"]["inner"]["embed"]
        if "layers" in change:
            features["net"]["layers"][1:1] = change["layers"]
        else:
            features.update(change)

    forge(tmp_path, replace)
    with pytest.raises(InputError, match="expected"):
        otad.load(tmp_path)


def test_more_neighbors_than_a_stated_cost_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(200, 5, generator=torch.Generator().manual_seed(0))
    large = model().replace(bank=FeatureBank(x, x, torch.zeros(200, dtype=torch.int64), "large"))
    large.save(folder)
    forge(folder, lambda card: card["settings"]["solver"].update(spares=190))
    message = "n_neighbors: expected at most 128, got 6 and 190 spares: about .* s a query"
    with pytest.raises(InputError, match=message):
        otad.load(folder)
    with pytest.raises(InputError, match=r"got 129: about .*OTAD_MOST_NEIGHBORS=129"):
        large.replace(n_neighbors=129)
    monkeypatch.setenv("OTAD_MOST_NEIGHBORS", "196")
    assert otad.load(folder).n_searched == 196
    monkeypatch.setenv("OTAD_MOST_NEIGHBORS", "many")
    with pytest.raises(
        InputError, match="OTAD_MOST_NEIGHBORS: expected a whole number, got 'many'"
    ):
        large.replace(n_neighbors=5)


@pytest.mark.parametrize("kind", ["local", "metric", "surrogate"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind](0)
    made.save(tmp_path)
    net = {"local": made.backbone, "metric": made.metric, "surrogate": made.solver}[kind]
    with torch.no_grad():
        next(net.parameters()).view(-1)[1] = torch.nan
    with pytest.raises(InputError, match="expected finite values, got nan"):
        made.save(tmp_path / "other") and otad.load(tmp_path / "other")
    assert torch.isfinite(otad.load(tmp_path)(queries(made))).all()


HUGE = (
    "[" * 100_000,
    "[" * 65 + "]" * 65,
    "[1e999]",
    "[NaN]",
    f"[{'9' * 5000}]",
    "[9223372036854775808]",
    "{",
)


@pytest.mark.parametrize("text", HUGE)
def test_json_is_bounded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"card\.json: expected JSON"):
        read_json(path)
    with pytest.raises(InputError, match=r"card\.json"):
        otad.load(tmp_path)


def test_notes_that_could_not_be_read_again_are_not_saved(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(70):
        deep = [deep]
    for note in (deep, 2**70):
        with pytest.raises(InputError, match="notes: expected plain JSON"):
            model().save(tmp_path, note=note)
    assert not (tmp_path / "card.json").exists()


@pytest.mark.parametrize("extra", [{"forward": 1.0}, {"smoothness": "1"}, [1], {}])
def test_a_state_sets_declared_numbers_alone(extra: object) -> None:
    made = model(scope="global")
    before, state = made.smoothness, made.state_dict()
    text = list(json.dumps(extra).encode())
    state["answerer._extra_state"] = torch.tensor(text, dtype=torch.uint8)
    with pytest.raises(InputError, match="state_dict: expected the numbers smoothness"):
        made.load_state_dict(state)
    assert made.smoothness == before
    assert callable(made.answerer.forward)
