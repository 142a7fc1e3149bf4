"""`attack`: one attack on a model, batch by batch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from otad.attacks import Attack, AttackResult, LpBall
from otad.checks import check_count
from otad.evaluate.identity import generator_for
from otad.evaluate.runner import prepared, warn_of_size
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
    """Run one attack: search for inputs within a threat model that the model answers wrongly.

    To say how robust a model is, use `otad.evaluate`. It reports the worst case over many attacks.

    Parameters
    ----------
    model, x, y, threat
        As in `otad.evaluate`.
    attack : str or Attack
        A name of `otad.attacks.ATTACKS`, or an attack.
    seed : int
        The seed of the attack.
    batch_size : int
        Rows at once.
    **options
        The options of the attack's class, if `attack` is a name.

    Returns
    -------
    AttackResult
        The perturbed inputs, whether each is answered wrongly, and its distance.

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> x, y = digits.test_x[:4], digits.test_y[:4]
    >>> found = otad.attack(model, x, y, otad.L2(0.5), attack="pgd", steps=5)
    >>> found.inputs.shape, found.broken.shape
    (torch.Size([4, 1, 8, 8]), torch.Size([4]))
    >>> bool((found.distance <= 0.5).all())
    True
    """
    module, inputs, targets, ball = prepared(model, x, y, threat)
    warn_of_size(ball, inputs, stacklevel=5)
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
