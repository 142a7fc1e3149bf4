"""The losses against plain formulas, and against each other."""

from __future__ import annotations

import math

import pytest
import torch

from otad.attacks.base import margin
from otad.attacks.objectives import LOSSES, cross_entropy, dlr, loss_for, squared_error
from otad.errors import InputError

LOGITS = torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.0, 5.0, 4.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([0, 2])


def test_closed_forms() -> None:
    assert margin(LOGITS, Y).tolist() == [-0.5, 1.0]
    expected = torch.tensor([-0.5 / 2.0, 1.0 / 4.0], dtype=torch.float64)
    torch.testing.assert_close(dlr(LOGITS, Y), expected)
    shares = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)
    torch.testing.assert_close(cross_entropy(LOGITS, Y), -shares[[0, 1], Y].log())
    values = torch.tensor([1.0, -2.0])
    assert squared_error(values, torch.tensor([3.0, -2.0])).tolist() == [4.0, 0.0]


def test_dlr_does_not_see_scale_and_shift() -> None:
    torch.testing.assert_close(dlr(7 * LOGITS - 3, Y), dlr(LOGITS, Y))


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_are_those_of_finite_differences(name, generator) -> None:
    logits = torch.randn(20, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (20,), generator=generator)
    assert torch.autograd.gradcheck(lambda logits: LOSSES[name](logits, y), logits)


def test_only_the_margin_is_never_flat() -> None:
    """A model that is very sure: the softmax has no gradient left in float32."""
    logits = torch.tensor([[200.0, 0.0, -1.0]], requires_grad=True)
    y = torch.tensor([0])
    (flat,) = torch.autograd.grad(cross_entropy(logits, y).sum(), logits)
    (steep,) = torch.autograd.grad(margin(logits, y).sum(), logits)
    assert not flat.any()
    assert steep.tolist() == [[-1.0, 1.0, 0.0]]


def test_choice_of_loss() -> None:
    assert loss_for("dlr", Y) is dlr
    assert loss_for("dlr", torch.ones(2)) is squared_error
    with pytest.raises(InputError, match=r"loss.*hinge"):
        loss_for("hinge", Y)
    with pytest.raises(InputError, match=r"loss.*dlr.*3.*2"):
        dlr(LOGITS[:, :2], torch.tensor([0, 1]))


def test_dlr_of_equal_logits_is_a_number() -> None:
    assert math.isfinite(float(dlr(torch.zeros(1, 3), torch.tensor([0]))))
