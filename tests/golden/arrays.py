"""Answers in files: all numbers of one kind in a row with an index, and their comparison."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# names that moved are changed here alone

HERE = Path(__file__).parent
MODELS = HERE / "models"
Arrays = dict[str, np.ndarray]
FLOAT32, FLOAT64, FOUND = (1e-4, 1e-5), (1e-9, 1e-11), (1e-3, 1e-5)
SOUGHT = ("distance", "gain", "error")


def tolerance_of(name: str, precise: bool) -> tuple[float, float]:
    """Relative and absolute: of what is computed in float64 from stored numbers, of what another
    processor may sum in another order in float32, or of what an attack finds by steps."""
    is_sought = name.startswith(("attack/", "evaluation/")) and name.endswith(SOUGHT)
    if is_sought:
        return FOUND
    return FLOAT64 if precise else FLOAT32


def agreement(found: np.ndarray, golden: np.ndarray, tolerance: tuple[float, float]) -> np.ndarray:
    """Where two arrays of one shape agree: numbers within the tolerance, all else exactly."""
    if golden.dtype.kind != "f":
        return np.asarray(found == golden)
    relative, absolute = tolerance
    return np.isclose(found, golden, rtol=relative, atol=absolute, equal_nan=True)


def undecided(name: str) -> str:
    return f"undecided/{name}"


def numbers_in(texts: np.ndarray) -> np.ndarray:
    """One text of numbers for each text."""
    return np.array([" ".join(re.findall(r"\d[\d.e+-]*", text)) for text in texts.tolist()])


def differences(found: Arrays, golden: Arrays, *, precise: bool = False) -> list[str]:
    """In words, everything in which answers differ from those kept, but for undecided places."""
    told = []
    kept = {name for name in golden if not name.startswith("undecided/")}
    for name in sorted(kept | found.keys()):
        if name not in found or name not in kept:
            told.append(f"{name}: {'no answer any more' if name in kept else 'a new answer'}")
            continue
        new, old = found[name], golden[name]
        if name.endswith("/assumptions"):  # the numbers in them, whatever the words are
            new, old = numbers_in(new), numbers_in(old)
        if new.shape != old.shape or new.dtype.kind != old.dtype.kind:
            told.append(f"{name}: {new.dtype} {new.shape} instead of {old.dtype} {old.shape}")
            continue
        excused = golden.get(undecided(name), np.zeros(old.shape, dtype=bool))
        wrong = ~agreement(new, old, tolerance_of(name, precise)) & ~excused
        if wrong.any():
            where = np.argwhere(wrong)[0].tolist()
            told.append(f"{name}: {new[wrong][:3]} instead of {old[wrong][:3]}, first at {where}")
    return told


def read_arrays(path: Path) -> Arrays:
    found: Arrays = {}
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(str(file["index"]))
        packed = {kind: file[f"numbers{place}"] for place, kind in enumerate(index["order"])}
    used = dict.fromkeys(packed, 0)
    for name, kind, shape, texts in index["entries"]:
        if kind not in packed:
            found[name] = np.array(texts, dtype=kind).reshape(shape)
            continue
        count = math.prod(shape)
        found[name] = packed[kind][used[kind] : used[kind] + count].reshape(shape)
        used[kind] += count
    return found


def given_in(golden: Arrays) -> tuple[Tensor, Tensor]:
    """The queries and right answers of a file."""
    return torch.from_numpy(golden["given/x"]), torch.from_numpy(golden["given/y"])


def training_data_in(golden: Arrays) -> dict[str, Tensor]:
    given = only(golden, within="given/")
    return {name.removeprefix("given/"): torch.from_numpy(value) for name, value in given.items()}


def start_in(golden: Arrays, training: str) -> dict[str, Tensor]:
    """The weights a training started from."""
    prefix = f"start/{training}/"
    start = only(golden, within=prefix)
    return {name.removeprefix(prefix): torch.from_numpy(value) for name, value in start.items()}


def only(golden: Arrays, *, within: str = "", without: tuple[str, ...] = ()) -> Arrays:
    """Entries whose names begin so, and not so, undecided places with them."""
    return {
        name: value
        for name, value in golden.items()
        if name.removeprefix(undecided("")).startswith(within)
        and not name.removeprefix(undecided("")).startswith(without)
    }


def as_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
