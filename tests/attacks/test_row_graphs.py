"""Graphs compute for each example what the functions that they run compute."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from attacks.bank_models import BOX, blobs, local_model
from torch import Tensor, nn

from otad.attacks import L2, Attack, Linf, LpBall, RandomNoise, RandomSearch, Square, base
from otad.attacks import row_graphs as module
from otad.attacks.adaptive import Keys, Pull, Region, SoftKnn
from otad.attacks.apgd import Apgd
from otad.attacks.pgd import Bpda, Pgd
from otad.attacks.row_graphs import (
    RowGraphs,
    graphs_for,
    graphs_of_rows,
    repeated,
    row_wise,
    sharing_graphs,
)
from otad.evaluate import evaluate

DEVICES = ["cpu"] + ["cuda:0"] * torch.cuda.is_available()


def again(steps, device, pool):
    for step in steps:
        step()
    return steps


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, and a CPU with graphs that run their steps again."""
    if request.param == "cpu":
        monkeypatch.setattr(module, "recorded", again)
        monkeypatch.setattr(module, "has_room", lambda device: True)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return torch.device(request.param)


@row_wise
def scaled(x: Tensor, y: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
    return factor * x.cumsum(1), x.sum(1) > y


def test_graphs_of_few_sizes_answer_any_number_of_rows(device: torch.device) -> None:
    graphs, found = RowGraphs(device), []
    with graphs_of_rows(graphs):
        for turn in range(40):
            generator = torch.Generator().manual_seed(turn)
            count = int(torch.randint(1, 200, (), generator=generator))
            given = (
                torch.rand(count, 3, generator=generator),
                torch.rand(count, generator=generator),
            )
            factor = 1.0 + turn % 2
            got = scaled(*(one.to(device).requires_grad_() for one in given), factor=factor)
            found.append((got, (factor * given[0].cumsum(1), given[0].sum(1) > given[1])))
        empty = torch.zeros(0, 3, device=device)
        assert scaled(empty, empty[:, 0], factor=1.0)[0].shape == (0, 3)
    for got, expected in found:  # at the end: no graph has written into an earlier result
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)
    made = [graph for graph in graphs._graphs.values() if graph is not None]
    assert {len(graph.inputs[0]) for graph in made} == {64, 128, 256}
    assert len(made) == 6, "one for each size and factor"


def test_what_cannot_be_a_graph_runs_as_it_is(device: torch.device, monkeypatch) -> None:
    made: list[int] = []

    def refused(steps, device, pool):
        made.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(module, "recorded", refused)
    x = torch.rand(5, 3, device=device)
    with graphs_of_rows(RowGraphs(device)):
        for _ in range(10):
            assert torch.equal(scaled(x, x[:, 0], factor=2.0)[0], 2 * x.cumsum(1))
        monkeypatch.setattr(module, "MOST_NUMBERS", 10)
        for _ in range(10):
            scaled(x, x[:, 0], factor=3.0)
    assert made == [1], "it is tried once, and not at all for large tensors"


@row_wise
def read(x: Tensor) -> Tensor:
    return x * float(x[0, 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_after_a_graph_that_fails_the_gpu_works_as_before() -> None:
    x, before = torch.rand(5, 3, device="cuda"), torch.cuda.current_stream()
    graphs = RowGraphs(x.device)
    with graphs_of_rows(graphs):
        for _ in range(10):
            assert torch.equal(read(x), x * float(x[0, 0]))
    assert [*graphs._graphs.values()] == [None]
    assert torch.cuda.current_stream() == before
    assert torch.rand(3, device="cuda").shape == (3,)


class Far(nn.Module):
    """A classifier of tiny images by their mean and the weights of its seed."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(4, 36, generator=torch.Generator().manual_seed(0))
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.flatten(1) - 0.5) @ self.weights.T)


NET = Far().eval()
IMAGES: list[Attack] = [
    Pgd(steps=12, targets=2),
    Pgd(steps=12, normalize=False, step_size=0.5),
    Pgd(steps=8, loss="dlr"),
    Apgd(steps=25, restarts=2, targets=2),
    Apgd(steps=25, loss="cross_entropy"),
    Bpda(network=NET, steps=12),
    RandomNoise(draws=12),
    RandomSearch(queries=40),
    Square(queries=60),
]
BANKS: list[Attack] = [
    SoftKnn((0.1, 0.01), 12, 1, polish=12),
    Pull(classes=1, sizes=(1, 3), steps=12, polish=12),
    Region(singles=6, opponents=4, classes=1, sizes=(2,), polish=0),
    Keys(steps=12, targets=1, restarts=1, polish=12),
]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, attack: Attack, model: nn.Module, x: Tensor, y: Tensor,
    ball: LpBall, tolerance: float = math.inf,
) -> None:  # fmt: skip
    """Attack with graphs and without, and check that a graph ran and that nothing else changed."""
    kept: list[RowGraphs] = []

    class Kept(RowGraphs):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            kept.append(self)

    monkeypatch.setattr(module, "RowGraphs", Kept)
    found = []
    for has_graphs in (False, True):
        monkeypatch.setattr(base, "has_kernel", lambda ball, x, answer=has_graphs: answer)
        generator = torch.Generator().manual_seed(0)
        found.append(attack(model, x, y, ball, generator=generator, tolerance=tolerance))
    plain, graphed = found
    assert any(graph is not None for graph in kept[0]._graphs.values())
    assert bool(plain.broken.any()), "the attack does something"
    assert torch.equal(plain.broken, graphed.broken)
    assert torch.equal(plain.forwards, graphed.forwards)
    assert torch.equal(plain.backwards, graphed.backwards)
    torch.testing.assert_close(graphed.inputs, plain.inputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(graphed.gain, plain.gain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ball", [L2(0.35, BOX), Linf(0.06, BOX)], ids=["l2", "linf"])
@pytest.mark.parametrize("attack", IMAGES, ids=lambda one: f"{one.name}-{one.family}")
def test_attacks_on_images_find_the_same_with_graphs(device, monkeypatch, attack, ball) -> None:
    model = NET.to(device)
    x = torch.rand(90, 1, 6, 6, generator=torch.Generator().manual_seed(1)).to(device)
    both_ways(monkeypatch, attack, model, x, model(x).argmax(1), ball)


@pytest.mark.parametrize("attack", BANKS, ids=lambda one: one.name)
def test_attacks_on_banks_find_the_same_with_graphs(device, monkeypatch, attack) -> None:
    model = local_model(neighbors=3).to(device)
    x = blobs(90, 3)[0].to(device)
    both_ways(monkeypatch, attack, model, x, model(x).argmax(1), L2(0.2, BOX))


@pytest.mark.parametrize(
    "attack",
    [Apgd(steps=20), SoftKnn((0.1,), 20, 1, polish=0), Pull(sizes=(3,), steps=12, polish=0)],
    ids=lambda one: one.name,
)
def test_regression_finds_the_same_with_graphs(device, monkeypatch, attack) -> None:
    model = local_model(neighbors=3, task="regression").to(device)
    x = blobs(90, 3)[0].to(device)
    both_ways(monkeypatch, attack, model, x, model(x).detach(), L2(0.2, BOX), 0.05)


def test_a_repeated_function_is_a_graph_for_one_shape(device: torch.device) -> None:
    def summed(x: Tensor) -> Tensor:
        return x.cumsum(0)  # across rows

    x = torch.rand(7, 3, device=device)
    assert repeated(summed, x, 40) is summed
    graphs = RowGraphs(device)
    with graphs_of_rows(graphs):
        assert repeated(summed, x, 3) is summed, "a graph takes longer to make"
        fast = repeated(summed, x, 40)
        assert fast is not summed
        for seed in range(3):
            moved = torch.rand(7, 3, generator=torch.Generator().manual_seed(seed)).to(device)
            torch.testing.assert_close(fast(moved), summed(moved))
        assert repeated(summed, x[:0], 40) is summed
    assert not graphs._graphs, "its memory is its own"


def test_an_evaluation_makes_graphs_once_for_each_ball(device, monkeypatch) -> None:
    made: list[torch.device] = []

    class Counted(RowGraphs):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(device)

    monkeypatch.setattr(module, "RowGraphs", Counted)
    monkeypatch.setattr(base, "has_kernel", lambda ball, x: True)
    x = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(1)).to(device)
    attacks = [Pgd(steps=2), Apgd(steps=2), RandomNoise(draws=2)]
    how = {"eps": [0.1, 0.2], "attacks": attacks, "flags": False, "batch_size": 5}
    evaluate(NET.to(device), x, NET.to(device)(x).argmax(1), L2(0.1, BOX), **how)
    assert len(made) == 3, "for the examples themselves, and for each eps"


def test_attacks_in_the_same_ball_share_graphs(device: torch.device) -> None:
    one, other = L2(0.2, BOX), L2(0.3, BOX)
    with sharing_graphs():
        first = graphs_for(device, one)
        assert graphs_for(device, one) is first
        with sharing_graphs():
            assert graphs_for(device, one) is not first
        assert graphs_for(device, one) is first
        kept = weakref.ref(first)
        del first
        graphs_for(device, other)
        assert kept() is None, "they take memory"
    assert graphs_for(device, one) is not graphs_for(device, one)
