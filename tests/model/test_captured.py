"""A CUDA graph may assume what it cannot read, but says whether it was true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import otad
from otad.checks import assuming, holds
from otad.cip.surrogate import CipNet
from otad.model import captured as module
from otad.model.captured import (
    CapturedModel,
    CapturedSearch,
    answer,
    captured,
    capturing,
    is_known,
    quick,
)

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
    assert [one.tolist() for one in conditions] == [[True, False]]
    assert not holds(torch.tensor(False))


@solvers
@torch.no_grad()
def test_the_answer_is_that_of_the_model(solver: str) -> None:
    model, x = model_of(points(60), solver), points(5, seed=1)
    outputs, is_right = answer(model, x)
    assert is_right.tolist() == [True] * 5
    assert torch.equal(outputs, model(x))
    of_net = answer(model.backbone, x)
    assert torch.equal(of_net[0], model.backbone(x))
    assert of_net[1] is None, "nothing is assumed"


@torch.no_grad()
@pytest.mark.parametrize("value", [1.5, -0.1])
def test_illegal_inputs_are_noticed(value: float) -> None:
    model, x = model_of(points(60)), points(5, seed=1)
    x[2, 3] = value
    assert answer(model, x)[1].tolist() == [True, True, False, True, True]


@torch.no_grad()
def test_neighbors_that_are_not_proved_are_noticed() -> None:
    equal = points(1).expand(30, 6)  # more points than the first shortlist has, at one distance
    model, x = model_of(torch.cat((equal, points(30, seed=2)))), points(3, seed=1)
    x[1] = equal[0]
    assert answer(model, x)[1].tolist() == [True, False, True]
    assert bool(model(x).isfinite().all())


def test_a_cpu_has_no_graphs() -> None:
    model, x = model_of(points(60)), points(5, seed=1)
    assert captured(model, x) is None
    with capturing(model):
        assert quick(model) is model


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs that do their steps again on the CPU; the sizes of those that were made."""
    sizes: list[int] = []

    def recorded(steps, device, pool=None):
        for step in steps:
            step()
        sizes.append(len(steps[0].__self__.x))
        return steps

    monkeypatch.setattr(module, "recorded", recorded)
    monkeypatch.setattr(module, "can_capture", lambda model: isinstance(model, otad.OTAD))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(module, "has_room", lambda device: True)
    return sizes


def slopes(model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of their squares."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    return outputs.detach(), torch.autograd.grad(outputs.square().sum(), x)[0]


def both_agree(one, two, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(x), two(x))
    for mine, theirs in zip(slopes(one, x), slopes(two, x), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_few_graphs_answer_batches_of_all_sizes(stand_in: list[int]) -> None:
    model = model_of(points(60))
    fast = CapturedModel(model)
    for round_ in range(6):
        for size in (1, 30, 64, 70, 200, 1100):
            both_agree(fast, model, points(size, seed=round_))
    assert sorted(stand_in) == [64, 64, 128, 128, 256, 256]  # with a gradient and without
    assert fast.turn > 0


def test_rows_for_which_an_assumption_fails_are_answered_again(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubted(model, x):
        outputs, is_right = answer(model, x)
        wrong = x[:, 0] > 0.5
        factor = torch.where(wrong, torch.nan, 1.0)[:, None]
        return outputs * factor, is_right & ~wrong

    monkeypatch.setattr(module, "answer", doubted)
    model = model_of(points(60))
    fast = CapturedModel(model)
    for seed in range(1, 7):
        both_agree(fast, model, points(20, seed=seed))
    assert len(stand_in) == 2


def test_an_attack_asks_again_once_an_assumption_has_failed(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubted(model, x):
        outputs, is_right = answer(model, x)
        wrong = x[:, 0] > 0.5
        return torch.where(wrong[:, None], torch.nan, outputs), is_right & ~wrong

    model, x = model_of(points(60)), points(70, seed=1)
    y, ball = model(x).argmax(1), otad.L2(0.3, bounds=(0.0, 1.0))
    attack, generator = otad.attacks.Apgd(steps=12), torch.Generator()
    with monkeypatch.context() as patch:
        patch.setattr(CapturedModel, "graph", lambda *given: None)
        expected = attack(model, x, y, ball, generator=generator.manual_seed(0))
    monkeypatch.setattr(module, "answer", doubted)
    found = attack(model, x, y, ball, generator=generator.manual_seed(0))
    assert len(stand_in) >= 1
    assert 0 < found.accuracy < 1
    assert not found.blind.any()
    for name in ("broken", "blind", "forwards", "backwards"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.inputs, expected.inputs)


def test_neighbors_in_a_bank_elsewhere_are_found_by_a_graph(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(points(60)), points(20, seed=1)
    fast = CapturedSearch(model, x)
    reads = []
    monkeypatch.setattr(model, "forward", lambda x: reads.append(len(x)) or model_of(points(60))(x))
    for seed, size in ((2, 20), (3, 20), (4, 7)):
        batch = points(size, seed=seed)
        torch.testing.assert_close(fast(batch), model_of(points(60))(batch))
    assert reads == [7]  # a batch of another size is answered in the usual way
    illegal = x.clone()
    illegal[3] = 1.5
    with pytest.raises(otad.InputError, match=r"1\.5"):
        fast(illegal)


def test_an_error_names_the_row_of_the_batch(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_checks(model, x):
        legal = (x <= 1).all(1)
        outputs, is_right = answer(model, torch.where(legal[:, None], x, 0.5))
        return outputs, is_right & legal

    monkeypatch.setattr(module, "answer", without_checks)
    model, x = model_of(points(60)), points(20, seed=1)
    fast = CapturedModel(model)
    with torch.no_grad():
        for _ in range(5):
            fast(x)
    assert stand_in
    x[13, 4] = 1.5
    with pytest.raises(otad.InputError) as expected:
        model(x)
    with pytest.raises(otad.InputError) as found, torch.no_grad():
        fast(x)
    assert str(found.value) == str(expected.value)


def test_a_gradient_may_come_after_other_batches(stand_in: list[int]) -> None:
    model, x = model_of(points(60)), points(20, seed=1)
    fast, expected = CapturedModel(model), slopes(model, x)[1]
    for _ in range(5):
        at = x.clone().requires_grad_()
        outputs = fast(at)
        fast(points(70, seed=2))
        fast(points(20, seed=3).requires_grad_())
        for _ in range(2):
            (gradient,) = torch.autograd.grad(outputs.square().sum(), at, retain_graph=True)
            torch.testing.assert_close(gradient, expected)
    assert stand_in


def test_a_model_that_no_graph_can_hold_answers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(module, "recorded", fail)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model, x = model_of(points(60)), points(20, seed=1)
    for has_room in (True, False):
        monkeypatch.setattr(module, "has_room", lambda device, free=has_room: free)
        fast = CapturedModel(model)
        for _ in range(6):
            both_agree(fast, model, x)


def test_a_model_is_captured_within_a_context(stand_in: list[int]) -> None:
    model, other = model_of(points(60)), model_of(points(50))
    with capturing(model):
        fast = quick(model)
        with capturing(model), capturing(other):
            assert quick(model) is fast
            assert isinstance(quick(other), CapturedModel)
        assert quick(other) is other
    assert quick(model) is model


def test_attacks_find_the_same_by_graphs(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = model_of(points(60)), points(70, seed=1)
    y, ball = model(x).argmax(1), otad.L2(0.3, bounds=(0.0, 1.0))
    attack = otad.attacks.Apgd(steps=12)
    fast = attack(model, x, y, ball, generator=torch.Generator().manual_seed(0))
    assert len(stand_in) >= 1
    monkeypatch.setattr(CapturedModel, "graph", lambda *given: None)
    slow = attack(model, x, y, ball, generator=torch.Generator().manual_seed(0))
    assert 0 < fast.accuracy < 1
    assert torch.equal(fast.broken, slow.broken)
    torch.testing.assert_close(fast.inputs, slow.inputs)
    assert torch.equal(fast.backwards, slow.backwards)


def test_the_model_itself_judges_what_an_attack_has_found(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(model, x):
        outputs, is_right = answer(model, x)
        return -outputs, is_right

    model, x = model_of(points(60)), points(70, seed=1)
    y, ball = model(x).argmax(1), otad.L2(1e-4, bounds=(0.0, 1.0))
    monkeypatch.setattr(module, "answer", lying)
    attack = otad.attacks.RandomNoise(draws=12)
    found = attack(model, x, y, ball, generator=torch.Generator().manual_seed(0))
    assert len(stand_in) >= 1
    assert found.accuracy == 1


def test_no_graph_holds_what_is_not_known() -> None:
    class Own(otad.OTAD):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model = model_of(points(60))
    assert is_known(model)
    assert is_known(model.backbone)
    assert not is_known(torch.nn.Linear(6, 3))
    with_hook = model_of(points(60))
    with_hook.backbone.register_forward_hook(lambda *given: None)
    assert not is_known(with_hook)
    model.__class__ = Own
    assert not is_known(model)


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
        with torch.enable_grad():
            for _ in range(module.USUAL_CALLS + 1):
                found, expected = slopes(fast, x)[1], slopes(model, x)[1]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
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
