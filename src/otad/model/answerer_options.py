"""Making an answerer from the arguments of a model: scope, curvature, solver, potential."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from otad.checks import check_count
from otad.cip import ExactCip
from otad.cip.protocols import Solver
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.lifted_potential import lifted_potential
from otad.cip.whole_bank.potential import (
    BankPotential,
    Progress,
    integrate_most,
    least_bank_smoothness,
)
from otad.errors import InputError, SolverError
from otad.model.answerers import (
    LOCAL_SMOOTHNESS,
    Answerer,
    NeighborAnswerer,
    SurrogateAnswerer,
    WholeBankAnswerer,
    check_curvature,
    is_global,
)
from otad.model.bank import FeatureBank


def make_answerer(
    bank: FeatureBank,
    *,
    n_neighbors: int,
    scope: str,
    smoothness: float | None,
    strong_convexity: float,
    solver: Solver | None = None,
    potential: BankPotential | None = None,
    sweep_progress: Progress | None = None,
    metric: nn.Module | None = None,
    lift: int = 0,
) -> Answerer:
    """The answerer that these arguments of `OTAD` ask for; a potential that is not given is found
    here, by sweeps over all pairs. `lift`: see `nets.LiftedNet`."""
    asked = n_neighbors, smoothness, strong_convexity, solver, scope
    check_settings(len(bank), *asked, metric=metric, dim=bank.dim)
    if not is_global(scope):
        if potential is not None:
            raise InputError("potential: expected with scope 'global' alone, got scope 'local'")
        smoothness = LOCAL_SMOOTHNESS if smoothness is None else smoothness
        curvature = {"smoothness": smoothness, "strong_convexity": strong_convexity}
        if isinstance(solver, CipNet):
            return SurrogateAnswerer(solver, **curvature)
        return NeighborAnswerer(solver, **curvature)
    if potential is None:
        potential = potential_of(bank, smoothness, strong_convexity, sweep_progress, lift=lift)
    elif smoothness is not None and not math.isclose(smoothness, potential.smoothness):
        raise InputError(
            f"smoothness: expected {potential.smoothness}, that of the potential, or None, "
            f"got {smoothness}"
        )
    levels = potential.levels
    if levels.dtype != torch.float64 or tuple(levels.shape) != (len(bank),):
        raise InputError(
            f"potential: expected float64 levels of shape ({len(bank)},), one per bank point, got "
            f"{levels.dtype} of shape {tuple(levels.shape)}"
        )
    return WholeBankAnswerer(replace(potential, levels=levels.to(bank.inputs.device)))


def solver_for(scope: str, **settings: Any) -> ExactCip | None:
    """The exact solver with these settings; None in global scope, where they do not apply and so
    must have their defaults. Rows without a solution fall back to the nearest point by default."""
    settings = {"on_failure": "fallback"} | settings
    solver = ExactCip(**settings)
    if not is_global(scope):
        return solver
    default = ExactCip(on_failure=solver.on_failure)
    changed = [name for name in settings if getattr(solver, name) != getattr(default, name)]
    if changed:
        raise InputError(
            f"scope: expected 'local' where {', '.join(changed)} is set, which applies to the "
            "neighbors of a row, got 'global'"
        )
    return None


def check_settings(
    points: int,
    n_neighbors: int,
    smoothness: float | None,
    strong_convexity: float,
    solver: Solver | None = None,
    scope: str = "local",
    *,
    metric: nn.Module | None = None,
    dim: int | None = None,
) -> None:
    """Refuse what cannot be asked of a bank of so many points, before any long work is done.

    `dim` (d): where it is known, a network that was made for another dimension is refused.
    """
    for name, given in (("solver", solver), ("metric", metric)):
        if is_global(scope) and given is not None:
            raise InputError(
                f"{name}: expected none in global scope, where no neighbors are searched, got "
                f"{type(given).__name__}"
            )
    if isinstance(solver, CipNet):
        solver.check_sizes(n_neighbors, solver.dim if dim is None else dim)
    spares = 0 if solver is None else solver.spares
    if check_count(n_neighbors, "n_neighbors") + spares > points:
        raise InputError(
            f"n_neighbors: expected at most the {points} points of the bank, got {n_neighbors} "
            f"and {spares} spares"
        )
    if not is_global(scope) or smoothness is not None:
        asked = LOCAL_SMOOTHNESS if smoothness is None else smoothness
        check_curvature(asked, strong_convexity, solver)
    elif not math.isfinite(strong_convexity):
        raise InputError(f"strong_convexity: expected a number, got {strong_convexity}")


def potential_of(
    bank: FeatureBank,
    smoothness: float | None,
    strong_convexity: float,
    progress: Progress | None = None,
    *,
    lift: int = 0,
) -> BankPotential:
    """One potential for the bank: of the least L that all its points allow, or of a given L,
    without the points that then contradict others. `progress` is called after each sweep.

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
            f"{error}. With a given smoothness, points that contradict others are left out; a net "
            "trained with more transport energy needs fewer, or none"
        ) from error
    if found.smoothness <= 0:
        raise InputError(
            "smoothness: expected a value above 0, got None, and the least for strong_convexity "
            f"{strong_convexity} is {found.smoothness}"
        )
    return found
