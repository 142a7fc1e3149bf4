"""A quick look at a sum must not decide what only the entries can."""

from __future__ import annotations

import pytest
import torch

from otad.checks import check_finite
from otad.errors import InputError


@pytest.mark.parametrize(
    "value",
    [
        torch.full((3, 4), 3e38),  # the sum overflows
        torch.full((70, 2), 6e4, dtype=torch.float16),
        torch.tensor([3e38, 3e38, -3e38]),
        torch.zeros(0),
        torch.arange(5),
        torch.ones(2, requires_grad=True),
    ],
)
def test_finite_values_pass(value: torch.Tensor) -> None:
    check_finite(value, "value")


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("size", [0.0, 3e38])
def test_one_entry_is_named(bad: str, size: float) -> None:
    value = torch.full((3, 4), size)
    value[1, 2] = float(bad)
    value[2, 3] = -float(bad)  # infinities may cancel in the sum
    with pytest.raises(InputError, match=rf"x: .*{bad} at \(1, 2\)"):
        check_finite(value, "x")
