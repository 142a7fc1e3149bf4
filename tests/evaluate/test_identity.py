"""Two models are one only if everything that tells them apart is the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from otad.attacks import Attack, MetricAttack, Pgd, Transfer
from otad.attacks.adaptive.straight import Straight
from otad.attacks.base import Target
from otad.evaluate.code_prints import class_print
from otad.evaluate.identity import model_card, settings_of
from otad.threat import LpBall


class Tempered(nn.Module):
    """Its weights and its name do not tell how it answers: a plain number does."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layer(x) / self.temperature
        return answer


def tempered(temperature: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tempered(temperature)


def test_a_plain_number_of_a_model_is_part_of_its_fingerprint() -> None:
    first, again, other = (model_card(tempered(value)) for value in (1.0, 1.0, -1.0))
    assert first["fingerprint"] == again["fingerprint"]
    assert first["fingerprint"] != other["fingerprint"]


def test_training_inputs_are_known_by_their_numbers_also_those_of_inference_mode() -> None:
    """Such a tensor does not count its changes, so it is read each time."""

    def known(train_x: Tensor) -> object:
        return settings_of(Straight(train_x=train_x))["train_x"]

    plain = torch.arange(12.0).view(4, 3)
    with torch.inference_mode():
        inside = torch.arange(12.0).view(4, 3)
    assert inside.is_inference()
    assert known(plain) == known(inside)
    first = known(plain)
    with torch.inference_mode():
        inside[0] = 7.0
    plain[0] = 7.0
    assert first != known(plain) == known(inside)


NET = """
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return {answer}
"""


def net_from(source: str) -> nn.Module:
    """As in a notebook, where code has no file."""
    names: dict[str, type[nn.Module]] = {"__name__": "notebook"}  # type: ignore[dict-item]
    exec(source, names)
    return names["Net"]()


def test_a_model_with_another_forward_is_another_model_in_a_notebook() -> None:
    first, again, edited = (
        model_card(net_from(source.format(answer=answer)))["fingerprint"]
        for source, answer in ((NET, "2 * x"), ("\n" + NET, "2 * x"), (NET, "3 * x"))
    )
    assert first == again != edited


def test_a_model_with_another_forward_is_another_model_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for answer in ("2 * x", "3 * x"):
        (tmp_path / "own_net.py").write_text(NET.format(answer=answer))
        module = importlib.import_module("own_net")
        found.append(model_card(module.Net())["fingerprint"])
        monkeypatch.delitem(sys.modules, "own_net")
        importlib.invalidate_caches()
    assert found[0] != found[1]


class Holder(nn.Module):
    """Keeps a value where no state dict shows it."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._value = value
        if isinstance(value, Tensor):
            self._value = None
            self.register_buffer("hidden", value, persistent=False)


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (0.5, 0.5, 2.0),
        ([1, 2], [1, 2], [1, 3]),
        (np.arange(3000), np.arange(3000), np.arange(3000) // 2 * 2),
        (torch.arange(3000), torch.arange(3000), torch.arange(3000) // 2 * 2),
        (lambda x: x + 1, lambda x: x + 1, lambda x: x + 2),
    ],
    ids=["number", "list", "array", "buffer", "function"],
)
def test_what_a_foreign_model_holds_is_part_of_its_fingerprint(value, same, other) -> None:
    first, again, third = (model_card(Holder(it))["fingerprint"] for it in (value, same, other))
    assert first == again != third


class Shift(Attack):
    """Keeps its setting to itself."""

    name = "shift"
    family = "random"

    def __init__(self, length: float) -> None:
        self._length = length

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return x + self._length


class LongShift(Shift):
    """What it does is told by the class it is made from."""

    name = "long_shift"


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


def linear(factor: float) -> nn.Linear:
    layer = nn.Linear(2, 2)
    for weight in layer.parameters():
        nn.init.constant_(weight, factor)
    return layer


def through(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)


@pytest.mark.parametrize(
    "attack",
    [
        Shift,
        lambda factor: Transfer(nn.Identity(), inner=Shift(factor)),
        lambda factor: MetricAttack(metric=scaled(factor)),
        lambda factor: MetricAttack(metric=partial(torch.mul, other=factor)),
        lambda factor: MetricAttack(metric=linear(factor).forward),
        lambda factor: MetricAttack(metric=through(linear(factor))),
    ],
    ids=["private", "inner", "lambda", "partial", "method", "closure"],
)
def test_attacks_that_do_other_things_have_other_settings(attack) -> None:
    first, again, other = (settings_of(attack(factor)) for factor in (1.0, 1.0, 2.0))
    assert first == again != other


def test_functions_of_one_name_are_told_apart() -> None:
    first, second = MetricAttack(metric=lambda x: x), MetricAttack(metric=lambda x: -x)
    assert settings_of(first) != settings_of(second)


def test_the_code_of_an_attack_is_that_of_all_classes_of_the_users() -> None:
    assert class_print(Pgd) == {}
    assert {name.rpartition(".")[2] for name in class_print(LongShift)} == {"LongShift", "Shift"}
