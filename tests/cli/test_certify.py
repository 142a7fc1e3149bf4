"""`otad certify`: radii and intervals as the library proves them, in any unit, and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, column, read_csv, terminal, write_rows

import otad
from otad.certify import certify, certify_values
from otad.cli.inputs import open_examples
from otad.data import Dataset
from otad.nets import LipschitzMetric

TO_FILE = ("--out", "rows.csv")


def test_radii_are_those_of_the_library_to_the_last_digit(nearest: Path, digits: Dataset) -> None:
    record = terminal.json("certify", nearest, "test", "--eps", "0.4,0.1,0.2", *TO_FILE)
    found = certify(otad.load(nearest), digits.test_x)
    radius = np.array(column("rows.csv", "radius", float))
    assert radius.tolist() == found.radius.tolist()
    predicted = np.array(column("rows.csv", "prediction", int))
    assert predicted.tolist() == found.prediction.tolist()
    assert column("rows.csv", "rule") == list(found.rules)
    assert column("rows.csv", "row") == [str(row) for row in range(40)]
    right = predicted == digits.test_y.numpy()
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

    terminal.succeed("certify", nearest, "test", "--unit", "std", *TO_FILE, "--force")
    std = float(otad.load(nearest).backbone.std.flatten()[0])  # one for all pixels
    in_std = np.array(column("rows.csv", "radius", float))
    np.testing.assert_allclose(in_std * std, radius, rtol=1e-4)


def test_rows_without_targets_are_certified_too(workshop: Path) -> None:
    with np.load(workshop / "digits.npz") as archive:
        np.savez("new.npz", x=archive["x"][:5])
    record = terminal.json("certify", workshop / "digits-model", "new.npz")
    assert (record["rows"], record["certified"], record["csv"]) == (5, {}, None)
    shown = terminal.text("certify", workshop / "digits-model", "new.npz")
    assert "median" in shown
    assert "certified at" not in shown


def test_targets_that_are_not_known_are_left_out_unless_they_are_asked_for(workshop: Path) -> None:
    body = read_csv(workshop / "body.csv")[:4]
    write_rows("known.csv", body, [*BODY, "progression"])
    body[2]["progression"] = ""
    write_rows("gap.csv", body, [*BODY, "progression"])
    with np.load(workshop / "digits.npz") as archive:
        np.savez("known.npz", x=archive["x"][:4], y=archive["y"][:4])
        np.savez("gap.npz", x=archive["x"][:4], y=["0", "1", "eleven", "3"])
    for model, kind, named, reason in (
        ("body-model", "csv", "progression", "gap.csv line 4, column 'progression'"),
        ("digits-model", "npz", "y", "got 'eleven' in row 2"),
    ):
        answers = []
        for file in ("known", "gap"):
            command = ("certify", workshop / model, f"{file}.{kind}", "--eps", 0.1)
            said = terminal.succeed(*command, *TO_FILE, "--force")
            answers.append(Path("rows.csv").read_text())
            left_out = f"targets are left out, because they are not known: {file}" in said.stderr
            assert left_out == (reason in said.stderr) == (file == "gap")
            assert ("certified at" in said.stdout or "certified mse" in said.stdout) != left_out
        assert answers[0] == answers[1]
        assert reason in terminal.refuse(*command, "--targets", named)
        assert reason in terminal.refuse("attack", *command[1:])


def test_a_regression_gets_intervals(workshop: Path, body_model: otad.OTAD) -> None:
    command = ("certify", workshop / "body-model", "test", "--unit", "std", "--eps")
    record = terminal.json(*command, "0.5,0.1", *TO_FILE)
    examples = open_examples(body_model, "test")
    x, y, widths = examples.x, examples.targets, {}
    eps_of_rows = np.array(column("rows.csv", "eps", float))
    for eps in (0.1, 0.5):
        found = certify_values(body_model, x, eps, unit=body_model.backbone.std)
        for name, expected in (("low", found.low), ("high", found.high)):
            mine = np.array(column("rows.csv", name, float))[eps_of_rows == eps]
            assert mine.tolist() == expected.tolist()
        with torch.no_grad():
            answers = body_model(x).double()
        assert bool(((found.low <= answers + 1e-3) & (answers - 1e-3 <= found.high)).all())
        worst = torch.maximum(found.high - y, y - found.low)
        interval = record["intervals"][f"{eps:g}"]
        assert interval["certified"]["value"] == pytest.approx(float(worst.square().mean()))
        widths[eps] = interval["width"]["median"]
    assert 0 < widths[0.1] <= widths[0.5]
    # Small intervals rest on more than large ones, where neighbors change in any case.
    small, large, both = (terminal.json(*command, eps)["assumptions"] for eps in
                          ("0.000001", "5", "5,0.000001"))  # fmt: skip
    assert set(large) < set(small)
    assert both == small


def test_a_radius_is_reported_to_the_last_digit(workshop: Path, nearest: Path) -> None:
    """Nothing is proved at 0.714286, which is more than was asked for."""
    radii = ["0.7142857142857143", "0.7142857142857144"]
    options = ("--eps", ",".join(radii), "--rows", 5)
    classes = terminal.json("certify", nearest, "test", *options)
    values = terminal.json("certify", workshop / "body-model", "test", *options, *TO_FILE)
    assert list(classes["certified"]) == list(values["intervals"]) == radii
    assert set(column("rows.csv", "eps")) == set(radii)
    shown = terminal.text("certify", nearest, "test", *options)
    assert all(f"certified at {radius}" in shown for radius in radii)


def test_a_global_map_is_certified_by_its_constant(workshop: Path, digits: Dataset) -> None:
    whole = ("--out", "whole", "--scope", "global", "--smoothness")
    terminal.succeed("defend", workshop / "digits-net", *whole, 12)
    record = terminal.json("certify", "whole", "test", "--eps", "0.01,0.1", *TO_FILE)
    found = certify(otad.load("whole"), digits.test_x)
    assert (record["scope"], set(record["rules"]) - {"none"}) == ("global", {"lipschitz"})
    assert column("rows.csv", "radius", float) == found.radius.tolist()
    assert record["certified"]["0.01"]["value"] > record["certified"]["0.1"]["value"]
    shown = terminal.text("certify", "whole", "test")
    assert "L = 12" in shown
    assert "duality gap" in shown
    terminal.succeed("defend", workshop / "body-net", *whole, 40, "--force")
    record = terminal.json("certify", "whole", "test", "--eps", "0.1", "--unit", "std")
    assert record["scope"] == "global"
    width = record["intervals"]["0.1"]["width"]
    assert width["least"] == pytest.approx(width["most"], rel=0.01), "the same for every input"


def test_a_metric_of_known_constant_is_named(digits_model: otad.OTAD, digits: Dataset) -> None:
    sizes = {"widths": (16, 32), "depth": 1, "key_dim": 16, "bounds": (0.0, 1.0)}
    options = {"metric": LipschitzMetric((1, 8, 8), **sizes), "n_neighbors": 3}
    keyed = otad.defend(digits_model.backbone, digits.train_x, digits.train_y, **options)
    keyed.notes = digits_model.notes
    keyed.save("keyed")
    record = terminal.json("certify", "keyed", "test", "--eps", "0.05,0.2", *TO_FILE)
    assert (record["scope"], record["metric"]) == ("local", "LipschitzMetric")
    assert record["certified"]["0.05"]["value"] > record["certified"]["0.2"]["value"]
    found = certify(otad.load("keyed"), digits.test_x)
    assert column("rows.csv", "radius", float) == found.radius.tolist()
    assert "keys of LipschitzMetric" in terminal.text("certify", "keyed", "test")
    message = terminal.refuse("certify", "keyed", "test", "--metric-lipschitz", 2)
    assert message.startswith("metric_lipschitz: expected None")


def test_a_map_without_a_certificate_is_refused(workshop: Path) -> None:
    options = ("--out", "bent", "--strong-convexity", -0.5, "--climb", "0.2,0.1")
    terminal.succeed("defend", workshop / "digits-net", *options)
    assert "strong" in terminal.refuse("certify", "bent", "test")


def test_an_infinite_radius_is_reported_everywhere(nearest: Path) -> None:
    model = otad.load(nearest)
    with torch.no_grad():  # the same answer whatever the input
        model.backbone.head.weight.zero_()
        model.backbone.head.bias.copy_(torch.arange(10.0))
    model.save("constant")
    record = terminal.json("certify", "constant", "test", *TO_FILE)
    assert record["radius"] == dict.fromkeys(record["radius"], "inf")
    assert set(column("rows.csv", "radius", float)) == {math.inf}
    assert "median infinite" in terminal.text("certify", "constant", "test")


def test_both_threats_are_in_columns_of_their_own(nearest: Path, digits: Dataset) -> None:
    options = ("--eps", "0.5", "--rows", 8, "--within-bounds")
    record = terminal.json("certify", nearest, "test", *options, *TO_FILE)
    inside = record["within_bounds"]
    assert inside["certified"]["0.5"]["value"] >= record["certified"]["0.5"]["value"]
    whole = column("rows.csv", "radius", float)
    within = column("rows.csv", "radius_within_bounds", float)
    assert all(one <= other for one, other in zip(whole, within, strict=True))
    assert whole != within
    assert inside["radius"]["most"] == max(within)
    assert "certified at 0.5 within bounds" in terminal.text("certify", nearest, "test", *options)


def test_a_regressor_has_no_certificate_within_bounds(workshop: Path) -> None:
    message = terminal.refuse("certify", workshop / "body-model", "test", "--within-bounds")
    assert "--within-bounds: expected a classifier" in message


def test_an_attack_without_limits_is_noted(nearest: Path) -> None:
    given = nearest, "test", "--attack", "noise", "--option", "draws=1", "--norm", "linf"
    for eps, is_noted in ((0.1, False), (8, True)):
        said = terminal.succeed("attack", *given, "--eps", eps).stderr
        assert ("note: threat: eps = 8 allows every input" in " ".join(said.split())) == is_noted


def test_bounds_are_asked_for_before_anything_is_certified(
    digits_model: otad.OTAD, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits_model.backbone.bounds = None
    digits_model.save("unbounded")
    monkeypatch.setattr("otad.cli.certify.certify_inputs", None)
    message = terminal.refuse("certify", "unbounded", "test", "--within-bounds")
    assert "within_bounds: expected a model with declared bounds, got None" in message
