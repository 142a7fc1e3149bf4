"""Certificates as an evaluation records them: in the norm and the units of its threat."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.certify import certify, certify_values
from otad.certify.input_reach import travel_of
from otad.errors import InputError
from otad.evaluate.records import CertificateRecord
from otad.model.otad import OTAD

SAFETY = 1 + 1e-12  # more than the rounding of a conversion


@dataclass(frozen=True)
class Stated:
    """Constants by which an embedding and a metric stretch at most, as the user states them."""

    embedding_lipschitz: float | None = None
    metric_lipschitz: float | None = None

    def check(self, model: nn.Module) -> None:
        """Refuse what no certificate of the model would use, before anything is attacked."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in given.items():
            if not isinstance(model, OTAD):
                raise InputError(
                    f"{name}: expected None, as only OTAD models are certified, "
                    f"got {value!r} for {type(model).__name__}"
                )
        if given and isinstance(model, OTAD):
            travel_of(model, None, self.embedding_lipschitz, self.metric_lipschitz)


NOTHING_STATED = Stated()


def prove(
    model: OTAD, x: Tensor, y: Tensor, ball: LpBall, stated: Stated = NOTHING_STATED
) -> CertificateRecord:
    """Radii of all rows, in regression the largest |f - y| within the ball.

    Certificates are in l2, in the units of the ball. A step of l-infinity size 1 in n features is
    at most sqrt(n) long in l2, so for such a ball radii are divided by that.
    """
    started = time.perf_counter()
    options: dict[str, Any] = {"unit": ball.scale} | asdict(stated)
    longest = 1.0
    radius: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    rules: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    if ball.norm != "l2":
        longest = math.sqrt(max(1, ball.degrees_of_freedom(x))) * SAFETY
        note = (f"a step of size 1 in {ball.norm} is at most {longest:.6g} long in l2",)
    if y.is_floating_point():
        interval = certify_values(model, x, ball.eps * longest, **options)
        targets = y.double()
        worst = torch.maximum(interval.high - targets, targets - interval.low)
        errors, assumptions = tuple(worst.tolist()), interval.assumptions
    else:
        certificate = certify(model, x, **options)
        radius = tuple((certificate.radius / longest).tolist())
        rules, assumptions = certificate.rules, certificate.assumptions
    return CertificateRecord(
        radius=radius,
        rules=rules,
        assumptions=(*assumptions, *note),
        worst_errors=errors,
        seconds=time.perf_counter() - started,
    )
