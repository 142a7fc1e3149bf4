"""Attacks that know the bank: they move an input until its NEIGHBORS change.

For fixed neighbors the defended map is smooth and its gradient small; the weakness is the choice of
the neighbors, which has no gradient. These attacks go for that choice.
"""

from otad.attacks.adaptive.region import Bisector, Region
from otad.attacks.adaptive.soft_knn import SoftKnn
from otad.attacks.adaptive.straight import Straight

__all__ = ["Bisector", "Region", "SoftKnn", "Straight"]
