"""Where commands write: `-` is standard output, and nothing is overwritten without --force."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from otad.checks import require

STDOUT = Path("-")


def check_out(
    out: Path | None,
    force: bool,
    as_json: bool = False,
    *,
    results: Sequence[str] = (),
    started: str = "",
) -> None:
    """Refuse an `out` that has a result already, unless `force` is set. The result is the file
    itself, or in a folder one of the `results`, which are listed in the order they are written. A
    folder with the file `started` but without the last result belongs to an interrupted run, which
    the same command resumes. Links are followed; devices, pipes and sockets are refused."""
    require(out != STDOUT or not results, "out", "a folder", "-, which is standard output")
    if out is None or out == STDOUT:
        found = "- together with --json, which also prints there"
        require(out is None or not as_json, "out", "a file, or - for standard output alone", found)
        return
    if started and (out / started).exists():
        results = results[-1:]
    for path in [out / name for name in results] or [out]:
        known = path.exists()
        regular = not known or stat.S_ISREG(path.stat().st_mode)
        expected = "a regular file, a new one, or - for standard output"
        require(regular, "out", expected, f"{path}, which is neither")
        expected = "a new place, or --force to replace what is there"
        require(force or not known, "out", expected, f"{path}, which exists")
