"""What is proved of a row: certified accuracy, or the error that no attack exceeds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otad.certify import certify, certify_values
from otad.data import Dataset
from otad.experiments.specs import CertifySpec, name_of
from otad.model.otad import OTAD
from otad.scores import Score, score_of, share_score

BATCH = 1000
Report = Callable[[int, int], None]


def certified_scores(
    model: OTAD, data: Dataset, spec: CertifySpec, report: Report
) -> dict[str, Score]:
    """By radius, over the first points of the test part."""
    count = len(data.test_x) if spec.points is None else min(spec.points, len(data.test_x))
    device, backbone = model.backbone.mean.device, model.backbone
    x, y = data.test_x[:count].to(device), data.test_y[:count].to(device)
    unit = backbone.std.expand(backbone.input_shape) if spec.unit == "std" else None
    if data.task == "regression":
        found = {}
        for done, radius in enumerate(spec.eps, start=1):
            proved = certify_values(model, x, radius, unit=unit)
            found[name_of(radius)] = score_of(farthest(proved.low, proved.high, y), y)
            report(done, len(spec.eps))
        return found
    return certified_shares(model, x, y, spec.eps, report, unit=unit)


def certified_shares(
    model: OTAD,
    x: Tensor,
    y: Tensor,
    eps: tuple[float, ...],
    report: Report,
    *,
    unit: Tensor | None = None,
) -> dict[str, Score]:
    """Certified accuracy by radius."""
    standing, done = dict.fromkeys(eps, 0), 0
    for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        certificate = certify(model, inputs, unit=unit)
        for radius in eps:
            standing[radius] += int(certificate.holds(targets, radius).sum())
        done += len(inputs)
        report(done, len(x))
    return {name_of(radius): share_score(count, len(x)) for radius, count in standing.items()}


def farthest(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """Of each interval the end (B,) that is farther from the right answer."""
    return torch.where((low - y).abs() > (high - y).abs(), low, high)
