"""NGOpt on the Carlini-Wagner loss: nevergrad's own candidates, one batch a step, closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attacks.linear_models import (
    Linear,
    inner_points,
)

from otad.attacks import L2
from otad.attacks.library_attacks import NgOpt, _losses, _Optimizers

nevergrad = pytest.importorskip("nevergrad", reason="needs the extra attacks")


@pytest.mark.parametrize(("dimension", "chosen"), [(3, "CMA"), (50, "MetaModelOnePlusOne")])
def test_the_candidates_are_those_of_ngopt_itself(dimension, chosen) -> None:
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=0.2)
    space.random_state = np.random.RandomState(5)
    theirs = nevergrad.optimizers.NGOpt(space, budget=850)
    assert theirs.optim.name == chosen
    ours = _Optimizers((dimension, 850, 0.2), {0: 5})
    for _ in range(70):
        candidate, own = theirs.ask(), ours.ask([0])
        np.testing.assert_array_equal(candidate.value, own[0])
        loss = float(((candidate.value - 0.3) ** 2).sum())
        theirs.tell(candidate, loss)
        ours.tell({0: loss})


def test_several_processes_find_what_one_finds() -> None:
    x = inner_points(5, (64,))
    model = Linear((64,))
    y = model(x).argmax(1)
    results = [
        NgOpt(budget=12, processes=processes)(
            model, x, y, L2(0.15), generator=torch.Generator().manual_seed(3)
        )
        for processes in (1, 2)
    ]
    assert torch.equal(results[0].inputs, results[1].inputs)
    assert torch.equal(results[0].forwards, results[1].forwards)


def test_the_loss_is_that_of_carlini_and_wagner() -> None:
    """By hand: margins 1 and 3 either way, steps of squared length 5 and 0.25."""
    outputs = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 4.0]])
    step = torch.tensor([[1.0, 2.0], [0.0, 0.5]])
    assert _losses(outputs, torch.tensor([0, 1]), step) == [5.0, 0.25]
    assert _losses(outputs, torch.tensor([1, 2]), step) == [10 * 1 + 5, 10 * 3 + 0.25]
    assert _losses(torch.tensor([3.0]), torch.tensor([5.5]), step[:1]) == [-2.5]
