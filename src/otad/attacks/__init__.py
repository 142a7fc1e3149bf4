"""Attacks on a model, each within a ball around every example."""

from otad.arguments import guard
from otad.attacks.apgd import Apgd
from otad.attacks.autoattack import AutoAttackSuite
from otad.attacks.base import ATTACKS, Attack, AttackResult, register_attack
from otad.attacks.categories import Categories
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.ngopt import NgOpt
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.attacks.random_search import Pixle, RandomNoise, RandomSearch, Square
from otad.attacks.transfer import Transfer
from otad.threat import L2, Linf, LpBall

__all__ = [
    "ATTACKS", "L2", "Apgd", "Attack", "AttackResult", "AutoAttackSuite", "Bpda", "Categories",
    "Knowledge", "Linf", "LpBall", "MetricAttack", "Needs", "NgOpt", "Pgd", "Pixle", "RandomNoise",
    "RandomSearch", "Square", "Transfer", "register_attack",
]  # fmt: skip

guard(globals(), __all__)
