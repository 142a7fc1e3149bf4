"""Threat models: the inputs an attacker may turn an input into."""

from otad.threat.ball import LpBall, per_row
from otad.threat.norms import L2, NORMS, Linf
from otad.threat.one_hot import switched

__all__ = ["L2", "NORMS", "Linf", "LpBall", "per_row", "switched"]
