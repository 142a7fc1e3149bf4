"""Attacks by name, and the suites of them an evaluation runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.adaptive import Bisector, Keys, Region, SoftKnn, Straight
from otad.attacks.adaptive.neighborhood import check_training_inputs, knows_inputs, knows_lines
from otad.attacks.apgd import Apgd
from otad.attacks.autoattack import AutoAttackSuite
from otad.attacks.ngopt import NgOpt
from otad.attacks.noise import RandomNoise
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.attacks.pixle import Pixle
from otad.attacks.random_search import RandomSearch
from otad.attacks.square import Square, check_windows
from otad.attacks.transfer import Transfer
from otad.baselines.knn import Knn
from otad.checks import check_choice
from otad.errors import InputError
from otad.evaluate.presets import KEYED_PRESETS, Choice
from otad.evaluate.presets import PRESETS as PRESETS
from otad.model.otad import OTAD
from otad.nets import Backbone

_CLASSES: dict[str, type[Attack]] = {
    "noise": RandomNoise,
    "transfer": Transfer,
    "bpda": Bpda,
    "pgd": Pgd,
    "apgd": Apgd,
    "metric": MetricAttack,
    "soft_knn": SoftKnn,
    "straight": Straight,
    "bisector": Bisector,
    "region": Region,
    "keys": Keys,
    "square": Square,
    "random_search": RandomSearch,
    "pixle": Pixle,
    "ngopt": NgOpt,
    "autoattack": AutoAttackSuite,
}
ATTACKS = tuple(_CLASSES)

NEED_NETWORK = ("bpda", "transfer", "metric")
NEED_BANK = ("soft_knn", "straight", "bisector", "region", "keys")
NEED_LINES = ("bisector", "region")
IMAGES_ONLY = ("square", "autoattack", "pixle")
UNIT_BOX_ONLY = ("square", "autoattack")
PACKAGES = {"square": "pyautoattack", "autoattack": "pyautoattack", "ngopt": "nevergrad"}


def choices_of(model: nn.Module, preset: str) -> list[Choice]:
    """The attacks of a preset for the kind of neighbors a model has."""
    check_choice(preset, "preset", tuple(PRESETS))
    defended = defended_of(model)
    has_lines = defended is None or knows_lines(defended)
    return PRESETS[preset] if has_lines else KEYED_PRESETS[preset]


def defended_of(model: nn.Module) -> OTAD | None:
    """The OTAD model that is, or lends its bank to, `model`; None for a foreign one."""
    if isinstance(model, Knn):
        return model.model
    return model if isinstance(model, OTAD) else None


def backbone_of(model: nn.Module) -> Backbone | None:
    """The network inside a model, None for a foreign one."""
    defended = defended_of(model)
    if defended is not None:
        return defended.backbone
    return model if isinstance(model, Backbone) else None


def make_attack(
    name: str, model: nn.Module, *, train_x: Tensor | None = None, **options: Any
) -> Attack:
    """The attack of that name on a model; `options` are those of its class.

    `train_x` (N,*input_shape): the training inputs, for attacks that walk to them, where they
    cannot be told from the bank (see `Straight`).
    """
    check_choice(name, "attack", ATTACKS)
    if reason := _misfit(name, model, train_x):
        raise InputError(f"attack: expected one that fits the model, got {name}: {reason}")
    defended = defended_of(model)
    if train_x is not None:
        if defended is None:
            raise InputError("train_x: expected None, as the model has no bank, got inputs")
        check_training_inputs(defended, train_x)
        if name == "straight":
            options = {"train_x": train_x} | options
    if defended is not None and name in NEED_NETWORK:
        embed = defended.backbone.embed if defended.metric is None else defended.metric
        part = {"bpda": "network", "transfer": "source", "metric": "metric"}[name]
        options = {part: embed if name == "metric" else defended.backbone} | options
    known = tuple(inspect.signature(_CLASSES[name]).parameters)
    if unknown := [option for option in options if option not in known]:
        raise InputError(
            f"attack: expected options of {name}, which are {', '.join(known)}, "
            f"got {', '.join(unknown)}"
        )
    try:
        return _CLASSES[name](**options)
    except TypeError as error:  # an option of a type that its check cannot compare
        raise InputError(f"attack: expected options of {name}, got {options}: {error}") from error


def suite(
    model: nn.Module,
    preset: str,
    input_shape: Sequence[int],
    task: str,
    threat: LpBall | None = None,
    train_x: Tensor | None = None,
) -> tuple[list[Attack], dict[str, str]]:
    """The attacks of a preset, in order, and why others of it are missing, by name."""
    attacks: list[Attack] = []
    missing: dict[str, str] = {}
    for name, options in choices_of(model, preset):
        reason = _misfit(name, model, train_x) or _unsuited(name, input_shape, task, threat)
        if reason:
            missing[name] = reason
        else:
            attacks.append(make_attack(name, model, train_x=train_x, **options))
    return attacks, missing


def named_attacks(
    model: nn.Module,
    attacks: Sequence[str | Attack],
    input_shape: Sequence[int],
    task: str,
    threat: LpBall | None = None,
    train_x: Tensor | None = None,
) -> list[Attack]:
    """Attacks asked for one by one, in order: one that does not fit is refused, not left out."""
    chosen = []
    for attack in attacks:
        if isinstance(attack, str):
            made = make_attack(attack, model, train_x=train_x)
            if reason := _unsuited(attack, input_shape, task, threat):
                raise InputError(f"attack: expected one that fits, got {attack}: {reason}")
            attack = made
        elif not isinstance(attack, Attack):
            raise InputError(f"attacks: expected names or attacks, got {type(attack).__name__}")
        chosen.append(attack)
    return chosen


def _misfit(name: str, model: nn.Module, train_x: Tensor | None) -> str | None:
    """Why an attack cannot be made for a model, None where it can."""
    defended = defended_of(model)
    if name in NEED_NETWORK and defended is None:
        plain = "" if name == "metric" else "; on a plain network it is pgd"
        return f"it attacks by way of the network inside a defended model{plain}"
    if name in NEED_BANK and defended is None:
        return "it needs a model that answers from a bank of training points"
    if name in NEED_LINES and defended is not None and not knows_lines(defended):
        kind = type(defended.metric or defended.backbone).__name__
        return (
            f"it needs neighbors of inputs that are normalized alone, unlike those of {kind}; "
            "keys looks for them by gradient"
        )
    if name == "straight" and defended is not None and not knows_inputs(defended, train_x):
        kind = type(defended.backbone).__name__
        return f"training inputs cannot be told from what {kind} embeds; train_x gives them"
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed: pip install 'otad[attacks]'"
    return None


def _unsuited(
    name: str, input_shape: Sequence[int], task: str, threat: LpBall | None
) -> str | None:
    """Why an attack cannot be run on such inputs under such a threat, None where it can."""
    if name == "autoattack" and task != "classification":
        return "it attacks classifiers"
    if name in IMAGES_ONLY and len(input_shape) != 3:
        return f"it attacks images (channels, height, width), got inputs {tuple(input_shape)}"
    if name not in UNIT_BOX_ONLY or threat is None:
        return None
    if threat.bounds is None:
        return "it needs bounded inputs, as pixels are"
    if threat.scale is not None or threat.mutable is not None:
        return "it treats all features alike, which this threat does not"
    if threat.norm == "l2":
        try:
            check_windows(*input_shape[1:])
        except InputError as error:
            return str(error)
    return None
