"""Thousands of bad calls with fixed seeds: each gives a result or a clear error."""

from __future__ import annotations

import random
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign.calls import Calls
from campaign.strangers import Commands, Folders

from otad.errors import OtadError

KINDS = {"calls": Calls, "commands": Commands, "folders": Folders}
CLEAR = RESULT, REFUSED, FILE, PYTHON = "result", "refused", "error of a file", "wrong arguments"
SIGNATURE = re.compile(r"missing .* argument|unexpected keyword|positional argument|multiple val")
SECONDS = 300  # only a call that hangs takes as long, also on a busy machine


def outcome(call: Callable[[], Any]) -> str:
    """A result, an error of ours, one of Python that names a file, or one that names a missing or
    unknown argument; all else is a failure."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        return RESULT
    except BaseException as error:
        if isinstance(error, OtadError) and str(error).strip():
            return REFUSED
        if isinstance(error, OSError) and error.filename:
            return FILE
        if isinstance(error, TypeError) and SIGNATURE.search(str(error)):
            return PYTHON
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def campaign(kind: str, numbers: range, seed: int) -> tuple[Counter[str], list[str], set[str]]:
    """How many calls had which outcome, what failed and how to repeat it, and the names called; in
    the current folder."""
    made, counts, failures, names = KINDS[kind](Path.cwd()), Counter[str](), [], set()
    for number in numbers:
        name, text, call = made.draw(random.Random(f"{kind} {seed} {number}"), number)
        found = outcome(call)
        names.add(name)
        counts[found if found in CLEAR else "failed"] += 1
        if found not in CLEAR:
            again = f"benchmarks/run_campaign.py --only {kind} {number} --seed {seed}"
            failures.append(f"{text}\n  {found}\n  again: PYTHONPATH=tests python {again}")
    return counts, failures, names


@pytest.mark.parametrize(
    ("kind", "count", "least"), [("calls", 600, 130), ("commands", 60, 10), ("folders", 40, 20)]
)
@pytest.mark.usefixtures("brief_reports")
def test_only_results_and_clear_errors(kind, count, least, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts, failures, names = campaign(kind, range(count), seed=0)
    assert not failures, "\n".join(failures)
    assert len(names) >= least
    assert counts["refused"] > count / 4
    assert counts["result"] > count / 10


def test_every_promise_names_tests_that_exist() -> None:
    tests = Path(__file__).parents[1]
    names = re.findall(r"`(test_\w+)`", (tests.parent / "docs/promises.md").read_text())
    texts = "".join(path.read_text() for path in tests.rglob("test_*.py"))
    assert names
    assert [name for name in names if f"def {name}(" not in texts] == []
