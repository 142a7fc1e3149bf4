"""`otad attack`: the figures it prints, the inputs it leaves behind, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import Terminal

import otad
from otad.attacks import L2
from otad.cli.attack import read_options
from otad.data import Dataset
from otad.errors import InputError
from otad.evaluate import make_attack
from otad.scores import wilson_interval

FAST = ("--option", "steps=5")


def read_arrays(path: str) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def test_the_figures_and_inputs_are_those_of_the_attack(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    options = ("--eps", 1.5, "--seed", 3, "--out", "found.npz", *FAST)
    record = terminal.json("attack", workshop / "digits-model", "test", *options)
    model = otad.load(workshop / "digits-model")
    x, y = digits.test_x, digits.test_y
    generator = torch.Generator().manual_seed(3)
    ball = L2(1.5, bounds=(0.0, 1.0))
    expected = make_attack("pgd", model, steps=5)(model, x, y, ball, generator=generator)
    with torch.no_grad():
        clean = int((model(x).argmax(1) == y).sum())
    remaining = int((~expected.broken).sum())
    assert remaining < clean  # else the two scores could not be told apart
    for name, count in (("clean", clean), ("attacked", remaining)):
        bounds = [100 * bound for bound in wilson_interval(count, len(x))]
        found = [record[name][key] for key in ("value", "low", "high")]
        assert found == pytest.approx([100 * count / len(x), *bounds])
    assert record["rows"] == len(x)
    assert record["forwards"] == int(expected.forwards.sum())
    assert record["backwards"] == int(expected.backwards.sum())
    assert record["options"] == {"steps": 5}
    assert record["threat"]["bounds"] == [0.0, 1.0]

    found = read_arrays("found.npz")
    np.testing.assert_array_equal(found["adversarial"], expected.inputs.numpy())
    assert found["y"].tolist() == [str(label) for label in y.tolist()]
    assert found["row"].tolist() == [str(row) for row in range(40)]
    step = (found["adversarial"] - found["x"]).reshape(len(x), -1).astype(np.float64)
    length = np.linalg.norm(step, axis=1)
    assert length.max() <= 1.5
    np.testing.assert_allclose(length, found["distance"], rtol=1e-6)
    assert found["adversarial"].min() >= 0
    assert found["adversarial"].max() <= 1
    with torch.no_grad():
        wrong = model(torch.from_numpy(found["adversarial"])).argmax(1) != y
    np.testing.assert_array_equal(wrong.numpy(), found["broken"])

    again = terminal.json("attack", workshop / "digits-model", "found.npz", *options[:4], *FAST)
    for name in ("clean", "attacked", "forwards"):
        assert again[name] == record[name]


def test_batches_change_no_clean_figure_and_rows_are_drawn(
    terminal: Terminal, workshop: Path
) -> None:
    model = workshop / "digits-model"
    options = ("--attack", "noise", "--option", "draws=1", "--eps", 0)
    whole = terminal.json("attack", model, "test", *options)
    parts = terminal.json("attack", model, "test", "--batch-size", 7, *options)
    assert parts["clean"] == whole["clean"] == whole["attacked"]
    drawn = {}
    for seed in (1, 2):
        some = ("--rows", 10, "--seed", seed, "--out", "some.npz")
        terminal.succeed("attack", model, "test", *options, *some)
        drawn[seed] = [int(row) for row in read_arrays("some.npz")["row"]]
        assert drawn[seed] == sorted(set(drawn[seed]))
        assert len(drawn[seed]) == 10
    assert drawn[1] != drawn[2]


def test_a_regression_is_reported_in_squared_errors(terminal: Terminal, workshop: Path) -> None:
    options = ("--norm", "linf", "--eps", 0.3, "--unit", "std", "--immutable", "age,sex")
    out = ("--out", "found.npz", *FAST)
    record = terminal.json("attack", workshop / "body-model", "test", *options, *out)
    model = otad.load(workshop / "body-model")
    found = read_arrays("found.npz")
    step = found["adversarial"].astype(np.float64) - found["x"].astype(np.float64)
    assert not step[:, :2].any()
    assert np.abs(step / model.backbone.std.numpy()).max() <= 0.3
    with torch.no_grad():
        for name, inputs in (("clean", "x"), ("attacked", "adversarial")):
            errors = model(torch.from_numpy(found[inputs])).numpy() - found["y"]
            assert record[name]["value"] == pytest.approx(float(np.square(errors).mean()), rel=1e-5)
    assert record["attacked"]["value"] > record["clean"]["value"]
    assert record["attacked"]["metric"] == "mse"


def test_options_are_read_as_json_or_text() -> None:
    given = ["steps=3", "step_size=0.5", "loss=margin", "random_start=false", "sigmas=[1, 2]"]
    values = {"steps": 3, "step_size": 0.5, "loss": "margin", "random_start": False}
    assert read_options(given) == values | {"sigmas": [1, 2]}
    for texts in (["steps"], ["=3"], ["a b=3"], ["steps=3", "steps=5"]):
        with pytest.raises(InputError, match=f"option: .*{texts[0].partition('=')[0]}"):
            read_options(texts)


def test_the_table_shows_attack_and_figures(terminal: Terminal, workshop: Path) -> None:
    """Of one row: a single error has no interval."""
    options = ("--eps", 0.1, "--unit", "std", "--rows", 1, *FAST)
    shown = terminal.succeed("attack", workshop / "body-model", "test", *options).stdout
    for text in ("l2, eps = 0.1", "mse unattacked", "mse under pgd", "n = 1", "gradients"):
        assert text in shown
    assert "inf" not in shown
