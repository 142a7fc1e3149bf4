"""Plain values to frozen dataclasses and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from otad.errors import InputError
from otad.io.codec import from_plain, read_toml, to_plain


@dataclass(frozen=True)
class Inner:
    share: float
    name: str = "none"


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    pair: tuple[float, float] | None
    parts: tuple[Inner, ...]
    named: dict[str, Inner] = field(default_factory=dict)
    free: Any = None


def test_round_trip_through_json_keeps_infinity_and_nesting() -> None:
    parts = (Inner(-math.inf), Inner(1.0, "b"))
    value = Outer(3, True, (0.2, math.inf), parts, {"x": Inner(2.0)}, [1, {"a": 2}])
    text = json.dumps(to_plain(value), allow_nan=False)
    assert from_plain(Outer, json.loads(text), "file") == value
    assert math.isnan(from_plain(Inner, to_plain(Inner(math.nan)), "file").share)
    assert isinstance(from_plain(Inner, {"share": 1}, "file").share, float)


GOOD = {"count": 1, "flag": False, "pair": None, "parts": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 1.5}, "file.count: expected int, got 1.5"),
        ({"count": True}, "file.count: expected int, got True"),
        ({"flag": 1}, "file.flag: expected bool, got 1"),
        ({"pair": [0.2]}, r"file.pair: expected tuple\[float, float\], got \[0.2\]"),
        ({"pair": [0.2, "much"]}, r"file.pair\[1\]: expected float, got 'much'"),
        ({"pair": [0.2, True]}, r"file.pair\[1\]: expected float, got True"),
        ({"parts": [{"share": 1.0}, {}]}, r"file.parts\[1\]: expected a value for 'share'"),
        ({"parts": [{"shore": 1.0}]}, r"file.parts\[0\]: .* unknown key 'shore'"),
        ({"parts": {}}, "file.parts: expected tuple"),
        ({"named": {"x": 3}}, "file.named.x: expected a table, got 3"),
        ({"named": []}, "file.named: expected dict"),
    ],
)
def test_refusals_name_the_place(change: dict[str, Any], message: str) -> None:
    assert from_plain(Outer, GOOD, "file").count == 1
    with pytest.raises(InputError, match=message):
        from_plain(Outer, GOOD | change, "file")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 2000,
        "x = " + "[" * 65 + "]" * 65,
        "a." * 80 + "a = 1",
        "a." * 8000 + "a = 1",  # takes seconds to parse
        "x = 0x" + "f" * 17,
        "x = " + "9" * 5000,
        "x = 1e999",
        "x = nan",
        "x = 2020-01-01",
        "x = 1\n" + "# much\n" * 20_000,
        "x = \xff",
        "x = ",
    ],
)
def test_toml_is_bounded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"own\.toml: expected a TOML file, got: "):
        read_toml(path)
    path.write_text("x = { y = [1, 2.5, true, 'text'] }")
    assert read_toml(path) == {"x": {"y": [1, 2.5, True, "text"]}}
