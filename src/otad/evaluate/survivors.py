"""Who still stands: what all attacks together know so far, one finished batch after another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.evaluate.clean import Clean
from otad.evaluate.code_prints import class_print
from otad.evaluate.identity import code_digest, generator_for, settings_of
from otad.evaluate.parts import Account, Part, PartStore, run_part
from otad.training.checkpoint import fingerprint, write_checkpoint


class Standing:
    """What is known so far: for each row the nearest wrong input, in regression the worst one."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: LpBall,
        model_fingerprint: str,
        clean: Clean,
        seed: int,
        folder: Path | None,
    ) -> None:
        self.model, self.x, self.y, self.threat, self.seed = model, x, y, threat, seed
        self.is_value = y.is_floating_point()
        self.right = clean.right
        self.distances = torch.zeros(len(x), dtype=torch.float64)
        self.distances[self.right] = math.inf
        self.errors = clean.errors.clone()
        self.inputs = x.cpu().clone()
        self.found = torch.zeros(len(x), dtype=torch.bool)
        self.earlier_seconds = 0.0  # of parts that an earlier run had finished
        self._store = PartStore(folder)
        self._data = fingerprint({"x": x, "y": y})
        self._common = {
            "code": code_digest(),
            "device": x.device.type,
            "model": model_fingerprint,
            "data": self._data,
            "seed": seed,
        }
        self._known: dict[str, dict[str, Any]] = {}

    def rows(self, eps: float, survivors_only: bool) -> Tensor:
        """Who is to be attacked."""
        standing = self.right
        if survivors_only and not self.is_value:
            standing = standing & (self.distances > eps)
        return standing.nonzero()[:, 0]

    def settings(self, attack: Attack) -> dict[str, Any]:
        found: dict[str, Any] = self._identity(attack)["settings"]
        return found

    def _identity(self, attack: Attack) -> dict[str, Any]:
        """As it was before it first ran, whatever it may note down about itself."""
        if attack.name not in self._known:
            self._known[attack.name] = {
                "attack": attack.name,
                "settings": settings_of(attack),
                "source": class_print(type(attack)),
            }
        return self._known[attack.name]

    def part(self, attack: Attack, eps: float, batch: int, rows: Tensor) -> Account:
        """One batch: read if it is there, run and kept otherwise."""
        ball = self.threat.with_eps(eps)
        place = {"threat": ball.to_dict(), "batch": batch, "rows": rows.tolist()}
        key = self._common | self._identity(attack) | place
        part = self._store.find(key)
        if part is None:
            generator = generator_for(self.seed, attack.name, repr(eps), batch)
            part = run_part(attack, self.model, self.x, self.y, ball, rows, generator)
            self._store.keep(key, part)
        else:
            self.earlier_seconds += part.account.seconds
        self._learn(part, eps)
        return part.account

    def _learn(self, part: Part, eps: float) -> None:
        if not self.is_value:
            rows = torch.tensor(part.account.broken, dtype=torch.int64)
            distances = torch.tensor(part.account.distances, dtype=torch.float64)
            better = distances < self.distances[rows]
            self.distances[rows[better]] = distances[better]
        elif eps <= self.threat.eps:
            rows = torch.tensor(part.account.attacked, dtype=torch.int64)
            errors = torch.tensor(part.account.errors, dtype=torch.float64)
            better = errors > self.errors[rows]
            self.errors[rows[better]] = errors[better]
        else:
            return
        self.inputs[rows[better]] = part.inputs[better]
        self.found[rows[better]] = True

    def worst(self, eps: float) -> float:
        if self.is_value:
            return float(self.errors.mean())
        return float((self.distances > eps).double().mean())

    def write_adversarial(self, path: Path) -> None:
        rows = self.found.nonzero()[:, 0]
        write_checkpoint(path, {"rows": rows, "inputs": self.inputs[rows]}, {"data": self._data})
