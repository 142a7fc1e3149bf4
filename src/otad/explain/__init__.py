"""Why a prediction came out: the training points it rests on, and with which weight."""

from otad.explain.explanation import Explanation, Neighbor, explain

__all__ = ["Explanation", "Neighbor", "explain"]
