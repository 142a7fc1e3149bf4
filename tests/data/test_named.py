"""The registered data sets: descriptions, the data folder, and the sets that need no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import datasets as bundled

from otad.data import Dataset, MissingDataError, describe, load, names, register_dataset
from otad.errors import InputError


def test_every_set_is_described() -> None:
    assert len(set(names())) == len(names()) == 14
    for name in names():
        info = describe(name)
        assert info.name == name
        assert all((info.summary, info.source, info.where))
    assert describe("RED-WINE").options == ("task", "test_fraction", "seed")
    assert describe("mnist").options == ()


def test_a_new_set_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otad.data.registry._INFOS", {})

    @register_dataset("line", "two points", source="a test")
    def line(*, length: float = 1.0, seed: int = 0, **about: Any) -> Dataset:
        x = length * torch.tensor([[0.0], [1.0]])
        y = torch.tensor([seed, 1.0])
        return Dataset(train_x=x, train_y=y, test_x=x, test_y=y, task="regression", **about)

    assert names() == ("line",)
    assert describe("Line").options == ("length", "seed")
    made = load("line", seed=3, length=2.0)
    assert (made.name, made.source) == ("line", "a test")
    assert (made.train_x[1].item(), made.train_y[0].item()) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imagenet", {}, r"mnist.* got 'imagenet'"),
        ("digits", {"size": 3}, r"digits: .*test_fraction, got 'size'"),
        ("mnist", {"size": 3}, "mnist: .*no options, got 'size'"),
        ("synthetic", {"std": 0.0}, "std: .*0.0"),
        ("synthetic", {"std": float("nan")}, "std: .*nan"),
        ("synthetic", {"radius": -1.0}, "radius: .*-1.0"),
        ("synthetic", {"classes": 1}, "classes: .*2.*1"),
        ("synthetic", {"train_size": 5}, "train_size: .*10.*5"),
        ("synthetic", {"dim": 1.5}, "dim: .*1.5"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(name, **options)


@pytest.mark.parametrize("name", [name for name in names() if describe(name).needs_folder])
def test_a_file_set_says_where_it_looked_and_where_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        load(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert describe(name).where in str(caught.value)


def test_the_folder_is_the_argument_else_the_variable_else_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTAD_DATA", raising=False)
    with pytest.raises(MissingDataError, match=r"pass data_dir .* or set OTAD_DATA"):
        load("mnist")
    monkeypatch.setenv("OTAD_DATA", str(tmp_path / "absent"))
    with pytest.raises(MissingDataError, match=r"OTAD_DATA: expected a folder, got .*absent"):
        load("mnist")
    with pytest.raises(MissingDataError, match=r"data_dir: expected a folder, got .*other"):
        load("mnist", tmp_path / "other")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, rows in ((first, 10), (second, 20)):
        (folder / "wine").mkdir(parents=True)
        lines = "\n".join(f"{k}.5;{5 + k % 2}" for k in range(rows))
        (folder / "wine" / "winequality-red.csv").write_text(f'"pH";"quality"\n{lines}\n')
    monkeypatch.setenv("OTAD_DATA", str(first))
    assert len(load("red_wine").train_x) == 8
    found, other = load("red-wine", second), load("red_wine", second, seed=1)
    assert (found.task, found.name, len(found.train_x)) == ("regression", "red_wine", 16)
    assert load("red_wine", second, task="classification").classes == ("5", "6")
    assert not torch.equal(found.test_x, other.test_x)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "train", "test"),
    [
        ("digits", (1, 8, 8), 10, 1437, 360),
        ("breast_cancer", (30,), 2, 455, 114),
        ("wine", (13,), 3, 142, 36),
        ("diabetes", (10,), 0, 353, 89),
    ],
)
def test_bundled_sets(name: str, shape: tuple[int], classes: int, train: int, test: int) -> None:
    dataset = load(name)
    assert (dataset.input_shape, len(dataset.classes)) == (shape, classes)
    assert (len(dataset.train_x), len(dataset.test_x)) == (train, test)
    options = {"scaled": False} if name == "diabetes" else {}
    original = getattr(bundled, f"load_{name}")(**options)
    x = torch.cat([dataset.train_x, dataset.test_x]).flatten(1).double()
    y = torch.cat([dataset.train_y, dataset.test_y]).double()
    raw = torch.from_numpy(original.data).float().double() / (16 if name == "digits" else 1)
    both = torch.cat([x, y.unsqueeze(1)], dim=1)
    expected = torch.cat([raw, torch.from_numpy(original.target).double().unsqueeze(1)], dim=1)
    assert sorted(both.tolist()) == sorted(expected.tolist())  # the same rows with their targets
    assert load(name, seed=0).fingerprint() == dataset.fingerprint()
    assert load(name, seed=1).fingerprint() != dataset.fingerprint()


def draw(**options: Any) -> Dataset:
    return load("synthetic", **{"train_size": 20_000, "test_size": 1_000, "dim": 16} | options)


def test_centers_lie_on_the_sphere_and_the_noise_has_the_std() -> None:
    dataset = draw(std=0.3, classes=5, radius=2.0)
    assert torch.bincount(dataset.train_y).tolist() == [4_000] * 5
    for label in range(5):
        rows = dataset.train_x[dataset.train_y == label]
        # 4,000 draws fix a mean to 0.3 / sqrt(4000) = 0.005 an axis, a std to one part in 90.
        assert abs(float(rows.mean(dim=0).norm()) - 2.0) < 0.03
        assert bool(((rows.std(dim=0) - 0.3).abs() < 0.02).all())
    dataset = draw(std=0.05)  # train and test share the centers
    centers = torch.stack([dataset.train_x[dataset.train_y == k].mean(dim=0) for k in range(10)])
    nearest = torch.cdist(dataset.test_x, centers).argmin(dim=1)
    assert torch.equal(nearest, dataset.test_y)


def test_only_the_noise_scale_changes_with_std_and_all_with_the_seed() -> None:
    one, two, three = (draw(std=std, train_size=100) for std in (0.1, 0.2, 0.3))
    assert torch.equal(one.train_y, two.train_y)
    torch.testing.assert_close(two.train_x - one.train_x, three.train_x - two.train_x)
    assert draw(seed=1).fingerprint() == draw(seed=1).fingerprint()
    assert draw(seed=1).fingerprint() != draw(seed=2).fingerprint()
