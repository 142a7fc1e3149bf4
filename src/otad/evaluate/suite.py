"""Attacks by name, and the suites of them an evaluation runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from otad.attacks import ATTACKS as ATTACKS
from otad.attacks import Attack, Knowledge, LpBall
from otad.attacks.adaptive.neighborhood import defended_of as defended_of
from otad.attacks.adaptive.neighborhood import knowledge_of
from otad.checks import check_choice
from otad.errors import InputError
from otad.evaluate.presets import PRESETS as PRESETS
from otad.evaluate.presets import Choice
from otad.nets import Backbone


def backbone_of(model: nn.Module) -> Backbone | None:
    """The network inside a model, None if there is none of this library."""
    defended = defended_of(model)
    if defended is not None:
        return defended.backbone
    return model if isinstance(model, Backbone) else None


def make_attack(
    name: str, model: nn.Module, *, train_x: Tensor | None = None, **options: Any
) -> Attack:
    """The attack of that name on a model; `options` are those of its class.

    `train_x` (N,*input_shape): the training inputs, for attacks that move towards them, where they
    cannot be computed from the bank (see `Straight`).
    """
    check_choice(name, "attack", tuple(ATTACKS))
    return _made(name, knowledge_of(model, train_x), options)


def choices_of(known: Knowledge, preset: str) -> list[Choice]:
    """The attacks of a preset for the kind of keys a model has."""
    check_choice(preset, "preset", tuple(PRESETS))
    return [one for one in PRESETS[preset] if one.affine in (None, known.affine_keys)]


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
    known = knowledge_of(model, train_x)
    for name, options, _ in choices_of(known, preset):
        if reason := ATTACKS[name].misfit(known, input_shape, task, threat):
            missing[name] = reason
        else:
            attacks.append(_made(name, known, options))
    return attacks, missing


def named_attacks(
    model: nn.Module,
    attacks: Sequence[str | Attack],
    input_shape: Sequence[int],
    task: str,
    threat: LpBall | None = None,
    train_x: Tensor | None = None,
) -> list[Attack]:
    """Attacks chosen one by one, in order: one that does not fit is refused, not left out."""
    known, chosen = knowledge_of(model, train_x), []
    for attack in attacks:
        if isinstance(attack, str):
            check_choice(attack, "attack", tuple(ATTACKS))
            attack = _made(attack, known, {}, input_shape, task, threat)
        elif not isinstance(attack, Attack):
            raise InputError(f"attacks: expected names or attacks, got {type(attack).__name__}")
        chosen.append(attack)
    return chosen


def _made(name: str, known: Knowledge, options: Mapping[str, Any], *inputs: Any) -> Attack:
    if reason := ATTACKS[name].misfit(known, *inputs):
        raise InputError(f"attack: expected one that fits, got {name}: {reason}")
    return ATTACKS[name].for_model(known, **options)
