"""The error tree: every exception the library raises on purpose is an `OtadError`."""

from __future__ import annotations

import importlib
from typing import Any


class OtadError(Exception):
    """Base of all errors raised by this library."""


class InputError(OtadError, ValueError):
    """An argument has the wrong shape, dtype, range or content."""


class MissingExtraError(OtadError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is needed here: pip install 'otad[{extra}]'")


class SolverError(OtadError, RuntimeError):
    """Rows of a batch could not be solved and the caller asked for an error."""


def import_extra(module: str, extra: str) -> Any:
    """The module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra) from error
