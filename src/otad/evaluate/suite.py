"""Attacks by name, and the suites of attacks that an evaluation runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from otad.attacks import ATTACKS as ATTACKS
from otad.attacks import Attack, Knowledge, LpBall
from otad.attacks.adaptive.neighborhood import defended_of as defended_of
from otad.attacks.adaptive.neighborhood import knowledge_of
from otad.attacks.needs import Setting
from otad.baselines import Purified
from otad.checks import check_choice, require
from otad.errors import InputError
from otad.nets import Backbone


class Choice(NamedTuple):
    """The name of an attack and its options; `affine`: only for models whose keys are (True) or are
    not (False) affine in the input, so that straight lines lead to the neighbors; `groups`: only
    for threats with categories."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    affine: bool | None = None
    groups: bool = False


# Strong and cheap first: expensive attacks skip the examples that these break. Attacks that know
# nothing about the model come late and show what the others have missed (see the flags).
_STANDARD = [
    Choice("categories", groups=True),
    Choice("straight"),
    Choice("keys", {"restarts": 3}, affine=False),
    Choice("soft_knn"),
    Choice("metric", {"steps": 50, "restarts": 3}, affine=False),
    Choice("bisector", affine=True),
    Choice("region", affine=True),
    Choice("pull", affine=True),
    Choice("pgd"),
    Choice("apgd", {"restarts": 3, "targets": 3}),
    Choice("bpda"),
    Choice("metric", {"steps": 20}, affine=True),
    Choice("transfer"),
    Choice("noise"),
    Choice("square", {"queries": 1000}),
    Choice("random_search", {"queries": 500}),
    Choice("pixle"),
]
_QUICK_KEYS = {"steps": 20, "targets": 2, "temperatures": (0.1,), "restarts": 1, "polish": 20}
PRESETS = {
    "quick": [
        Choice("categories", {"beam": 2}, groups=True),
        Choice("straight", {"points": 12}),
        Choice("keys", _QUICK_KEYS, affine=False),
        Choice("soft_knn", {"temperatures": (0.1, 0.01), "steps": 20}),
        Choice("metric", {"steps": 20}, affine=False),
        Choice("region", {"rounds": 1}, affine=True),
        Choice("pgd", {"steps": 20, "targets": 3}),
        Choice("bpda", {"steps": 20}),
        Choice("transfer"),
        Choice("noise", {"draws": 20}),
        Choice("square", {"queries": 200}),
        Choice("random_search", {"queries": 200}),
    ],
    "standard": _STANDARD,
    "full": [*_STANDARD, Choice("ngopt"), Choice("autoattack")],
}


def backbone_of(model: nn.Module) -> Backbone | None:
    """Return the network inside a model, or None if it has no network of this library."""
    if isinstance(model, Purified):
        return model.net
    inside = getattr(defended_of(model), "backbone", model)
    return inside if isinstance(inside, Backbone) else None


def make_attack(
    name: str, model: nn.Module, *, train_x: Tensor | None = None, **options: Any
) -> Attack:
    """Make the attack of that name for a model.

    Parameters
    ----------
    name : str
        A name of `otad.attacks.ATTACKS`.
    model : Module
        The model to attack. Adaptive attacks need a defended model.
    train_x : Tensor (N, *input_shape), optional
        The training inputs, if they cannot be computed from the bank.
    **options
        Options of the attack's class.

    Raises
    ------
    InputError
        If the attack does not exist or does not fit the model.

    Examples
    --------
    >>> import otad
    >>> from otad.evaluate import make_attack
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> make_attack("pgd", net, steps=5).name
    'pgd'
    """
    return _made(name, knowledge_of(model, train_x), None, **options)


def _made(
    attack: str | Attack, known: Knowledge, setting: Setting | None, **options: Any
) -> Attack:
    if isinstance(attack, Attack):
        return attack
    require(isinstance(attack, str), "attacks", "names or attacks", type(attack).__name__)
    check_choice(attack, "attack", tuple(ATTACKS))
    if reason := ATTACKS[attack].misfit(known, setting):
        raise InputError(f"attack: expected one that fits, got {attack}: {reason}")
    return ATTACKS[attack].for_model(known, **options)


def suite(
    model: nn.Module,
    attacks: str | Sequence[str | Attack],
    input_shape: Sequence[int],
    task: str,
    threat: LpBall | None = None,
    train_x: Tensor | None = None,
) -> tuple[list[Attack], dict[str, str]]:
    """Return the attacks of a preset, in order, and why others of it are missing, by name. Attacks
    that are chosen one by one are never left out: one that does not fit is refused."""
    known, setting = knowledge_of(model, train_x), Setting(input_shape, task, threat)
    if not isinstance(attacks, str):
        chosen = [_made(attack, known, setting) for attack in attacks]
        names = [attack.name for attack in chosen]
        unique = names and len(set(names)) == len(names)
        require(unique, "attacks", "at least one, each name once", names)
        return chosen, {}
    expected = f"one of {', '.join(PRESETS)}, or a list of names of attacks"
    require(attacks in PRESETS, "attacks", expected, repr(attacks))
    choices = [one for one in PRESETS[attacks] if one.affine in (None, known.affine_keys)]
    if threat is None or threat.groups is None:
        choices = [one for one in choices if not one.groups]
    reasons = {one.name: ATTACKS[one.name].misfit(known, setting) for one in choices}
    fitting = [one for one in choices if reasons[one.name] is None]
    made = [ATTACKS[one.name].for_model(known, **one.options) for one in fitting]
    return made, {name: reason for name, reason in reasons.items() if reason is not None}
