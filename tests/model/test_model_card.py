"""The model card that `save` writes: what it says comes from the model, and stays true of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from factories import exact, refuses

import otad
from otad.attacks import Pgd, RandomNoise
from otad.errors import InputError
from otad.evaluate.records import Evaluation
from otad.model.folder import note_evaluation
from otad.model.model_card import MARK
from otad.model.otad import OTAD


@pytest.fixture(scope="module")
def model() -> OTAD:
    return exact()


@pytest.fixture(scope="module")
def evaluation(model: OTAD) -> Evaluation:
    x = torch.rand(6, *model.backbone.input_shape, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % model.backbone.n_outputs
    attacks = [Pgd(steps=5), RandomNoise(draws=5)]
    options = {"attacks": attacks, "flags": False, "undefended": False, "eps": [0.1, 0.5]}
    return otad.evaluate(model, x, y, otad.L2(0.5), **options)


def read(folder: Path) -> tuple[dict[str, object], str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_has_the_figures_of_the_evaluation(
    model: OTAD, evaluation: Evaluation, tmp_path: Path
) -> None:
    model.save(tmp_path, evaluation=evaluation, data={"name": "toy | data"})
    front, body = read(tmp_path)
    assert front["library_name"] == "otad"
    (entry,) = front["model-index"]
    (result,) = entry["results"]
    values = [metric["value"] for metric in result["metrics"]]
    worst = [evaluation.worst_case(eps).value / 100 for eps in (0.1, 0.5)]
    assert values[:3] == [5 / 6, *worst]
    assert f"| 0.5 | {worst[1]:.1%} |" in body
    assert "6 examples; without attack 83.3%" in body
    assert "Attacks: pgd, noise. The strength of the attacks was not checked." in body
    assert "toy \\| data" in body
    assert f"{len(model.bank_inputs):,}, all of them stored" in body


def test_figures_stay_while_the_model_is_the_same(
    model: OTAD, evaluation: Evaluation, tmp_path: Path
) -> None:
    model.save(tmp_path / "a", evaluation=evaluation)
    loaded = otad.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    assert "model-index" in read(tmp_path / "b")[0]
    loaded.replace(n_neighbors=2).save(tmp_path / "c")
    front, body = read(tmp_path / "c")
    assert "model-index" not in front
    assert "without an evaluation" in body


def test_an_evaluation_of_another_model_is_refused(
    model: OTAD, evaluation: Evaluation, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"evaluation.*n_neighbors"):
        model.replace(n_neighbors=2).save(tmp_path, evaluation=evaluation)
    with pytest.raises(InputError, match=r"notes.evaluations"):
        model.save(tmp_path, evaluations=[{"worst": 1.0}])
    assert not list(tmp_path.iterdir())


def test_a_later_evaluation_of_the_same_kind_replaces_the_first(
    model: OTAD, evaluation: Evaluation, tmp_path: Path
) -> None:
    model.save(tmp_path)
    assert "model-index" not in read(tmp_path)[0]
    bank = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    for new in (evaluation, replace(evaluation, clean_right=())):
        note_evaluation(tmp_path, new, model.describe(), interface=model.interface())
    assert bank == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(json.loads((tmp_path / "card.json").read_text())["notes"]["evaluations"]) == 1
    assert "without attack 0.0%" in read(tmp_path)[1]
    assert len(otad.load(tmp_path).notes["evaluations"]) == 1


def test_a_readme_of_the_user_is_left_alone(model: OTAD, tmp_path: Path) -> None:
    model.save(tmp_path)
    path = tmp_path / "README.md"
    own = path.read_text().replace(MARK + "\n", "") + "mine\n"
    path.write_text(own)
    model.save(tmp_path)
    assert path.read_text() == own


def test_odd_notes_do_not_break_the_card(model: OTAD, tmp_path: Path) -> None:
    model.save(tmp_path, data="x", estimator="y")
    model.save(tmp_path, data={"name": "a\n---\n# b", "source": None}, classes=["<b>", 1.5, "c"])
    _, body = read(tmp_path)
    assert "\n# b" not in body
    assert "\\<b\\>" in body


def test_the_card_of_an_estimator_names_its_class_and_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame({"age": range(12), "town": ["a", "b", "c"] * 4})
    otad.OTADClassifier(epochs=1).fit(x, x["age"] > 5).save(tmp_path / "text")
    otad.OTADRegressor(epochs=1).fit(x[["age"]].to_numpy(), x["age"]).save(tmp_path / "array")
    body = read(tmp_path / "text")[1]
    assert 'model = otad.OTADClassifier.load("FOLDER")' in body
    assert "model.predict(X)  # X: a DataFrame with the columns age, town\n" in body
    assert "`otad evaluate FOLDER data.csv --targets COLUMN --eps 0.5 --card`" in body
    body = read(tmp_path / "array")[1]
    assert 'model = otad.OTADRegressor.load("FOLDER")' in body
    assert "model.predict(X)  # X: an array of shape (rows, 1)\n" in body


def test_the_card_advises_an_evaluation_that_the_command_accepts(
    model: OTAD, tmp_path: Path
) -> None:
    model.save(tmp_path)
    assert "`otad evaluate FOLDER data.npz --eps 0.5 --card`" in read(tmp_path)[1]
    model.save(tmp_path, data={"choice": {"data": "toy"}})
    assert "`otad evaluate FOLDER test --eps 0.5 --card`" in read(tmp_path)[1]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["a", "b"], "notes.classes: expected 3 names"),
        ("abc", "notes.classes: expected 3 names"),
        (["a", None, "b"], "notes.classes: expected 3 names"),
        (["a", "1", 1], "notes.classes: expected distinct names, got repeated 1"),
    ],
)
def test_names_that_do_not_fit_the_classes_are_refused(
    model: OTAD, tmp_path: Path, classes: object, message: str
) -> None:
    refuses(model.save, tmp_path / "model", classes=classes, match=message)
    assert not (tmp_path / "model" / "card.json").exists()
