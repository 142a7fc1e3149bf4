"""Certificates in the norm and the units of a threat, and their check against every attack."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.certify import certify, certify_values
from otad.certify.input_reach import input_reach
from otad.errors import InputError
from otad.evaluate.flags import FlagContext, NotRunError, check
from otad.evaluate.records import SANDWICH, CertificateRecord
from otad.model.otad import OTAD

SAFETY = 1 + 1e-12  # more than the rounding of a conversion
ROUNDING = 1e-5  # a float32 answer may exceed its certified interval by so much


def check_constants(model: nn.Module, constants: dict[str, float | None]) -> None:
    """Refuse Lipschitz constants that no certificate of the model would use."""
    given = {name: value for name, value in constants.items() if value is not None}
    if not given:
        return
    if not isinstance(model, OTAD):
        name, value = next(iter(given.items()))
        raise InputError(
            f"{name}: expected None, as only OTAD models are certified, "
            f"got {value!r} for {type(model).__name__}"
        )
    input_reach(model, None, **constants)


def prove(
    model: nn.Module, x: Tensor, y: Tensor, ball: LpBall, **constants: Any
) -> CertificateRecord:
    """Radii of all rows, in regression the largest |f - y| within the ball.

    Certificates are in l2, in the units of the ball. A step of l-infinity size 1 in n features is
    at most sqrt(n) long in l2, so for such a ball radii are divided by that.
    """
    if not isinstance(model, OTAD):
        raise InputError("certificates are proved for OTAD models alone")
    started = time.perf_counter()
    longest = 1.0
    note: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    radius: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    if ball.norm != "l2":
        longest = math.sqrt(max(1, len(ball.free_features(x)))) * SAFETY
        note = (f"a step of size 1 in {ball.norm} is at most {longest:.6g} long in l2",)
    if y.is_floating_point():
        interval = certify_values(model, x, ball.eps * longest, unit=ball.scale, **constants)
        worst = torch.maximum(interval.high - y.double(), y.double() - interval.low)
        errors, assumptions = tuple(worst.tolist()), interval.assumptions
    else:
        certificate = certify(model, x, unit=ball.scale, **constants)
        radius = tuple((certificate.radius / longest).tolist())
        rules, assumptions = certificate.rules, certificate.assumptions
    seconds = time.perf_counter() - started
    return CertificateRecord(radius, rules, (*assumptions, *note), errors, seconds)


@check(
    SANDWICH,
    "A certificate proves that no input nearer than its radius is answered differently. An "
    "adversarial example inside a certified radius refutes the proof or its assumptions.",
    "This is a bug in the certificate, in its assumptions or in the measure of distances. Believe "
    "no certified figure of this model, and report it.",
)
def certificate_holds(context: FlagContext) -> tuple[bool, str]:
    """The certified radius, in regression the certified error, against every attack."""
    proof = context.certificate
    if proof is None:
        raise NotRunError("there is no certificate")
    is_value = context.is_regression
    limits = proof.worst_errors if is_value else proof.radius
    count, contradictions = 0, []
    for record in context.records:
        if is_value and record.eps > context.threat.eps:
            continue  # the errors are certified at the eps of the threat
        rows, values = (
            (record.attacked, record.errors) if is_value else (record.broken, record.distances)
        )
        count += len(rows)
        for row, value in zip(rows, values, strict=True):
            limit = limits[row]
            if is_value and value > limit * (1 + ROUNDING) + ROUNDING:
                what = f"has an error of {value:.6g}, above the certified {limit:.6g}"
                contradictions.append(f"row {row} under {record.attack} {what}")
            elif not is_value and value < limit:
                what = (
                    f"was broken at distance {value:.6g}, within its certified radius {limit:.6g}"
                )
                contradictions.append(f"row {row} under {record.attack} {what}")
    if contradictions:
        return False, f"{len(contradictions)} of {count} contradict the proof: {contradictions[0]}"
    return True, f"{count} attacked inputs, none of which contradicts the proof"
