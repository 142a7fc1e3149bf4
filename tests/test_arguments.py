"""What public functions refuse by the annotations of their parameters."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from factories import model, queries
from torch import Tensor

import otad
from otad.arguments import checked
from otad.errors import InputError

X = torch.ones(2, 3)


@checked
def function(
    count: int = 1,
    share: float | None = None,
    name: str = "",
    path: Path = Path(),
    x: Tensor = X,
    sizes: Sequence[int] = (),
    pair: tuple[float, float] = (0.0, 1.0),
    options: Mapping[str, float] | None = None,
    task: Literal["one", "two"] = "one",
    report: Callable[[int], None] = print,
    kind: type[Exception] = ValueError,
    **others: Any,
) -> None:
    if count == 2**40:
        torch.empty(count, count)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": True}, "an integer"), ({"count": 1.0}, "an integer"), ({"count": 2**64}, "bits"),
        ({"count": 10**5000}, "bits, got int"), ({"count": 2**40}, "memory suffices"),
        ({"share": "1"}, "a number or None, got '1'"), ({"name": "a\0"}, "text"),
        ({"path": 5}, "a path"), ({"path": "\0"}, "a path"), ({"path": Path("\0")}, "a path"),
        ({"x": 1}, "Tensor"),
        ({"x": X.to("meta")}, "on meta"), ({"x": X.to_sparse()}, "Tensor.*sparse_coo"),
        ({"x": X * 1j}, "Tensor.*complex64"), ({"sizes": 1}, "Sequence of an integer"),
        ({"sizes": [1, "2"]}, "Sequence"), ({"sizes": np.ones(2)}, "Sequence"),
        ({"sizes": X}, "Sequence"), ({"pair": (1.0,)}, "tuple"), ({"options": {1: 2.0}}, "Mapping"),
        ({"task": "three"}, "'two'"), ({"report": 1}, "a function"),
        ({"kind": int}, "type"), ({"kind": 1}, "type"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    (name,) = given
    with pytest.raises(InputError, match=f"^({name}|function): expected .*{message}"):
        function(**given)


def test_what_fits_is_taken() -> None:
    function(np.int64(2), np.float32(0.5), "a", Path("b"), X, np.arange(2), (1, X.sum()), {"a": 1})
    function(sizes=[], share=X.sum(), task="two", kind=InputError, others=object())
    with pytest.raises(TypeError, match="positional"):
        function(*range(99))


def test_known_types_do_not_hide_other_values() -> None:
    @checked
    def counted(count: int, share: float = 0.5, x: Tensor = X) -> int:
        return count

    assert counted(2, 0.1, X) == counted(2, x=X, share=0.1) == 2
    with pytest.raises(InputError, match=r"^count: expected an integer of at most 64 bits"):
        counted(2**64, 0.1, X)
    for value in ("3", 2.5, True):
        with pytest.raises(InputError, match=r"^count: expected an integer, got"):
            counted(value, 0.1, X)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^x: expected .*on meta"):
        counted(2, x=X.to("meta"), share=0.1)
    with pytest.raises(InputError, match=r"^x: expected .*complex64"):
        counted(2, 0.1, X * 1j)


def test_other_processes_find_checked_functions() -> None:
    for one in (otad.load, otad.evaluate, otad.data.load, otad.nets.build, made := otad.nets.adapt):
        assert pickle.loads(pickle.dumps(one)) is one
    assert made.__module__ == "otad.nets"


def test_methods_and_records_of_a_model() -> None:
    made, record = model(), otad.Trace  # whose constructor is checked from now on
    assert isinstance(made.trace(queries(made)), record)
    with pytest.raises(InputError, match=r"folder: expected text or a path, got .*list"):
        made.save([])
    with pytest.raises(InputError, match=r"x: expected .*Tensor"):
        made.query_keys("x")
    with pytest.raises(InputError, match=r"x: expected values within \(0.0, 1.0\)"):
        otad.L2(0.1, bounds=(0.0, 1.0)).project(X, 9 * X)  # no step leads from there into the box


def test_text_is_taken_for_a_path() -> None:
    def stem(path: Path, other: Path | None = None) -> tuple[str, str | None]:
        return path.stem, other and other.stem

    assert checked(stem)("a/b.c", other="d.e") == ("b", "d")
