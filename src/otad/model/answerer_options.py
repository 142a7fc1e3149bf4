"""Makes an answerer from the arguments of a model: scope, curvature, solver, potential."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from otad.checks import check_count, check_shape, require
from otad.cip import ExactCip
from otad.cip.protocols import Solver
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank import potential as potentials
from otad.cip.whole_bank.lifted_bank import lifted_potential
from otad.cip.whole_bank.potential import BankPotential, Progress
from otad.errors import InputError, SolverError
from otad.model import answerers
from otad.model.answerers import Answerer, NeighborAnswerer, WholeBankAnswerer, is_global
from otad.model.bank import FeatureBank
from otad.progress import part_bars

MOST_VARIABLE = "OTAD_MOST_NEIGHBORS"
SECONDS = (6e-9, 5e-7)  # seconds per K^3 of a row with K neighbors, measured on one CPU core


def make_answerer(
    bank: FeatureBank,
    *,
    lift: int,
    potential: BankPotential | None = None,
    sweep_progress: Progress | bool | None = None,
    **settings: Any,
) -> Answerer:
    """Return the answerer that these arguments of `OTAD` ask for.

    `settings` are those of `check_settings`. A potential that is not given is computed here. `lift`
    is explained in `nets.LiftedNet`."""
    local = check_settings(len(bank), dim=bank.dim, **settings)
    if local is not None:
        require(potential is None, "potential", "with scope 'global' alone", "scope 'local'")
        return local
    smoothness = settings.get("smoothness")
    if potential is None:
        convexity = settings.get("strong_convexity", 0.0)
        own = sweep_progress if callable(sweep_progress) else None
        with part_bars(False if own else sweep_progress) as draw:  # type: ignore[arg-type]
            report = own or (lambda sweep, _: draw("integrating the bank, sweeps", sweep))
            potential = _find_potential(bank, smoothness, convexity, report, lift)
    agrees = smoothness is None or math.isclose(smoothness, potential.smoothness)
    expected = f"{potential.smoothness}, that of the potential, or None"
    require(agrees, "smoothness", expected, smoothness)
    levels = potential.levels
    require(levels.dtype == torch.float64, "potential", "float64 levels", levels.dtype)
    check_shape(levels, "potential", (len(bank),), "with one level per bank point")
    return WholeBankAnswerer(replace(potential, levels=levels.to(bank.inputs.device)))


def solver_for(scope: str, **settings: Any) -> ExactCip | None:
    """Return the exact solver with these settings, or None in global scope.

    In global scope the settings do not apply, so they must have their defaults. Rows without a
    solution fall back to the nearest point by default."""
    settings = {"on_failure": "fallback"} | settings
    solver = ExactCip(**settings)
    if not is_global(scope):
        return solver
    default = ExactCip(on_failure=solver.on_failure)
    changed = [name for name in settings if getattr(solver, name) != getattr(default, name)]
    expected = f"'local', where {', '.join(changed)} applies to the neighbors of a row"
    require(not changed, "scope", expected, "'global'")
    return None


def check_settings(
    points: int,
    *,
    n_neighbors: int,
    scope: str = "local",
    smoothness: float | None = None,
    strong_convexity: float = 0.0,
    solver: Solver | None = None,
    metric: nn.Module | None = None,
    dim: int | None = None,
    **unknown: Any,
) -> NeighborAnswerer | None:
    """Refuse settings that do not fit a bank of `points` points, before any long work is done.

    In local scope the answerer of these settings is returned. `dim` is the dimension of the bank,
    if it is known."""
    for name in unknown:
        known = "n_neighbors, scope, smoothness, strong_convexity, solver and potential"
        raise TypeError(f"unexpected keyword argument {name!r}; others are {known}")
    local, spares = None, 0
    if is_global(scope):
        for name, given in (("solver", solver), ("metric", metric)):
            expected = "none in global scope, where no neighbors are searched"
            require(given is None, name, expected, type(given).__name__)
        if smoothness is not None:
            answerers.check_curvature(smoothness, strong_convexity)
        require(math.isfinite(strong_convexity), "strong_convexity", "a number", strong_convexity)
    else:
        is_net = isinstance(solver, CipNet)
        kind = answerers.SurrogateAnswerer if is_net else answerers.NeighborAnswerer
        local = kind(solver, smoothness, strong_convexity)
        local.check_sizes(n_neighbors, dim)
        spares = local.spares
    searched = check_count(n_neighbors, "n_neighbors") + spares
    asked = f"{n_neighbors}" + (f" and {spares} spares" if spares else "")
    expected = f"at most the {points} points of the bank"
    require(searched <= points, "n_neighbors", expected, asked)
    most = most_neighbors()
    if local is not None and searched > most:
        low, high = (f"{seconds * searched**3:.2g}" for seconds in SECONDS)
        remedy = f"set {MOST_VARIABLE}={searched} to insist"
        cost = f"about {low} s a query, and {high} s where neighbors contradict each other"
        raise InputError(f"n_neighbors: expected at most {most}, got {asked}: {cost}; {remedy}")
    return local


def most_neighbors() -> int:
    """Return how many neighbors and spares a row may have.

    It is 128, or the number in the user's environment variable. No file can raise it."""
    text = os.environ.get(MOST_VARIABLE) or "128"
    require(text.isdecimal(), MOST_VARIABLE, "a whole number", repr(text))
    return int(text)


def _find_potential(
    bank: FeatureBank,
    smoothness: float | None,
    convexity: float,
    progress: Progress,
    lift: int,
) -> BankPotential:
    """Return the potential of the least L that all points allow, or of a given L.

    For a given L, points that contradict others are left out. In a lifted bank (see
    `cip.whole_bank.lifted_bank`) pairs alone decide which, and l is 2 - L."""
    pairs = bank.inputs, bank.features
    if lift:
        expected = "0, its default, for a lifted net, where it is 2 - L"
        require(convexity == 0, "strong_convexity", expected, convexity)
        allowed = smoothness is None or smoothness > 1
        require(allowed, "smoothness", "above 1 for a lifted net", smoothness)
        return lifted_potential(*pairs, lift, None if smoothness is None else smoothness - 1)
    if smoothness is not None:
        return potentials.integrate_most(*pairs, float(smoothness), convexity, progress=progress)
    try:
        found = potentials.least_bank_smoothness(*pairs, convexity, progress=progress)
    except SolverError as error:
        raise SolverError(
            f"{error}. With a given smoothness, points that contradict others are left out"
        ) from error
    least = f"None, and the least for strong_convexity {convexity} is {found.smoothness}"
    require(found.smoothness > 0, "smoothness", "a value above 0", least)
    return found
