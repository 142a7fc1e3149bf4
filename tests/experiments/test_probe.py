"""The steps that are timed are what the model does: the same calls, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from otad.cip import BankProblem, ExactCip
from otad.cip.surrogate import CipNet
from otad.experiments import probe as probe_module
from otad.experiments.probe import time_steps
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

X = torch.rand(9, 6, generator=torch.Generator().manual_seed(5))
STEPS = ["search", "products", "potentials and QP", "image"]


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
    assert list(found) == STEPS
    assert all(seconds >= 0 for seconds in found.values())
    assert list(time_steps(on_disk(tmp_path), X)) == ["search", "rows", *STEPS[1:]]
    network = model(solver=CipNet(6, 4, width=8, blocks=1, heads=2))
    assert list(time_steps(network, X)) == ["search", "network"]
    assert list(time_steps(model(scope="global"), X)) == ["global map"]


WATCHED: dict[str, list[tuple[type, str]]] = {
    "search": [(OTAD, "query_keys"), (OTAD, "neighbors")],
    "rows": [(BankProblem, "fetched")],
    "products": [(ExactCip, "products")],
    "potentials and QP": [(ExactCip, "solve")],
    "image": [(ExactCip, "solution")],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each watched call takes a time of its own on a clock that stands still otherwise."""
    calls: list[tuple[str, int]] = []
    now, spent = [0], count(1)

    def watch(owner: type, name: str, step: str) -> None:
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
    monkeypatch.setattr(probe_module, "time", clock)
    return calls


@pytest.mark.parametrize("climb", [None, (1.0, 1.0)])
def test_the_steps_are_the_calls_of_a_prediction(
    tmp_path: Path, calls: list[tuple[str, int]], climb: tuple[float, float] | None
) -> None:
    solver = ExactCip(climb=climb, on_failure="fallback")
    ours = on_disk(tmp_path, metric=FirstFeatures(), solver=solver)
    ours(X)
    predicted = [step for step, _ in calls]
    assert set(predicted) == set(WATCHED)
    calls.clear()
    found = time_steps(ours, X)
    assert [step for step, _ in calls] == predicted, "nothing else is timed"
    assert found == {step: sum(spent for name, spent in calls if name == step) for step in WATCHED}
