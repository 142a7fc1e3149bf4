"""The error tree: every exception the library raises on purpose is an `OtadError`."""

from __future__ import annotations


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
