"""Public functions refuse arguments of another type than they declare, and name them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from otad.errors import InputError

_TAKEN = {int: Integral, float: Real, Path: os.PathLike}  # what fits beside the type itself
_WORDS = {NoneType: "None", int: "an integer", float: "a number", str: "text", Path: "a path"}


def guard(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Check the arguments of the functions that a package offers under these names, and of the
    constructors of its classes. Calls within the package go to the functions themselves."""
    for name in names:
        value = namespace[name]
        if inspect.isfunction(value):
            namespace[name] = checked(value)
        elif inspect.isclass(value) and inspect.isfunction(value.__init__):
            value.__init__ = checked(value.__init__)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which refuses an argument that does not fit its annotation."""
    if hasattr(function, "_is_checked"):
        return function
    signature, hints = inspect.signature(function), {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not hints:
            found = get_type_hints(function)
            names = (name for name, one in signature.parameters.items() if one.kind not in several)
            hints.update({name: found.get(name, Any) for name in names})
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError:
            return function(*args, **options)  # Python says what is missing or unknown
        for name, value in given.items():
            if not _fits(value, hints.get(name, Any)):
                raise InputError(f"{name}: expected {_words(hints[name])}, got {_shown(value)}")
        return function(*args, **options)

    call._is_checked = True  # type: ignore[attr-defined]
    return call


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if not isinstance(kind, type) or kind in (Any, object) or getattr(kind, "_is_protocol", False):
        return True  # a type variable, or a choice, which the function checks itself, too
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if isinstance(value, str) or kind is str:
        return kind is str and isinstance(value, str)
    if not isinstance(value, _TAKEN.get(kind, kind)):
        return False
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if parts and isinstance(value, (list, tuple)):
        return all(_fits(item, parts[0]) for item in value)
    return True


def _words(hint: Any) -> str:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_words, parts))
    inner = ", ".join("..." if part is Ellipsis else _words(part) for part in parts)
    name = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name} of {inner}" if parts and isinstance(parts[0], type) else name


def _shown(value: Any) -> str:
    """The type, and what is short in full."""
    text = repr(value) if isinstance(value, (str, bytes, int, float, list, tuple)) else ""
    name = type(value).__name__
    return f"{name} {text}".strip() if len(text) <= 40 else name
