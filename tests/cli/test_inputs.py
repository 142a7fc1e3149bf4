"""From arguments to inputs, targets, balls and radii; and no command writes over what it reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.small import BODY, column, read_csv, terminal, write_body, write_cells, write_image
from cli.small import write_rows as write_csv
from PIL import Image

import otad
from otad.attacks import L2, Linf
from otad.cli.inputs import open_examples, open_inputs
from otad.cli.options import read_radii, threat_to
from otad.cli.sources import DataChoice, refuse_overwriting
from otad.data import Dataset, load_h5ad
from otad.errors import InputError


def test_a_table_has_its_targets_in_the_column_trained_on(
    workshop: Path, body_model: otad.OTAD
) -> None:
    body, rows = body_model, read_csv(workshop / "body.csv")[:6]
    expected = torch.tensor([float(row["progression"]) for row in rows])
    write_csv("whole.csv", rows, ["progression", *BODY])
    assert torch.equal(open_examples(body, "whole.csv").targets, expected)
    for row in rows:
        row["later"] = str(2 * float(row["progression"]))
    write_csv("later.csv", rows, [*BODY, "later"])
    assert open_examples(body, "later.csv").y is None
    found = open_examples(body, "later.csv", targets="later")
    assert torch.equal(found.targets, 2 * expected)
    write_csv("answers.csv", rows, ["progression"])
    assert torch.equal(open_examples(body, "later.csv", targets="answers.csv").targets, expected)
    write_csv("short.csv", rows[:5], ["progression"])
    write_csv("two.csv", rows, ["age", "later"])
    for targets, message in (
        ("never", "got 'never'"),
        ("short.csv", "targets: .*6.*5"),
        ("two.csv", "one column, got age, later"),
    ):
        with pytest.raises(InputError, match=message):
            open_examples(body, "later.csv", targets=targets)


def test_an_archive_has_its_targets_in_y(workshop: Path, digits_model: otad.OTAD) -> None:
    digits, whole = digits_model, np.load(workshop / "digits.npz")
    x, y = whole["x"][:5], whole["y"][:5]
    np.savez("numbers.npz", x=x, y=y)
    np.savez("words.npz", x=x, y=y.astype(str))
    np.savez("other.npz", x=x, label=y)
    np.savez("alone.npz", x=x)
    for source, targets in (
        ("numbers.npz", None),
        ("words.npz", None),
        ("other.npz", "label"),
        ("alone.npz", "numbers.npz"),
    ):
        assert open_examples(digits, source, targets=targets).targets.tolist() == y.tolist()
    assert open_examples(digits, "alone.npz").y is None
    for wrong, message in ((y + 7, "0, 1, .*got '1[0-9]' in row"), (y / 2, "y: .*whole numbers")):
        np.savez("wrong.npz", x=x, y=wrong)
        with pytest.raises(InputError, match=message):
            open_examples(digits, "wrong.npz")


def test_an_image_has_its_target_in_its_folder(workshop: Path, digits_model: otad.OTAD) -> None:
    digits, whole = digits_model, np.load(workshop / "digits.npz")
    for number, (pixels, label) in enumerate(zip(whole["x"][:6], whole["y"][:6], strict=True)):
        for folder in (f"sorted/{label}", "flat", f"named/class {label}"):
            write_image(Path(folder, f"{number}.png"), pixels)
    found = open_examples(digits, "sorted")
    folders = [name.partition("/")[0] for name in found.names]
    assert folders == [str(label) for label in found.targets.tolist()]
    assert open_examples(digits, "flat").y is None
    assert open_examples(digits, "named").y is None
    write_image(Path("sorted", "zebra", "6.png"), whole["x"][6])
    with pytest.raises(InputError, match=r"sorted, targets: .*0, 1, .*got 'zebra'"):
        open_examples(digits, "sorted")
    np.savez("answers.npz", y=whole["y"][:6])
    found = open_examples(digits, "flat", targets="answers.npz")
    assert found.targets.tolist() == whole["y"][:6].tolist()
    with pytest.raises(InputError, match=r"targets: .*'y'"):
        open_examples(digits, "flat", targets="y")


@pytest.mark.filterwarnings("ignore:defense")
@pytest.mark.parametrize(("bounds", "by_keys"), [((0.0, 16.0), False), (None, False), (None, True)])
def test_images_are_not_read_on_another_scale_in_silence(
    bounds: Any, by_keys: bool, digits: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = 16 * digits.train_x, digits.train_y
    if by_keys:
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 9), torch.nn.ReLU(), torch.nn.Linear(9, 10)
        )
        model = otad.defend(net, x, y, inputs="features", metric=torch.nn.Flatten())
    else:
        model = otad.defend(None, x, y, inputs="pixels", bounds=bounds)
    write_image(Path("flat/0.png"), digits.test_x[0, 0].numpy())
    np.savez("bytes.npz", x=np.zeros((1, 8, 8), np.uint8))
    np.savez("floats.npz", x=x[:1].numpy())
    assert torch.equal(open_inputs(model, "floats.npz").row(0), x[:1])
    assert capsys.readouterr().err == ""
    for source in ("flat", "bytes.npz"):
        if bounds is None:
            open_inputs(model, source)
            error = capsys.readouterr().err
            assert "values from 0 to 1, but training points have values from 0 to 16" in error
        else:
            message = r"bounds \(0.0, 16.0\) of the model, got images, .* values from 0 to 1"
            with pytest.raises(InputError, match=message):
                open_inputs(model, source)


def test_images_of_a_model_without_bounds_may_have_the_usual_scale(
    digits: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {"inputs": "pixels", "bank_dtype": torch.bfloat16}
    model = otad.defend(None, digits.train_x, digits.train_y, **half)
    write_image(Path("flat/0.png"), digits.test_x[0, 0].numpy())
    open_inputs(model, "flat")
    assert capsys.readouterr().err == ""


def test_rows_keep_their_names_inputs_and_targets(digits_model: otad.OTAD) -> None:
    whole = open_examples(digits_model, "test")
    some, other = (open_examples(digits_model, "test", rows=9, seed=seed) for seed in (4, 5))
    places = [int(name) for name in some.names]
    assert (len(some), places) == (9, sorted(set(places)))
    assert some.names != other.names
    assert torch.equal(some.x, whole.x[places])
    assert torch.equal(some.targets, whole.targets[places])


def test_a_command_that_needs_targets_says_so(workshop: Path) -> None:
    write_csv("new.csv", read_csv(workshop / "body.csv")[:3], BODY)
    message = terminal.refuse("attack", workshop / "body-model", "new.csv", "--eps", 1)
    assert "new.csv: expected targets" in message


def test_cells_are_prepared_as_for_the_training() -> None:
    kinds = np.arange(60) % 2
    rates = np.where(kinds[:, None] == 0, [9, 1, 3], [1, 9, 3])
    names = [f"kind {k}" for k in kinds]
    counts = np.random.default_rng(0).poisson(rates)
    cells = write_cells(Path("cells.h5ad"), counts, kind=names, again=names[::-1])
    terminal.succeed(
        "train", "cells.h5ad", "--label", "kind", "--out", "net", "--epochs", 12, "--blocks", 1
    )
    terminal.succeed("defend", "net", "--out", "model")
    terminal.succeed("predict", "model", "cells.h5ad", "--out", "all.csv", "--batch-size", 11)
    predicted = np.array(column("all.csv", "prediction"))
    assert (predicted == names).mean() > 0.9
    own, nearest = column("all.csv", "row"), column("all.csv", "nearest")
    assert own == [f"cell {k}" for k in range(60)]
    assert sum(map(str.__eq__, own, nearest)) >= 40  # training cells, except for equal ones
    terminal.succeed("predict", "model", "test", "--out", "test.csv")
    assert set(column("test.csv", "row")) == {*own} - {*otad.load("model").notes["train_names"]}
    assert terminal.json("explain", "model", "cells.h5ad", "--row", "cell 7")["name"] == "cell 7"
    repeated = cells.copy()
    repeated.obs_names = ["cell 7"] * 60
    repeated.write_h5ad("repeated.h5ad")
    assert "'0'" in terminal.refuse("explain", "model", "repeated.h5ad", "--row", "cell 7")
    terminal.succeed("explain", "model", "repeated.h5ad", "--row", 7)
    assert "cell 7" not in load_h5ad(Path("repeated.h5ad"), "kind").train_names
    cells[:, ["c", "a", "b"]].copy().write_h5ad("turned.h5ad")
    terminal.succeed("predict", "model", "turned.h5ad", "--out", "turned.csv")
    assert Path("turned.csv").read_text() == Path("all.csv").read_text()
    write_cells(Path("logs.h5ad"), np.log1p(counts), kind=names)
    message = terminal.refuse("predict", "model", "logs.h5ad", "--out", "x.csv")
    assert "cells: expected counts" in message
    older = load_h5ad(Path("logs.h5ad"), "kind", normalize=True)
    assert older.preparation is not None
    card = older.preparation.to_json()
    del card["counts"]  # as earlier versions wrote it, which normalized such values
    read = DataChoice("logs.h5ad", 0, {"label": "kind"}).load(None, {"preparation": card})
    assert torch.equal(read.test_x, older.test_x)
    cells[:, ["c", "a"]].copy().write_h5ad("short.h5ad")
    assert "1 of them: b" in terminal.refuse("predict", "model", "short.h5ad", "--out", "x.csv")
    Path("cells.csv").write_text("a,b,c\n1,2,3\n")
    assert ".h5ad" in terminal.refuse("predict", "model", "cells.csv", "--out", "x.csv")
    model = otad.load("model")
    assert open_examples(model, "cells.h5ad").targets.tolist() == kinds.tolist()
    found = open_examples(model, "cells.h5ad", targets="again", rows=7)
    reverse = kinds[::-1][[int(name.removeprefix("cell ")) for name in found.names]]
    assert found.targets.tolist() == reverse.tolist()
    del cells.obs["kind"]
    cells.write_h5ad("unknown.h5ad")
    assert open_examples(model, "unknown.h5ad").y is None
    terminal.succeed("certify", "model", "unknown.h5ad")
    assert "expected targets" in terminal.refuse("attack", "model", "unknown.h5ad", "--eps", 1)
    with pytest.raises(InputError, match=r"again.* got 'kind'"):
        open_examples(model, "unknown.h5ad", targets="kind")


def test_training_points_among_the_rows_are_reported(
    workshop: Path, digits_model: otad.OTAD, capsys: pytest.CaptureFixture[str]
) -> None:
    open_examples(digits_model, str(workshop / "digits.npz"))
    assert "160 of the 200 rows are training points" in capsys.readouterr().err
    open_examples(digits_model, "test")
    assert capsys.readouterr().err == ""


def test_norm_eps_and_bounds(digits_model: otad.OTAD, body_model: otad.OTAD) -> None:
    ball = threat_to(digits_model, "linf", 0.1)
    assert isinstance(ball, Linf)
    assert (ball.eps, ball.bounds, ball.scale, ball.mutable) == (0.1, (0.0, 1.0), None, None)
    assert isinstance(threat_to(body_model, "l2", 2.0), L2)
    assert threat_to(body_model, "l2", 2.0, unit="1").bounds is None


def test_a_network_that_does_not_standardize_has_no_standard_deviations() -> None:
    """A user's own network has a std of 1, which is not that of the training data."""
    x, y = 20 * torch.randn(30, 2), torch.arange(30) % 3
    with pytest.warns(UserWarning, match="defense"):
        model = otad.defend(torch.nn.Linear(2, 3), x, y, metric=torch.nn.Flatten())
    ball = threat_to(model, "l2", 1.0)
    assert (ball.scale, ball.unit_name) == (None, "")
    with pytest.raises(InputError, match=r"unit: expected 1, .*--scale.*'std'"):
        threat_to(model, "l2", 1.0, unit="std")


def test_units_are_standard_deviations_or_those_of_a_file(
    body_model: otad.OTAD, tmp_path: Path
) -> None:
    def scale(**options: Any) -> list[float]:
        ball = threat_to(body_model, "linf", 0.5, **options)
        assert ball.scale is not None
        return ball.scale.tolist()

    assert scale(unit="std") == body_model.backbone.std.tolist()
    path = tmp_path / "units.json"
    path.write_text('{"bmi": 0.5, "age": 2, "bp": 3.5, "sex": 1}')
    assert scale(scale=path) == [2, 1, 0.5, 3.5]
    path.write_text('{"bmi": 0.5, "bp": 3.5}')
    assert scale(scale=path, immutable=["age,sex"]) == [1, 1, 0.5, 3.5]
    with pytest.raises(InputError, match="got none for age, sex"):
        scale(scale=path)


@pytest.mark.parametrize(
    ("names", "given", "mutable"),
    [
        (["age", "sex", "bmi", "bp"], ["age, bmi"], [False, True, False, True]),
        (["age", "sex", "bmi", "bp"], ["age", "bmi"], [False, True, False, True]),
        (["a,b", "a", "b", "c"], ["a,b"], [False, True, True, True]),
        (None, ["0,3"], [False, True, True, False]),
    ],
)
def test_immutable_features(
    body_model: otad.OTAD, names: list[str] | None, given: list[str], mutable: list[bool]
) -> None:
    body_model.notes["feature_names"] = names
    ball = threat_to(body_model, "l2", 1.0, immutable=given)
    assert ball.mutable is not None
    assert ball.mutable.tolist() == mutable


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"unit": "1"}, "{}", "scale: .*both"),
        ({}, '{"hair": 1}', "units.json: .*'hair'"),
        ({}, "[1, 2]", r"units.json: .*number.*\[1, 2\]"),
        ({}, '{"bmi": "much"}', "units.json: .*number.*much"),
        ({}, "no json", "units.json: .*JSON"),
        ({}, '{"bmi": 0, "age": 1, "sex": 1, "bp": 1}', "scale: .*positive.*0"),
        ({"unit": "meter"}, "", "unit: .*1, std, got 'meter'"),
        ({"immutable": ["hair"]}, "", "immutable: .*age, sex.*'hair'"),
        ({"immutable": ["age,sex,bmi,bp"]}, "", "immutable: .*all of them"),
    ],
)
def test_balls_that_are_refused(
    body_model: otad.OTAD, tmp_path: Path, options: dict[str, Any], text: str, message: str
) -> None:
    if text:
        options = options | {"scale": tmp_path / "units.json"}
        options["scale"].write_text(text)
    with pytest.raises(InputError, match=message):
        threat_to(body_model, "l2", 1.0, **options)


def test_radii() -> None:
    assert read_radii("2,0.5, 1") == (2.0, 0.5, 1.0)
    for text in ("", "1,two", "1,1.0", "1,-1", "nan"):
        with pytest.raises(InputError, match=f"eps: .*'{text}'"):
            read_radii(text)


REFUSED = "out: expected a place that is not an input, got "


@pytest.mark.parametrize(
    ("command", "source", "options"),
    [
        ("predict", "body.csv", "--out body.csv"),
        ("predict", "body.csv", "--out other/../body.csv"),
        ("certify", "body.csv", "--out body.csv"),
        ("certify", "body.csv", "--targets answers.csv --out answers.csv"),
        ("certify", "body.csv", "--scale units.json --out units.json"),
        ("attack", "body.npz", "--eps 1 --out body.npz"),
        ("attack", "body.csv", "--eps 1 --targets body.npz --out body.npz"),
    ],
)
def test_inputs_are_not_replaced(workshop: Path, command: str, source: str, options: str) -> None:
    write_body(Path("body.csv"), 10)
    Path("answers.csv").write_text("progression\n" + "100\n" * 10)
    Path("units.json").write_text(json.dumps(dict.fromkeys(BODY, 1.0)))
    np.savez("body.npz", x=np.array([[50.0, 1.0, 25.0, 90.0]] * 3), y=np.full(3, 100.0))
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    Path("other").mkdir()
    message = terminal.refuse(command, workshop / "body-model", source, *options.split())
    assert f"{REFUSED}{options.split()[-1]}, which would overwrite" in message
    Path("other").rmdir()
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_the_model_and_its_data_are_not_replaced(workshop: Path) -> None:
    """The word test means the file that the model was made from."""
    shutil.copytree(workshop / "body-model", "model")
    for out in (workshop / "body.csv", Path("model/card.json"), *Path("model").glob("bank-*")):
        before = out.read_bytes()
        assert REFUSED in terminal.refuse("predict", "model", "test", "--out", out)
        assert out.read_bytes() == before
    for _ in range(2):  # what is no part of the model may be beside it, and be replaced
        terminal.succeed("predict", "model", "test", "--out", "model/answers.csv", "--force")


def test_pictures_in_a_folder_are_not_replaced(workshop: Path) -> None:
    Path("pictures").mkdir()
    Image.new("L", (8, 8), 51).save("pictures/one.png")
    before = Path("pictures/one.png").read_bytes()
    command = ("explain", workshop / "digits-model", "pictures", "--out")
    for out in ("pictures/one.png", "pictures/why.png"):
        message = terminal.refuse(*command, out)
        assert f"got {out}, which would be read as part of pictures" in message
    assert [path.read_bytes() for path in Path("pictures").iterdir()] == [before]
    terminal.succeed(*command, "why.png")


def test_names_that_are_no_files(workshop: Path, body_model: otad.OTAD) -> None:
    Path("test").mkdir()
    body_model.notes["data"]["choice"]["data"] = "red-wine"
    body_model.save("model")
    write_body(Path("body.csv"), 10)
    for _ in range(2):
        of_test = ("predict", workshop / "body-model", "test", "--out", "test/answers.csv")
        terminal.succeed(*of_test, "--force")
        terminal.succeed("predict", "model", "body.csv", "--out", "red-wine", "--force")


def test_links_are_followed(tmp_path: Path) -> None:
    source, link, new = (tmp_path / name for name in ("source.csv", "link.csv", "new.csv"))
    source.write_text("x")
    os.symlink(source, link)
    for out, given in ((link, source), (source, link), (source, str(source))):
        with pytest.raises(InputError, match="would overwrite"):
            refuse_overwriting(out, new, None, given)
    refuse_overwriting(new, source, link)
    refuse_overwriting(None, source)
