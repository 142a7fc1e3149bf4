"""Tables of metrics and surrogates, and of what a query costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otad.experiments import cells
from otad.experiments.cells import GIGABYTE, NONE, table
from otad.experiments.learned_records import MetricRecord, SpeedRecord
from otad.experiments.records import RunRecord
from otad.experiments.specs import SpeedSpec


def metrics(record: RunRecord) -> str:
    head = ["metric", "keys", "parameters", "loss", "against", "epochs", "train score"]
    head += ["Lipschitz", "seconds"]
    return table(head, [_metric(key, one) for key, one in record.metrics.items()])


def _metric(key: str, found: MetricRecord) -> list[str]:
    what = found.features or found.kind
    line = [f"{key}: {what}{cells.in_brackets(found.options)}", str(found.key_dim)]
    line += [f"{found.parameters:,}"]
    if found.train is None:
        line += [NONE] * 4
    else:
        loss = f"{found.train['loss']}, temperature {found.train['temperature']:g}"
        line += [loss, _adversary(found.train["adversary"]), str(found.train["epochs"])]
        line += [NONE if found.train_score is None else f"{found.train_score:.4f}"]
    return [*line, cells.number(found.lipschitz), f"{found.seconds:.0f}"]


def _adversary(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return NONE
    share = told.get("weight_share", 0.0)  # older records have none
    weights = f", weights {share:.1%}" if share else ""
    return f"eps {told['eps']:g}, {told['steps']} steps{weights}"


def surrogates(record: RunRecord) -> str:
    head = ["CIP-net", "learned from", "alpha", "parameters", "epochs", "error", "held-out error"]
    body = []
    for key, found in record.surrogates.items():
        taught = record.rows[found.row].label
        line = [key + cells.in_brackets(found.options), taught, f"{found.alpha:g}"]
        line += [f"{found.parameters:,}", str(found.train["epochs"])]
        errors = (found.error, found.held_out_error)
        line += [NONE if error is None else f"{error:.4f}" for error in errors]
        body.append([*line, f"{found.seconds:.0f}"])
    return table([*head, "seconds"], body)


def speeds(record: RunRecord) -> str:
    """With what was asked for, and where the published figures stand."""
    if not record.speeds:
        return ""
    asked = SpeedSpec(**{k: _tuple(v) for k, v in record.config["speed"].items()})
    steps = list(dict.fromkeys(step for one in record.speeds for step in one.steps))
    head = [
        "a query",
        "bank",
        "bank in",
        "device",
        "batch",
        "ms",
        "published ms",
        "times the first",
    ]
    head += [*(f"{step} ms" for step in steps), "resident GB", "on device GB", "accuracy %"]
    first = record.speeds[0].milliseconds
    body = []
    for one in record.speeds:
        on_device = None if one.device_memory is None else one.device_memory / GIGABYTE
        line = [record.rows[one.row].label, f"{one.bank:,}" if one.bank else NONE]
        line += [one.place or NONE, one.device, str(one.batch_size), f"{one.milliseconds:.4f}"]
        line += [cells.number(asked.published.get(one.row)), f"{one.milliseconds / first:.2f}"]
        line += [f"{one.steps[step]:.4f}" if step in one.steps else NONE for step in steps]
        line += [f"{one.resident / GIGABYTE:.2f}"]
        line += [NONE if on_device is None else f"{on_device:.2f}", f"{one.accuracy:.2f}"]
        body.append([*line, *_goal(one, asked, first)])
    source = f"\n\nPublished: {asked.published_in}." if asked.published_in else ""
    return table([*head, "asked for", "met"], body) + source


def _goal(one: SpeedRecord, asked: SpeedSpec, first: float) -> tuple[str, str]:
    if one.place == "memory" and one.row in asked.ratio_at_most:
        most = asked.ratio_at_most[one.row]
        return f"at most {most:g} times the first", cells.met(one.milliseconds <= most * first)
    if one.place == "disk" and one.row in asked.gigabytes_at_most:
        most = asked.gigabytes_at_most[one.row]
        return f"at most {most:g} GB resident", cells.met(one.resident <= most * GIGABYTE)
    return NONE, NONE


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
