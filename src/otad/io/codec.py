"""Frozen dataclasses to plain JSON or TOML values and back, and files of them."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from otad.checks import require
from otad.errors import InputError
from otad.io.files import replacing

_MOST_BYTES = 2**28
_MOST_LEVELS, _MOST_TOML, _MOST_LINE = 64, 2**17, 2**12
_hints = cache(get_type_hints)  # which compiles every annotation
_NOT_FINITE = ("inf", "-inf", "nan")  # as text: JSON does not have them


def to_plain(value: Any) -> Any:
    """Return dicts, lists, text and finite numbers; infinity and NaN become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (str, int, NoneType)):
        return value
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Return the value as a dataclass, tuple, dict, optional or plain type. Errors name `where`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        (inner,) = (part for part in parts if part is not NoneType)
        return from_plain(inner, value, where)
    if origin is Literal:
        require(value in parts, where, f"one of {', '.join(map(repr, parts))}", repr(value))
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is dict and isinstance(value, Mapping):
        return {name: from_plain(parts[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        if parts[0] in (int, float) and parts[-1] is Ellipsis and {*map(type, value)} <= {parts[0]}:
            return tuple(value)  # records have long ones
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(from_plain(part, item, f"{where}[{k}]") for k, (part, item) in pairs)
    if kind is float and not isinstance(value, bool):
        if isinstance(value, (int, float)) or value in _NOT_FINITE:
            return float(value)
    elif origin is None and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    name = str(kind) if parts else getattr(kind, "__name__", kind)
    raise InputError(f"{where}: expected {name}, got {value!r}")


def _dataclass(kind: type, value: Any, where: str) -> Any:
    require(isinstance(value, Mapping), where, "a table", repr(value))
    known, hints = {field.name: field for field in fields(kind)}, _hints(kind)
    for name in value:
        require(name in known, where, f"one of {', '.join(known)}", f"the unknown key {name!r}")
    for name, field in known.items():
        given = name in value or not field.default is field.default_factory is MISSING
        require(given, where, f"a value for {name!r}", "none")
    items = {name: from_plain(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    return kind(**items)


def read_json(path: Path) -> Any:
    """The plain values of a file."""
    try:
        text = _text(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected JSON, got: {error}") from error
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> Any:
    """The plain values of a text, with finite numbers; whole ones of at most 64 bits."""
    try:
        return _bounded(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: expected JSON, got: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The plain values of a file, bounded as in JSON."""
    try:
        text = _text(path, _MOST_TOML)
        # The parser's time grows with the square of the parts of a dotted key, which are in a line.
        if max(map(len, text.split("\n"))) > _MOST_LINE:
            raise ValueError(f"a line of more than {_MOST_LINE} characters")
        return _bounded(tomllib.loads(text))  # type: ignore[no-any-return]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected a TOML file, got: {error}") from error


def _text(path: Path, most: int) -> str:
    """Return the text of a regular file of at most so many bytes. (Reading a device might never
    end.)"""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("a folder, a device or a pipe")
    if found.st_size > most:
        raise ValueError(f"{found.st_size} bytes, more than {most}")
    return path.read_text(encoding="utf-8")


def _bounded(content: Any) -> Any:
    """Return the same values; refuse more than 64 levels, numbers that are not finite, and integers
    of more than 64 bits."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                inner += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError("a number of more than 64 bits")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"the number {value}, which is not finite")
            elif not isinstance(value, (str, int, float, NoneType)):
                raise ValueError(f"a {type(value).__name__}")
        level = inner
        if not level:
            return content
    raise ValueError(f"more than {_MOST_LEVELS} levels")


def write_json(path: Path, content: Any) -> None:
    """Replace a file by plain values, atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def digest_of(content: Any, length: int = 24) -> str:
    """A name of so many hexadecimal digits for plain values: equal values, equal names."""
    text = json.dumps(to_plain(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
