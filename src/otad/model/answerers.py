"""How an answer is found: from each input's own neighbors, or by one map for the whole bank.

"local": the K nearest training points of an input are integrated by a potential of their own,
exactly or by a network that imitates the exact solver.
"global": all N points by one potential, once; its gradient is a single map, L-Lipschitz everywhere,
which every input is sent through. The few points that get weight are its support.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_choice, check_count
from otad.cip import CipSolution, ExactCip
from otad.cip.protocols import Solver
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.lifted_potential import lifted_potential
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import (
    BankPotential,
    Progress,
    integrate_most,
    least_bank_smoothness,
)
from otad.errors import InputError, SolverError
from otad.io.mapped_rows import gathered
from otad.model.bank import FeatureBank
from otad.search.neighbors import Neighbors

SCOPES = ("local", "global")
LOCAL_SMOOTHNESS = 2.0  # where none is asked for


@dataclass(frozen=True, eq=False)
class Answer:
    """The training points (B,K) an answer rests on, the convex integration answer, and in global
    scope its duality `gap` (B,): |z' - exact|^2 <= 2 (L - l) gap."""

    neighbors: Neighbors
    solution: CipSolution
    gap: Tensor | None = None


def check_settings(
    points: int,
    n_neighbors: int,
    smoothness: float | None,
    strong_convexity: float,
    solver: Solver | None = None,
    scope: str = "local",
    *,
    dim: int | None = None,
) -> None:
    """Refuse what cannot be asked of a bank of so many points, before any long work is done.

    `dim` (d) is asked for where a network is the solver: it is made for one dimension and one K.
    """
    if check_choice(scope, "scope", SCOPES) == "global" and solver is not None:
        raise InputError(
            "solver: expected none in global scope, where no small problems are solved, "
            f"got {type(solver).__name__ if isinstance(solver, CipNet) else solver}"
        )
    if isinstance(solver, CipNet):
        solver.check_sizes(n_neighbors, solver.dim if dim is None else dim)
    spares = 0 if solver is None else solver.spares
    if check_count(n_neighbors, "n_neighbors") + spares > points:
        raise InputError(
            f"n_neighbors: expected at most the {points} points of the bank, got {n_neighbors} "
            f"and {spares} spares"
        )
    if smoothness is None and scope == "global":
        if not math.isfinite(strong_convexity):
            raise InputError(f"strong_convexity: expected a number, got {strong_convexity}")
        return
    asked = LOCAL_SMOOTHNESS if smoothness is None else smoothness
    if not -math.inf < strong_convexity < asked < math.inf or asked <= 0:
        raise InputError(
            "smoothness: expected a finite value above 0 and above strong_convexity "
            f"({strong_convexity}), got {asked}"
        )
    cap = None if solver is None else solver.max_smoothness
    if cap is not None and cap < asked:
        raise InputError(f"max_smoothness: expected at least the smoothness {asked}, got {cap}")


def describe_solver(solver: Solver) -> dict[str, Any]:
    """Its settings in plain values; of a network all but its weights."""
    if isinstance(solver, CipNet):
        return {"cip_net": solver.config()}
    if isinstance(solver, ExactCip):
        return asdict(solver)
    raise InputError(
        "solver: expected ExactCip or CipNet, which can describe themselves, got "
        f"{type(solver).__name__}"
    )


def potential_of(
    bank: FeatureBank,
    smoothness: float | None,
    strong_convexity: float,
    progress: Progress | None = None,
    *,
    lift: int = 0,
) -> BankPotential:
    """One potential for the bank: of the least L that all its points allow, or of the L given,
    without the points that contradict the others then. `progress` is told after each sweep.

    In a lifted bank (see `cip.whole_bank.lifted_potential`) pairs alone decide, and l is 2 - L.
    """
    pairs = bank.inputs, bank.features
    if lift:
        if strong_convexity != 0:
            raise InputError(
                "strong_convexity: expected 0, its default, for a lifted net, where it follows "
                f"from the smoothness L as 2 - L, got {strong_convexity}"
            )
        if smoothness is not None and smoothness <= 1:
            raise InputError(f"smoothness: expected above 1 for a lifted net, got {smoothness}")
        return lifted_potential(*pairs, lift, None if smoothness is None else smoothness - 1)
    if smoothness is not None:
        return integrate_most(*pairs, float(smoothness), strong_convexity, progress=progress)
    try:
        found = least_bank_smoothness(*pairs, strong_convexity, progress=progress)
    except SolverError as error:
        raise SolverError(
            f"{error}. With a smoothness given, points that contradict the others are left out; a "
            "net trained with more transport energy needs fewer, or none"
        ) from error
    if found.smoothness <= 0:
        raise InputError(
            "smoothness: expected a value above 0, got None, and the least for strong_convexity "
            f"{strong_convexity} is {found.smoothness}"
        )
    return found


def answer_by(whole: WholeBank, inputs: Tensor, query: Tensor) -> Answer:
    """The answer of the one map to queries (B,d), with the bank points it rests on (B,W).

    They come most weight first; rows with fewer repeat their first, with weight 0 and not `active`.
    """
    found = whole(query)
    neighbors = Neighbors(found.indices, _distances(query.detach(), inputs, found.indices))
    return Answer(neighbors, found.solution, found.gap)


def _distances(query: Tensor, inputs: Tensor, indices: Tensor) -> Tensor:
    """|x_i - x'| (B,W) float64, one column at a time: never B*W*d numbers at once."""
    columns = (gathered(inputs, column, query.device) for column in indices.unbind(1))
    return torch.stack([(points.double() - query).norm(dim=1) for points in columns], dim=1)
