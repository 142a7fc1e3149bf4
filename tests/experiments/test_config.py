"""The experiments that come with the repository, and what is refused in a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from otad.data import describe
from otad.errors import InputError
from otad.experiments import names
from otad.experiments.config import read_experiment
from otad.transport import TrainConfig

SMALL = """
title = "small"
[data.digits]
name = "digits"
[train]
epochs = 7
[otad]
n_neighbors = 4
[nets.one]
data = "digits"
blocks = 2
train = { learning_rate = 0.5 }
[rows.plain]
net = "one"
method = "net"
[rows.otad]
net = "one"
method = "otad"
n_neighbors = 5
"""


def small(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in SMALL
    path = folder / "small.toml"
    path.write_text(SMALL.replace(old, new, 1) if old else SMALL + new, encoding="utf-8")
    return path


def test_every_result_asked_for_has_its_experiment() -> None:
    assert set(names()) >= {"mnist", "plain", "synthetic", "red_wine", "merfish", "cost"}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", names())
def test_shipped_experiments_are_sound(name: str, quick: bool) -> None:
    experiment = read_experiment(name, quick=quick)
    assert experiment.rows or experiment.cost
    for data in experiment.data.values():
        known = describe(data.name)
        assert set(data.options) <= set(known.options)
        assert not (quick and known.needs_folder), "a quick run needs no files"
    for net in experiment.nets.values():
        TrainConfig(**net.train)
    for row in experiment.rows.values():
        assert bool(row.published) == bool(row.published_in)
        assert set(row.published) <= {"accuracy", "mse", "relative_error", "lipschitz"}


def test_defaults_reach_every_net_and_row_and_are_overridden(tmp_path: Path) -> None:
    experiment = read_experiment(small(tmp_path))
    assert experiment.name == "small"
    assert experiment.nets["one"].train == {"epochs": 7, "learning_rate": 0.5}
    assert experiment.rows["plain"].n_neighbors == 4
    assert experiment.rows["otad"].n_neighbors == 5
    assert experiment.rows["otad"].label == "otad"


def test_quick_changes_tables_but_replaces_data(tmp_path: Path) -> None:
    quick = """
[quick]
data.digits = { name = "wine", options = { test_fraction = 0.5 } }
train.epochs = 1
rows.otad.smoothness = 3.0
"""
    path = small(tmp_path, new=quick)
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    assert (slow.data["digits"].name, slow.quick) == ("digits", False)
    assert (fast.data["digits"].name, fast.quick) == ("wine", True)
    assert fast.nets["one"].train == {"epochs": 1, "learning_rate": 0.5}
    assert (fast.rows["otad"].smoothness, fast.rows["otad"].n_neighbors) == (3.0, 5)
    assert fast.source["train"] == {"epochs": 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blocks = 2", "blocks = 2\nblock = 3", "small.toml.nets.one: unknown key 'block'"),
        ("blocks = 2", "", "nets.one: expected a value for 'blocks'"),
        ("blocks = 2", 'blocks = "two"', "nets.one.blocks: expected int"),
        ('data = "digits"', 'data = "digit"', "nets.one.data: expected one of digits, got 'digit'"),
        ('net = "one"', 'net = "two"', "rows.plain.net: expected one of one, got 'two'"),
        ('method = "net"', 'method = "magic"', "method: expected one of net, otad"),
        ('method = "net"', 'method = "net"\nnoise = -1', "noise: expected a number of at least 0"),
        (
            'method = "net"',
            'method = "majority_knn"\nlipschitz = { radius = 1 }',
            "lipschitz: expected for net or otad, got it for majority_knn",
        ),
        ('title = "small"', "", "expected a value for 'title'"),
        ("[nets.one]", "[nets.one", "expected a TOML file"),
        ("[otad]", "[cost]\nnet = 'two'\nbanks = [1]\nqueries = 1\n[otad]", "cost.net"),
        (
            "blocks = 2",
            "blocks = 2\nchoose = { setting = 'energy_weight', values = [0], row = 'no' }",
            "nets.one.choose.row: expected one of plain, otad, got 'no'",
        ),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_experiment(small(tmp_path, old, new))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown experiment 'minst', expected one of cost"):
        read_experiment("minst")
    with pytest.raises(InputError, match="expected a TOML file"):
        read_experiment(tmp_path / "absent.toml")
