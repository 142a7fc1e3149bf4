"""Explanations: a prediction, and what each training point contributes to it."""

from otad.arguments import guard
from otad.explain.explaining import explain
from otad.explain.explanation import Explanation
from otad.explain.neighbor import ClassPart, Neighbor

__all__ = ["ClassPart", "Explanation", "Neighbor", "explain"]

guard(globals(), __all__)
