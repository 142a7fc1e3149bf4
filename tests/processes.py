"""Work for other processes, which import it from here."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from evaluate.small import Walk, Wander, run_plane
from torch import Tensor, nn

from otad import workers
from otad.errors import InputError
from otad.evaluate import Evaluation

ATTACKS = (Walk(), Wander())
START_METHOD = "fork"  # in a process that itself starts others: a server takes seconds to start


def assess(**options: Any) -> Evaluation:
    """An evaluation of 40 examples in batches of 7, at two radii."""
    return run_plane(**{"attacks": ATTACKS, "eps": (0.2, 0.4)} | options)


def assess_until(batches: int, folder: Path, shared: Path) -> None:
    """Start `assess` with two processes, and kill this process after some batches."""
    tempfile.tempdir = str(shared)
    workers.START_METHOD = START_METHOD

    def progress(attack: str, done: int, total: int, worst: float) -> None:
        if len([*folder.glob("parts/*")]) >= batches:
            os.kill(os.getpid(), signal.SIGKILL)

    assess(folder=folder, executor=2, progress=progress)


def reproduce_with_two(path: Path, out: Path) -> None:
    """Reproduce an experiment with two processes."""
    from otad.experiments import reproduce_together  # which other processes do not need

    workers.START_METHOD = START_METHOD
    reproduce_together([path], executor=2, out=out)


class Large(nn.Module):
    """A buffer of 64 MB that every process reads."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.ones(2**24))
        self.register_buffer("counter", torch.zeros(3))


def read_all(model: Large, others: int, meeting: Path) -> tuple[float, int, int]:
    """Read the buffer while other processes do the same; return its sum, the bytes that this takes
    for this process alone, and the process."""
    before = _memory("Private_Dirty")
    total = float(model.bank.sum())
    model.counter += 1  # a small tensor is the process's own
    (meeting / str(os.getpid())).touch()
    while len([*meeting.iterdir()]) < others:
        time.sleep(0.01)
    return total, _memory("Private_Dirty") - before, os.getpid()


def _memory(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def complain(value: str, what: str) -> None:
    warnings.warn(f"{value} is odd", stacklevel=1)
    if what == "error":
        raise InputError(f"value: expected another, got {value}")
    if what == "strange error":
        raise StrangeError(1, 2)


class StrangeError(Exception):
    """Cannot be pickled: its arguments are not those of its class."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")
