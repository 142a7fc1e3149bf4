"""Short attacks for the flags that repeat attacks."""

from __future__ import annotations

from typing import Any

import pytest

from otad.attacks import Attack
from otad.evaluate import attack_flags, make_attack


@pytest.fixture
def brief_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that vary an attack give it a few steps, and two examples get a planted weakness."""

    def briefly(name: str, *given: Any, **how: Any) -> Attack:
        return make_attack(name, *given, **how | ({"polish": 5} if name == "soft_knn" else {}))

    monkeypatch.setattr(attack_flags, "make_attack", briefly)
    monkeypatch.setattr(attack_flags, "STEPS", 3)
    monkeypatch.setattr(attack_flags, "PLANTS", 2)
