"""Certificates in the norm and units of a threat, and their comparison with every attack."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.certify import certify, certify_values
from otad.certify.input_reach import input_reach
from otad.checks import require
from otad.errors import InputError
from otad.evaluate.flags import FlagContext, NotRunError, check
from otad.evaluate.records import CERTIFICATE_CHECK, CertificateRecord
from otad.model.otad import OTAD
from otad.nets import Backbone

SAFETY = 1 + 1e-12  # more than the rounding of a conversion
ROUNDING = 1e-5  # a float32 answer may exceed its certified interval by so much


def check_constants(model: nn.Module, constants: dict[str, Any]) -> None:
    """Refuse Lipschitz constants that no certificate of the model would use."""
    for name, value in constants.items():
        if value is not None and isinstance(model, OTAD):
            input_reach(model, None, **constants)
        elif value is not None:
            got = f"{value} for {type(model).__name__}"
            raise InputError(f"{name}: expected None, as only OTAD models need it, got {got}")


def check_within_bounds(
    model: nn.Module, task: str, within_bounds: bool, certificate: bool
) -> None:
    """Refuse certificates within the bounds where there are none."""
    if within_bounds:
        require(certificate, "within_bounds", "False without a certificate", within_bounds)
        require(task == "classification", "within_bounds", "False in regression", within_bounds)
        backbone = model.backbone if isinstance(model, OTAD) else model
        bounds = getattr(backbone, "bounds", None)
        require(bounds is not None, "within_bounds", "a model with declared bounds", bounds)


def prove(
    model: nn.Module, x: Tensor, y: Tensor, ball: LpBall, **options: Any
) -> CertificateRecord:
    """Return the radii of all rows, or in regression the largest |f - y| within the ball. `options`
    are those of `certify`."""
    own = model.lipschitz if isinstance(model, Backbone) else None
    if own is None and not isinstance(model, OTAD):
        raise InputError("only OTAD models and networks with a Lipschitz bound have certificates")
    assert isinstance(model, OTAD | Backbone)
    started, longest = time.perf_counter(), 1.0
    note: tuple[str, ...] = ()
    # No step is longer in l-infinity than in l2. In l2, n features move by up to sqrt(n) eps.
    if ball.norm != "l2" and (own is None or own.norm == "l2"):
        movable = replace(ball, groups=None).free_features(x)  # at a larger eps groups switch, too
        longest = math.sqrt(max(1, len(movable))) * SAFETY
        note = (f"a step of size 1 in {ball.norm} is at most {longest:.6g} long in l2",)
    if y.is_floating_point():
        assert isinstance(model, OTAD)  # networks with a bound are classifiers
        found = certify_values(model, x, ball.eps * longest, unit=ball.scale, **options)
        worst = torch.maximum(found.high - y.double(), y.double() - found.low)
        record = CertificateRecord((), (), (*found.assumptions, *note), tuple(worst.tolist()))
    else:
        proof = certify(model, x, unit=ball.scale, **options)
        radius = tuple((proof.radius / longest).tolist())
        record = CertificateRecord(radius, proof.rules, (*proof.assumptions, *note), ())
    return replace(record, seconds=time.perf_counter() - started)


@check(
    CERTIFICATE_CHECK,
    "A certificate proves that no input nearer than its radius is answered differently. An "
    "adversarial example inside a certified radius refutes the proof or its assumptions.",
    "Check the constants that you gave. Otherwise this is a bug in the certificate or in the "
    "measured distance: do not trust any certified number of this model, and report it.",
)
def certificate_holds(context: FlagContext) -> tuple[bool, str]:
    """Compare the certified radius, or in regression the certified error, with every attack."""
    proof = context.certificate
    if proof is None:
        raise NotRunError("there is no certificate")
    count, contradictions = 0, []
    inside = context.certificate_within_bounds or proof
    for record in context.records:
        if not context.is_regression:
            found = zip(record.broken, record.distances, strict=True)
            limits = tuple(map(max, proof.radius, inside.radius))  # attacks stay within the bounds
        elif record.eps <= context.threat.eps:  # errors are certified at the eps of the threat
            found, limits = zip(record.attacked, record.errors, strict=True), proof.worst_errors
        else:
            continue
        for row, value in found:
            count, limit = count + 1, limits[row]
            what = f"was broken at distance {value:.6g}, within its certified radius {limit:.6g}"
            is_wrong = value < limit
            if context.is_regression:
                what = f"has an error of {value:.6g}, above the certified {limit:.6g}"
                is_wrong = value > limit * (1 + ROUNDING) + ROUNDING
            if is_wrong:
                contradictions.append(f"row {row} under {record.attack} {what}")
    if contradictions:
        return False, f"{len(contradictions)} of {count} contradict the proof: {contradictions[0]}"
    return True, f"{count} attacked inputs, none of which contradicts the proof"
