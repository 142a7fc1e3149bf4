"""Exact convex integration: the value of a Lipschitz map at a query, from K given pairs.

Make a `CipProblem`, solve it by `ExactCip`, and read the `CipSolution`. Any solution can be graded
by `problem.residual(solution)`."""

from otad.arguments import guard
from otad.cip.local.potentials import least_smoothness
from otad.cip.local.solver import ExactCip
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.reference import CvxpyCip
from otad.cip.solution import CipSolution, Status

__all__ = [
    "BankProblem", "CipProblem", "CipSolution", "CvxpyCip", "ExactCip", "Status",
    "least_smoothness",
]  # fmt: skip

guard(globals(), __all__)
