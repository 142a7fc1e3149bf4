"""How a model does on labeled inputs, and how its answers were found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import Status, least_smoothness
from otad.model.diagnostics import Distribution, problem_of, residual_of
from otad.model.otad import OTAD
from otad.scores import abstained, squared_errors
from otad.training.supervised import METRICS

NET, DEFENDED, MAJORITY, MEAN_FEATURE = "net", "otad", "knn_majority", "knn_mean_feature"


@dataclass(frozen=True, eq=False)
class Assessment:
    """`scores`: accuracy, or mean squared error (`metric` says which), of each predictor.

    One entry a row (N,) of the defended model: `predictions` (class numbers, -1 where it gives no
    answer, or values), `smoothness` used (NaN where there is no solution), `least_smoothness` its
    neighbors need, `status`, and the `residual` of its answer, graded in float64 (see
    `residual_of`). `seconds`: all its predictions.
    """

    metric: str
    scores: dict[str, float]
    predictions: Tensor
    smoothness: Tensor
    least_smoothness: Tensor
    asked_smoothness: float
    status: Tensor
    residual: Tensor
    seconds: float

    def __len__(self) -> int:
        return len(self.predictions)

    @property
    def status_counts(self) -> dict[str, int]:
        """How many rows have each status; only those that occur."""
        counts = {status.name.lower(): int((self.status == status).sum()) for status in Status}
        return {name: count for name, count in counts.items() if count}

    @property
    def share_raised(self) -> float:
        """The share of rows whose neighbors needed a larger L than was asked for."""
        margin = 1e-9 * self.asked_smoothness
        return float((self.smoothness > self.asked_smoothness + margin).double().mean())

    @property
    def largest_residual(self) -> float | None:
        """Over the rows that were solved exactly; None where there are none."""
        solved = self.residual[self.status < int(Status.ESTIMATED)]
        return float(solved.max()) if len(solved) else None

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON, for a model card."""
        used, least = Distribution.of(self.smoothness), Distribution.of(self.least_smoothness)
        return {
            "metric": self.metric,
            "rows": len(self),
            **{name: _finite(score) for name, score in self.scores.items()},
            "status": self.status_counts,
            "share_raised": self.share_raised,
            "smoothness": _plain(used),
            "least_smoothness": _plain(least),
            "largest_residual": self.largest_residual,
            "seconds": self.seconds,
        }


@torch.no_grad()
def assess(
    model: OTAD,
    x: Tensor,
    y: Tensor,
    *,
    baselines: bool = False,
    batch_size: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> Assessment:
    """The net, the defended model and, if asked for, both kinds of k-NN on inputs x and targets y.

    `progress` is told (rows done, rows in all) after each batch.
    """
    device = model.bank_inputs.device if model.resident else model.backbone.mean.device
    others: dict[str, nn.Module] = {NET: model.backbone}
    if baselines:
        others |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
    found: dict[str, list[Tensor]] = {name: [] for name in (DEFENDED, *others)}
    smoothness, least, status, residual, seconds = [], [], [], [], 0.0
    for batch in x.split(batch_size):
        inputs = batch.to(device)
        started = time.perf_counter()
        trace = model.trace(inputs)
        found[DEFENDED].append(_answers(trace.outputs))  # reading the answers waits for a GPU
        seconds += time.perf_counter() - started
        for name, predictor in others.items():
            found[name].append(_answers(predictor(inputs)))
        smoothness.append(trace.solution.smoothness.cpu())
        status.append(trace.solution.status.cpu())
        embedded, indices = model.backbone.embed(inputs), trace.neighbors.indices
        residual.append(residual_of(model, embedded, trace).cpu())
        if model.scope == "global":  # those found are the support of the answer
            indices = model.neighbors(embedded).indices
        nearest = problem_of(model, embedded, indices[:, : model.n_neighbors])
        least.append(least_smoothness(nearest).cpu())
        if progress is not None:
            progress(sum(map(len, status)), len(x))
    predictions = {name: torch.cat(parts) for name, parts in found.items()}
    return Assessment(
        metric=METRICS[model.backbone.task],
        scores={name: _score(answers, y) for name, answers in predictions.items()},
        predictions=predictions[DEFENDED],
        smoothness=torch.cat(smoothness),
        least_smoothness=torch.cat(least),
        asked_smoothness=model.smoothness,
        status=torch.cat(status),
        residual=torch.cat(residual),
        seconds=seconds,
    )


def _answers(outputs: Tensor) -> Tensor:
    if outputs.dim() == 2:
        return outputs.argmax(1).masked_fill(abstained(outputs), -1).cpu()
    return outputs.cpu()


def _score(answers: Tensor, targets: Tensor) -> float:
    if targets.dtype == torch.int64:
        return float((answers == targets).double().mean())
    return float(squared_errors(answers, targets).mean())


def _plain(distribution: Distribution | None) -> dict[str, float | None] | None:
    if distribution is None:
        return None
    return {name: _finite(value) for name, value in asdict(distribution).items()}


def _finite(value: float) -> float | None:
    """JSON knows no infinity: there it is None."""
    return value if math.isfinite(value) else None
