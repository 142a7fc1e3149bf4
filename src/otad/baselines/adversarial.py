"""Adversarial training: the usual defense that OTAD is compared with."""

from __future__ import annotations

from typing import Any

import torch

from otad.checks import check_broadcast, check_choice, refusing, require
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
    """Train a network in place against attacks, the usual defense.

    It is `otad.training.train` with an adversary, so a run resumes from its `checkpoint_dir`.

    Parameters
    ----------
    net : Backbone
        The network, such as an `otad.nets.ResNet`. Its bounds limit the attacks.
    data
        As in `otad.training.train`: (train_x, train_y) or (train_x, train_y, val_x, val_y).
    threat : LpBall
        What the attacker may do, such as `otad.L2(0.5)`. A table may measure its features in the
        standard deviations by which the network divides them.
    method : str
        "pgd" minimizes the loss at inputs perturbed by `steps` steps of ascent, and "fgsm" by one
        step from the input itself. "trades" and "mart" compare the outputs at perturbed and clean
        inputs. In regression the loss is the squared error, and there is no "mart".
    steps : int
        The number of steps of the attack.
    beta : float
        The weight of the comparison in "trades" and "mart".
    weight_share : float
        Perturb each weight matrix too, by this share of its norm (AWP). A usual value is 0.005.
    warmup : float
        The number of epochs in which the radius grows from 0. It helps "fgsm" to converge.
    settings : dict or None
        Settings of `otad.training.TrainConfig`, such as `epochs` and `learning_rate`.
    progress, **options
        As in `otad.training.train`.

    Returns
    -------
    TrainResult
        A record of every epoch. Its scores are taken at perturbed inputs, for validation data too.

    Examples
    --------
    >>> import otad
    >>> from otad.baselines import adversarial_training
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> data = digits.train_x[:400], digits.train_y[:400]
    >>> settings = {"epochs": 5, "batch_size": 50}
    >>> result = adversarial_training(net, data, otad.L2(0.5), steps=3, settings=settings)
    >>> result.final.train_score > 0.5  # under attack
    True
    """
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
        scale = check_broadcast(threat.scale, "threat.scale", net.input_shape)
        known = torch.equal(scale.to(std), std)
        require(known, "threat.scale", "none, or the standard deviations of the net", "others")
        attack["unit"] = "std"
    changes: dict[str, Any] = {"adversary": Adversary(threat.eps, **attack), "beta": beta}
    changes["loss"] = method if method in ("trades", "mart") else "fit"
    with refusing("settings: expected those of TrainConfig"):
        config = TrainConfig(**{**(settings or {}), **changes})
    return train(net, data, config, progress=progress, **options)
