"""Bad command lines, and forged model folders: cards edited and sealed, files swapped and cut."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from experiments.toml_files import WINE, written
from factories import KINDS, points, queries
from typer.testing import CliRunner

import otad
from otad.cli.main import COMMANDS, load_command, main
from otad.errors import InputError
from otad.io.codec import digest_of

# fmt: off
WORDS = (
    "", "-1", "0", "1", "nan", "inf", "-inf", "1e400", "0,5", "0.1,0.1", "1,2", "abc", "--", "-",
    "\x1b[31mred", "[b]x[/b]", "é" * 300, "=1+1", "9223372036854775808", "cuda:9", "test", ".",
    "none.npz", "rows.npz", "broken.npz", "broken.csv", "broken.toml", "broken.json", "net",
    "model", "/dev/null", "../..", "linf", "global", "paper", "sgd", "float16", "steps=x",
)
ODD = (None, True, -1, 0, 3, 10**9, 2**62, 1.5, -1e308, "", "local", "../x", "\0", [], {}, [[]],
       [1] * 9, {"a": {}})
# fmt: on
GOOD = {  # every command but `serve`, which runs until it is stopped
    "demo": "--out rows.npz",  # which is a file
    "train": "rows.npz --out net-2 --force --epochs 1 --blocks 1",
    "defend": "net --out model-2 --force --neighbors 3",
    "imitate": "model --out model-3 --force --epochs 1 --width 8 --heads 2 --blocks 1",
    "predict": "model test --out predictions.csv --force",
    "explain": "model test",
    "attack": "model test --eps 0.1 --attack pgd --option steps=1 --rows 3",
    "certify": "model test --eps 0.1 --out radii.csv --force",
    "evaluate": "model test --eps 0.1 --attack pgd --rows 3 --no-flags --out evaluation --force",
    "report": "evaluation --out report.html --force",
    "reproduce": "wine.toml --out results --force",
}
assert {*GOOD, "serve"} == {*COMMANDS}


def run(words: list[str]) -> None:
    """Run a command; a refusal in one line is raised as an error."""
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "\x1b[31mred" not in result.output, "control characters reach the terminal"
    if result.exit_code == 2 and ("otad: " in result.stderr or "Usage: " in result.stderr):
        raise InputError(result.stderr)
    assert result.exit_code == 0, result.output


class Commands:
    """A small good call of each command, of which one or two words are made odd."""

    def __init__(self, folder: Path) -> None:
        x = points(40)
        np.savez(folder / "rows.npz", x=x.numpy(), y=(3 * x[:, 0]).long().numpy())
        written(folder, WINE, name="wine")
        for name in ("npz", "csv", "toml", "json"):
            (folder / f"broken.{name}").write_bytes(b"PK\3\4,[{\xff\0")
        run(["train", *["rows.npz", "--out", "net", "--epochs", "1", "--blocks", "1"]])
        run(["defend", *["net", "--out", "model"]])
        run(["evaluate", *GOOD["evaluate"].split()])

    def draw(self, rng: random.Random, number: int) -> tuple[str, str, Callable[[], Any]]:
        name = list(GOOD)[number % len(GOOD)]
        words, options = [name, *GOOD[name].split()], load_command(name).params
        for _ in range(rng.choice((1, 1, 2))):
            option = rng.choice([one for one in options if (name, one.name) != ("demo", "out")])
            if option.param_type_name == "argument":
                words[rng.choice((1, 2))] = rng.choice(WORDS)
            else:
                words += [option.opts[0]] + [rng.choice(WORDS)] * (not option.is_flag)
        return name, f"otad {words}", lambda: run(words)


class Folders:
    """Models of every kind, changed in one way."""

    def __init__(self, folder: Path) -> None:
        self.source, self.forged = folder / "saved", folder / "forged"
        for seed in (0, 1):
            for kind, make in KINDS.items():
                choice = {"data": "/etc/passwd", "seed": 0, "options": {}}
                make(seed).save(self.source / kind / str(seed), data={"choice": choice})

    def draw(self, rng: random.Random, number: int) -> tuple[str, str, Callable[[], Any]]:
        kind, folder = sorted(KINDS)[number % len(KINDS)], self.forged / "model"
        shutil.rmtree(self.forged, ignore_errors=True)
        shutil.copytree(self.source / kind / "0", folder)
        how = rng.choice(("card",) * 8 + ("cut", "flip", "swap", "link", "pipe", "folder"))
        if how == "card":
            _edit_card(folder / "card.json", rng)
        else:
            path = rng.choice(sorted(folder.glob("*.safetensors")))
            (other,) = (self.source / kind / "1").glob(f"{path.name.partition('-')[0]}-*")
            _change_file(path, how, rng, other)

        def use() -> None:
            model = otad.load(folder)
            assert how == "card", "a wrong file was read"
            model(queries(model, 3))

        return f"{kind}, {how}", f"a forged folder ({kind}, {how})", use


def _edit_card(path: Path, rng: random.Random) -> None:
    """Replace, delete or add an entry at any depth, and seal the card."""
    card = json.loads(path.read_text())
    del card["checksum"]
    part, place = card, rng.choice(list(card))
    while isinstance(part[place], (dict, list)) and part[place] and rng.random() < 0.75:
        part = part[place]
        place = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
    action = rng.random()
    if action < 0.15:
        del part[place]
    elif action < 0.3 and type(part[place]) in (int, float):
        part[place] *= rng.choice((-1, 2, 0.5, 10**6))
    else:
        part["unknown" if action < 0.4 and isinstance(part, dict) else place] = rng.choice(ODD)
    path.write_text(json.dumps(card | {"checksum": digest_of(card, length=64)}))


def _change_file(path: Path, how: str, rng: random.Random, other: Path) -> None:
    content = path.read_bytes()
    place, elsewhere = rng.randrange(len(content)), path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    changes: dict[str, Callable[[], object]] = {
        "cut": lambda: path.write_bytes(content[:place]),
        "flip": lambda: path.write_bytes(
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        ),
        "swap": lambda: shutil.copy(other, path),
        "link": lambda: path.symlink_to(elsewhere),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    changes[how]()
