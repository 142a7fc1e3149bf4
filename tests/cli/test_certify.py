"""`otad certify`: radii and intervals as the library proves them, in any unit, and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import Terminal, read_csv

import otad
from otad.certify import certify, certify_values
from otad.cli.sources import DataChoice
from otad.data import Dataset
from otad.nets import LipschitzMetric


def test_radii_are_those_of_the_library_to_the_last_digit(
    terminal: Terminal, nearest: Path, digits: Dataset
) -> None:
    options = ("--eps", "0.4,0.1,0.2", "--out", "radii.csv")
    record = terminal.json("certify", nearest, "test", *options)
    lines = read_csv("radii.csv")
    found = certify(otad.load(nearest), digits.test_x)
    assert [float(line["radius"]) for line in lines] == found.radius.tolist()
    assert [line["prediction"] for line in lines] == list(map(str, found.prediction.tolist()))
    assert [line["rule"] for line in lines] == list(found.rules)
    assert [line["row"] for line in lines] == [str(row) for row in range(40)]
    right = np.array([line["prediction"] for line in lines]) == digits.test_y.numpy().astype(str)
    radius = np.array([float(line["radius"]) for line in lines])
    assert list(record["certified"]) == ["0.1", "0.2", "0.4"]
    for eps, score in record["certified"].items():
        assert score["value"] == pytest.approx(100 * np.mean(right & (radius > float(eps))))
    shares = [score["value"] for score in record["certified"].values()]
    assert shares[0] > shares[1] > shares[2] > 0
    assert record["radius"]["most"] == radius.max()
    assert sum(record["rules"].values()) == 40
    assert record["assumptions"] == list(found.assumptions)

    options = ("--attack", "straight", "--eps", 1.5, "--out", "found.npz")
    terminal.succeed("attack", nearest, "test", *options)
    with np.load("found.npz") as archive:
        broken, distance = archive["broken"], archive["distance"]
    moved = broken & (distance > 0)
    assert moved.sum() > 5
    assert (distance[moved] >= radius[moved]).all()  # no attack gets inside a radius


def test_units_of_the_training_data(terminal: Terminal, nearest: Path) -> None:
    radii = {}
    for unit in ("1", "std"):
        terminal.succeed("certify", nearest, "test", "--unit", unit, "--out", "radii.csv")
        radii[unit] = np.array([float(line["radius"]) for line in read_csv("radii.csv")])
    std = float(otad.load(nearest).backbone.std.flatten()[0])  # one for all pixels
    np.testing.assert_allclose(radii["std"] * std, radii["1"], rtol=1e-4)
    assert radii["1"].any()


def test_rows_without_targets_are_certified_too(terminal: Terminal, workshop: Path) -> None:
    with np.load(workshop / "digits.npz") as archive:
        np.savez("new.npz", x=archive["x"][:5])
    record = terminal.json("certify", workshop / "digits-model", "new.npz")
    assert (record["rows"], record["certified"], record["csv"]) == (5, {}, None)
    shown = terminal.succeed("certify", workshop / "digits-model", "new.npz").stdout
    assert "median" in shown
    assert "certified at" not in shown


def test_a_regression_gets_intervals(terminal: Terminal, workshop: Path) -> None:
    options = ("--eps", "0.5,0.1", "--unit", "std", "--out", "intervals.csv")
    record = terminal.json("certify", workshop / "body-model", "test", *options)
    lines = read_csv("intervals.csv")
    model = otad.load(workshop / "body-model")
    dataset = DataChoice.from_json(model.notes["data"]["choice"]).load()
    widths = {}
    for eps in (0.1, 0.5):
        found = certify_values(model, dataset.test_x, eps, unit=model.backbone.std)
        mine = [line for line in lines if float(line["eps"]) == eps]
        assert [float(line["low"]) for line in mine] == found.low.tolist()
        assert [float(line["high"]) for line in mine] == found.high.tolist()
        with torch.no_grad():
            answers = model(dataset.test_x).double()
        assert bool((found.low <= answers + 1e-3).all())
        assert bool((answers - 1e-3 <= found.high).all())
        worst = torch.maximum(found.high - dataset.test_y, dataset.test_y - found.low)
        certified = record["intervals"][f"{eps:g}"]["certified"]
        assert certified["value"] == pytest.approx(float(worst.square().mean()))
        widths[eps] = record["intervals"][f"{eps:g}"]["width"]["median"]
    assert 0 < widths[0.1] <= widths[0.5]


def test_a_radius_is_reported_to_the_last_digit(
    terminal: Terminal, workshop: Path, nearest: Path
) -> None:
    """Nothing is proved at 0.714286, which is more than was asked for."""
    radii = ["0.7142857142857143", "0.7142857142857144"]
    options = ("--eps", ",".join(radii), "--out", "intervals.csv")
    classes = terminal.json("certify", nearest, "test", *options)
    values = terminal.json("certify", workshop / "body-model", "test", *options)
    assert list(classes["certified"]) == list(values["intervals"]) == radii
    assert {line["eps"] for line in read_csv("intervals.csv")} == set(radii)
    shown = terminal.succeed("certify", nearest, "test", *options[:2]).stdout
    assert all(f"certified at {radius}" in shown for radius in radii)


def test_the_assumptions_of_every_interval_are_reported(terminal: Terminal, workshop: Path) -> None:
    """Small intervals rest on more than large ones, where neighbors change in any case."""
    command = ("certify", workshop / "body-model", "test", "--unit", "std", "--eps")
    small, large, both = (
        terminal.json(*command, eps)["assumptions"] for eps in ("0.000001", "5", "5,0.000001")
    )
    assert set(large) < set(small)
    assert both == small


def test_a_global_map_is_certified_by_its_constant(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    command = ("--out", "whole", "--scope", "global")
    terminal.succeed("defend", workshop / "digits-net", *command, "--smoothness", 12)
    options = ("--eps", "0.01,0.1", "--out", "radii.csv")
    record = terminal.json("certify", "whole", "test", *options)
    model = otad.load("whole")
    found = certify(model, digits.test_x)
    assert (record["scope"], set(record["rules"]) - {"none"}) == ("global", {"lipschitz"})
    assert [float(line["radius"]) for line in read_csv("radii.csv")] == found.radius.tolist()
    assert record["certified"]["0.01"]["value"] > record["certified"]["0.1"]["value"]
    shown = " ".join(terminal.succeed("certify", "whole", "test").stdout.split())
    assert "L = 12" in shown
    assert "duality gap" in shown


def test_a_metric_of_known_constant_is_named(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    model = otad.load(workshop / "digits-model")
    metric = LipschitzMetric((1, 8, 8), widths=(16, 32), depth=1, key_dim=16, bounds=(0.0, 1.0))
    keyed = otad.defend(model.backbone, digits.train_x, digits.train_y, n_neighbors=3,
                        metric=metric)  # fmt: skip
    keyed.notes = model.notes
    keyed.save("keyed")
    options = ("--eps", "0.05,0.2", "--out", "radii.csv")
    record = terminal.json("certify", "keyed", "test", *options)
    assert (record["scope"], record["metric"]) == ("local", "LipschitzMetric")
    assert record["certified"]["0.05"]["value"] > record["certified"]["0.2"]["value"]
    found = certify(otad.load("keyed"), digits.test_x)
    assert [float(line["radius"]) for line in read_csv("radii.csv")] == found.radius.tolist()
    shown = " ".join(terminal.succeed("certify", "keyed", "test").stdout.replace("│", " ").split())
    assert "searched by the keys of LipschitzMetric" in shown
    message = terminal.refuse("certify", "keyed", "test", "--metric-lipschitz", 2)
    assert message.startswith("metric_lipschitz: expected None")


def test_intervals_of_a_global_map(terminal: Terminal, workshop: Path) -> None:
    command = ("--out", "whole", "--scope", "global", "--smoothness", 40)
    terminal.succeed("defend", workshop / "body-net", *command)
    record = terminal.json("certify", "whole", "test", "--eps", "0.1", "--unit", "std")
    assert record["scope"] == "global"
    width = record["intervals"]["0.1"]["width"]
    assert width["least"] == pytest.approx(width["most"], rel=0.01), "the same for every input"


def test_a_map_without_a_certificate_is_refused(terminal: Terminal, workshop: Path) -> None:
    options = ("--out", "bent", "--strong-convexity", -0.5, "--climb", "0.2,0.1")
    terminal.succeed("defend", workshop / "digits-net", *options)
    assert "strong" in terminal.refuse("certify", "bent", "test")


def test_an_infinite_radius_is_reported_everywhere(terminal: Terminal, nearest: Path) -> None:
    model = otad.load(nearest)
    with torch.no_grad():  # the same answer whatever the input
        model.backbone.head.weight.zero_()
        model.backbone.head.bias.copy_(torch.arange(10.0))
    model.save("constant")
    command = ("certify", "constant", "test", "--out", "radii.csv")
    record = terminal.json(*command)
    assert record["radius"] == dict.fromkeys(record["radius"], "inf")
    assert {float(line["radius"]) for line in read_csv("radii.csv")} == {math.inf}
    assert "median infinite" in " ".join(terminal.succeed(*command).stdout.split())
