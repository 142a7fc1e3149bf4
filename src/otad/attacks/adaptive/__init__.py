"""Attacks that know the bank: they move an input until its neighbors change.

The choice of neighbors has no gradient, so attacks by gradients alone do not see it. A global map
chooses no neighbors, but it is constant where one point has all the weight; there these attacks aim
at places where other points get some weight."""

from otad.arguments import guard
from otad.attacks.adaptive.ascent import Keys, SoftKnn
from otad.attacks.adaptive.lines import Bisector, Pull, Region, Straight

__all__ = ["Bisector", "Keys", "Pull", "Region", "SoftKnn", "Straight"]

guard(globals(), __all__)
