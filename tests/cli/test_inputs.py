"""Where the targets of an input come from, and what happens where there are none."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, Terminal, read_csv, write_cells
from PIL import Image

import otad
from otad.cli.inputs import open_examples
from otad.errors import InputError


@pytest.fixture
def body(workshop: Path) -> otad.OTAD:
    return otad.load(workshop / "body-model")


@pytest.fixture
def digits(workshop: Path) -> otad.OTAD:
    return otad.load(workshop / "digits-model")


def read_digits(workshop: Path) -> dict[str, np.ndarray]:
    with np.load(workshop / "digits.npz") as archive:
        return dict(archive)


def read_body(workshop: Path, rows: int) -> list[dict[str, str]]:
    with (workshop / "body.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))[:rows]


def write_csv(path: str, rows: list[dict[str, str]], columns: list[str]) -> None:
    with Path(path).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.usefixtures("terminal")
def test_a_table_has_its_targets_in_the_column_trained_on(workshop: Path, body: otad.OTAD) -> None:
    rows = read_body(workshop, 6)
    expected = torch.tensor([float(row["progression"]) for row in rows])
    write_csv("whole.csv", rows, ["progression", *BODY])
    assert torch.equal(open_examples(body, "whole.csv").targets, expected)
    for row in rows:
        row["later"] = str(2 * float(row["progression"]))
    write_csv("later.csv", rows, [*BODY, "later"])
    assert open_examples(body, "later.csv").y is None
    found = open_examples(body, "later.csv", targets="later")
    assert torch.equal(found.targets, 2 * expected)
    with pytest.raises(InputError, match="got 'never'"):
        open_examples(body, "later.csv", targets="never")
    write_csv("answers.csv", rows, ["progression"])
    assert torch.equal(open_examples(body, "later.csv", targets="answers.csv").targets, expected)
    write_csv("short.csv", rows[:5], ["progression"])
    with pytest.raises(InputError, match=r"targets: .*6.*5"):
        open_examples(body, "later.csv", targets="short.csv")
    write_csv("two.csv", rows, ["age", "later"])
    with pytest.raises(InputError, match="expected one column, got age, later"):
        open_examples(body, "later.csv", targets="two.csv")


@pytest.mark.usefixtures("terminal")
def test_an_archive_has_its_targets_in_y(workshop: Path, digits: otad.OTAD) -> None:
    whole = read_digits(workshop)
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
    np.savez("strange.npz", x=x, y=y + 7)
    with pytest.raises(InputError, match=r"0, 1, .*got '1[0-9]' in row"):
        open_examples(digits, "strange.npz")
    np.savez("broken.npz", x=x, y=y.astype(float))
    with pytest.raises(InputError, match=r"y: .*whole numbers or text"):
        open_examples(digits, "broken.npz")


@pytest.mark.usefixtures("terminal")
def test_an_image_has_its_target_in_its_folder(workshop: Path, digits: otad.OTAD) -> None:
    whole = read_digits(workshop)
    for number, (pixels, label) in enumerate(zip(whole["x"][:6], whole["y"][:6], strict=True)):
        image = Image.fromarray((pixels * 255).round().astype(np.uint8))
        for folder in (Path("sorted", str(label)), Path("flat"), Path("named", f"class {label}")):
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    found = open_examples(digits, "sorted")
    folders = [name.partition("/")[0] for name in found.names]
    assert folders == [str(label) for label in found.targets.tolist()]
    assert open_examples(digits, "flat").y is None
    assert open_examples(digits, "named").y is None
    np.savez("answers.npz", y=whole["y"][:6])
    found = open_examples(digits, "flat", targets="answers.npz")
    assert found.targets.tolist() == whole["y"][:6].tolist()
    with pytest.raises(InputError, match=r"targets: .*'y'"):
        open_examples(digits, "flat", targets="y")


def test_rows_keep_their_names_inputs_and_targets(digits: otad.OTAD) -> None:
    whole = open_examples(digits, "test")
    some = open_examples(digits, "test", rows=9, seed=4)
    places = [int(name) for name in some.names]
    assert len(some) == 9
    assert torch.equal(some.x, whole.x[places])
    assert torch.equal(some.targets, whole.targets[places])


def test_a_command_that_needs_targets_says_so(terminal: Terminal, workshop: Path) -> None:
    write_csv("new.csv", read_body(workshop, 3), list(BODY))
    message = terminal.refuse("attack", workshop / "body-model", "new.csv", "--eps", 1)
    assert "new.csv: expected targets" in message
    assert "--targets" in message


def test_cells_are_prepared_as_for_the_training(terminal: Terminal) -> None:
    kinds = np.arange(60) % 2
    rates = np.where(kinds[:, None] == 0, [9, 1, 3], [1, 9, 3])
    names = [f"kind {k}" for k in kinds]
    counts = np.random.default_rng(0).poisson(rates)
    cells = write_cells(Path("cells.h5ad"), counts, kind=names, again=names[::-1])
    terminal.succeed("train", "cells.h5ad", "--label", "kind", "--out", "net", "--epochs", 20)
    terminal.succeed("defend", "net", "--out", "model")
    terminal.succeed("predict", "model", "cells.h5ad", "--out", "all.csv", "--batch-size", 11)
    said = [line["prediction"] for line in read_csv("all.csv")]
    assert np.mean([one == other for one, other in zip(said, names, strict=True)]) > 0.9
    cells[:, ["c", "a", "b"]].copy().write_h5ad("turned.h5ad")
    terminal.succeed("predict", "model", "turned.h5ad", "--out", "turned.csv")
    assert Path("turned.csv").read_text() == Path("all.csv").read_text()
    cells[:, ["c", "a"]].copy().write_h5ad("short.h5ad")
    assert "1 of them: b" in terminal.refuse("predict", "model", "short.h5ad", "--out", "x.csv")
    Path("cells.csv").write_text("a,b,c\n1,2,3\n")
    assert ".h5ad" in terminal.refuse("predict", "model", "cells.csv", "--out", "x.csv")
    model = otad.load("model")
    assert open_examples(model, "cells.h5ad").targets.tolist() == kinds.tolist()
    found = open_examples(model, "cells.h5ad", targets="again", rows=7)
    reverse = kinds[::-1][[int(name) for name in found.names]]
    assert found.targets.tolist() == reverse.tolist()
    del cells.obs["kind"]
    cells.write_h5ad("unknown.h5ad")
    assert open_examples(model, "unknown.h5ad").y is None
    terminal.succeed("certify", "model", "unknown.h5ad")
    assert "expected targets" in terminal.refuse("attack", "model", "unknown.h5ad", "--eps", 1)
    with pytest.raises(InputError, match=r"again.* got 'kind'"):
        open_examples(model, "unknown.h5ad", targets="kind")


def test_training_points_among_the_rows_are_reported(terminal: Terminal, workshop: Path) -> None:
    model = otad.load(workshop / "digits-model")
    command = ("certify", workshop / "digits-model")
    noted = terminal.succeed(*command, workshop / "digits.npz").stderr
    assert f"note: {len(model.bank_inputs)} of the 200 rows are training points" in noted
    assert "training points" not in terminal.succeed(*command, "test").stderr
