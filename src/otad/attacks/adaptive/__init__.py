"""Attacks that know the bank: they move an input until its NEIGHBORS change, a choice that has no
gradient. A global map chooses none, but where one point has all the weight it is constant as well;
there they aim at the place where other points get some."""

from otad.arguments import guard
from otad.attacks.adaptive.ascent import Keys, SoftKnn
from otad.attacks.adaptive.lines import Bisector, Pull, Region, Straight

__all__ = ["Bisector", "Keys", "Pull", "Region", "SoftKnn", "Straight"]

guard(globals(), __all__)
