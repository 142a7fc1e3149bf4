"""Attacks by name, and the suites of them an evaluation runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

from otad.attacks import Attack, LpBall
from otad.attacks.adaptive import Bisector, Region, SoftKnn, Straight
from otad.attacks.adaptive.neighborhood import knows_lines
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
from otad.defense import OTAD
from otad.errors import InputError
from otad.nets import Backbone

Choice = tuple[str, dict[str, Any]]
"""The name of an attack and its options."""

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
    "square": Square,
    "random_search": RandomSearch,
    "pixle": Pixle,
    "ngopt": NgOpt,
    "autoattack": AutoAttackSuite,
}
ATTACKS = tuple(_CLASSES)

NEED_NETWORK = ("bpda", "transfer", "metric")
NEED_BANK = ("soft_knn", "straight", "bisector", "region")
NEED_PLAIN_EMBEDDING = ("straight", "bisector", "region")
IMAGES_ONLY = ("square", "autoattack", "pixle")
UNIT_BOX_ONLY = ("square", "autoattack")
PACKAGES = {"square": "pyautoattack", "autoattack": "pyautoattack", "ngopt": "nevergrad"}

# Strong and cheap first: what they break, the dear ones are spared. Attacks that know nothing of
# the model come late, so that they show what those that know it have missed (see the flags).
_STANDARD: list[Choice] = [
    ("straight", {}),
    ("soft_knn", {}),
    ("bisector", {}),
    ("region", {}),
    ("pgd", {}),
    ("apgd", {"restarts": 3}),
    ("bpda", {}),
    ("metric", {"steps": 20}),
    ("transfer", {}),
    ("noise", {}),
    ("square", {"queries": 1000}),
    ("random_search", {"queries": 500}),
    ("pixle", {}),
]
PRESETS: dict[str, list[Choice]] = {
    "quick": [
        ("straight", {"points": 12}),
        ("soft_knn", {"temperatures": (0.1, 0.01), "steps": 20}),
        ("region", {"rounds": 1}),
        ("pgd", {"steps": 20}),
        ("bpda", {"steps": 20}),
        ("transfer", {}),
        ("noise", {"draws": 20}),
        ("square", {"queries": 200}),
        ("random_search", {"queries": 200}),
    ],
    "standard": _STANDARD,
    "full": [*_STANDARD, ("ngopt", {}), ("autoattack", {})],
}


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


def make_attack(name: str, model: nn.Module, **options: Any) -> Attack:
    """The attack of that name on a model; `options` are those of its class."""
    check_choice(name, "attack", ATTACKS)
    if reason := _misfit(name, model):
        raise InputError(f"attack: expected one that fits the model, got {name}: {reason}")
    defended = defended_of(model)
    if defended is not None and name in NEED_NETWORK:
        part = {"bpda": "network", "transfer": "source", "metric": "metric"}[name]
        options = {part: defended.locate if name == "metric" else defended.backbone} | options
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
) -> tuple[list[Attack], dict[str, str]]:
    """The attacks of a preset, in order, and why others of it are missing, by name."""
    attacks: list[Attack] = []
    missing: dict[str, str] = {}
    for name, options in PRESETS[check_choice(preset, "preset", tuple(PRESETS))]:
        reason = _misfit(name, model) or _unsuited(name, input_shape, task, threat)
        if reason:
            missing[name] = reason
        else:
            attacks.append(make_attack(name, model, **options))
    return attacks, missing


def named_attacks(
    model: nn.Module,
    attacks: Sequence[str | Attack],
    input_shape: Sequence[int],
    task: str,
    threat: LpBall | None = None,
) -> list[Attack]:
    """Attacks asked for one by one, in order: one that does not fit is refused, not left out."""
    chosen = []
    for attack in attacks:
        if isinstance(attack, str):
            made = make_attack(attack, model)
            if reason := _unsuited(attack, input_shape, task, threat):
                raise InputError(f"attack: expected one that fits, got {attack}: {reason}")
            attack = made
        elif not isinstance(attack, Attack):
            raise InputError(f"attacks: expected names or attacks, got {type(attack).__name__}")
        chosen.append(attack)
    return chosen


def _misfit(name: str, model: nn.Module) -> str | None:
    """Why an attack cannot be made for a model, None where it can."""
    defended = defended_of(model)
    if name in NEED_NETWORK and defended is None:
        plain = "" if name == "metric" else "; on a plain network it is pgd"
        return f"it attacks by way of the network inside a defended model{plain}"
    if name in NEED_BANK and defended is None:
        return "it needs a model that answers from a bank of training points"
    if name in NEED_PLAIN_EMBEDDING and defended is not None and not knows_lines(defended):
        kind = type(defended.metric or defended.backbone).__name__
        return f"it needs neighbors of inputs that are normalized alone, unlike those of {kind}"
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
