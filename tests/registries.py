"""What tests register is forgotten after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from otad.attacks import ATTACKS
from otad.baselines import Purifier
from otad.data import registry
from otad.nets import Backbone, Metric
from otad.nets.pretrained import _BUILDERS

REGISTRIES: list[dict[str, Any]] = [
    ATTACKS, registry._INFOS, Backbone.family._kinds, Metric.family._kinds, _BUILDERS,
    Purifier.family._kinds,
]  # fmt: skip


@contextmanager
def restored() -> Iterator[None]:
    with ExitStack() as stack:
        for known in REGISTRIES:
            stack.enter_context(patch.dict(known))
        yield
