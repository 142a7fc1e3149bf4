"""Exact convex integration: the feature of a Lipschitz map through K given pairs.

problem = CipProblem(query, anchors, images, smoothness=2.0)
solution = ExactCip()(problem)
solution.image, solution.residual, problem.residual(solution)"""

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
