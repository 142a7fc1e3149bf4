"""One attack on one batch: run, drawn back, and kept in a file so that it is never run twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.base import Target
from otad.errors import InputError
from otad.io.codec import digest_of, from_plain, to_plain
from otad.training.checkpoint import read_checkpoint, write_checkpoint

DRAWS = 8  # halvings of the way back: 1/256 of the distance is left to chance


@dataclass(frozen=True)
class Account:
    """What a batch adds to an `AttackRecord`; rows are numbers of examples."""

    attacked: tuple[int, ...]
    broken: tuple[int, ...]
    distances: tuple[float, ...]
    abstained: tuple[int, ...]
    errors: tuple[float, ...]
    forwards: int
    backwards: int
    seconds: float
    remarks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """`inputs` (m,*) on the CPU: the adversarial inputs of the broken rows; in regression, the
    worst inputs of all rows."""

    account: Account
    inputs: Tensor


def run_part(
    attack: Attack,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: LpBall,
    rows: Tensor,
    generator: torch.Generator,
) -> Part:
    """Attack the examples with these numbers (on the CPU), all in one batch."""
    started = time.perf_counter()
    places = rows.to(x.device)
    x, y = x[places], y[places]
    result = attack(model, x, y, ball, generator=generator)
    is_value = y.is_floating_point()
    broken, abstained, distance = result.broken, result.abstained, result.distance
    inputs, forwards = result.inputs, int(result.forwards.sum())
    if is_value:
        broken = torch.zeros_like(broken)
    elif bool(broken.any()):
        target = Target(model, y[broken])
        nearest, silent = draw_back(target, x[broken], inputs[broken], ball)
        inputs, abstained, distance = inputs.clone(), abstained.clone(), distance.clone()
        inputs[broken], abstained[broken] = nearest, silent
        distance[broken] = ball.distance(nearest, x[broken])
        forwards += int(target.forwards.sum())
    account = Account(
        attacked=tuple(rows.tolist()),
        broken=tuple(rows[broken.cpu()].tolist()),
        distances=tuple(distance[broken].tolist()),
        abstained=tuple(rows[(broken & abstained).cpu()].tolist()),
        errors=tuple(result.gain.double().tolist()) if is_value else (),
        forwards=forwards,
        backwards=int(result.backwards.sum()),
        seconds=time.perf_counter() - started,
        remarks=tuple(str(remark) for remark in getattr(attack, "remarks", ())),
    )
    return Part(account, (inputs if is_value else inputs[broken]).cpu())


@torch.no_grad()
def draw_back(
    target: Target, x: Tensor, found: Tensor, ball: LpBall, draws: int = DRAWS
) -> tuple[Tensor, Tensor]:
    """The shortest wrong input met when `found` (B,*), all wrong, goes back to x by bisection.

    Also (B,) whether the model abstains there.
    """
    best, length = found.clone(), ball.distance(found, x)
    silent = target(found).isnan().any(1)
    low = x.new_zeros(len(x), *[1] * (x.dim() - 1))
    high = torch.ones_like(low)
    for _ in range(draws):
        share = (low + high) / 2
        moved = ball.project(x + share * (found - x), x)
        answers = target(moved)
        wrong, distance = target.is_broken(answers), ball.distance(moved, x)
        shorter = wrong & (distance < length)
        best[shorter], length[shorter] = moved[shorter], distance[shorter]
        silent[shorter] = answers[shorter].isnan().any(1)
        is_high = wrong.view_as(high)
        high, low = torch.where(is_high, share, high), torch.where(is_high, low, share)
    return best, silent


class PartStore:
    """Finished parts by a digest of all they depend on, in a folder or (None) nowhere."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else folder / "parts"

    def find(self, key: Mapping[str, Any]) -> Part | None:
        """The part, or None where it is not there whole: then it is computed again."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            tensors, header = read_checkpoint(path)
            return Part(from_plain(Account, header, path.name), tensors["inputs"])
        except (InputError, KeyError):
            return None

    def keep(self, key: Mapping[str, Any], part: Part) -> None:
        path = self._path(key)
        if path is not None:
            write_checkpoint(path, {"inputs": part.inputs}, to_plain(part.account))

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        return None if self.folder is None else self.folder / f"{digest_of(key)}.safetensors"
