"""Where the right answers of an input come from, and what happens where there are none."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, Terminal
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
def test_a_table_has_its_answers_in_the_column_trained_on(workshop: Path, body: otad.OTAD) -> None:
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
    with pytest.raises(InputError, match="one for each of the 6 rows, got 5"):
        open_examples(body, "later.csv", targets="short.csv")
    write_csv("two.csv", rows, ["age", "later"])
    with pytest.raises(InputError, match="expected one column, got age, later"):
        open_examples(body, "later.csv", targets="two.csv")


@pytest.mark.usefixtures("terminal")
def test_an_archive_has_its_answers_in_y(workshop: Path, digits: otad.OTAD) -> None:
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
    with pytest.raises(InputError, match=r"whole numbers or text of shape \(N,\) in y"):
        open_examples(digits, "broken.npz")


@pytest.mark.usefixtures("terminal")
def test_an_image_has_its_answer_in_its_folder(workshop: Path, digits: otad.OTAD) -> None:
    whole = read_digits(workshop)
    for number, (pixels, label) in enumerate(zip(whole["x"][:6], whole["y"][:6], strict=True)):
        image = Image.fromarray((pixels * 255).round().astype(np.uint8))
        for folder in (Path("sorted", str(label)), Path("flat"), Path("named", f"class {label}")):
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
    found = open_examples(digits, "sorted")
    assert [name.partition("/")[0] for name in found.names] == list(
        map(str, found.targets.tolist())
    )
    assert open_examples(digits, "flat").y is None
    assert open_examples(digits, "named").y is None
    np.savez("answers.npz", y=whole["y"][:6])
    found = open_examples(digits, "flat", targets="answers.npz")
    assert found.targets.tolist() == whole["y"][:6].tolist()
    with pytest.raises(InputError, match="expected a CSV or NPZ file for images, got 'y'"):
        open_examples(digits, "flat", targets="y")


def test_rows_keep_their_names_inputs_and_answers(digits: otad.OTAD) -> None:
    whole = open_examples(digits, "test")
    some = open_examples(digits, "test", rows=9, seed=4)
    places = [int(name) for name in some.names]
    assert len(some) == 9
    assert torch.equal(some.x, whole.x[places])
    assert torch.equal(some.targets, whole.targets[places])


def test_a_command_that_needs_answers_says_so(terminal: Terminal, workshop: Path) -> None:
    write_csv("new.csv", read_body(workshop, 3), list(BODY))
    message = terminal.refuse("attack", workshop / "body-model", "new.csv", "--eps", 1)
    assert "new.csv: expected inputs with targets, got inputs only" in message
    assert "--targets" in message


def test_cells_have_their_answers_in_the_obs_column(terminal: Terminal) -> None:
    anndata = pytest.importorskip("anndata", reason="needs the extra singlecell")
    random = np.random.default_rng(0)
    kinds = np.arange(60) % 2
    counts = random.poisson(np.where(kinds[:, None] == 0, [9, 1, 3], [1, 9, 3])).astype(np.float32)
    names = [f"kind {k}" for k in kinds]
    cells = anndata.AnnData(counts, obs={"kind": names, "again": names[::-1]})
    cells.obs_names = [f"cell {k}" for k in range(60)]
    cells.var_names = ["a", "b", "c"]
    cells.write_h5ad("cells.h5ad")
    terminal.succeed("train", "cells.h5ad", "--label", "kind", "--out", "net", "--epochs", 2)
    terminal.succeed("defend", "net", "--out", "model")
    model = otad.load("model")
    assert open_examples(model, "cells.h5ad").targets.tolist() == kinds.tolist()
    found = open_examples(model, "cells.h5ad", targets="again", rows=7)
    reverse = kinds[::-1][[int(name) for name in found.names]]
    assert found.targets.tolist() == reverse.tolist()
    del cells.obs["kind"]
    cells.write_h5ad("unknown.h5ad")
    assert open_examples(model, "unknown.h5ad").y is None
    terminal.succeed("certify", "model", "unknown.h5ad")
    message = terminal.refuse("attack", "model", "unknown.h5ad", "--eps", 1)
    assert "expected inputs with targets, got inputs only" in message
    with pytest.raises(InputError, match=r"again.* got 'kind'"):
        open_examples(model, "unknown.h5ad", targets="kind")


def test_training_points_among_the_rows_are_told(terminal: Terminal, workshop: Path) -> None:
    model = otad.load(workshop / "digits-model")
    told = terminal.succeed("certify", workshop / "digits-model", workshop / "digits.npz").stderr
    assert f"note: {len(model.bank_inputs)} of the 200 rows are training points" in told
    assert "training points" not in terminal.succeed(
        "certify", workshop / "digits-model", "test"
    ).stderr  # fmt: skip
