"""Test scores of a model and of its relatives, and the account of how its answers were found."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET
from otad.model.account import AccountBuilder, SolverAccount
from otad.model.otad import OTAD
from otad.progress import progress_bar
from otad.scores import abstained, is_right, squared_errors
from otad.training.supervised import METRICS

BATCH = 1000  # rows at a time


@dataclass(frozen=True, eq=False)
class Assessment:
    """`scores`: accuracy, or mean squared error (see `metric`), of each predictor. Of the defended
    model: `predictions` (n,), classes (-1 where it abstains) or values, the `account` of its
    answers, the `least_smoothness` (n,) of its neighbors, and all the `seconds`."""

    metric: str
    scores: dict[str, float]
    predictions: Tensor
    account: SolverAccount
    least_smoothness: Tensor
    smoothness: float
    seconds: float

    def __len__(self) -> int:
        return len(self.predictions)

    @property
    def share_raised(self) -> float:
        """The share of rows whose neighbors needed a larger L than the model's."""
        return self.account.share_raised or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON for a model card; None where a number is infinite."""
        account = self.account
        record = {
            "metric": self.metric,
            "rows": len(self),
            **self.scores,
            "status": account.counts,
            "share_raised": self.share_raised,
            "smoothness": account.smoothness and asdict(account.smoothness),
            "least_smoothness": account.least_smoothness and asdict(account.least_smoothness),
            "largest_residual": account.residual,
            "seconds": self.seconds,
        }
        plain: dict[str, Any] = json.loads(json.dumps(record), parse_constant=lambda _: None)
        return plain


@torch.no_grad()
def assess(model: OTAD, x: Tensor, y: Tensor, *, baselines: bool = False) -> Assessment:
    """Test the network, the model and, with `baselines`, k-NN."""
    others: dict[str, nn.Module] = {NET: model.backbone}
    if baselines:
        others |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
    builder = AccountBuilder(model, least_smoothness=True)
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    seconds, done = 0.0, 0
    with progress_bar("testing") as report:
        for batch in x.split(BATCH):
            inputs = batch.to(model.backbone.mean.device)
            started = time.perf_counter()
            trace = model.trace(inputs)
            found[DEFENDED].append(trace.outputs.cpu())  # waits for a GPU
            seconds += time.perf_counter() - started
            builder.add(inputs, trace)
            for name, predictor in others.items():
                found[name].append(predictor(inputs).cpu())
            done += len(batch)
            report(done, len(x))
    outputs = {name: torch.cat(parts) for name, parts in found.items()}
    measure = squared_errors if y.is_floating_point() else is_right
    scores = {name: float(measure(it, y.cpu()).double().mean()) for name, it in outputs.items()}
    predictions, least = outputs[DEFENDED], builder.rows("least_smoothness")
    if predictions.dim() == 2:
        predictions = predictions.argmax(1).masked_fill(abstained(predictions), -1)
    assert least is not None
    metric, account = METRICS[model.backbone.task], builder.account()
    return Assessment(metric, scores, predictions, account, least, model.smoothness, seconds)
