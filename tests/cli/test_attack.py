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


def test_the_figures_are_those_of_the_attack(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    options = ("--eps", 1.5, "--seed", 3, "--out", "found.npz", *FAST)
    record = terminal.json("attack", workshop / "digits-model", "test", *options)
    model = otad.load(workshop / "digits-model")
    x, y = digits.test_x, digits.test_y
    ball = L2(1.5, bounds=(0.0, 1.0))
    generator = torch.Generator().manual_seed(3)
    expected = make_attack("pgd", model, steps=5)(model, x, y, ball, generator=generator)
    with torch.no_grad():
        clean = int((model(x).argmax(1) == y).sum())
    standing = int((~expected.broken).sum())
    assert standing < clean  # else nothing below would tell the two apart
    for name, count in (("clean", clean), ("attacked", standing)):
        low, high = wilson_interval(count, len(x))
        assert record[name]["value"] == pytest.approx(100 * count / len(x))
        assert record[name]["low"] == pytest.approx(100 * low)
        assert record[name]["high"] == pytest.approx(100 * high)
    assert record["rows"] == len(x)
    assert record["forwards"] == int(expected.forwards.sum())
    assert record["backwards"] == int(expected.backwards.sum())
    assert record["options"] == {"steps": 5}
    assert record["threat"]["bounds"] == [0.0, 1.0]

    found = read_arrays("found.npz")
    np.testing.assert_array_equal(found["adversarial"], expected.inputs.numpy())
    assert found["y"].tolist() == [str(label) for label in y.tolist()]


def test_the_inputs_found_are_near_legal_and_wrong(terminal: Terminal, workshop: Path) -> None:
    options = ("--eps", 1.5, "--out", "found.npz", *FAST)
    terminal.succeed("attack", workshop / "digits-model", "test", *options)
    found = read_arrays("found.npz")
    step = (found["adversarial"] - found["x"]).reshape(len(found["x"]), -1).astype(np.float64)
    length = np.linalg.norm(step, axis=1)
    assert length.max() <= 1.5
    np.testing.assert_allclose(length, found["distance"], rtol=1e-6)
    assert found["adversarial"].min() >= 0
    assert found["adversarial"].max() <= 1
    with torch.no_grad():
        said = otad.load(workshop / "digits-model")(torch.from_numpy(found["adversarial"]))
    wrong = said.argmax(1).numpy() != found["y"].astype(int)
    np.testing.assert_array_equal(wrong, found["broken"])
    assert found["row"].tolist() == [str(row) for row in range(40)]


def test_what_it_leaves_behind_is_an_input_with_answers(terminal: Terminal, workshop: Path) -> None:
    model = workshop / "digits-model"
    options = ("--eps", 0.5, *FAST)
    first = terminal.json("attack", model, "test", "--out", "found.npz", *options)
    second = terminal.json("attack", model, "found.npz", *options)
    for name in ("clean", "attacked", "forwards"):
        assert first[name] == second[name]


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


def test_a_regression_is_told_in_squared_errors(terminal: Terminal, workshop: Path) -> None:
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
    expected = {
        "steps": 3,
        "step_size": 0.5,
        "loss": "margin",
        "random_start": False,
        "sigmas": [1, 2],
    }
    assert read_options(given) == expected
    for text in ("steps", "=3", "a b=3"):
        with pytest.raises(InputError, match="expected name=value"):
            read_options([text])
    with pytest.raises(InputError, match="steps"):
        read_options(["steps=3", "steps=5"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attack", "magic"], "attack: expected one of"),
        (["--option", "speed=3"], "expected options of pgd, which are "),
        (["--option", "metric=l2"], "option: expected none that is part of the model, got metric"),
        (["--option", "train_x=0"], "option: expected none that is part of the model, got train_x"),
        (["--option", "steps=0"], "steps: expected an integer of at least 1, got 0"),
        (["--norm", "l7"], "norm: expected one of l2, linf, got 'l7'"),
        (["--out", "found.csv"], "out: expected a name that ends in .npz"),
        (["--rows", "41"], "rows: expected at most the 40 rows of the input, got 41"),
        (["--immutable", "age"], "immutable: expected a model of tables"),
        (["--targets", "y"], "targets: expected none for the test part"),
        (["--eps", "-1"], "eps: expected a finite number of at least 0, got -1"),
    ],
)
def test_refusals_write_nothing(
    terminal: Terminal, workshop: Path, options: list[str], message: str
) -> None:
    given = ["--eps", "0.5", *options]
    assert message in terminal.refuse("attack", workshop / "digits-model", "test", *given)
    assert not list(Path().iterdir())


def test_the_table_shows_attack_and_figures(terminal: Terminal, workshop: Path) -> None:
    """Of one row: a single error has no interval."""
    options = ("--eps", 0.1, "--unit", "std", "--rows", 1, *FAST)
    shown = terminal.succeed("attack", workshop / "body-model", "test", *options).stdout
    for text in ("l2, eps = 0.1", "mse unattacked", "mse under pgd", "n = 1", "gradients"):
        assert text in shown
    assert "inf" not in shown
