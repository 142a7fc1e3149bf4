"""How long each step of the defense takes: the very calls that answer a query, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from otad.cip import BankProblem, ExactCip
from otad.cip.local import solve_torch
from otad.cip.local.solve_triton import can_solve
from otad.model.diagnostics import problem_of
from otad.model.otad import OTAD

T = TypeVar("T")
STEPS = ("search", "rows", "products", "potentials and QP", "feasibility", "QP", "image")
"""All steps there are, in their order. No model has all of them: see `time_steps`."""


@torch.no_grad()
def time_steps(model: OTAD, x: Tensor) -> dict[str, float]:
    """Seconds of each step for a batch of inputs, on the device of the model.

    - "search": checks, embedding, key, neighbors;
    - "rows": the pairs of the neighbors brought from a bank in a file or on another device;
    - "products": the inner products of the neighbors;
    - "feasibility": L and longest paths, eq. (2), which the paper solves as a linear program;
    - "QP": potentials, and eq. (3);
    - "image": the feature put together and read by the head.

    A GPU does "potentials and QP" in one kernel. A network in the solver's place has one step,
    "network", after the search, and a map of the whole bank is one step, "one map".
    """
    clock = _Clock(model.backbone.mean.device)
    if not model.answerer.rests_on_neighbors:
        clock("one map", lambda: model(x))
        return clock.seconds

    def sought() -> BankProblem:
        inputs = model.backbone.check_inputs(x)
        embedded = model.backbone.embed(inputs)
        located = embedded if model.metric is None else model.query_keys(inputs)
        return problem_of(model, embedded, model.neighbors(located).indices)

    problem, solver = clock("search", sought), model.solver
    assert solver is not None
    if not isinstance(solver, ExactCip):
        clock("network", lambda: model.backbone.head(solver(problem).image))
        return clock.seconds
    near = clock("rows", problem.fetched)
    if near is problem:
        del clock.seconds["rows"]  # they are read where they are, by the steps that need them
    products = clock("products", lambda: solver.products(near))
    if can_solve(products):
        found = clock("potentials and QP", lambda: solver.solve(near, products))
    else:
        gram, asked = products.gram(), (near.smoothness, near.strong_convexity)
        how = solver.relaxation, solver.potential
        potentials = clock("feasibility", lambda: solve_torch.find_potentials(gram, *asked, *how))
        found = clock("QP", lambda: solve_torch.solve_qp(gram, potentials, solver.mode))
    clock("image", lambda: model.backbone.head(solver.solution(near, found).image))
    return {step: clock.seconds[step] for step in STEPS if step in clock.seconds}


@dataclass(frozen=True)
class _Clock:
    """Seconds by name of what was done on a device."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        wait(self.device)
        started = time.perf_counter()
        result = work()
        wait(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return result


def wait(device: torch.device) -> None:
    """Until a GPU has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
