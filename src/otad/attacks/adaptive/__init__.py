"""Attacks that know the bank: they move an input until its NEIGHBORS change.

For fixed neighbors the defended map is smooth and its gradient small; the weakness is the choice of
the neighbors, which has no gradient. These attacks aim at that choice. A global map chooses none,
but where one point has all the weight it is constant as well; there they aim at the place where
other points get some.
"""

from otad.attacks.adaptive.ascent import Keys, SoftKnn
from otad.attacks.adaptive.lines import Bisector, Region, Straight

__all__ = ["Bisector", "Keys", "Region", "SoftKnn", "Straight"]
