"""Proof below, attack above: nothing may be broken where it is proved not to be."""

from __future__ import annotations

from otad.evaluate.flag_context import Scene, not_run
from otad.evaluate.records import FAIL, PASS, SANDWICH, Flag

ROUNDING = 1e-5  # a float32 answer may end so far beyond the interval it lies in
MEANING = (
    "A certificate proves that no input nearer than its radius is answered differently. An "
    "adversarial example inside a certified radius refutes the proof or its assumptions."
)
BUG = (
    "This is a bug in the certificate, in its assumptions or in the measure of distances. Believe "
    "no certified figure of this model, and report it."
)


def sandwich(scene: Scene) -> Flag:
    """The certified radius, in regression the certified error, against every attack."""
    if scene.certificate is None:
        return not_run(SANDWICH, "there is no certificate", MEANING)
    if scene.task == "regression":
        count, contradictions = _larger_errors(scene)
    else:
        count, contradictions = _nearer_examples(scene)
    if contradictions:
        found = f"{len(contradictions)} of {count} contradict the proof: {contradictions[0]}"
        return Flag(SANDWICH, FAIL, found, MEANING, BUG)
    found = f"{count} attacked inputs, none of which contradicts the proof"
    return Flag(SANDWICH, PASS, found, MEANING, "Nothing to do.")


def _nearer_examples(scene: Scene) -> tuple[int, list[str]]:
    count, found = 0, []
    radius = scene.certificate.radius if scene.certificate else ()
    for record in scene.records:
        count += len(record.broken)
        for row, distance in zip(record.broken, record.distances, strict=True):
            if distance < radius[row]:
                found.append(
                    f"{record.attack} broke row {row} at distance {distance:.6g}, within its "
                    f"certified radius {radius[row]:.6g}"
                )
    return count, found


def _larger_errors(scene: Scene) -> tuple[int, list[str]]:
    count, found = 0, []
    limits = scene.certificate.worst_errors if scene.certificate else ()
    for record in scene.records:
        if record.eps > scene.threat.eps:
            continue  # the errors are certified at the eps of the threat
        count += len(record.attacked)
        for row, error in zip(record.attacked, record.errors, strict=True):
            if error > limits[row] * (1 + ROUNDING) + ROUNDING:
                found.append(
                    f"{record.attack} got an error of {error:.6g} in row {row}, above the "
                    f"certified {limits[row]:.6g}"
                )
    return count, found
