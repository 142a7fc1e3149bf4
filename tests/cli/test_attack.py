"""`otad attack`: the figures it prints, the inputs it writes, and refusals."""

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


def test_the_figures_and_inputs_are_those_of_the_attack(
    terminal: Terminal, workshop: Path, digits: Dataset, digits_model: otad.OTAD
) -> None:
    options = ("--eps", 1.5, "--seed", 3, *FAST)
    command = ("attack", workshop / "digits-model", "test", *options)
    record = terminal.json(*command, "--out", "found.npz")
    model, x, y = digits_model, digits.test_x, digits.test_y
    generator, ball = torch.Generator().manual_seed(3), L2(1.5, bounds=(0.0, 1.0))
    expected = make_attack("pgd", model, steps=5)(model, x, y, ball, generator=generator)
    with torch.no_grad():
        clean = int((model(x).argmax(1) == y).sum())
    remaining = int((~expected.broken).sum())
    assert remaining < clean  # else the two scores could not be told apart
    for name, count in (("clean", clean), ("attacked", remaining)):
        bounds = [100 * bound for bound in wilson_interval(count, len(x))]
        found = [record[name][key] for key in ("value", "low", "high")]
        assert found == pytest.approx([100 * count / len(x), *bounds])
    assert (record["rows"], record["options"]) == (len(x), {"steps": 5})
    for name in ("forwards", "backwards"):
        assert record[name] == int(getattr(expected, name).sum())
    assert record["threat"]["bounds"] == [0.0, 1.0]

    arrays = np.load("found.npz", allow_pickle=False)
    np.testing.assert_array_equal(arrays["adversarial"], expected.inputs.numpy())
    assert arrays["y"].tolist() == [str(label) for label in y.tolist()]
    assert arrays["row"].tolist() == [str(row) for row in range(40)]
    step = (arrays["adversarial"] - arrays["x"]).reshape(len(x), -1).astype(np.float64)
    length = np.linalg.norm(step, axis=1)
    assert length.max() <= 1.5
    np.testing.assert_allclose(length, arrays["distance"], rtol=1e-6)
    with torch.no_grad():
        wrong = model(torch.from_numpy(arrays["adversarial"])).argmax(1) != y
    np.testing.assert_array_equal(wrong.numpy(), arrays["broken"])

    again = terminal.json("attack", workshop / "digits-model", "found.npz", *options)
    for name in ("clean", "attacked", "forwards"):
        assert again[name] == record[name]
    assert terminal.json(*command, "--batch-size", 7)["clean"] == record["clean"]


def test_a_regression_is_reported_in_squared_errors(
    terminal: Terminal, workshop: Path, body_model: otad.OTAD
) -> None:
    options = ("--norm", "linf", "--eps", 0.3, "--unit", "std", "--immutable", "age,sex", *FAST)
    command = ("attack", workshop / "body-model", "test", *options)
    record = terminal.json(*command, "--out", "found.npz")
    found = np.load("found.npz", allow_pickle=False)
    step = found["adversarial"].astype(np.float64) - found["x"].astype(np.float64)
    assert not step[:, :2].any()
    assert np.abs(step / body_model.backbone.std.numpy()).max() <= 0.3
    with torch.no_grad():
        for name, inputs in (("clean", "x"), ("attacked", "adversarial")):
            errors = body_model(torch.from_numpy(found[inputs])).numpy() - found["y"]
            assert record[name]["value"] == pytest.approx(float(np.square(errors).mean()), rel=1e-5)
    assert record["attacked"]["value"] > record["clean"]["value"]
    assert record["attacked"]["metric"] == "mse"
    shown = terminal.text(*command, "--rows", 1)  # a single error has no interval
    for text in ("linf, eps = 0.3", "mse unattacked", "mse under pgd", "n = 1", "gradients"):
        assert text in shown
    assert "inf]" not in shown


def test_options_are_read_as_json_or_text() -> None:
    given = ["steps=3", "step_size=0.5", "loss=margin", "random_start=false", "sigmas=[1, 2]"]
    values = {"steps": 3, "step_size": 0.5, "loss": "margin", "random_start": False}
    assert read_options(given) == values | {"sigmas": [1, 2]}
    for texts in (["steps"], ["=3"], ["a b=3"], ["steps=3", "steps=5"]):
        with pytest.raises(InputError, match=f"option: .*{texts[0].partition('=')[0]}"):
            read_options(texts)
