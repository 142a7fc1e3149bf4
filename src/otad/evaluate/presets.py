"""The suites: which attacks, in which order, with which options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """The name of an attack and its options.

    `affine`: only for models whose keys are (True) or are not (False) affine in the input, see
    `Knowledge`. Where they are not, no straight line leads to the neighbors: `keys` searches them
    by gradient, in place of the attacks that need a line.
    """

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    affine: bool | None = None


# Strong and cheap first: expensive attacks skip the examples that these break. Attacks that know
# nothing about the model come late and show what the others have missed (see the flags).
_STANDARD = [
    Choice("straight"),
    Choice("keys", {"restarts": 3}, affine=False),
    Choice("soft_knn"),
    Choice("metric", {"steps": 50, "restarts": 3}, affine=False),
    Choice("bisector", affine=True),
    Choice("region", affine=True),
    Choice("pgd"),
    Choice("apgd", {"restarts": 3}),
    Choice("bpda"),
    Choice("metric", {"steps": 20}, affine=True),
    Choice("transfer"),
    Choice("noise"),
    Choice("square", {"queries": 1000}),
    Choice("random_search", {"queries": 500}),
    Choice("pixle"),
]
_QUICK_KEYS = {"steps": 20, "targets": 2, "temperatures": (0.1,), "restarts": 1, "polish": 20}
PRESETS = {
    "quick": [
        Choice("straight", {"points": 12}),
        Choice("keys", _QUICK_KEYS, affine=False),
        Choice("soft_knn", {"temperatures": (0.1, 0.01), "steps": 20}),
        Choice("metric", {"steps": 20}, affine=False),
        Choice("region", {"rounds": 1}, affine=True),
        Choice("pgd", {"steps": 20}),
        Choice("bpda", {"steps": 20}),
        Choice("transfer"),
        Choice("noise", {"draws": 20}),
        Choice("square", {"queries": 200}),
        Choice("random_search", {"queries": 200}),
    ],
    "standard": _STANDARD,
    "full": [*_STANDARD, Choice("ngopt"), Choice("autoattack")],
}
