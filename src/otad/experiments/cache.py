"""The work folder: finished parts and trained weights, shared by all processes that use it.

parts/NAME.json                 a finished part with its checksum; a damaged one is computed again
KIND/NAME/weights.safetensors   the weights and results of a finished training
KIND/NAME/seconds.json          the time of each epoch; beside it, until the end, a checkpoint
locks/NAME.lock                 held by the process that computes NAME; others wait and then read it

NAME is the digest of weights, data, settings and a version declared by the module that computes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from otad.errors import InputError, OtadError
from otad.io.codec import digest_of, from_plain, read_json, to_plain, write_json
from otad.io.files import locked
from otad.io.tensor_files import read_tensors, write_tensors
from otad.progress import Counter

T = TypeVar("T")
Train = Callable[..., tuple[int, dict[str, Any]]]
SAVE_SECONDS = 60.0  # between two checkpoints
RESUMES = "the same command resumes"


def once(method: Callable[[Any, str], T]) -> Callable[[Any, str], T]:
    """A method of `Study` whose result for each key is remembered."""

    @wraps(method)
    def remembering(study: Any, key: str) -> T:
        name = (method.__name__, key)
        if name not in study.made:
            study.made[name] = method(study, key)
        return cast(T, study.made[name])

    return remembering


class UnfinishedError(OtadError):
    """A training ran out of time; the same command resumes it."""


class WorkFolder:
    """See the module; `deadline` (by `time.time`) is when trainings have to stop."""

    def __init__(self, folder: Path, deadline: float | None = None) -> None:
        self.folder, self.deadline = folder, deadline

    def lock(self, name: str) -> AbstractContextManager[bool]:
        """One process at a time; the lock ends with its process, however that ends."""
        return locked(self.folder / "locks" / f"{name}.lock")

    def part(self, kind: type[T], identity: Any, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, a dataclass, or the saved result of an earlier run."""
        name = digest_of(identity)
        path = self.folder / "parts" / f"{name}.json"
        with self.lock(name):
            plain = _read_sealed(path)
            if plain is None:
                _write_sealed(path, plain := to_plain(compute()))
            found: T = from_plain(kind, plain, path.name)
            return found

    def trained(
        self, kind: str, identity: Any, net: nn.Module, epochs: int, train: Train, report: Counter
    ) -> dict[str, Any]:
        """Train `net`, or load the weights of an earlier run; the results, with "seconds". `train`
        gets the arguments of a trainer that resumes, and gives the epochs done and its results."""
        name = digest_of(identity)
        place = self.folder / kind / name
        weights, times = place / "weights.safetensors", place / "seconds.json"
        with self.lock(name):
            seconds: dict[str, float] = _read_sealed(times) or {}

            def tick(record: Any) -> None:
                seconds[str(record.epoch)] = record.seconds
                _write_sealed(times, seconds)
                report(record.epoch, epochs)

            if not weights.exists():
                saving = {"checkpoint_dir": place, "save_seconds": SAVE_SECONDS, "progress": tick}
                done, results = train(max_seconds=self._seconds_left(), **saving)
                if done < epochs:
                    raise UnfinishedError(f"out of time after epoch {done} of {epochs}; {RESUMES}")
                write_tensors(weights, net.state_dict(), results)
            for checkpoint in {*place.glob("*.safetensors")} - {weights}:
                checkpoint.unlink()
            tensors, results = read_tensors(weights)
        net.load_state_dict(tensors)
        report(epochs, epochs)
        return results | {"seconds": sum(seconds.values())}

    def _seconds_left(self) -> float | None:
        if self.deadline is None:
            return None
        left = self.deadline - time.time()
        if left <= 0:
            raise UnfinishedError(f"out of time; {RESUMES}")
        return left


def _write_sealed(path: Path, content: Any) -> None:
    write_json(path, {"checksum": digest_of(content, 64), "content": content})


def _read_sealed(path: Path) -> Any:
    """None where there is no such file, or a damaged one, or one without a checksum."""
    try:
        stored = read_json(path)
        return stored["content"] if stored["checksum"] == digest_of(stored["content"], 64) else None
    except (InputError, KeyError, TypeError):
        return None
