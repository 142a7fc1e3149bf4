"""No command writes over what it reads, however the file is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.small import BODY, Terminal, write_body
from PIL import Image

import otad
from otad.cli.sources import refuse_overwriting
from otad.errors import InputError

REFUSED = "out: expected another place than that of an input, got "


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
def test_inputs_are_not_replaced(
    terminal: Terminal, workshop: Path, command: str, source: str, options: str
) -> None:
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


def test_the_model_and_its_data_are_not_replaced(terminal: Terminal, workshop: Path) -> None:
    """The word test means the file that the model was made from."""
    shutil.copytree(workshop / "body-model", "model")
    for out in (workshop / "body.csv", Path("model/card.json"), *Path("model").glob("bank-*")):
        before = out.read_bytes()
        assert REFUSED in terminal.refuse("predict", "model", "test", "--out", out)
        assert out.read_bytes() == before
    for _ in range(2):  # what is no part of the model may be beside it, and be replaced
        terminal.succeed("predict", "model", "test", "--out", "model/answers.csv")


def test_pictures_in_a_folder_are_not_replaced(terminal: Terminal, workshop: Path) -> None:
    Path("pictures").mkdir()
    Image.new("L", (8, 8), 51).save("pictures/one.png")
    before = Path("pictures/one.png").read_bytes()
    command = ("explain", workshop / "digits-model", "pictures", "--out")
    for out in ("pictures/one.png", "pictures/why.png"):
        message = terminal.refuse(*command, out)
        assert f"got {out}, which would be read as part of pictures" in message
    assert [path.read_bytes() for path in Path("pictures").iterdir()] == [before]
    terminal.succeed(*command, "why.png")


def test_names_that_are_no_files(terminal: Terminal, workshop: Path, body_model: otad.OTAD) -> None:
    Path("test").mkdir()
    body_model.notes["data"]["choice"]["data"] = "red-wine"
    body_model.save("model")
    write_body(Path("body.csv"), 10)
    for _ in range(2):
        terminal.succeed("predict", workshop / "body-model", "test", "--out", "test/answers.csv")
        terminal.succeed("predict", "model", "body.csv", "--out", "red-wine")


def test_links_are_followed(tmp_path: Path) -> None:
    source, link, new = (tmp_path / name for name in ("source.csv", "link.csv", "new.csv"))
    source.write_text("x")
    os.symlink(source, link)
    for out, given in ((link, source), (source, link), (source, str(source))):
        with pytest.raises(InputError, match="would overwrite"):
            refuse_overwriting(out, new, None, given)
    refuse_overwriting(new, source, link)
    refuse_overwriting(None, source)
