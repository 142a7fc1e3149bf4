"""`attack`: one attack on a model, batch by batch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from otad.attacks import Attack, AttackResult, LpBall
from otad.checks import check_count
from otad.evaluate.identity import generator_for
from otad.evaluate.runner import prepared
from otad.evaluate.suite import make_attack
from otad.model.conversion import ArrayLike, Estimator


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def attack(
    model: nn.Module | Estimator,
    x: ArrayLike,
    y: ArrayLike | None = None,
    threat: LpBall | None = None,
    *,
    attack: str | Attack = "apgd",
    seed: int = 0,
    batch_size: int = 250,
    **options: Any,
) -> AttackResult:
    """Look for inputs within `threat` of examples x (n,*) that the model answers wrongly.

    `attack` is a name of `otad.attacks.ATTACKS`, with `options` of its class, or an attack. Model
    and data are given as in `otad.evaluate`, which runs a whole suite: the worst case over many
    attacks, not one of them, says how robust a model is."""
    module, inputs, targets, ball = prepared(model, x, y, threat)
    check_count(batch_size, "batch_size")
    check_count(seed, "seed", least=0)
    made = make_attack(attack, module, **options) if isinstance(attack, str) else attack
    found = []
    parts = zip(inputs.split(batch_size), targets.split(batch_size), strict=True)
    for number, part in enumerate(parts):
        generator = generator_for(seed, made.name, repr(ball.eps), number)
        found.append(made(module, *part, ball, generator=generator))
    names = [one.name for one in fields(AttackResult) if one.name != "seconds"]
    columns: dict[str, Any] = {
        name: torch.cat([getattr(one, name) for one in found]) for name in names
    }
    return AttackResult(**columns, seconds=sum(one.seconds for one in found))
