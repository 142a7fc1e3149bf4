"""The tree of errors: every exception that the library raises on purpose is an `OtadError`."""

from __future__ import annotations

import importlib
import unicodedata
from typing import Any

_NOT_SHOWN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, marks of direction, halves of characters


def printable(text: str) -> str:
    r"""Return text that is safe to print on a terminal.

    Names from a file cannot move the cursor or hide what is shown: control characters are written
    as \x1b. Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    hidden = {mark for mark in {*text} - {*"\n\t"} if unicodedata.category(mark) in _NOT_SHOWN}
    return text.translate({ord(mark): mark.encode("unicode_escape").decode() for mark in hidden})


class OtadError(Exception):
    """Base of all errors that this library raises. Its message is safe to print.

    Examples
    --------
    >>> import otad
    >>> try:
    ...     otad.load("no-such-folder")
    ... except otad.OtadError as error:
    ...     print(type(error).__name__)
    InputError
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(OtadError, ValueError):
    """An argument has the wrong type, shape, dtype, range or content.

    It is a `ValueError`, too. The message names the argument, what was expected and what came.

    Examples
    --------
    >>> import otad
    >>> try:
    ...     otad.L2(-1.0)
    ... except otad.InputError as error:
    ...     print(error)
    eps: expected a finite number of at least 0, got -1.0
    """


class MissingExtraError(OtadError, ImportError):
    """An optional dependency is missing. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is needed here: pip install 'otad[{extra}]'")


class SolverError(OtadError, RuntimeError):
    """Rows of a batch could not be solved, and the caller asked for an error in this case."""


def import_extra(module: str, extra: str) -> Any:
    """Import and return the module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra) from error
