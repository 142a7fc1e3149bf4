"""How long each step of the defense takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from otad.cip import ExactCip
from otad.cip.gram import gram_of
from otad.cip.relax import Relaxation
from otad.defense import OTAD
from otad.regularity import problem_of

T = TypeVar("T")
STEPS = ("search", "products", "feasibility", "QP")


@torch.no_grad()
def time_steps(model: OTAD, x: Tensor) -> dict[str, float]:
    """Seconds of each step for a batch of inputs, on the device of the model.

    - "search": embedding, key, neighbors;
    - "products": the inner products of the neighbors, which both of the following need;
    - "feasibility": L and potentials, eq. (2), which the paper solves as a linear program;
    - "QP": eq. (3), and putting the feature together.

    A network in the solver's place has one step, "network", after the search.
    """
    backbone = model.backbone
    device = backbone.mean.device

    def sought() -> tuple[Tensor, Tensor]:
        embedded = backbone.embed(x)
        located = embedded if model.metric is None else model.locate(x)
        return embedded, model.neighbors(located).indices

    (embedded, indices), search = _timed(sought, device)
    problem, solver = problem_of(model, embedded, indices), model.solver
    solved = _timed(lambda: solver(problem), device)[1]
    if not isinstance(solver, ExactCip):
        return {"search": search, "network": solved}
    falls = solver.climb is not None and solver.climb[1] > 0
    bends = falls or bool(problem.strong_convexity.any())
    gram, products = _timed(lambda: gram_of(problem, solver.chunk, bends=bends), device)
    cap = torch.inf if solver.max_smoothness is None else solver.max_smoothness
    relaxed = Relaxation(solver.climb, cap, solver.spares)
    asked = problem.smoothness, problem.strong_convexity
    feasibility = _timed(lambda: relaxed(gram, *asked), device)[1]
    rest = max(0.0, solved - products - feasibility)
    return dict(zip(STEPS, (search, products, feasibility, rest), strict=True))


def _timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    wait(device)
    started = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Until a GPU has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
