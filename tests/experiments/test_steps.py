"""The steps are what the model does: the same calls in the same order, and all of their time."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from otad.cip import BankProblem, ExactCip
from otad.cip.local import solve_torch
from otad.cip.surrogate import CipNet
from otad.experiments import steps as steps_module
from otad.experiments.steps import STEPS, time_steps
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

X = torch.rand(9, 6, generator=torch.Generator().manual_seed(5))
ON_CPU = ["search", "products", "feasibility", "QP", "image"]
ON_GPU = ["search", "products", "potentials and QP", "image"]


class FirstFeatures(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


def model(**options: Any) -> OTAD:
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    net = fc_resnet((6,), 2, blocks=2, seed=1, bounds=(0.0, 1.0)).eval()
    return defend(net, x, (x[:, 0] > 0.5).long(), n_neighbors=4, **options)


def on_disk(tmp_path: Path, **options: Any) -> OTAD:
    return model(resident=False, bank_path=str(tmp_path / "bank.safetensors"), **options)


def test_names(tmp_path: Path) -> None:
    found = time_steps(model(), X)
    assert list(found) == ON_CPU
    assert all(seconds >= 0 for seconds in found.values())
    assert list(time_steps(on_disk(tmp_path), X)) == ["search", "rows", *ON_CPU[1:]]
    assert set(ON_CPU) | set(ON_GPU) | {"rows"} == set(STEPS)


def test_a_network_and_a_whole_map_are_one_step() -> None:
    network = model(solver=CipNet(6, 4, width=8, blocks=1, heads=2))
    assert list(time_steps(network, X)) == ["search", "network"]
    assert list(time_steps(model(scope="global"), X)) == ["one map"]


WATCHED: dict[str, list[tuple[Any, str]]] = {
    "search": [(OTAD, "query_keys"), (OTAD, "neighbors")],
    "rows": [(BankProblem, "fetched")],
    "products": [(ExactCip, "products")],
    "feasibility": [(solve_torch, "find_potentials")],
    "QP": [(solve_torch, "solve_qp")],
    "image": [(ExactCip, "solution")],
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each watched call takes a time of its own on a clock that stands still otherwise."""
    calls: list[tuple[str, int]] = []
    now, spent = [0], count(1)

    def watch(owner: Any, name: str, step: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seconds = 2 ** next(spent)
            now[0] += seconds
            calls.append((step, seconds))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for step, owners in WATCHED.items():
        for owner, name in owners:
            watch(owner, name, step)
    clock = SimpleNamespace(perf_counter=lambda: float(now[0]))
    monkeypatch.setattr(steps_module, "time", clock)
    return calls


@pytest.mark.parametrize("climb", [None, (1.0, 1.0)])
def test_the_steps_are_the_calls_of_a_prediction(
    tmp_path: Path, told: list[tuple[str, int]], climb: tuple[float, float] | None
) -> None:
    solver = ExactCip(climb=climb, on_failure="fallback")
    ours = on_disk(tmp_path, metric=FirstFeatures(), solver=solver)
    ours(X)
    predicted = [step for step, _ in told]
    assert set(predicted) == set(WATCHED)
    told.clear()
    found = time_steps(ours, X)
    assert [step for step, _ in told] == predicted  # nothing is timed that a prediction does not do
    for step, seconds in found.items():
        assert seconds == math.fsum(spent for name, spent in told if name == step)
    assert math.fsum(found.values()) == math.fsum(spent for _, spent in told)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_kernel_is_one_step() -> None:
    pytest.importorskip("triton", reason="needs triton")
    assert list(time_steps(model().to("cuda"), X.cuda())) == ON_GPU
