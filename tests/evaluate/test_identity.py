"""Two models are one only if everything that tells them apart is the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from otad.attacks.adaptive.straight import Straight
from otad.evaluate.identity import model_card, settings_of


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
