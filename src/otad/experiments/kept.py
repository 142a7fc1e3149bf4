"""What is learned once and kept, for all processes that share a work folder.

FOLDER/weights.safetensors   the weights, once the training is finished: all that is needed then
FOLDER/seconds.json          what each epoch took
FOLDER/lock                  held by the process that trains: others wait for it, then read weights
FOLDER/*.safetensors         a checkpoint, from which a training that was killed goes on; gone once
                             it is finished, as it is several times as large as the weights
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from otad.errors import OtadError
from otad.io.codec import read_json, write_json
from otad.io.tensor_files import read_tensors, write_tensors

SAVE_SECONDS = 60.0


class UnfinishedError(OtadError):
    """A training was out of time; the same command goes on from there."""


@dataclass(frozen=True)
class Deadline:
    """When trainings have to end; `seconds` from now, None for never."""

    at: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """Seconds to go."""
        if self.at is None:
            return None
        left = self.at - time.monotonic()
        if left <= 0:
            raise UnfinishedError("out of time; the same command goes on from here")
        return left


@dataclass(frozen=True)
class Learned:
    """A finished training: the seconds of all its epochs and what it has to say of itself."""

    seconds: float
    facts: dict[str, Any]


Tick = Callable[[int, float], None]
"""Called with the number of an epoch and its seconds."""


def learned_once(folder: Path, net: nn.Module, learn: Callable[[Tick], dict[str, Any]]) -> Learned:
    """Put the weights of `folder` into `net`, or those that `learn` gives it, which are kept.

    `learn` trains in place, with checkpoints in the same folder, and returns facts in plain JSON.
    """
    weights, times = folder / "weights.safetensors", folder / "seconds.json"
    with alone(folder):
        seconds: dict[str, float] = read_json(times) if times.exists() else {}
        if weights.exists():
            tensors, facts = read_tensors(weights)
            net.load_state_dict(tensors)
            return Learned(sum(seconds.values()), facts)

        def tick(epoch: int, took: float) -> None:
            seconds[str(epoch)] = took
            write_json(times, seconds)

        facts = learn(tick)
        write_tensors(weights, net.state_dict(), facts)
        for checkpoint in folder.glob("*.safetensors"):
            if checkpoint != weights:
                checkpoint.unlink()
        return Learned(sum(seconds.values()), facts)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time works in this folder; a lock ends with its process, however that ends.

    Where the system knows no such locks, see to it yourself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":
        yield
        return
    import fcntl

    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
