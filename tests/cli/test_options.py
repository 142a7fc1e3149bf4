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


@pytest.mark.parametrize(
    ("names", "given", "mutable"),
    [
        (["age", "sex", "bmi", "bp"], ["age, bmi"], [False, True, False, True]),
        (["age", "sex", "bmi", "bp"], ["age", "bmi"], [False, True, False, True]),
        (["a,b", "a", "b", "c"], ["a,b"], [False, True, True, True]),
        (None, ["0,3"], [False, True, True, False]),
    ],
)
def test_immutable_features(
    body: otad.OTAD, names: list[str] | None, given: list[str], mutable: list[bool]
) -> None:
    body.notes["feature_names"] = names
    ball = threat_to(body, "l2", 1.0, immutable=given)
    assert ball.mutable is not None
    assert ball.mutable.tolist() == mutable


def test_refusals(body: otad.OTAD, tmp_path: Path) -> None:
    path = tmp_path / "units.json"
    path.write_text('{"bmi": 0.5}')
    for options, message in (
        ({"unit": "1", "scale": path}, "scale: .*both"),
        ({"unit": "meter"}, "unit: .*1, std, got 'meter'"),
        ({"immutable": ["hair"]}, "immutable: .*age, sex.*'hair'"),
        ({"immutable": ["age,sex,bmi,bp"]}, "immutable: .*all of them"),
    ):
        with pytest.raises(InputError, match=message):
            threat_to(body, "l2", 1.0, **options)  # type: ignore[arg-type]
    for text, message in (
        ('{"hair": 1}', "units.json: .*'hair'"),
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
        ("", "eps: .*''"),
        ("1,two", "eps: .*'1,two'"),
        ("1,1.0", "eps: .*distinct"),
        ("1,-1", "eps: .*at least 0"),
        ("nan", "eps: .*at least 0"),
    ):
        with pytest.raises(InputError, match=message):
            read_radii(text)
