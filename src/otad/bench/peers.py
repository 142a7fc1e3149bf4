"""Who takes part: one small callable per solver, all of them on the same instances.

Three questions are asked. Each has ours, in both precisions, and the solvers of others that answer
it; where a question has more than one answer, the one compared is said here.

- MAP: the image z' for l = 0. Ours finds the potentials (eq. 2) and z' (eq. 3); the others are
  given our potentials and solve eq. (3) alone.
- STRONG_MAP: the same for l = 0.1, because POT requires l > 0. POT solves two conic problems per
  query, for a lower and an upper potential; the lower one is the z' of eq. (3).
- POTENTIALS: the lowest potential with u_1 = 0 (eq. 2), which is unique.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.bench.instances import Instance
from otad.cip import CipProblem, ExactCip
from otad.cip.local.gram import gram_of
from otad.cip.local.relax import Curvature

MAP = "map"
STRONG_MAP = "map, l = 0.1"
POTENTIALS = "potentials"
QUESTIONS = {MAP: 0.0, STRONG_MAP: 0.1, POTENTIALS: 0.0}  # with their strong convexity

OURS_32, OURS_64 = "ours, float32", "ours, float64"
NOT_INSTALLED = "not installed (pip install 'otad[reference]')"

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Answer:
    """One row per query solved: z' (n,d) or u (n,K), NaN where the solver gave up.

    `own_seconds` is the time the solver itself claims, without the modeling around it.
    """

    rows: Tensor | Array
    own_seconds: float | None = None


Solve = Callable[[slice], Answer]


@dataclass(frozen=True)
class Peer:
    """A solver, the question it answers, and the modules it needs.

    `prepare` brings an instance into the form the solver reads, which is not timed, and returns
    the callable that is. A `batched` solver is called with all rows, the others row by row.
    """

    name: str
    question: str
    prepare: Callable[[Instance, torch.device], Solve]
    modules: tuple[str, ...] = ()
    batched: bool = False

    @property
    def installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.modules)


def _ours(instance: Instance, device: torch.device, *, dtype: torch.dtype) -> Solve:
    """From tensors to z', the checks of the problem included."""
    query, anchors, images = (
        part.to(device, dtype) for part in (instance.query, instance.anchors, instance.images)
    )

    def solve(rows: slice) -> Answer:
        problem = CipProblem(
            query[rows],
            anchors[rows],
            images[rows],
            instance.smoothness,
            instance.strong_convexity,
        )
        return Answer(ExactCip()(problem).image)

    return solve


def _our_potentials(instance: Instance, device: torch.device, *, dtype: torch.dtype) -> Solve:
    """The first column of the batched max-plus closure."""
    query, anchors, images = (
        part.to(device, dtype) for part in (instance.query, instance.anchors, instance.images)
    )
    smoothness = instance.solution.smoothness.to(device)

    def solve(rows: slice) -> Answer:
        problem = CipProblem(query[rows], anchors[rows], images[rows], smoothness[rows])
        gram = gram_of(problem, None, bends=False)
        everyone = torch.ones_like(gram.tilt, dtype=torch.bool)
        curvature = Curvature(problem.smoothness, problem.strong_convexity, everyone)
        longest, _ = curvature.closure(gram)
        level = longest[:, 0] + gram.shift_of_levels(problem.strong_convexity)
        return Answer((level - level[0]).mT)

    return solve


@dataclass(frozen=True, eq=False)
class _Arrays:
    """An instance with its solution's potentials and smoothness, in NumPy."""

    query: Array
    anchors: Array
    images: Array
    potentials: Array
    smoothness: Array

    @staticmethod
    def of(instance: Instance) -> _Arrays:
        solution = instance.solution
        tensors = (instance.query, instance.anchors, instance.images)
        return _Arrays(
            *(part.numpy() for part in (*tensors, solution.potentials, solution.smoothness))
        )

    def numbers(self, rows: slice) -> range:
        return range(len(self.query))[rows]


def _clarabel(instance: Instance, device: torch.device) -> Solve:
    """The paper's formulation: minimize v over (v, z') under K quadratic constraints in R^d."""
    import cvxpy as cp

    data = _Arrays.of(instance)

    def image_of(row: int) -> tuple[Array, float]:
        point, value = cp.Variable(data.query.shape[1]), cp.Variable()
        query, smoothness = data.query[row], data.smoothness[row]
        pairs = zip(data.anchors[row], data.images[row], data.potentials[row], strict=True)
        bounds = [
            value >= u + z @ (query - x) + cp.sum_squares(point - z) / (2 * smoothness)
            for x, z, u in pairs
        ]
        problem = cp.Problem(cp.Minimize(value), bounds)
        problem.solve(solver=cp.CLARABEL)
        found = np.full_like(query, np.nan) if point.value is None else point.value
        return found, problem.solver_stats.solve_time

    return partial(_conic_answer, data, image_of)


def _pot(instance: Instance, device: torch.device) -> Solve:
    """Lower and upper potential by POT, one conic problem each; the lower one is compared."""
    from ot.mapping import nearest_brenier_potential_predict_bounds

    data = _Arrays.of(instance)

    def image_of(row: int) -> tuple[Array, float]:
        _, gradients, log = nearest_brenier_potential_predict_bounds(
            data.anchors[row],
            data.potentials[row],
            data.images[row],
            data.query[row : row + 1],
            strongly_convex_constant=instance.strong_convexity,
            gradient_lipschitz_constant=float(data.smoothness[row]),
            log=True,
            solver="CLARABEL",
        )
        return gradients[0, 0], sum(part["solve_time"] for part in log[0].values())

    return partial(_conic_answer, data, image_of)


def _conic_answer(
    data: _Arrays, image_of: Callable[[int], tuple[Array, float]], rows: slice
) -> Answer:
    with warnings.catch_warnings():
        # "Solution may be inaccurate": how inaccurate, the comparison with ours will tell.
        warnings.simplefilter("ignore", UserWarning)
        solved = [_unless_given_up(image_of, row, data) for row in data.numbers(rows)]
    images, seconds = zip(*solved, strict=True)
    known = [part for part in seconds if part is not None]
    return Answer(np.stack(images), sum(known) if len(known) == len(seconds) else None)


def _unless_given_up(
    image_of: Callable[[int], tuple[Array, float]], row: int, data: _Arrays
) -> tuple[Array, float | None]:
    """A conic solver that fails raises: count the row as failed, and go on."""
    from cvxpy.error import SolverError

    try:
        return image_of(row)
    except SolverError:
        return np.full_like(data.query[row], np.nan), None


def _proxqp(instance: Instance, device: torch.device) -> Solve:
    """The same K-dimensional dual, query by query, in one solver object that is kept."""
    from proxsuite import proxqp

    data = _Arrays.of(instance)
    count = data.anchors.shape[1]
    qp = proxqp.dense.QP(count, 1, count)
    qp.settings.eps_abs = 1e-9
    one, far = np.ones((1, count)), np.full(count, 1e20)
    eye, zero = np.eye(count), np.zeros(count)
    qp.init(eye, zero, one, np.ones(1), eye, zero, far)

    def image_of(row: int) -> Array:
        offset = data.anchors[row] - data.query[row]
        image = data.images[row]
        center = image[0]
        spread = image - center
        gram = spread @ spread.T / data.smoothness[row]
        level = data.potentials[row] - offset @ center
        linear = level - (spread * offset).sum(1) + np.diag(gram) / 2
        qp.update(H=gram, g=-linear)
        qp.solve()
        if qp.results.info.status != proxqp.PROXQP_SOLVED:
            return np.full_like(center, np.nan)
        found: Array = qp.results.x @ image
        return found

    return lambda rows: Answer(np.stack([image_of(row) for row in data.numbers(rows)]))


def _highs(instance: Instance, device: torch.device) -> Solve:
    """Eq. (2) as a linear program: minimize the sum of u with u_1 = 0."""
    from scipy.optimize import linprog

    data = _Arrays.of(instance)
    count = data.anchors.shape[1]
    upper, lower = np.nonzero(~np.eye(count, dtype=bool))
    difference = np.zeros((len(upper), count))
    difference[np.arange(len(upper)), lower] = 1.0
    difference[np.arange(len(upper)), upper] = -1.0
    bounds = [(0.0, 0.0)] + [(None, None)] * (count - 1)

    def potentials_of(row: int) -> Array:
        image, anchor = data.images[row], data.anchors[row]
        slope, product = anchor @ image.T, image @ image.T
        square = np.diag(product)
        bend = (square[:, None] + square[None] - 2 * product) / (2 * data.smoothness[row])
        weight = slope - np.diag(slope)[None] + bend  # u_i - u_j >= weight_ij
        found = linprog(np.ones(count), A_ub=difference, b_ub=-weight[upper, lower], bounds=bounds)
        potentials: Array = np.full(count, np.nan) if found.x is None else found.x
        return potentials

    return lambda rows: Answer(np.stack([potentials_of(row) for row in data.numbers(rows)]))


def _both_precisions(question: str, prepare: Callable[..., Solve]) -> list[Peer]:
    return [
        Peer(name, question, partial(prepare, dtype=dtype), batched=True)
        for name, dtype in ((OURS_32, torch.float32), (OURS_64, torch.float64))
    ]


PEERS = (
    *_both_precisions(MAP, _ours),
    Peer("ProxQP", MAP, _proxqp, ("proxsuite",)),
    Peer("CVXPY + Clarabel", MAP, _clarabel, ("cvxpy", "clarabel")),
    *_both_precisions(STRONG_MAP, _ours),
    Peer("POT, both bounds", STRONG_MAP, _pot, ("ot", "cvxpy", "clarabel")),
    *_both_precisions(POTENTIALS, _our_potentials),
    Peer("HiGHS", POTENTIALS, _highs, ("scipy",)),
)


def our_answer(instance: Instance, question: str) -> Array:
    """What all answers to a question are compared with: ours, float64, on the CPU."""
    cpu = torch.device("cpu")
    if question == POTENTIALS:
        found = _our_potentials(instance, cpu, dtype=torch.float64)(slice(None)).rows
    else:
        found = instance.solution.image
    return np.asarray(found)
