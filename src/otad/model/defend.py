"""`defend`: a trained network and its training data made into an OTAD model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_weights
from otad.cip.whole_bank.potential import Progress
from otad.io.tensor_files import fingerprint_of
from otad.model.answerer_options import check_settings
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD, keys_of
from otad.nets import adapt
from otad.progress import Counter


@torch.inference_mode(False)  # tensors made in that mode could never be differentiated through
def defend(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    n_neighbors: int = 10,
    search: str = "torch",
    resident: bool = True,
    bank_dtype: torch.dtype = torch.float32,
    bank_path: str | None = None,
    metric: nn.Module | None = None,
    batch_size: int = 1024,
    progress: Counter | bool | None = None,
    sweep_progress: Progress | bool | None = None,
    **answering: Any,
) -> OTAD:
    """Turn a trained network into an OTAD model with the bank of its training data.

    `net` is a `Backbone`, or an `nn.Sequential` that ends in a Linear layer and preserves the size
    of its flattened input up to there (see `otad.nets.adapt`; other nets are given in parts, by
    `otad.nets.SequentialBackbone`); it is put in evaluation mode. `x` (N,*input_shape) and `y` (N,)
    are the training data. With `bank_path` the bank is written there and mapped from the file.
    `progress`: see `otad.progress`, with (rows done, rows in all). For all else see `OTAD`:
    `answering` are its scope, smoothness, strong_convexity and solver.
    """
    shape = x.shape[1:] if isinstance(x, Tensor) else None
    is_value = isinstance(y, Tensor) and y.is_floating_point()
    task = "regression" if is_value else "classification"
    backbone = adapt(net, input_shape=shape, task=task).eval()
    check_weights(backbone, "net")
    inputs = backbone.check_inputs(x)
    targets = backbone.check_targets(y, len(inputs))
    asked: dict[str, Any] = {"n_neighbors": n_neighbors, **answering}
    check_settings(len(inputs), metric=metric, dim=backbone.dim, **asked)
    device = backbone.mean.device

    def transport(batch: Tensor) -> tuple[Tensor, Tensor]:
        embedded = backbone.embed(batch.to(device))
        return embedded, backbone.transport(embedded)[0]

    bank = FeatureBank.build(
        transport,
        inputs,
        targets,
        fingerprint=fingerprint_of(backbone, {"x": inputs, "y": targets}),
        batch_size=batch_size,
        dtype=bank_dtype,
        path=bank_path,
        progress=progress,
    )
    keys = None
    if metric is not None:
        metric = metric.to(device).eval()
        check_weights(metric, "metric")
        with torch.no_grad():
            batches = inputs.split(batch_size)
            keys = torch.cat([keys_of(batch.to(device), metric) for batch in batches])
    return OTAD(
        backbone,
        bank.to(device) if resident else bank,
        **asked,
        sweep_progress=False if progress is False else sweep_progress,
        search=search,
        resident=resident,
        metric=metric,
        keys=keys,
    )
