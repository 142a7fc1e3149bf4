"""The suites: which attacks, in which order, with which options."""

from __future__ import annotations

from typing import Any

Choice = tuple[str, dict[str, Any]]
"""The name of an attack and its options."""

# Strong and cheap first: what they break, the dear ones are spared. Attacks that know nothing of
# the model come late, so that they show what those that know it have missed (see the flags).
_STANDARD: list[Choice] = [
    ("straight", {}),
    ("soft_knn", {}),
    ("bisector", {}),
    ("region", {}),
    ("pgd", {}),
    ("apgd", {"restarts": 3}),
    ("bpda", {}),
    ("metric", {"steps": 20}),
    ("transfer", {}),
    ("noise", {}),
    ("square", {"queries": 1000}),
    ("random_search", {"queries": 500}),
    ("pixle", {}),
]
PRESETS: dict[str, list[Choice]] = {
    "quick": [
        ("straight", {"points": 12}),
        ("soft_knn", {"temperatures": (0.1, 0.01), "steps": 20}),
        ("region", {"rounds": 1}),
        ("pgd", {"steps": 20}),
        ("bpda", {"steps": 20}),
        ("transfer", {}),
        ("noise", {"draws": 20}),
        ("square", {"queries": 200}),
        ("random_search", {"queries": 200}),
    ],
    "standard": _STANDARD,
    "full": [*_STANDARD, ("ngopt", {}), ("autoattack", {})],
}

# Where neighbors are sought by a metric, or in an embedding that does more than normalize, no
# straight line leads to them: `keys` looks for them by gradient in the place of those that need one
_KEYED_STANDARD: list[Choice] = [
    ("straight", {}),
    ("keys", {"restarts": 3}),
    ("soft_knn", {}),
    ("metric", {"steps": 50, "restarts": 3}),
    *(choice for choice in _STANDARD[4:] if choice[0] != "metric"),
]
KEYED_PRESETS: dict[str, list[Choice]] = {
    "quick": [
        ("straight", {"points": 12}),
        ("keys", {"steps": 20, "targets": 2, "temperatures": (0.1,), "restarts": 1, "polish": 20}),
        ("soft_knn", {"temperatures": (0.1, 0.01), "steps": 20}),
        ("metric", {"steps": 20}),
        *PRESETS["quick"][3:],
    ],
    "standard": _KEYED_STANDARD,
    "full": [*_KEYED_STANDARD, ("ngopt", {}), ("autoattack", {})],
}
