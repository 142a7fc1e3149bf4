"""A terminal to run commands in, and small data for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_diabetes, load_digits
from typer.testing import CliRunner

from otad.cli.main import main

QUICK = ("--epochs", "2", "--blocks", "2")
BODY = ("age", "sex", "bmi", "bp")


class Terminal:
    """Runs `otad` commands in this process."""

    def run(self, *arguments: object) -> Any:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    def succeed(self, *arguments: object) -> Any:
        result = self.run(*arguments)
        assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
        return result

    def text(self, *arguments: object) -> str:
        """What a command shows, without the lines of tables and line breaks."""
        return " ".join(self.succeed(*arguments).stdout.replace("│", " ").split())

    def json(self, *arguments: object) -> Any:
        """The record that a command prints with --json."""
        return json.loads(self.succeed(*arguments, "--json").stdout)

    def refuse(self, *arguments: object) -> str:
        """The one message of a command that must fail and print nothing else to stdout."""
        result = self.run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        _, mark, message = result.stderr.partition("otad: ")
        assert mark
        assert "Traceback" not in message
        return message


terminal = Terminal()


def write_digits(path: Path, rows: int = 200) -> None:
    """The first digits as gray images with 17 levels, labeled by whole numbers."""
    bunch = load_digits()
    np.savez(path, x=bunch.images[:rows] / 16, y=bunch.target[:rows])


def write_body(path: Path, rows: int = 120) -> None:
    """A table with four measurements, a column of text, and the progression as target."""
    bunch = load_diabetes(scaled=False)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*BODY, "remark", "progression"])
        for values, target in zip(bunch.data[:rows, :4], bunch.target[:rows], strict=True):
            writer.writerow([*values, "none", target])


def write_cells(path: Path, counts: np.ndarray, **obs: list[str]) -> Any:
    """Cells by genes a, b, c as an .h5ad file; returns them."""
    anndata = pytest.importorskip("anndata", reason="needs the extra singlecell")
    cells = anndata.AnnData(counts.astype(np.float32), obs=obs)
    cells.obs_names = [f"cell {k}" for k in range(len(counts))]
    cells.var_names = ["a", "b", "c"]
    cells.write_h5ad(path)
    return cells


def write_rows(path: str, rows: list[dict[str, str]], columns: Sequence[str]) -> None:
    """A CSV file with some columns of the rows."""
    with Path(path).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Pixels from 0 to 1 as a gray image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255).round().astype(np.uint8)).save(path)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


def column(path: str | Path, name: str, kind: Any = str) -> list[Any]:
    return [kind(line[name]) for line in read_csv(path)]
