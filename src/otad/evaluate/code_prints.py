"""What code does, in plain values: the same in every run, others once it was edited."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

from otad.training.checkpoint import nameless

KNOWN = ("otad", "torch", "builtins", "abc")  # packages whose code `code_digest` tells


def class_print(kind: type) -> dict[str, Any]:
    """The code of a class and of those it is made from, as far as it is the user's own."""
    own = [one for one in kind.__mro__ if not is_known(one)]
    return {f"{one.__module__}.{one.__qualname__}": _source(one) for one in own}


def is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in KNOWN


def function_print(function: FunctionType) -> list[Any]:
    """Of lambdas too, which share one name."""
    defaults = nameless((function.__defaults__, function.__kwdefaults__))
    return [function.__qualname__, _compiled(function.__code__), defaults]


def _source(kind: type) -> Any:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed in at a prompt or in a notebook
        return {name: _member(value) for name, value in vars(kind).items()}


def _member(value: object) -> Any:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(function, FunctionType):
        return function_print(function)
    return nameless(value) if isinstance(value, (bool, int, float, str, tuple)) else None


def _compiled(code: CodeType) -> list[Any]:
    """Without the numbers of its lines: code that was only moved is the same."""
    return [code.co_code.hex(), list(map(_constant, code.co_consts)), list(code.co_names)]


def _constant(value: object) -> Any:
    if isinstance(value, CodeType):
        return _compiled(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
