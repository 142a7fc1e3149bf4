"""A CUDA graph may assume what it cannot read, but says whether it was true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import otad
from otad.checks import assuming, holds
from otad.cip.surrogate import CipNet
from otad.model.captured import CapturedModel, answer, captured

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def points(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 6, generator=torch.Generator().manual_seed(seed))


def model_of(inputs: Tensor, solver: str = "exact") -> otad.OTAD:
    torch.manual_seed(0)
    net = otad.nets.fc_resnet((6,), 3, blocks=1, hidden=8, bounds=(0.0, 1.0)).to(inputs.device)
    labels = torch.arange(len(inputs), device=inputs.device) % 3
    model = otad.defend(net, inputs, labels, n_neighbors=4, smoothness=20.0)
    if solver == "exact":
        return model
    return model.replace(solver=CipNet(6, 4, width=8, blocks=1, heads=2).to(inputs.device))


solvers = pytest.mark.parametrize("solver", ["exact", "CIP-net"])


def test_conditions_are_collected_instead_of_read() -> None:
    assert holds(torch.tensor([True, True]))
    assert not holds(torch.tensor([True, False]))
    with assuming() as conditions:
        assert holds(torch.tensor([True, False]))
    assert [bool(one) for one in conditions] == [False]
    assert not holds(torch.tensor(False))


@solvers
@torch.no_grad()
def test_the_answer_is_that_of_the_model(solver: str) -> None:
    model, x = model_of(points(60), solver), points(5, seed=1)
    outputs, is_proved = answer(model, x)
    assert bool(is_proved)
    assert torch.equal(outputs, model(x))
    assert torch.equal(answer(model.backbone, x)[0], model.backbone(x))


@torch.no_grad()
@pytest.mark.parametrize("value", [1.5, -0.1])
def test_illegal_inputs_are_noticed(value: float) -> None:
    model, x = model_of(points(60)), points(5, seed=1)
    x[2, 3] = value
    assert not bool(answer(model, x)[1])


@torch.no_grad()
def test_neighbors_that_are_not_proved_are_noticed() -> None:
    equal = points(1).expand(30, 6)  # more points than the first shortlist has, at one distance
    model, x = model_of(torch.cat((equal, points(30, seed=2)))), points(3, seed=1)
    x[1] = equal[0]
    assert not bool(answer(model, x)[1])
    assert bool(model(x).isfinite().all())


def test_a_cpu_has_no_graphs() -> None:
    x = points(5, seed=1)
    assert captured(model_of(points(60)), x) is None


@needs_cuda
@solvers
@pytest.mark.parametrize("size", [10, 60, 3000])  # all are compared, or some, or groups of them
@torch.no_grad()
def test_a_graph_answers_like_the_model(size: int, solver: str) -> None:
    model = model_of(points(size).cuda(), solver)
    batches = [points(20, seed=seed).cuda() for seed in range(1, 4)]
    fast = captured(model, batches[0])
    assert isinstance(fast, CapturedModel)
    for x in (*batches, batches[0][:7]):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    for value, reason in ((2.0, "bounds"), (torch.nan, "finite")):
        wrong = batches[0].clone()
        wrong[3, 1] = value
        with pytest.raises(otad.InputError, match=reason):
            fast(wrong)
    torch.testing.assert_close(fast(batches[1]), model(batches[1]), rtol=1e-5, atol=1e-6)


@needs_cuda
def test_predictions_do_not_depend_on_the_graph() -> None:
    model, x = model_of(points(3000).cuda()), points(205, seed=1).cuda()
    with torch.no_grad():
        torch.testing.assert_close(
            otad.predict(model, x, batch_size=20), model(x), rtol=1e-5, atol=1e-6
        )
        net = otad.predict(model.backbone, x, batch_size=20)
        torch.testing.assert_close(net, model.backbone(x), rtol=1e-5, atol=1e-6)
