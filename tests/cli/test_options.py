"""From options to a ball: units, immutable features, bounds, radii, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import otad
from otad.attacks import L2, Linf
from otad.cli.options import read_radii, threat_to
from otad.errors import InputError


@pytest.fixture
def body(workshop: Path) -> otad.OTAD:
    return otad.load(workshop / "body-model")


def test_norm_eps_and_bounds(workshop: Path, body: otad.OTAD) -> None:
    ball = threat_to(otad.load(workshop / "digits-model"), "linf", 0.1)
    assert isinstance(ball, Linf)
    assert (ball.eps, ball.bounds, ball.scale, ball.mutable) == (0.1, (0.0, 1.0), None, None)
    assert isinstance(threat_to(body, "l2", 2.0), L2)
    assert threat_to(body, "l2", 2.0, unit="1").bounds is None


def test_units_are_standard_deviations_or_those_of_a_file(body: otad.OTAD, tmp_path: Path) -> None:
    ball = threat_to(body, "linf", 0.5, unit="std")
    assert ball.scale is not None
    assert torch.equal(ball.scale, body.backbone.std)
    path = tmp_path / "units.json"
    path.write_text('{"bmi": 0.5, "age": 2, "bp": 3.5, "sex": 1}')
    ball = threat_to(body, "linf", 0.5, scale=path)
    assert ball.scale is not None
    assert ball.scale.tolist() == [2, 1, 0.5, 3.5]
    path.write_text('{"bmi": 0.5, "bp": 3.5}')
    ball = threat_to(body, "linf", 0.5, scale=path, immutable=["age,sex"])
    assert ball.scale is not None
    assert ball.scale.tolist() == [1, 1, 0.5, 3.5]
    with pytest.raises(InputError, match="got none for age, sex"):
        threat_to(body, "linf", 0.5, scale=path)


def test_immutable_features_by_name(body: otad.OTAD) -> None:
    for given in (["age, bmi"], ["age", "bmi"]):
        ball = threat_to(body, "l2", 1.0, immutable=given)
        assert ball.mutable is not None
        assert ball.mutable.tolist() == [False, True, False, True]


def test_names_with_commas_and_features_without_names(body: otad.OTAD) -> None:
    body.notes["feature_names"] = ["a,b", "a", "b", "c"]
    ball = threat_to(body, "l2", 1.0, immutable=["a,b"])
    assert ball.mutable is not None
    assert ball.mutable.tolist() == [False, True, True, True]
    body.notes["feature_names"] = None
    ball = threat_to(body, "l2", 1.0, immutable=["0,3"])
    assert ball.mutable is not None
    assert ball.mutable.tolist() == [False, True, True, False]


def test_refusals(body: otad.OTAD, tmp_path: Path) -> None:
    path = tmp_path / "units.json"
    path.write_text('{"bmi": 0.5}')
    with pytest.raises(InputError, match="expected either --unit or --scale, got both"):
        threat_to(body, "l2", 1.0, unit="1", scale=path)
    with pytest.raises(InputError, match="unit: expected one of 1, std, got 'meter'"):
        threat_to(body, "l2", 1.0, unit="meter")
    with pytest.raises(InputError, match="unknown feature 'hair', expected one of age, sex"):
        threat_to(body, "l2", 1.0, immutable=["hair"])
    with pytest.raises(InputError, match="at least one feature to be left"):
        threat_to(body, "l2", 1.0, immutable=["age,sex,bmi,bp"])
    for text, message in (
        ('{"hair": 1}', "unknown feature 'hair'"),
        ("[1, 2]", "expected a number for each feature"),
        ('{"bmi": "much"}', "expected a number for each feature"),
        ("no json", "expected a record in JSON"),
        ('{"bmi": 0, "age": 1, "sex": 1, "bp": 1}', "scale: expected positive values"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            threat_to(body, "l2", 1.0, scale=path)


def test_radii() -> None:
    assert read_radii("2,0.5, 1") == (2.0, 0.5, 1.0)
    for text, message in (
        ("", "expected numbers such as 0.5,1,2"),
        ("1,two", "expected numbers such as 0.5,1,2"),
        ("1,1.0", "expected distinct numbers"),
        ("1,-1", "expected finite numbers of at least 0"),
        ("nan", "expected finite numbers of at least 0"),
    ):
        with pytest.raises(InputError, match=message):
            read_radii(text)
