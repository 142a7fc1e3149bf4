"""Adversarial examples found, and which of them to show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.errors import InputError
from otad.evaluate.records import Evaluation
from otad.io.tensor_files import read_tensors
from otad.threat import NORMS, LpBall


@dataclass(frozen=True, eq=False)
class Adversarial:
    """For examples `rows` (m,) of an evaluation, wrong `inputs` (m,*input_shape) near them."""

    rows: Tensor
    inputs: Tensor

    @staticmethod
    def read(path: Path) -> Adversarial:
        """The safetensors file an evaluation leaves beside its record."""
        tensors, _ = read_tensors(path)
        if missing := {"rows", "inputs"} - set(tensors):
            raise InputError(f"{path}: expected rows and inputs, got no {' and no '.join(missing)}")
        return Adversarial(tensors["rows"], tensors["inputs"])


def ball_of(threat: dict[str, Any], input_shape: torch.Size) -> LpBall:
    """The threat model of a record, for inputs of this shape."""
    scale, mutable, bounds = (threat.get(name) for name in ("scale", "mutable", "bounds"))
    return NORMS[str(threat["norm"])](
        float(threat["eps"]),
        None if bounds is None else (bounds[0], bounds[1]),
        None if scale is None else torch.tensor(scale).view(input_shape),
        None if mutable is None else torch.tensor(mutable).view(input_shape),
    )


def spread(distances: Tensor, eps: float, count: int) -> list[int]:
    """Up to `count` places of the list, from nearest to furthest within eps; where these are too
    few, then the nearest beyond."""
    order = [place for place in distances.argsort().tolist() if math.isfinite(distances[place])]
    within = [place for place in order if distances[place] <= eps]
    if len(within) <= count:
        return order[:count]
    steps = torch.linspace(0, len(within) - 1, count).round().int().tolist()
    return [within[step] for step in steps]


def finder_of(evaluation: Evaluation, row: int) -> str:
    """The attack that broke the row from the shortest distance; empty where none did."""
    found = [
        (distance, record.attack)
        for record in evaluation.attacks
        for broken, distance in zip(record.broken, record.distances, strict=True)
        if broken == row
    ]
    return min(found)[1] if found else ""
