"""The solvers that are compared, each as one small function of the same instances.

- MAP: the image z' for l = 0. Our solver finds the potentials (eq. 2) and z' (eq. 3). The other
  solvers use our potentials and solve eq. (3) alone.
- STRONG_MAP: the same for l = 0.1, because POT requires l > 0. POT solves two conic problems per
  query, for a lower and an upper potential; the lower one gives the z' of eq. (3).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from instances import Instance
from numpy.typing import NDArray
from torch import Tensor

from otad import cip

MAP = "map"
STRONG_MAP = "map, l = 0.1"
QUESTIONS = {MAP: 0.0, STRONG_MAP: 0.1}  # with their strong convexity

OURS_32, OURS_64 = "ours, float32", "ours, float64"
BESIDE = "beside"
MISSING = "not installed (pip install 'otad[reference]')"

Array = NDArray[np.float64]


Found = tuple[Tensor | Array, float | None]
"""Images z' (n,d), NaN where the solver failed, and the seconds that the solver reports."""
Solve = Callable[[slice], Found]


@dataclass(frozen=True)
class Peer:
    """A solver, the question it answers, and the modules it needs.

    `prepare` converts an instance, which is not timed, and returns the function that is timed. A
    `batched` solver is called with all rows, other solvers with as many as their budget allows.
    """

    name: str
    question: str
    prepare: Callable[[Instance, torch.device], Solve]
    modules: tuple[str, ...] = ()
    batched: bool = False

    @property
    def installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.modules)


def _ours(
    instance: Instance, device: torch.device, *, dtype: torch.dtype, cip: ModuleType = cip
) -> Solve:
    """Return our solver, from tensors to z', including the checks of the problem."""
    parts = [t.to(device, dtype) for t in (instance.query, instance.anchors, instance.images)]
    curvature, solver = (instance.smoothness, instance.strong_convexity), cip.ExactCip()

    def solve(rows: slice) -> Found:
        problem = cip.CipProblem(*(t[rows] for t in parts), *curvature)
        return solver(problem).image, None

    return solve


def _both_precisions(question: str, prefix: str, prepare: Callable[..., Solve]) -> list[Peer]:
    return [
        Peer(f"{prefix}, {name}", question, partial(prepare, dtype=dtype), batched=True)
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64))
    ]


def peers_beside(source: Path) -> list[Peer]:
    """Return the solver of another checkout, whose folder src is `source`, in this process."""
    ours = _loaded()
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    try:
        other = importlib.import_module("otad.cip")
        theirs = _loaded()
    finally:
        sys.path.pop(0)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(ours)

    def prepare(instance: Instance, device: torch.device, *, dtype: torch.dtype) -> Solve:
        solve = _ours(instance, device, dtype=dtype, cip=other)

        def swapped(rows: slice) -> Found:
            sys.modules.update(theirs)  # because functions may import modules
            try:
                return solve(rows)
            finally:
                theirs.update(_loaded())
                sys.modules.update(ours)

        return swapped

    return [peer for name in QUESTIONS for peer in _both_precisions(name, BESIDE, prepare)]


def _loaded() -> dict[str, ModuleType]:
    return {k: module for k, module in sys.modules.items() if k == "otad" or k.startswith("otad.")}


def _arrays(instance: Instance) -> tuple[Array, ...]:
    """Return query, anchors and images, with the potentials and smoothness of our solution."""
    solution = instance.solution
    tensors = (instance.query, instance.anchors, instance.images)
    return tuple(t.numpy() for t in (*tensors, solution.potentials, solution.smoothness))


def _clarabel(instance: Instance, device: torch.device) -> Solve:
    """Solve the paper's formulation: minimize v over (v, z') under K quadratic constraints."""
    import cvxpy as cp

    def image_of(
        query: Array, anchors: Array, images: Array, potentials: Array, smoothness: float
    ) -> tuple[Array, float]:
        point, value = cp.Variable(len(query)), cp.Variable()
        bounds = [
            value >= u + z @ (query - x) + cp.sum_squares(point - z) / (2 * smoothness)
            for x, z, u in zip(anchors, images, potentials, strict=True)
        ]
        problem = cp.Problem(cp.Minimize(value), bounds)
        problem.solve(solver=cp.CLARABEL)
        found = np.full_like(query, np.nan) if point.value is None else point.value
        return found, problem.solver_stats.solve_time

    return partial(_row_by_row, _arrays(instance), image_of)


def _pot(instance: Instance, device: torch.device) -> Solve:
    """Find the lower and the upper potential by POT; the lower one is compared."""
    from ot.mapping import nearest_brenier_potential_predict_bounds

    def image_of(
        query: Array, anchors: Array, images: Array, potentials: Array, smoothness: float
    ) -> tuple[Array, float]:
        _, gradients, log = nearest_brenier_potential_predict_bounds(
            anchors,
            potentials,
            images,
            query[None],
            strongly_convex_constant=instance.strong_convexity,
            gradient_lipschitz_constant=float(smoothness),
            log=True,
            solver="CLARABEL",
        )
        return gradients[0, 0], sum(part["solve_time"] for part in log[0].values())

    return partial(_row_by_row, _arrays(instance), image_of)


def _proxqp(instance: Instance, device: torch.device) -> Solve:
    """Solve the same K-dimensional dual, query by query, in one solver object."""
    from proxsuite import proxqp

    count = instance.anchors.shape[1]
    qp = proxqp.dense.QP(count, 1, count)
    qp.settings.eps_abs = 1e-9
    eye, zero = np.eye(count), np.zeros(count)
    qp.init(eye, zero, np.ones((1, count)), np.ones(1), eye, zero, np.full(count, 1e20))

    def image_of(
        query: Array, anchors: Array, images: Array, potentials: Array, smoothness: float
    ) -> tuple[Array, None]:
        offset, spread = anchors - query, images - images[0]
        gram = spread @ spread.T / smoothness
        level = potentials - offset @ images[0]
        qp.update(H=gram, g=(spread * offset).sum(1) - level - np.diag(gram) / 2)
        qp.solve()
        solved = qp.results.info.status == proxqp.PROXQP_SOLVED
        return (qp.results.x @ images if solved else np.full_like(query, np.nan)), None

    return partial(_row_by_row, _arrays(instance), image_of)


def _row_by_row(
    arrays: tuple[Array, ...], image_of: Callable[..., tuple[Array, float | None]], rows: slice
) -> Found:
    """Solve row by row. If a conic solver raises an error, the row counts as failed."""
    images, seconds = [], []
    with warnings.catch_warnings():
        # "Solution may be inaccurate": the comparison with ours shows how inaccurate.
        warnings.simplefilter("ignore", UserWarning)
        for row in zip(*(array[rows] for array in arrays), strict=True):
            try:
                image, taken = image_of(*row)
            except Exception as error:
                if type(error).__name__ != "SolverError":  # the error of cvxpy, if it is installed
                    raise
                image, taken = np.full_like(row[0], np.nan), None
            images.append(image)
            seconds.append(taken)
    return np.stack(images), None if None in seconds else sum(seconds)


PEERS = (
    *_both_precisions(MAP, "ours", _ours),
    Peer("ProxQP", MAP, _proxqp, ("proxsuite",)),
    Peer("CVXPY + Clarabel", MAP, _clarabel, ("cvxpy", "clarabel")),
    *_both_precisions(STRONG_MAP, "ours", _ours),
    Peer("POT, both bounds", STRONG_MAP, _pot, ("ot", "cvxpy", "clarabel")),
)
