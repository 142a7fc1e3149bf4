"""Banks of an experiment: of a whole train part, or of some points a class, searched by a metric.

A bank is behind the plainest OTAD there is; rows put their settings on it (see `rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.data import most_central, subset_per_class
from otad.experiments.kept import alone
from otad.experiments.nets import Trained
from otad.experiments.part_specs import NetSpec
from otad.io.codec import digest_of
from otad.io.tensor_files import fingerprint_of
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.model.prototypes import PrototypeNet
from otad.nets import Metric

Report = Callable[[int, int], None]
ROWS = 1024


@dataclass(frozen=True, eq=False)
class Keyed:
    """A metric, and its keys (N,m) of all points of a bank."""

    metric: Metric
    keys: Tensor


def whole_bank(trained: Trained, spec: NetSpec, folder: Path, report: Report) -> OTAD:
    """The bank of the train part; one that is not resident is a file below `folder`, made once.

    Prototypes bring a bank of their own.
    """
    net, x, y = trained.net, trained.data.train_x, trained.data.train_y
    if isinstance(net, PrototypeNet):
        return OTAD(net, net.bank(), n_neighbors=1).eval()
    dtype = getattr(torch, spec.bank)
    if spec.resident:
        return defend(net, x, y, n_neighbors=1, bank_dtype=dtype, progress=report)
    place = folder / digest_of(trained.identity | {"dtype": spec.bank})
    path = place / "bank.safetensors"
    with alone(place):
        if path.exists():
            expected = fingerprint_of(net, {"x": x, "y": y})
            bank = FeatureBank.load(path, expect_fingerprint=expected, verify=False)
            report(len(x), len(x))
            return OTAD(net, bank, n_neighbors=1, resident=False).eval()
        return defend(
            net,
            x,
            y,
            n_neighbors=1,
            resident=False,
            bank_dtype=dtype,
            bank_path=str(path),
            progress=report,
        )


@torch.no_grad()
def keys_of(metric: Metric, x: Tensor, report: Report) -> Keyed:
    """Keys of inputs (N,*input_shape), made where the metric is."""
    found, device = [], metric.mean.device
    for batch in x.split(ROWS):
        found.append(metric(batch.to(device)))
        report(min(len(found) * ROWS, len(x)), len(x))
    return Keyed(metric, torch.cat(found))


def searched(base: OTAD, keyed: Keyed | None, rows: Tensor | None) -> OTAD:
    """The same bank searched by a metric, or only some rows of it (see `bank_rows`)."""
    if keyed is None and rows is None:
        return base
    bank, metric, keys = base.bank, None, None
    if keyed is not None:
        metric, keys = keyed.metric, keyed.keys
    if rows is not None:
        bank = _part(bank, rows.to(bank.inputs.device))
        keys = None if keys is None else keys[rows.to(keys.device)]
    return base.replace(bank=bank, metric=metric, keys=keys)


def bank_rows(
    labels: Tensor, per_class: int | None, seed: int, keys: Tensor | None = None
) -> Tensor | None:
    """Which points of the train part are in a bank of `per_class` of each class, None for all.

    Random ones, of which fewer are among more; or, by their keys (N,m), the most central: those
    nearest to the mean key of their class.
    """
    if per_class is None:
        return None
    if keys is None:
        return subset_per_class(labels.cpu(), per_class, torch.Generator().manual_seed(seed))
    return most_central(keys, labels.to(keys.device), per_class).cpu()


def _part(bank: FeatureBank, rows: Tensor) -> FeatureBank:
    name = digest_of({"of": bank.fingerprint, "rows": rows.tolist()})
    inputs, features, labels = bank.inputs[rows], bank.features[rows], bank.labels[rows]
    return FeatureBank(inputs, features, labels, name, verify=False)
