"""Attacks on a model, each within a ball around every example."""

from otad.attacks.balls import L2, Linf, LpBall
from otad.attacks.base import Attack, AttackResult

__all__ = ["L2", "Attack", "AttackResult", "Linf", "LpBall"]
