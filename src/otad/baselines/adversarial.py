"""Adversarial training: the usual defense that OTAD is compared with."""

from __future__ import annotations

from typing import Any

import torch

from otad.checks import check_choice, refusing, require
from otad.nets import Backbone
from otad.threat import LpBall
from otad.training import Adversary, TrainConfig, TrainResult, train
from otad.training.supervised import Data, Progress

METHODS: dict[str, dict[str, Any]] = {
    "pgd": {},
    "fgsm": {"steps": 1, "random_start": False},
    "trades": {},
    "mart": {},
}
"""What each one changes of the adversary."""


def adversarial_training(
    net: Backbone,
    data: Data,
    threat: LpBall,
    *,
    method: str = "pgd",
    steps: int = 10,
    beta: float = 6.0,
    weight_share: float = 0.0,
    warmup: float = 0.0,
    settings: dict[str, Any] | None = None,
    progress: Progress = None,
    **options: Any,
) -> TrainResult:
    """Train `net` in place against attacks within `threat`, such as `otad.L2(0.5)`.

    - `method`: "pgd" (`steps` steps of steepest ascent), "fgsm" (one step from the input itself),
      "trades" or "mart", which weigh outputs at perturbed against clean inputs by `beta`. In
      regression, cross-entropy is replaced by the squared error, and there is no "mart".
    - `weight_share`: perturb each weight matrix too, by this share of its norm (AWP): 0.005, say.
    - `warmup`: epochs in which eps grows from 0, without which "fgsm" may not converge.
    - `settings`: those of `otad.training.TrainConfig`, such as `epochs` and `learning_rate`.

    `data`, `progress` and `options` are those of `otad.training.train`, which resumes a run from
    its `checkpoint_dir`. The bounds of inputs are those of the net. A threat may measure features
    in the standard deviations by which the net divides them. All scores of the result are those of
    perturbed inputs."""
    check_choice(method, "method", tuple(METHODS))
    for name in ("mutable", "groups"):
        got = getattr(threat, name)
        require(got is None, f"threat.{name}", "none: training perturbs all features", got)
    same = threat.bounds in (None, net.bounds)
    require(same, "threat.bounds", f"those of the net, {net.bounds}", threat.bounds)
    attack: dict[str, Any] = {"steps": steps, "weight_share": weight_share, "warmup": warmup}
    attack |= {"norm": threat.norm} | METHODS[method]
    if threat.scale is not None:
        std = net.std.expand(net.input_shape)
        known = threat.scale.shape == std.shape and torch.equal(threat.scale.to(std), std)
        require(known, "threat.scale", "none, or the standard deviations of the net", "others")
        attack["unit"] = "std"
    changes: dict[str, Any] = {"adversary": Adversary(threat.eps, **attack), "beta": beta}
    changes["loss"] = method if method in ("trades", "mart") else "fit"
    with refusing("settings: expected those of TrainConfig"):
        config = TrainConfig(**{**(settings or {}), **changes})
    return train(net, data, config, progress=progress, **options)
