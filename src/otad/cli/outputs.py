"""Where commands write: standard output for `-`, and nothing over what is there without --force."""

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
    """Refuse an `out` that has a result already, unless it is to be replaced: the file itself, or
    in a folder one of the `results`, in the order they are written. A folder that has what is
    `started` first, but not the last result, is that of an interrupted run, which the same command
    resumes. Links are followed; devices, pipes and sockets are refused."""
    require(out != STDOUT or not results, "out", "a folder", "-, which is standard output")
    if out is None or out == STDOUT:
        found = "-, and --json, which prints there too"
        require(out is None or not as_json, "out", "a file, or - for standard output alone", found)
        return
    if started and (out / started).exists():
        results = results[-1:]
    for path in [out / name for name in results] or [out]:
        known = path.exists()
        regular = not known or stat.S_ISREG(path.stat().st_mode)
        expected = "a regular file, a new one, or - for standard output"
        require(regular, "out", expected, f"{path}, which is none")
        expected = "a new place, or --force to replace what is there"
        require(force or not known, "out", expected, f"{path}, which exists")


def start_anew(folder: Path, result: str, checkpoint: str) -> None:
    """With --force: a finished `result` and its checkpoint make room for a new run; without one, a
    run that was interrupted resumes."""
    if (folder / result).exists():
        (folder / result).unlink()
        (folder / checkpoint).unlink(missing_ok=True)
