"""Reads the python version of CIFAR-10 without unpickling it.

A pickle is a program, and running a stranger's program is not reading data. Here the
instructions are only listed (`pickletools.genops` decodes and never executes) and a small
interpreter follows those that build dicts, lists, tuples, text, bytes, whole numbers and uint8
arrays. Names of functions stay names: five of them have a meaning written here, and any other
name or instruction is refused.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from otad.errors import InputError

T = TypeVar("T")

_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE")
_TEXTS = ("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, *_BYTES))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE_SIZES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAY_MAKERS = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = frozenset((*_ARRAY_MAKERS, "numpy ndarray", "numpy dtype", "_codecs encode"))


@dataclass(frozen=True)
class _Name:
    """A function or class the file mentions; never looked up."""

    text: str


class _Mark:
    """Marks where a run of items begins on the stack."""


class _Bytes8:
    """The dtype uint8."""


class _Array:
    """An array whose contents come with a later instruction."""

    def __init__(self) -> None:
        self.values: NDArray[np.uint8] | None = None

    def fill(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _Bytes8(), bool(fortran), bytes() | str() as raw):
                data = raw.encode("latin-1") if isinstance(raw, str) else raw
            case _:
                raise InputError("expected the contents of a uint8 array")
        if not all(isinstance(size, int) for size in shape) or math.prod(shape) != len(data):
            raise InputError(f"expected as many bytes as shape {shape} has, got {len(data)}")
        flat = np.frombuffer(data, np.uint8)
        self.values = flat.reshape(shape, order="F" if fortran else "C")


def read_batch(data: bytes, where: str) -> dict[str, object]:
    """The dict in a pickled batch with its keys as text; `where` names the file in errors."""
    try:
        value = _interpret(data)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: damaged batch file ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a dict, got {type(value).__name__}")
    return {_text(key): _finished(item) for key, item in value.items()}


def _interpret(data: bytes) -> object:
    stack: list[object] = []
    memo: dict[int, object] = {}

    def since_mark() -> list[object]:
        items: list[object] = []
        while not isinstance(item := stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_Mark())
            case name if name in _LITERALS:
                stack.append(_CONSTANTS.get(name, argument))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case name if name in _TUPLE_SIZES:
                size = _TUPLE_SIZES[name]
                items = [stack.pop() for _ in range(size)]
                stack.append(tuple(items[::-1]))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND" | "APPENDS" as name:
                items = since_mark() if name == "APPENDS" else [stack.pop()]
                _expect(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS" as name:
                pairs = since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                _expect(stack[-1], dict).update(zip(pairs[::2], pairs[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[_expect(argument, int)] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[_expect(argument, int)])
            case "GLOBAL":
                stack.append(_known_name(_expect(argument, str)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_known_name(f"{module} {attribute}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_meaning(_expect(function, _Name), _expect(arguments, tuple)))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], _Array):
                    stack[-1].fill(state)
                else:  # the state of a dtype tells its byte order, and uint8 has none
                    _expect(stack[-1], _Bytes8)
            case name:
                raise InputError(f"refused instruction {name}: not needed to hold image data")
    raise InputError("damaged batch file (no end)")


def _known_name(text: str) -> _Name:
    if text not in _NAMES:
        raise InputError(f"refused: the file wants to use {text.replace(' ', '.')!r}")
    return _Name(text)


def _meaning(function: _Name, arguments: tuple[object, ...]) -> object:
    if function.text in _ARRAY_MAKERS:
        return _Array()
    match function.text, arguments:
        case "numpy dtype", ("u1" | b"u1" | "uint8", *_):
            return _Bytes8()
        case "_codecs encode", (str(text), "latin1" | "latin-1"):
            return text.encode("latin-1")  # how protocol 2 spells bytes
    raise InputError(f"refused call of {function.text.replace(' ', '.')!r} with {arguments!r:.80}")


def _expect(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise InputError(f"damaged batch file (expected {kind.__name__})")
    return value


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else _expect(value, str)


def _finished(value: object) -> object:
    return value.values if isinstance(value, _Array) else value
