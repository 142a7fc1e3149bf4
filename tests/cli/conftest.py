"""Every command runs in an empty folder; nets and models for the commands to work with."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.small import BODY, QUICK, terminal, write_body, write_digits
from evaluate.small import QUICK_CHECKS

import otad
from otad.cli.sources import DataChoice
from otad.data import Dataset
from otad.evaluate import runner


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OTAD_DATA", raising=False)
    monkeypatch.setattr(runner, "CHECKS", QUICK_CHECKS)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, nets and models: of images (digits) and of a table (body)."""
    folder = tmp_path_factory.mktemp("workshop")
    write_digits(folder / "digits.npz")
    write_body(folder / "body.csv")
    reading = ["--target", "progression", "--task", "regression"]
    reading += [f"--features={name}" for name in BODY]
    for data, options in (("digits.npz", ()), ("body.csv", reading)):
        name = data.partition(".")[0]
        net = folder / f"{name}-net"
        terminal.succeed("train", folder / data, "--out", net, *QUICK, *options)
        terminal.succeed("defend", net, "--out", folder / f"{name}-model")
    return folder


@pytest.fixture(scope="session")
def digits(workshop: Path) -> Dataset:
    """The data of the model of images."""
    return DataChoice(str(workshop / "digits.npz")).load()


@pytest.fixture
def digits_model(workshop: Path) -> otad.OTAD:
    return otad.load(workshop / "digits-model")


@pytest.fixture
def body_model(workshop: Path) -> otad.OTAD:
    return otad.load(workshop / "body-model")


@pytest.fixture(scope="session")
def nearest(workshop: Path) -> Path:
    """A model that answers by one neighbor: fast, and much can be proved of it."""
    folder = workshop / "nearest-model"
    terminal.succeed("defend", workshop / "digits-net", "--out", folder, "--neighbors", 1)
    return folder
