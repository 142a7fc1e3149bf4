"""Who still stands, and with what."""

from __future__ import annotations

import torch
from torch import nn

from otad.attacks.base import Target
from otad.attacks.survivors import Survivors


def test_judged_by_the_model_remembered_by_gain() -> None:
    survivors = Survivors(Target(nn.Identity(), torch.tensor([0, 0, 1])), torch.zeros(3, 1))
    assert survivors.rows.tolist() == [0, 1, 2]
    first = torch.tensor([[2.0, 1.0], [1.0, 3.0], [0.0, 9.0]])
    standing = survivors.judge(torch.full((3, 1), 1.0), first, torch.arange(3))
    assert standing.tolist() == [True, False, True]
    assert survivors.rows.tolist() == [0, 2]
    second = torch.tensor([[0.0, 10.0], [2.0, 1.5]])  # a smaller gain, then a larger one
    survivors.judge(torch.full((2, 1), 2.0), second, torch.tensor([2, 0]))
    assert survivors.inputs.flatten().tolist() == [2.0, 1.0, 1.0]


def test_a_tie_that_breaks_is_better_than_one_that_does_not() -> None:
    """Equal logits have gain 0 both times; the first of the classes is the answer."""
    survivors = Survivors(Target(nn.Identity(), torch.tensor([1])), torch.zeros(1, 1))
    row = torch.tensor([0])
    survivors.judge(torch.full((1, 1), 1.0), torch.tensor([[0.0, 2.0, 2.0]]), row)
    assert survivors.rows.tolist() == [0]
    survivors.judge(torch.full((1, 1), 2.0), torch.tensor([[2.0, 2.0, 0.0]]), row)
    assert survivors.rows.tolist() == []
    assert float(survivors.inputs) == 2.0
